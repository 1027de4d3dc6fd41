"""What pieces of a load have in common is found once: it must be what each piece by itself would give."""

from hypothesis import event, example, given
from hypothesis import strategies as st

from functional_ckpt.plan.layout import Layout, grid_of
from functional_ckpt.plan.load import plan_load
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.shard import ShardSpec
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
