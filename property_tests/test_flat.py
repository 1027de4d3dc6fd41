"""F: a range of a flattened array is its boxes in order, and fragments are runs of the buffer."""

from math import prod

import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from functional_ckpt.errors import ShapeError
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.flat import flat_boxes
from functional_ckpt.spec.sharding import ShardSpec, fragments
from functional_ckpt.testing import laws, model
from functional_ckpt.testing import strategies as fst


@st.composite
def flat_ranges(draw, cuts=2):
    shape = draw(fst.shapes(max_side=5))
    places = st.lists(st.integers(0, prod(shape)), min_size=cuts, max_size=cuts)
    return shape, *sorted(draw(places))


@given(flat_ranges())
@example(((3, 4), 5, 7))
@example(((2, 3, 4), 1, 23))
def test_f1_boxes_are_the_range_in_order(case):
    shape, start, stop = case
    number = np.arange(prod(shape)).reshape(shape)
    boxes = flat_boxes(shape, start, stop)
    event(f"{len(boxes)} boxes")
    cells = [number[box.slices].ravel() for box in boxes]
    assert np.concatenate([*cells, []]).tolist() == list(range(start, stop))
    assert all(box.size for box in boxes)
    assert list(boxes) == sorted(boxes)


@given(flat_ranges())
def test_f1_there_are_few_boxes(case):
    shape, start, stop = case
    assert len(flat_boxes(shape, start, stop)) <= max(2 * len(shape) - 1, 1)


@given(flat_ranges(3))
def test_f2_a_cut_range_is_its_parts(case):
    shape, start, cut, stop = case
    whole = model.counts(shape, flat_boxes(shape, start, stop))
    parts = model.counts(shape, flat_boxes(shape, start, cut) + flat_boxes(shape, cut, stop))
    assert (whole == parts).all()


@given(fst.array_specs("w").flatmap(lambda a: st.tuples(fst.shards(a), fst.arrays(a))))
def test_f3_fragments_are_runs_of_the_buffer(case):
    shard, array = case
    laws.check_fragments(shard, model.view(shard, array), array)


@given(fst.sharded_arrays("w"))
def test_f3_fragments_of_a_world_are_runs_of_its_buffers(case):
    array, world, buffers = case
    for shards, locals_ in zip(world.ranks, buffers, strict=True):
        for shard, local in zip(shards, locals_, strict=True):
            laws.check_fragments(shard, local, array)


@given(flat_ranges())
def test_f3_the_whole_range_is_the_whole_shard(case):
    shape, *_ = case
    array = ArraySpec("w", shape, "int8")
    flat = ShardSpec(array, array.box, 0, (0, array.box.size))
    assert fragments(flat) == fragments(ShardSpec(array, array.box))
    assert flat.identity == ShardSpec(array, array.box).identity


@given(flat_ranges())
def test_a_range_outside_is_refused(case):
    shape, start, stop = case
    for bad in [(-1, stop), (start, prod(shape) + 1), (stop + 1, stop)]:
        with pytest.raises(ShapeError):
            flat_boxes(shape, *bad)
        with pytest.raises(ShapeError):
            ShardSpec(ArraySpec("w", shape, "int8"), Box.from_shape(shape), 0, bad)
