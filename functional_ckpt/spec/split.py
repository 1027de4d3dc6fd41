"""`Split`: how the ranks of a mesh cut one axis of many arrays into intervals.

Even splits are computed by formula, so that a query costs the same on 8 and on 16,384 ranks; and arrays with equal
placements are computed together.
"""

from collections.abc import Callable
from functools import lru_cache
from math import gcd, prod
from typing import Protocol

import attrs
import numpy as np

from functional_ckpt.spec.columns import Ints
from functional_ckpt.spec.placement import spans_of_places

__all__ = ["Split", "common_face", "is_even", "split_of"]


class Split(Protocol):
    """One axis of many arrays, cut into non-empty intervals, numbered in order; one place of the mesh holds each.

    A place is a position on the mesh axes that cut the axis, as a row-major number. Arguments and results have one row
    per array.
    """

    def at(self, rows: Ints) -> "Split":
        """Return the split of the chosen arrays, which may repeat."""

    def held(self, place: int) -> list[Ints]:
        """Return the intervals of one place: for each a number per array, -1 where the array has no such interval."""

    def bounds(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return where intervals start and stop."""

    def touched(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return the range of intervals that share a cell with ``[low, high)``, which is not empty."""

    def places(self, numbers: Ints) -> Ints:
        """Return the place of intervals."""

    def largest(self, low: Ints, high: Ints) -> tuple[Ints, Callable[[Ints], Ints]]:
        """Return how many intervals share the most cells with ``[low, high)``, and a function that returns the k-th."""


@attrs.frozen(eq=False)
class _EvenSplit:
    """Intervals of `step` cells, the last one maybe shorter.

    Number and place are the same, or, with the sizes of two mesh axes as `order`, one is the transpose of the other.
    """

    extent: Ints
    step: Ints
    order: tuple[int, ...] = ()

    def at(self, rows: Ints) -> "_EvenSplit":
        return _EvenSplit(self.extent[rows], self.step[rows], self.order)

    def held(self, place: int) -> list[Ints]:
        if self.order:
            outer, inner = self.order
            place = place % outer * inner + place // outer
        return [np.where(place * self.step < self.extent, place, -1)]

    def bounds(self, numbers: Ints) -> tuple[Ints, Ints]:
        return numbers * self.step, np.minimum((numbers + 1) * self.step, self.extent)

    def touched(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        return low // self.step, -(-high // self.step)

    def places(self, numbers: Ints) -> Ints:
        if not self.order:
            return numbers
        outer, inner = self.order
        return numbers % inner * outer + numbers // inner

    def largest(self, low: Ints, high: Ints) -> tuple[Ints, Callable[[Ints], Ints]]:
        first, last = self.touched(low, high)
        # Intervals in the middle are whole; the first or the last equals them only if it is whole too.
        head = np.minimum((first + 1) * self.step, high) - np.maximum(first * self.step, low)
        tail = high - np.maximum((last - 1) * self.step, low)
        most = np.where(last - first > 2, self.step, np.maximum(head, tail))
        begin = np.where(head == most, first, first + 1)
        return np.where(tail == most, last, last - 1) - begin, lambda k: begin + k


@attrs.frozen(eq=False)
class _ListedSplit:
    """Intervals of any length, listed; the same for all arrays."""

    start: Ints
    stop: Ints
    place: Ints

    def at(self, rows: Ints) -> "_ListedSplit":
        return self

    def held(self, place: int) -> list[Ints]:
        return [np.array(number) for number in np.flatnonzero(self.place == place).tolist()]

    def bounds(self, numbers: Ints) -> tuple[Ints, Ints]:
        return self.start[numbers], self.stop[numbers]

    def touched(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        return np.searchsorted(self.stop, low, "right"), np.searchsorted(self.start, high, "left")

    def places(self, numbers: Ints) -> Ints:
        return self.place[numbers]

    def largest(self, low: Ints, high: Ints) -> tuple[Ints, Callable[[Ints], Ints]]:
        found = [self._largest(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True)]
        counts = np.array([len(numbers) for numbers in found], np.int64)
        return counts, lambda k: np.array([n[i] for n, i in zip(found, k.tolist(), strict=True)], np.int64)

    def _largest(self, low: int, high: int) -> Ints:
        first, last = np.searchsorted(self.stop, low, "right"), np.searchsorted(self.start, high, "left")
        sizes = np.minimum(self.stop[first:last], high) - np.maximum(self.start[first:last], low)
        return first + np.flatnonzero(sizes == sizes.max())


def is_even(extent: int, cuts: tuple[tuple[int, int], ...]) -> bool:
    """Tell whether `cuts` divide an axis of `extent` cells into intervals of one length, the last maybe shorter.

    Examples
    --------
    >>> is_even(10, ((1, 4),)), is_even(10, ((1, 2), (1, 2))), is_even(8, ((2, 2), (1, 2)))
    (True, False, True)
    """
    ways = prod(size for _, size in cuts)
    is_plain = all(factor == 1 for factor, _ in cuts)
    is_woven = len(cuts) == 2 and cuts[0][0] == cuts[1][1] and cuts[1][0] == 1
    return ways == 1 or not extent or (is_plain and len(cuts) == 1) or (extent % ways == 0 and (is_plain or is_woven))


def common_face(extent: int, cuts: tuple[tuple[int, int], ...]) -> int:
    """Return the common divisor of the faces between intervals of an axis, 0 without any.

    Examples
    --------
    >>> common_face(10, ((1, 4),)), common_face(10, ((1, 2), (1, 2))), common_face(10, ())
    (3, 1, 0)
    """
    if not is_even(extent, cuts):
        return gcd(*_listed(extent, cuts).start.tolist())
    step = -(-extent // prod(size for _, size in cuts))
    return step if step < extent else 0


def split_of(extents: Ints, cuts: tuple[tuple[int, int], ...]) -> Split:
    """Return how mesh axes cut one axis of many arrays, from ``(split factor, size)`` of each, in mesh order.

    Either all extents split evenly (`is_even`), or all are equal.

    Examples
    --------
    >>> split = split_of(np.array([10]), ((1, 4),))
    >>> split.bounds(np.array([3])), split.largest(np.array([2]), np.array([10]))[0]
    ((array([9]), array([10])), array([2]))
    """
    if all(is_even(extent, cuts) for extent in np.unique(extents).tolist()):
        step = np.maximum(-(-extents // prod(size for _, size in cuts)), 1)
        is_woven = len(cuts) == 2 and cuts[0][0] > 1
        return _EvenSplit(extents, step, (cuts[1][1], cuts[0][1]) if is_woven else ())
    return _listed(int(extents[0]), cuts)


@lru_cache(maxsize=256)
def _listed(extent: int, cuts: tuple[tuple[int, int], ...]) -> _ListedSplit:
    spans = sorted((low, high, place) for place, held in enumerate(spans_of_places(extent, cuts)) for low, high in held)
    columns = np.array(spans, np.int64).reshape(len(spans), 3).T
    return _ListedSplit(columns[0], columns[1], columns[2])
