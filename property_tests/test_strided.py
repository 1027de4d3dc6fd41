"""Strided views: two overlap if and only if their bytes, listed one by one, say so."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from functional_ckpt.spec import strided
from functional_ckpt.spec.strided import View, overlapping


@st.composite
def views(draw, space=160):
    """Return a view of any strides, within about `space` bytes."""
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    shape = draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
    step = st.integers(-12, 12) | st.sampled_from([itemsize, 2 * itemsize, 4 * itemsize, 8 * itemsize, 0])
    strides = tuple(draw(st.lists(step, min_size=len(shape), max_size=len(shape))))
    return View(draw(st.integers(1000, 1000 + space)), shape, strides, itemsize)


@st.composite
def slices_of_one(draw):
    """Return views that somebody cut out of one array, and what they hold of it."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    base = np.zeros(shape, "f4")
    axes = draw(st.permutations(range(base.ndim)))
    cut = st.builds(slice, st.integers(0, 5), st.integers(0, 6), st.sampled_from([1, 2, 3, -1]))
    return base, axes, [tuple(draw(cut) for _ in shape) for _ in range(draw(st.integers(1, 6)))]


def element_bytes(view):
    """Return the bytes of each element."""
    return [
        {view.address + sum(i * s for i, s in zip(index, view.strides, strict=True)) + byte
         for byte in range(view.itemsize)}
        for index in np.ndindex(view.shape)
    ]  # fmt: skip


def view_of(array):
    return View(array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)


@given(views())
@example(View(1000, (3, 2), (2, 3), 1))
@example(View(1000, (2, 4), (4, 0), 4))
def test_a_view_overlaps_itself_if_two_elements_share_a_byte(view):
    cells = element_bytes(view)
    assert view.overlaps_itself == (len(set().union(*cells)) < len(cells) * view.itemsize)
    low, high = view.bounds
    assert (low, high) == ((min(map(min, cells)), max(map(max, cells)) + 1) if cells else (view.address,) * 2)


@given(views(), views())
def test_two_views_overlap_if_they_share_a_byte(one, other):
    assert one.overlaps(other) == bool(set().union(*element_bytes(one)) & set().union(*element_bytes(other)))


@pytest.mark.parametrize("marked", [False, True], ids=["compared", "marked"])
@given(st.lists(views(60), max_size=6))
def test_each_view_that_shares_a_byte_with_an_earlier_one_is_told_once(marked, many):
    with patch.object(strided, "_MAX_CELLS", 2**27 * marked):
        check_told(many)


def check_told(many):
    held = [set().union(*element_bytes(view)) for view in many]
    found = overlapping(many)
    for late, early in found:
        assert early < late
        assert held[late] & held[early]
        assert many[late] != many[early]
    late = {a for a, _ in found}
    distinct = [i for i, view in enumerate(many) if view not in many[:i]]
    assert late == {i for n, i in enumerate(distinct) if any(held[i] & held[j] for j in distinct[:n])}


@given(slices_of_one())
def test_parts_of_one_array_overlap_where_they_hold_one_cell(case):
    base, axes, cuts = case
    parts = [base.transpose(axes)[tuple(cut[i] for i in axes)] for cut in cuts]
    cells = np.arange(base.size).reshape(base.shape).transpose(axes)
    held = [set(cells[tuple(cut[i] for i in axes)].ravel().tolist()) for cut in cuts]
    seen = {late for late, _ in overlapping([view_of(part) for part in parts])}
    same = [view_of(part) for part in parts]
    for late in range(len(parts)):
        earlier = [i for i in range(late) if same[i] != same[late]]
        if same[late] not in same[:late]:
            assert (late in seen) == any(held[late] & held[i] for i in earlier)


@pytest.mark.parametrize("strides", [(8192, 4), (4, 4096), (-8192, 4), (4, -4096), (8, 8192)])
def test_strides_alone_prove_that_a_large_view_does_not_overlap_itself(strides):
    assert not View(2**30, (1024, 2048), strides, 4).overlaps_itself
    assert View(2**30, (1025, 2049), strides, 4).overlaps_itself


def test_elements_are_listed_up_to_a_number_of_them(monkeypatch):
    view = View(64, (2, 3), (5, 4), 1)  # its strides prove nothing
    monkeypatch.setattr(strided, "MAX_LISTED_ELEMENTS", 6)
    assert not view.overlaps_itself
    monkeypatch.setattr(strided, "MAX_LISTED_ELEMENTS", 5)
    assert view.overlaps_itself


def test_what_is_too_hard_to_tell_is_said_to_overlap(monkeypatch):
    monkeypatch.setattr(strided, "_MAX_WORK", 1)
    monkeypatch.setattr(strided, "MAX_LISTED_ELEMENTS", 1)
    odd, other = View(64, (9, 11, 13), (84, 60, 36), 2), View(69, (9, 11, 13), (78, 102, 114), 2)
    assert odd.overlaps_itself
    assert odd.overlaps(other)


@pytest.mark.parametrize("count", [5000])
def test_parts_of_one_buffer_are_compared_by_their_bounds_only(count, monkeypatch):
    monkeypatch.setattr(View, "overlaps", lambda self, other: pytest.fail("compared"))
    assert overlapping([View(400 * i, (10, 10), (40, 4), 4) for i in range(1, count)]) == []


def test_many_columns_of_one_array_are_not_compared_in_pairs(monkeypatch):
    compared, real = [], View.overlaps
    monkeypatch.setattr(View, "overlaps", lambda self, other: (compared.append(1), real(self, other))[1])
    columns = [View(64 + 4 * i, (100,), (8000,), 4) for i in range(2000)]
    assert overlapping(columns) == []
    assert overlapping([*columns, View(64 + 8000, (2,), (4,), 4)]) == [(2000, 0)]
    assert len(compared) < 10
