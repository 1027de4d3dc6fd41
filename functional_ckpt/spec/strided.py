"""Strided views of memory: whether a view holds an element twice, and which views of a set share one.

Only addresses, shapes and strides are used; the memory is never read.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import gcd, prod
from typing import Any

import attrs
import numpy as np
from numpy.lib.stride_tricks import as_strided

__all__ = ["View", "clusters", "overlapping"]

#: A view of more elements counts as overlapping itself if its strides alone do not prove that it does not.
MAX_LISTED_ELEMENTS = 2**20
# Candidate solutions that numpy tries at most; common cuts of an array need a few.
_MAX_WORK = 10**5
# Cells that are marked at most, a byte of memory each; and how many are marked in the time of one comparison of views.
_MAX_CELLS = 2**27
_CELLS_PER_PAIR = 1000


@attrs.frozen
class View:
    """Elements of `itemsize` bytes at `address`, in `shape`, `strides` apart: all in bytes but the shape.

    Examples
    --------
    >>> View(0, (2, 3), (12, 4), 4).bounds, View(8, (3,), (-4,), 4).bounds
    ((0, 24), (0, 12))
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def bounds(self) -> tuple[int, int]:
        """Address of the first byte, and of the one after the last; equal if the view has no elements."""
        if self._is_run:
            return self.address, self.address + self.itemsize * self.shape[0]
        if 0 in self.shape:
            return self.address, self.address
        reach = [(n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)]
        low = self.address + sum(r for r in reach if r < 0)
        return low, self.address + sum(r for r in reach if r > 0) + self.itemsize

    @property
    def overlaps_itself(self) -> bool:
        """Whether two of its elements share a byte; true also for a large view where that would take too long to find.

        Examples
        --------
        >>> View(0, (2, 3), (4, 4), 4).overlaps_itself, View(0, (2, 3), (4, 8), 4).overlaps_itself
        (True, False)
        """
        if self._is_run or 0 in self.shape:
            return False
        axes = sorted((abs(step), n) for n, step in zip(self.shape, self.strides, strict=True) if n > 1)
        reach = self.itemsize
        for step, n in axes:
            if step < reach:
                break
            reach += (n - 1) * step
        else:
            return False
        if prod(self.shape) > MAX_LISTED_ELEMENTS:
            return True
        starts = np.zeros(1, np.int64)
        for step, n in axes:
            starts = np.add.outer(starts, np.arange(n) * step).ravel()
        return bool(np.diff(np.sort(starts)).min() < self.itemsize)

    @property
    def start(self) -> int:
        """Address of the first byte."""
        return self.bounds[0]

    @property
    def stop(self) -> int:
        """Address after the last byte."""
        return self.bounds[1]

    @classmethod
    def of(cls, held: "View | range") -> "View":
        """Return a view; that of contiguous bytes, which a range is enough for, has their addresses.

        Examples
        --------
        >>> View.of(range(8, 12)).bounds
        (8, 12)
        """
        return cls(held.start, (len(held),), (1,), 1) if isinstance(held, range) else held

    def overlaps(self, other: "View") -> bool:
        """Tell whether the views share a byte; true also where that would take too long to find.

        Examples
        --------
        >>> left, right = View(64, (2, 3), (24, 4), 4), View(76, (2, 3), (24, 4), 4)
        >>> left.overlaps(right), left.overlaps(View(72, (2,), (4,), 4))
        (False, True)
        """
        effort: Any = _MAX_WORK  # numpy's stubs know 0 and -1 only
        try:
            return bool(np.shares_memory(self._array, other._array, max_work=effort))
        except np.exceptions.TooHardError:
            return True

    @property
    def _is_run(self) -> bool:
        """Whether it is one run of elements: nearly all are, and worth a shortcut."""
        return self.strides == (self.itemsize,)

    @cached_property
    def _array(self) -> Any:
        return np.asarray(_Interface(self))


class _Interface:
    """Numpy makes an array of this without reading its memory, which need not exist."""

    def __init__(self, view: View) -> None:
        self.__array_interface__ = {
            "data": (view.address, True),
            "shape": view.shape,
            "strides": view.strides,
            "typestr": f"|V{view.itemsize}",
            "version": 3,
        }


def overlapping(views: Sequence[View]) -> list[tuple[int, int]]:
    """Return pairs of positions of views that share a byte: one pair for each view that overlaps an earlier one.

    Equal views count as one. Only views whose bounds intersect are compared, so that disjoint views cost a sort.

    Examples
    --------
    >>> flat = [View(4 * i, (1,), (4,), 4) for i in range(1, 5)]
    >>> overlapping(flat), overlapping([*flat, View(8, (2,), (4,), 4)])
    ([], [(4, 1)])
    """
    found: list[tuple[int, int]] = []
    for cluster in clusters(views):
        first: dict[View, int] = {}
        for position in cluster:
            first.setdefault(views[position], position)
        found += [(first[late], first[early]) for late, early in _pairs(list(first))]
    return sorted(found)


def clusters(views: Sequence[View | range]) -> Iterator[list[int]]:
    """Yield the groups of positions of several views, each in order, whose bounds intersect directly or through others.

    Examples
    --------
    >>> list(clusters([range(8, 12), range(16, 20), range(10, 14)]))
    [[0, 2]]
    """
    low, high = np.array([view.start for view in views], np.int64), np.array([view.stop for view in views], np.int64)
    rows = np.flatnonzero(low < high)
    rows = rows[np.argsort(low[rows], kind="stable")]
    low, high = low[rows], high[rows]
    begins = np.flatnonzero(low[1:] >= np.maximum.accumulate(high)[:-1]) + 1
    for members in np.split(rows, begins) if len(rows) > len(begins) + 1 else ():
        if len(members) > 1:
            yield sorted(members.tolist())


def _pairs(views: Sequence[View]) -> Iterator[tuple[View, View]]:
    """Yield each view that shares a byte with an earlier one, and that earlier one."""
    bounds = [view.bounds for view in views]
    low, high = min(a for a, _ in bounds), max(b for _, b in bounds)
    numbers = [(view.address - low, view.itemsize, *view.strides) for view in views]
    unit = gcd(*(number for row in numbers for number in row))
    cells = (high - low) // unit
    suspects: Iterable[int] = range(len(views))
    if cells <= min(_MAX_CELLS, len(views) ** 2 * _CELLS_PER_PAIR):
        suspects = _marked_twice(views, low, unit, cells)
    for late in suspects:
        early = next((view for view in views[:late] if view.overlaps(views[late])), None)
        if early is not None:
            yield views[late], early


def _marked_twice(views: Sequence[View], low: int, unit: int, cells: int) -> Iterator[int]:
    """Yield the positions of views that overlap an earlier one, by marking the cells of each view."""
    marks = np.zeros(cells, bool)
    for position, view in enumerate(views):
        shape = (*view.shape, view.itemsize // unit)
        strides = (*(step // unit for step in view.strides), 1)
        held = as_strided(marks[(view.address - low) // unit :], shape, strides)
        if held.any():
            yield position
        held[...] = True
