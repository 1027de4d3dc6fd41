"""Strategies for shapes, boxes, tilings of an array by boxes, and splits of a flat range."""

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from functional_ckpt.spec.box import Box
from functional_ckpt.spec.tiling import chunked_sizes

__all__ = [
    "any_boxes",
    "balanced_sizes",
    "boxes",
    "flat_splits",
    "grid_boxes",
    "grid_tilings",
    "guillotine_tilings",
    "shapes",
    "tilings",
    "uneven_tilings",
]

Boxes = tuple[Box, ...]


def shapes(
    max_rank: int = 4, max_side: int = 8, min_side: int = 0, min_rank: int = 0
) -> SearchStrategy[tuple[int, ...]]:
    """Generate shapes of `min_rank` to `max_rank` dimensions, mostly without zero extents.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(shapes(), lambda shape: len(shape) == 2)
    (1, 1)
    """
    full = _extents(max(min_side, 1), max_side, min_rank, max_rank)
    if min_side:
        return full
    # Zero extents come from a separate branch, one of four: drawn per axis they would empty most arrays.
    return st.one_of(full, full, full, _extents(0, min(max_side, 3), min_rank, max_rank))


def _extents(low: int, high: int, min_rank: int, max_rank: int) -> SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(low, high), min_size=min_rank, max_size=max_rank).map(tuple)


@st.composite
def boxes(draw: DrawFn, shape: Sequence[int], empty: bool = True) -> Box:
    """Generate boxes within an array of `shape`, some of them (unless not `empty`) without cells.

    An array without cells has only empty boxes.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(boxes((4, 4)), lambda box: box.size == 6)
    Box(start=(0, 0), stop=(2, 3))
    """
    # Drawn once, not per axis: most boxes of many axes would be empty.
    least = 0 if empty and draw(st.integers(0, 3)) == 3 else 1
    start, stop = [], []
    for extent in shape:
        length = draw(st.integers(min(least, extent), extent))
        start.append(draw(st.integers(0, extent - length)))
        stop.append(start[-1] + length)
    return Box(tuple(start), tuple(stop))


def any_boxes() -> SearchStrategy[Box]:
    """Generate boxes of up to 4 dimensions.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(any_boxes(), lambda box: box.ndim == 0)
    Box(start=(), stop=())
    """
    return shapes().flatmap(boxes)


@st.composite
def guillotine_tilings(draw: DrawFn, shape: Sequence[int], max_boxes: int = 8) -> Boxes:
    """Generate tilings made by repeatedly cutting a box in two: general layouts, grids are rare.

    Shrinks to the whole array in one box.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(guillotine_tilings((2, 2)), lambda tiling: len(tiling) == 3)
    (Box(start=(0, 0), stop=(1, 1)), Box(start=(0, 1), stop=(1, 2)), Box(start=(1, 0), stop=(2, 2)))
    """
    parts = [Box.from_shape(shape)]
    for _ in range(draw(st.integers(0, max_boxes - 1))):
        places = [(i, axis) for i, box in enumerate(parts) for axis, n in enumerate(box.shape) if n > 1]
        if not places:
            break
        i, axis = draw(st.sampled_from(places))
        box = parts[i]
        at = draw(st.integers(box.start[axis] + 1, box.stop[axis] - 1))
        parts[i : i + 1] = _cut(box, axis, at)
    return tuple(parts)


def _cut(box: Box, axis: int, at: int) -> list[Box]:
    low = Box(box.start, (*box.stop[:axis], at, *box.stop[axis + 1 :]))
    high = Box((*box.start[:axis], at, *box.start[axis + 1 :]), box.stop)
    return [low, high]


@st.composite
def grid_tilings(draw: DrawFn, shape: Sequence[int], max_parts: int = 4) -> Boxes:
    """Generate grids with cuts anywhere along each axis; some cells may be empty.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(grid_tilings((4,)), lambda tiling: len(tiling) == 2)
    (Box(start=(0,), stop=(0,)), Box(start=(0,), stop=(4,)))
    """
    return grid_boxes([_sizes(n, draw(_cuts(n, max_parts))) for n in shape])


def _cuts(extent: int, max_parts: int) -> SearchStrategy[list[int]]:
    return st.lists(st.integers(0, extent), max_size=max_parts - 1).map(sorted)


def _sizes(extent: int, cuts: Sequence[int]) -> tuple[int, ...]:
    return tuple(hi - lo for lo, hi in zip((0, *cuts), (*cuts, extent), strict=True))


@st.composite
def uneven_tilings(draw: DrawFn, shape: Sequence[int], max_parts: int = 4) -> Boxes:
    """Generate grids as ``torch.chunk`` (last parts short or empty) or ``numpy.array_split`` cut them.

    Examples
    --------
    >>> from hypothesis import find
    >>> [box.shape for box in find(uneven_tilings((5,)), lambda tiling: len(tiling) == 3)]
    [(2,), (2,), (1,)]
    """
    rule = draw(st.sampled_from([chunked_sizes, balanced_sizes]))
    return grid_boxes([rule(n, draw(st.integers(1, max_parts))) for n in shape])


def tilings(shape: Sequence[int]) -> SearchStrategy[Boxes]:
    """Generate tilings of an array of `shape` of every kind.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(tilings((3, 3)), lambda tiling: True)
    (Box(start=(0, 0), stop=(3, 3)),)
    """
    return guillotine_tilings(shape) | grid_tilings(shape, 3) | uneven_tilings(shape, 3)


@st.composite
def flat_splits(draw: DrawFn, size: int, max_parts: int = 4) -> tuple[tuple[int, int], ...]:
    """Generate splits of the flat range ``[0, size)`` into half-open ranges in order; some may be empty.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(flat_splits(9), lambda ranges: len(ranges) == 2 and all(lo < hi for lo, hi in ranges))
    ((0, 1), (1, 9))
    """
    cuts = draw(_cuts(size, max_parts))
    return tuple(zip((0, *cuts), (*cuts, size), strict=True))


def balanced_sizes(extent: int, parts: int) -> tuple[int, ...]:
    """Split `extent` elements as ``numpy.array_split`` does: sizes differ by at most one.

    Examples
    --------
    >>> balanced_sizes(5, 4)
    (2, 1, 1, 1)
    """
    part, longer = divmod(extent, parts)
    return tuple(part + (i < longer) for i in range(parts))


def grid_boxes(sizes_per_axis: Sequence[Sequence[int]]) -> tuple[Box, ...]:
    """Return the cells of a grid, row-major, from the part sizes along each axis.

    Examples
    --------
    >>> [b.start for b in grid_boxes([(2, 2), (3,)])]
    [(0, 0), (2, 0)]
    """
    edges = [np.concatenate([[0], np.cumsum(sizes)]).tolist() for sizes in sizes_per_axis]
    spans = [list(pairwise(e)) for e in edges]
    return tuple(Box(tuple(s[0] for s in cell), tuple(s[1] for s in cell)) for cell in product(*spans))
