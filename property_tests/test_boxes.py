"""B: boxes are the sets of cells that a numpy mask says they are."""

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from functional_ckpt.errors import ShapeError
from functional_ckpt.spec.box import MAX_NDIM, Box
from functional_ckpt.testing import model
from functional_ckpt.testing import strategies as fst


def mask(shape, *boxes):
    """Return the cells of an array of `shape` that any of `boxes` holds."""
    return model.counts(shape, boxes) > 0


@st.composite
def several_boxes(draw, count):
    shape = draw(fst.shapes(max_side=6))
    return shape, *(draw(fst.boxes(shape)) for _ in range(count))


@given(several_boxes(2))
@example(((), Box((), ()), Box((), ())))
def test_b1_intersect_is_the_common_cells(case):
    shape, a, b = case
    common = a.intersect(b)
    expected = mask(shape, a) & mask(shape, b)
    assert (common is None) == (not expected.any())
    if common is not None:
        assert common.size == expected.sum()
        assert (mask(shape, common) == expected).all()


@given(several_boxes(3))
def test_b1_intersect_is_a_semilattice(case):
    shape, a, b, c = case

    def meet(x, y):
        return None if x is None or y is None else x.intersect(y)

    assert meet(a, b) == meet(b, a)
    assert meet(meet(a, b), c) == meet(a, meet(b, c))
    assert meet(a, a) == (a if a.size else None)
    assert meet(a, Box.from_shape(shape)) == (a if a.size else None)


@given(several_boxes(2))
def test_b1_contains_is_the_subset_relation(case):
    shape, a, b = case
    assert a.contains(b) == (not (mask(shape, b) & ~mask(shape, a)).any())


@given(several_boxes(2))
def test_b2_subtract_and_intersect_partition(case):
    shape, a, b = case
    rest = a.subtract(b)
    common = a.intersect(b)
    parts = rest if common is None else (*rest, common)
    assert all(part.size for part in rest)
    assert len(rest) <= 2 * len(shape)
    assert (model.counts(shape, parts) == mask(shape, a)).all()
    assert not (mask(shape, *rest) & mask(shape, b)).any()


def test_b1_and_b2_hold_of_all_pairs_in_a_small_array():
    """Hypothesis seldom draws two boxes that meet without being equal, with cells of the one on both sides."""
    shape = (3, 2)
    spans = [[(lo, hi) for lo in range(n + 1) for hi in range(lo, n + 1)] for n in shape]
    every = [Box(start, stop) for start, stop in (zip(*span, strict=True) for span in product(*spans))]
    for a, b in product(every, every):
        test_b2_subtract_and_intersect_partition.hypothesis.inner_test((shape, a, b))


@given(several_boxes(2), st.lists(st.integers(0, 5), min_size=4, max_size=4))
def test_b3_shift_and_relative_to_are_inverse(case, offsets):
    shape, a, b = case
    offset = tuple(offsets[: len(shape)])
    assert a.shift(offset).shape == a.shape
    assert a.shift(offset).shift(tuple(-o for o in offset)) == a
    outer = Box(tuple(map(min, a.start, b.start)), Box.from_shape(shape).stop)
    assert a.relative_to(outer).shift(outer.start) == a
    assert a.relative_to(a) == Box.from_shape(a.shape)


@given(several_boxes(2))
def test_b3_slices_select_the_cells(case):
    shape, a, _ = case
    number = np.arange(prod(shape)).reshape(shape)
    assert number[a.slices].shape == a.shape
    assert (np.sort(number[a.slices], axis=None) == number[mask(shape, a)]).all()


@given(several_boxes(3))
def test_b4_order_is_total_and_row_major(case):
    shape, *boxes = case
    ordered = sorted(boxes)
    backwards = boxes[::-1]
    backwards.sort()
    assert ordered == backwards
    if all(box.size for box in boxes):
        first = [np.ravel_multi_index(box.start, shape) if shape else 0 for box in ordered]
        assert first == sorted(first)
    a, b = boxes[:2]
    assert (a < b) + (a == b) + (b < a) == 1


@given(several_boxes(1))
def test_values_are_hashable_and_equal_by_content(case):
    _, a = case
    assert hash(Box(list(a.start), np.array(a.stop, int))) == hash(a)
    assert Box.from_shape(a.shape, a.start) == a


@pytest.mark.parametrize(("start", "stop"), [((0,), (1, 2)), ((2,), (1,)), ((-1,), (1,)), ((0,) * (MAX_NDIM + 1),) * 2])
def test_what_is_no_box_is_refused(start, stop):
    with pytest.raises(ShapeError):
        Box(start, stop)


@given(several_boxes(1))
def test_boxes_of_another_rank_are_refused(case):
    shape, a = case
    for operation in (a.intersect, a.subtract):
        with pytest.raises(ShapeError):
            operation(Box.from_shape((1, *shape)))
