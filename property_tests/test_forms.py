"""What pieces of a load, or of a save, have in common is found once, and is what each piece by itself would give."""

from unittest.mock import patch

import numpy as np
from hypothesis import event, example, given
from hypothesis import strategies as st

from functional_ckpt.plan.layout import Layout, grid_of
from functional_ckpt.plan.load import plan_load
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.plan.save import plan_save, restrict
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.shard import ShardSpec
from functional_ckpt.store import execute
from functional_ckpt.store.base import Capabilities
from functional_ckpt.store.buffer import HostBuffer
from functional_ckpt.store.encoding import chunk_path, node_name, numpy_dtype
from functional_ckpt.store.fill import _Form, _forms
from functional_ckpt.testing import strategies as fst


def entry(key, shape, chunk, dtype="int8", codecs=()):
    layout = Layout("exclusive", chunk, codecs, dtype)
    return ArrayEntry(ArraySpec(key, shape, dtype), layout, bytes(16 * grid_of(shape, chunk).size))


@st.composite
def stored_and_wanted(draw):
    """Arrays of few shapes, so that many have one in common, and shards of them."""
    shapes = draw(st.lists(st.tuples(*[st.integers(1, 3)] * draw(st.integers(0, 2))), min_size=1, max_size=2))
    stored, wanted = {}, []
    for key in "abcd":
        shape = draw(st.sampled_from(shapes))
        chunk = tuple(draw(st.integers(1, n)) for n in shape)
        dtype, codecs = draw(st.sampled_from(["int8", "int32"])), draw(st.sampled_from([(), ("zstd",)]))
        stored[key] = entry(key, shape, chunk, dtype, codecs)
        wanted += draw(st.lists(fst.shards(stored[key].spec), max_size=2))
    return stored, wanted


def half(key, start, stop):
    return ShardSpec(ArraySpec(key, (4,), "int8"), Box((start,), (stop,)))


LIKE = {"a": entry("a", (4,), (4,)), "b": entry("b", (4,), (2,)), "c": entry("c", (4,), (4,), codecs=("zstd",))}


@given(stored_and_wanted())
@example((LIKE, [half("a", 0, 2), half("b", 0, 2)]))
@example((LIKE, [half("a", 0, 4), half("c", 0, 4)]))
@example((LIKE, [half("b", 0, 2), half("b", 0, 3), half("b", 0, 4), half("b", 2, 4), half("b", 1, 4)]))
def test_a_piece_has_the_form_that_it_would_have_alone(case):
    plan = plan_load(*case)
    found = _forms(plan)
    event(f"pieces: {min(4, len(found))}, forms: {min(4, len(set(map(id, found))))}")
    assert found == [_Form.of(plan, row) for row in range(len(plan.cut))]


class Names:
    """A store that knows only the names of what is created; with `concurrency` each request waits for a server."""

    def __init__(self, concurrency):
        self.capabilities = Capabilities(False, rename=True, shared=True, concurrency=concurrency)
        self.found = []

    def create(self, name, parts, nbytes, each=None):
        self.found.append(name)


def memory_of(shard):
    return HostBuffer(np.zeros(shard.data_shape, numpy_dtype(shard.array.dtype)))


@given(fst.worlds(), fst.layout_policies(codecs=False) | fst.joining_policies(), st.booleans(), st.data())
def test_what_a_rank_writes_directly_is_each_header_and_each_chunk_once(world, policy, waits, data):
    """The columns say which metadata goes with a small fragment, which by itself, and what is left to the assembler."""
    with patch.object(execute, "SMALL_NBYTES", data.draw(st.sampled_from([1, 9, 2**18]))):
        for rank, shards in enumerate(world.ranks):
            plan = restrict(plan_save(world, policy, shared_ok=False), rank)
            store = Names(2 if waits else 0)
            for work in execute._direct_work(plan, [memory_of(shard) for shard in shards], store):
                work.call()
            moved = {move.key for move in plan.moves}
            headers = [f"{node_name(h.key)}/zarr.json" for h in plan.headers if h.key not in moved]
            grids = {array.spec.key: array.grid for array in plan.arrays}
            chunks = [chunk_path(w.key, index) for w in plan.writes for index in grids[w.key].touched(w.box)]
            event(f"headers {min(2, len(headers))}, chunks {min(2, len(chunks))}, moved {bool(moved)}")
            assert sorted(store.found) == sorted([*headers, *chunks])
