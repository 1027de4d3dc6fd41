"""Do boxes tile an array? Overlaps and gaps, found without a quadratic step on tilings that cut cleanly.

1. Along some axis, sort the boxes by start and cut wherever no box crosses the cut: the groups between cuts
   are independent. Repeat inside each group. Grids, guillotine cuts and 1-d splits are separated into
   single boxes this way, one vectorised sort per level.
2. A group that has no such cut along any axis is compared pairwise.

The module also has the splits of one axis that torch and numpy make.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from functional_ckpt.spec.box import Box
from functional_ckpt.spec.columns import Ints

__all__ = [
    "check_tiling",
    "chunked_sizes",
    "find_overlap",
    "first_gap",
    "surely_tiled",
]


def chunked_sizes(extent: int, parts: int) -> tuple[int, ...]:
    """Split `extent` elements as ``torch.chunk`` and DTensor do: equal parts, the last ones short or empty.

    Examples
    --------
    >>> chunked_sizes(5, 4)
    (2, 2, 1, 0)
    """
    part = -(-extent // parts)
    return tuple(max(0, min(part, extent - i * part)) for i in range(parts))


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the positions of two boxes that share a cell, or None.

    Examples
    --------
    >>> find_overlap([Box((0,), (3,)), Box((3,), (5,)), Box((4,), (6,))])
    (1, 2)
    """
    starts, stops, members = _stack(boxes)
    if members.size and not starts.shape[1]:
        return (int(members[0]), int(members[1])) if members.size > 1 else None
    todo = [members] if members.size > 1 else []
    while todo:
        group = todo.pop()
        cut = _cut(starts[group], stops[group])
        if cut is None:
            pair = _overlapping_pair(starts, stops, group)
            if pair is not None:
                return pair
        else:
            todo += [group[g] for g in cut[1] if g.size > 1]
    return None


def first_gap(whole: Box, boxes: Sequence[Box]) -> Box | None:
    """Return a non-empty region of `whole` that none of `boxes` touches, or None.

    Examples
    --------
    >>> first_gap(Box((0,), (6,)), [Box((0,), (2,)), Box((4,), (6,))])
    Box(start=(2,), stop=(4,))
    """
    inside = [common for b in boxes if (common := whole.intersect(b)) is not None]
    return _gap(whole, inside)


def check_tiling(whole: Box, boxes: Sequence[Box]) -> tuple[tuple[int, int] | None, Box | None]:
    """Return ``(overlap, gap)``: two overlapping positions or None, an uncovered region or None.

    Both are None exactly when every cell of `whole` lies in exactly one of `boxes`. A gap is searched only if there
    is an overlap or the sizes do not add up, so a correct tiling is checked in one pass.

    Examples
    --------
    >>> check_tiling(Box((0,), (4,)), [Box((0,), (2,)), Box((2,), (4,))])
    (None, None)
    """
    overlap = find_overlap(boxes)
    if overlap is None and sum(b.size for b in boxes) == whole.size:
        return None, None
    return overlap, first_gap(whole, boxes)


def surely_tiled(shapes: Ints, array: Ints, start: Ints, stop: Ints) -> NDArray[np.bool_]:
    """Tell for each array whether its boxes surely tile it, all arrays at once; where False, ask `check_tiling`.

    `array` is the row of `shapes` of each box, sorted; no box is empty. True is proven: the sizes add up, and clean
    cuts separate all boxes of the array.

    Examples
    --------
    >>> shapes, array = np.array([[4], [4]]), np.array([0, 0, 1])
    >>> surely_tiled(shapes, array, np.array([[0], [2], [0]]), np.array([[2], [4], [3]])).tolist()
    [True, False]
    """
    volumes = np.zeros(len(shapes), np.int64)
    np.add.at(volumes, array, (stop - start).prod(axis=1))
    tiled: NDArray[np.bool_] = volumes == shapes.prod(axis=1)
    rows, group = np.flatnonzero(tiled[array]), array[tiled[array]]
    axis, idle = 0, 0
    while len(rows) and idle < shapes.shape[1]:
        order, cuts = _cut_groups(group, start[rows, axis], stop[rows, axis])
        idle = idle + 1 if len(cuts) == len(np.unique(group)) else 0
        sizes = np.diff(np.append(cuts, len(rows)))
        entangled = np.repeat(sizes > 1, sizes)
        group = np.repeat(np.arange(len(cuts)), sizes)[entangled]
        rows = rows[order][entangled]
        axis = (axis + 1) % shapes.shape[1]
    tiled[array[rows]] = False
    return tiled


def _cut_groups(group: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Return the intervals' order by group and start, and the positions in it where clean cuts begin new groups."""
    order = np.lexsort((low, group))
    group, low, high = group[order], low[order], high[order]
    # Intervals of later groups are shifted beyond those of earlier ones, so that one running maximum serves all groups.
    extent = int(high.max(initial=0)) + 1
    _, number = np.unique(group, return_inverse=True)
    if extent * (len(group) + 1) >= 2**62:
        low, high = (ends.reshape(-1) for ends in np.split(np.unique([low, high], return_inverse=True)[1].ravel(), 2))
        extent = int(high.max(initial=0)) + 1
    reach = np.maximum.accumulate(high + number * extent)
    is_cut = np.ones(len(group), bool)
    is_cut[1:] = (low[1:] + number[1:] * extent >= reach[:-1]) | (group[1:] != group[:-1])
    return order, np.flatnonzero(is_cut)


def _stack(boxes: Sequence[Box]) -> tuple[Ints, Ints, Ints]:
    ndim = boxes[0].ndim if boxes else 0
    starts = np.array([b.start for b in boxes], dtype=np.int64).reshape(len(boxes), ndim)
    stops = np.array([b.stop for b in boxes], dtype=np.int64).reshape(len(boxes), ndim)
    return starts, stops, np.flatnonzero((starts < stops).all(axis=1))


def _cut(starts: Ints, stops: Ints) -> tuple[int, list[Ints]] | None:
    """Return an axis and the groups of rows between its clean cuts, in order, if any axis has one."""
    for axis in range(starts.shape[1]):
        order = np.argsort(starts[:, axis], kind="stable")
        reach = np.maximum.accumulate(stops[order, axis])
        cuts = np.flatnonzero(starts[order[1:], axis] >= reach[:-1]) + 1
        if cuts.size:
            return axis, np.split(order, cuts)
    return None


def _overlapping_pair(starts: Ints, stops: Ints, group: Ints) -> tuple[int, int] | None:
    for position, one in enumerate(group[:-1]):
        rest = group[position + 1 :]
        meets = (np.maximum(starts[rest], starts[one]) < np.minimum(stops[rest], stops[one])).all(axis=1)
        if meets.any():
            other = int(rest[np.argmax(meets)])
            return min(int(one), other), max(int(one), other)
    return None


def _gap(region: Box, boxes: list[Box]) -> Box | None:
    if region.size == 0:
        return None
    if not boxes:
        return region
    starts, stops, _ = _stack(boxes)
    cut = _cut(starts, stops) if len(boxes) > 1 else None
    if cut is None:
        return _subtract_all(region, boxes)
    axis, groups = cut
    reached = region.start[axis]
    for group in groups:
        low, high = int(starts[group, axis].min()), int(stops[group, axis].max())
        if reached < low:
            return _slab(region, axis, reached, low)
        gap = _gap(_slab(region, axis, low, high), [boxes[i] for i in group])
        if gap is not None:
            return gap
        reached = high
    return _slab(region, axis, reached, region.stop[axis]) if reached < region.stop[axis] else None


def _subtract_all(region: Box, boxes: list[Box]) -> Box | None:
    left: list[Box] = [region]
    for box in boxes:
        left = [part for piece in left for part in piece.subtract(box)]
    return min(left) if left else None


def _slab(region: Box, axis: int, low: int, high: int) -> Box:
    start, stop = list(region.start), list(region.stop)
    start[axis], stop[axis] = low, high
    return Box(tuple(start), tuple(stop))
