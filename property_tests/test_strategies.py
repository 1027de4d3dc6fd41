"""The strategies themselves: they reach what they promise, and Hypothesis knows our types."""

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from functional_ckpt.plan.layout import LayoutPolicy
from functional_ckpt.plan.manifest import Manifest
from functional_ckpt.spec.array import DTYPES, ArraySpec, ObjectSpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.placement import StridedShard
from functional_ckpt.spec.sharding import Fragment, ShardSpec, World
from functional_ckpt.testing import model, register_type_strategies
from functional_ckpt.testing import strategies as fst

QUICK = settings(max_examples=5000, phases=[Phase.generate], database=None)
TYPES = [ArraySpec, Box, Fragment, LayoutPolicy, Manifest, ObjectSpec, ShardSpec, World]


def reached(strategy, predicate):
    return find(strategy, predicate, settings=QUICK)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_types_have_strategies(kind):
    register_type_strategies()
    assert type(reached(st.from_type(kind), lambda _: True)) is kind


SHARDINGS = fst.array_specs("w").flatmap(fst.shardings)


@pytest.mark.parametrize(
    "holds",
    [
        lambda shards: any(s.flat is not None for s in shards),
        lambda shards: any(not s.is_main for s in shards),
        lambda shards: any(not s.size for s in shards),
        lambda shards: len({s.box for s in shards}) > 3,
        lambda shards: not shards[0].array.shape,
        lambda shards: 0 in shards[0].array.shape,
    ],
    ids=["flat", "copies", "empty shards", "many boxes", "rank 0", "no cells"],
)
def test_shardings_reach_every_case(holds):
    reached(SHARDINGS, lambda world: holds([s for shards in world.ranks for s in shards]))


def test_shardings_leave_some_ranks_empty():
    reached(SHARDINGS, lambda world: () in world.ranks and world.size > 1)


def test_placements_reach_strided_shards():
    reached(fst.placements((2, 2), 2), lambda how: any(isinstance(p, StridedShard) for p in how))


@pytest.mark.parametrize("kind", ["shape", "dtype", "offset", "dropped", "dropped main", "doubled main", "no main"])
def test_corruptions_reach_every_kind(kind):
    full = fst.array_specs("w", fst.shapes(min_side=1)).flatmap(fst.shardings)
    reached(full.flatmap(fst.corruptions), lambda fault: fault.kind == kind)


@given(fst.array_specs("w").flatmap(lambda spec: st.tuples(st.just(spec), fst.arrays(spec))))
def test_arrays_are_of_their_spec(case):
    spec, array = case
    assert array.shape == spec.shape
    assert array.dtype == model.numpy_dtype(spec.dtype)
    if spec.dtype == "bool":
        assert set(model.bits(array)) <= {0, 1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_tell_cells_apart(dtype):
    """As far as the data type has room: neighbours and rows differ."""
    array = model.positions(ArraySpec("w", (16, 16), dtype))
    itemsize = array.dtype.itemsize
    cells = model.bits(array)
    values = {cells[i : i + itemsize] for i in range(0, len(cells), itemsize)}
    assert len(values) == (2 if dtype == "bool" else 256)


def test_special_words_hold_nan_payloads_and_negative_zero():
    words = fst.special_words("float32")
    floats = words.view(np.float32)
    assert np.isnan(floats).sum() >= 3
    assert len({*words[np.isnan(floats)]}) >= 3
    assert any(np.signbit(x) and x == 0 for x in floats)
