"""Ranges of a flattened array, as boxes.

A half-open range of the row-major order of an n-d array is the union of at most ``2 * ndim - 1``
boxes: the tail of a first row, whole rows, the head of a last row, and the same again inside those
partial rows. Each box is one contiguous run, so the boxes in order are the range in order.
"""

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

from functional_ckpt.errors import ShapeError
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.columns import Ints

__all__ = ["flat_boxes", "flat_rows", "flat_runs", "joined"]


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Return the cells ``[start, stop)`` of the row-major order of `shape`, as boxes in order.

    Raises
    ------
    ShapeError
        If not ``0 <= start <= stop <= prod(shape)``.

    Examples
    --------
    >>> flat_boxes((3, 4), 2, 9)
    (Box(start=(0, 2), stop=(1, 4)), Box(start=(1, 0), stop=(2, 4)), Box(start=(2, 0), stop=(3, 1)))
    """
    shape = tuple(shape)
    if not 0 <= start <= stop <= prod(shape):
        raise ShapeError(
            "a flat range must lie within its array",
            shape=shape,
            expected=f"0 <= start <= stop <= {prod(shape)}",
            found=f"[{start}, {stop})",
        )
    return tuple(_boxes(shape, start, stop)) if start < stop else ()


def flat_runs(shape: Sequence[int], box: Box) -> tuple[tuple[int, int], ...]:
    """Return where `box` lies in the row-major order of `shape`: half-open ranges in order, none touching the next.

    Examples
    --------
    >>> flat_runs((3, 4), Box((1, 0), (3, 2)))
    ((4, 6), (8, 10))
    >>> flat_runs((3, 4), Box((1, 0), (3, 4)))
    ((4, 12),)
    """
    if box.size == 0:
        return ()
    axis = len(shape)  # from here on the box spans whole rows
    while axis > 0 and box.shape[axis - 1] == shape[axis - 1]:
        axis -= 1
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    run = prod(box.shape[max(axis - 1, 0) :])
    starts = np.array([sum(a * n for a, n in zip(box.start, strides, strict=True))])
    for extent, stride in zip(box.shape[: max(axis - 1, 0)], strides, strict=False):
        starts = (starts[:, None] + np.arange(extent) * stride).ravel()
    return tuple((start, start + run) for start in starts.tolist())


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return half-open ranges with adjacent ones merged.

    Examples
    --------
    >>> joined([(0, 2), (2, 3), (5, 6)])
    [(0, 3), (5, 6)]
    """
    found: list[tuple[int, int]] = []
    for low, high in ranges:
        if found and found[-1][1] == low:
            found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return found


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if head and first == last:
        return _in_row(first, _boxes(shape[1:], head, tail))
    boxes = _in_row(first, _boxes(shape[1:], head, row)) if head else []
    whole = first + bool(head)
    if whole < last:
        boxes.append(Box((whole, *(0,) * (len(shape) - 1)), (last, *shape[1:])))
    if tail:
        boxes += _in_row(last, _boxes(shape[1:], 0, tail))
    return boxes


def _in_row(index: int, boxes: list[Box]) -> list[Box]:
    return [Box((index, *b.start), (index + 1, *b.stop)) for b in boxes]


def flat_rows(extents: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return `flat_boxes` of many ranges at once: ``(row, start, stop, run)`` of each box.

    Range ``[low[i], high[i])`` lies in the row-major order of shape ``extents[i]``; `row` is i, `run` the number of
    elements of the range before the box. Boxes come in order of row and run.

    Examples
    --------
    >>> row, start, stop, run = flat_rows(np.array([[3, 4]]), np.array([2]), np.array([9]))
    >>> start.tolist(), stop.tolist(), run.tolist()
    ([[0, 2], [1, 0], [2, 0]], [[1, 4], [2, 4], [3, 1]], [0, 2, 6])
    """
    ndim = extents.shape[1]
    inner = np.cumprod(np.concatenate([np.ones((len(extents), 1), np.int64), extents[:, :0:-1]], 1), 1)[:, ::-1]
    inner = np.maximum(inner, 1)
    first, last = -(-low[:, None] // inner), high[:, None] // inner  # whole sub-arrays of each axis in the range
    middle = np.argmax(first <= last, axis=1)
    found = []
    for axis in range(ndim):
        begin, end = first[:, axis], last[:, axis]
        if axis:
            is_below = middle < axis
            found.append((axis, begin, np.where(is_below, first[:, axis - 1] * extents[:, axis], begin)))
            found.append((axis, np.where(is_below, last[:, axis - 1] * extents[:, axis], end), end))
        is_middle = middle == axis
        found.append((axis, np.where(is_middle, begin, 0), np.where(is_middle, end, 0)))
    parts = [_rows_of_axis(axis, begin, end, extents, inner, low) for axis, begin, end in found]
    row, start, stop, run = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.lexsort((run, row))
    return row[order], start[order], stop[order], run[order]


def _rows_of_axis(axis: int, begin: Ints, end: Ints, extents: Ints, inner: Ints, low: Ints) -> tuple[Ints, ...]:
    """Return the boxes of sub-arrays ``[begin, end)`` along `axis`, numbered through the whole array."""
    row = np.flatnonzero((begin < end) & (low < end * inner[:, axis]))
    begin, end, shape = begin[row], end[row], extents[row]
    start, stop = np.zeros_like(shape), shape.copy()
    parent, start[:, axis] = np.divmod(begin, shape[:, axis])
    stop[:, axis] = start[:, axis] + end - begin
    for outer in range(axis - 1, -1, -1):
        parent, start[:, outer] = np.divmod(parent, shape[:, outer])
        stop[:, outer] = start[:, outer] + 1
    return row, start, stop, begin * inner[row, axis] - low[row]
