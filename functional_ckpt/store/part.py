"""Part of a plain chunk: the byte ranges of its file that hold the part, and the strides of the part once read."""

from collections.abc import Iterator
from math import prod
from typing import Any

import attrs
import numpy as np
from numpy.lib.stride_tricks import as_strided

from functional_ckpt.plan.layout import ChunkGrid, subdivide
from functional_ckpt.spec.box import Box
from functional_ckpt.store.base import BLOCK_NBYTES, PAGE_NBYTES, Store
from functional_ckpt.store.encoding import Array

__all__ = ["PART_NBYTES", "Ranges", "blocks_of", "ranges_of", "read_part"]

#: At most so many bytes are fetched at once, unless they are read directly into their place.
PART_NBYTES = 4 * BLOCK_NBYTES


@attrs.frozen
class Ranges:
    """Ranges of a file, all `nbytes` long, that hold a box; packed one after the other, its cells are `strides` apart.

    All three are in bytes.
    """

    starts: list[int]
    nbytes: int
    strides: tuple[int, ...]

    @property
    def total_nbytes(self) -> int:
        """Bytes of all ranges."""
        return len(self.starts) * self.nbytes


def ranges_of(chunk: tuple[int, ...], box: Box, itemsize: int, page_nbytes: int = PAGE_NBYTES) -> Ranges:
    """Return the ranges of a plain chunk's file that hold `box` (in the chunk's coordinates).

    Ranges less than a page apart are merged: the disk fetches the page in any case, and a call costs as much as copying
    a page.

    Examples
    --------
    >>> ranges_of((4, 4096), Box((1, 0), (3, 2048)), 4)
    Ranges(starts=[16384, 32768], nbytes=8192, strides=(8192, 4))
    >>> ranges_of((4, 64), Box((1, 0), (3, 32)), 4)
    Ranges(starts=[256], nbytes=384, strides=(256, 4))
    """
    shape = box.shape
    steps = [prod(chunk[axis + 1 :]) * itemsize for axis in range(len(chunk))]
    nbytes, inner = itemsize, len(chunk)  # a range holds the axes from `inner` on
    for axis in reversed(range(len(chunk))):
        if shape[axis] > 1 and steps[axis] - nbytes >= page_nbytes:
            break
        nbytes += (shape[axis] - 1) * steps[axis]
        inner = axis
    starts = np.array([sum(low * step for low, step in zip(box.start, steps, strict=True))], np.int64)
    for extent, step in zip(shape[:inner], steps, strict=False):
        starts = (starts[:, None] + np.arange(extent) * step).ravel()
    packed = [prod(shape[axis + 1 : inner]) * nbytes for axis in range(inner)]
    return Ranges(starts.tolist(), nbytes, (*packed, *steps[inner:]))


def blocks_of(box: Box, ranges: Ranges, itemsize: int, limit_nbytes: int = PART_NBYTES) -> Iterator[Box]:
    """Yield `box`, which lies in `ranges`, in pieces for which about `limit_nbytes` at most are fetched, row-major.

    Examples
    --------
    >>> box = Box((0, 0), (4, 2**20))
    >>> [piece.shape for piece in blocks_of(box, ranges_of((4, 2**20), box, 4), 4)]
    [(1, 1048576), (1, 1048576), (1, 1048576), (1, 1048576)]
    """
    total = ranges.total_nbytes
    if total <= limit_nbytes:
        yield box
        return
    wanted = max(itemsize, limit_nbytes * box.size * itemsize // total)
    grid = ChunkGrid(box.shape, subdivide(box.shape, (False,) * box.ndim, itemsize, wanted, 0))
    for index in grid.touched(Box.from_shape(box.shape)):
        piece = grid.box(index)
        start = tuple(low + at for low, at in zip(box.start, piece.start, strict=True))
        yield Box.from_shape(piece.shape, start)


def read_part(store: Store, name: str, ranges: Ranges, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return the box of `shape` that `ranges` of a chunk's file hold."""
    data = np.empty(ranges.total_nbytes, np.uint8)
    store.read_ranges(name, ranges.starts, ranges.nbytes, data.data)
    values: Array = as_strided(data.view(dtype), shape, ranges.strides)
    return values
