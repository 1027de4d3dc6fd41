"""What pieces of a load, or of a save, have in common is found once, and is what each piece by itself would give."""

from unittest.mock import patch

import numpy as np
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from functional_ckpt.plan.layout import ArrayPlan, Layout, grid_of
from functional_ckpt.plan.load import plan_load
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.plan.pieces import Pieces
from functional_ckpt.plan.save import plan_save, restrict
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.shard import ShardSpec
from functional_ckpt.store import execute, orders
from functional_ckpt.store.base import Capabilities
from functional_ckpt.store.buffer import HostBuffer
from functional_ckpt.store.encoding import chunk_path, node_name, numpy_dtype
from functional_ckpt.store.fill import _Form, _forms
from functional_ckpt.store.wave import Form, forms_of
from functional_ckpt.testing import strategies as fst
from property_tests.test_exchange import moves, plan_of


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
    with patch.object(orders, "SMALL_NBYTES", data.draw(st.sampled_from([1, 9, 2**18]))):
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


@settings(max_examples=settings.default.max_examples // 3)
@given(moves(max_arrays=4))
def test_a_piece_that_moves_has_the_form_that_it_would_have_alone(case):
    world, _, _, policy = case
    plan = plan_of(world, policy)
    for mine in (restrict(plan, rank) for rank in range(world.size)):
        moving = mine.pieces.take(mine.pieces.chunk >= 0)
        found = forms_of(moving, mine.arrays)
        event(f"pieces: {min(9, len(found)) // 3 * 3}+, forms: {min(4, len(set(map(id, found))))}")
        assert found == [Form.of(moving, mine.arrays, row) for row in range(len(moving))]


def test_pieces_of_two_forms_differ_in_any_one_of_what_these_are_made_of():
    """Two rows that are the same but for one fact, in turn for each fact, and twice in a row."""
    one = {"shape": (4,), "dtype": "int8", "cells": (2,), "chunk": 0, "start": 0, "stop": 1, "low": 0, "high": 2}
    others = {"shape": (1,), "dtype": "int16", "cells": (4,), "chunk": 1, "start": 1, "stop": 2, "low": 1, "high": 3}
    both = [(one, {**one, fact: value}) for fact, value in others.items()]
    both.append((one, {**one, "low": -1, "high": -1}))
    for pair in both:
        rows = (*pair, *pair)
        arrays = [
            ArrayPlan(ArraySpec(name, row["shape"], row["dtype"]), Layout("owned", row["cells"], (), row["dtype"]))
            for name, row in zip("abcd", rows, strict=True)
        ]
        ends = [[[row[name]] for row in rows] for name in ("start", "stop", "low", "high")]
        nothing = [0] * len(rows)
        pieces = Pieces(range(len(rows)), [row["chunk"] for row in rows], *ends, *[nothing] * 5)
        assert forms_of(pieces, arrays) == [Form.of(pieces, arrays, number) for number in range(len(rows))]
