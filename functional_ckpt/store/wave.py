"""The pieces of one wave, from the point of view of a rank: which it keeps, sends and receives, and their places."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs
import numpy as np

from functional_ckpt.plan.layout import ArrayPlan
from functional_ckpt.plan.pieces import Pieces
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.columns import runs
from functional_ckpt.store.buffer import WHOLE, Buffer, region_of
from functional_ckpt.store.encoding import Array, numpy_dtype

__all__ = ["Wave", "waves_of"]


def waves_of(pieces: Pieces, arrays: Sequence[ArrayPlan], rank: int) -> Iterator["Wave"]:
    """Yield the waves of the pieces that move, as `rank` sees them, in order."""
    rows = pieces.take(pieces.chunk >= 0)
    order = np.argsort(rows.wave, kind="stable")
    begin, _ = runs(rows.wave[order])
    for low, high in pairwise([*begin.tolist(), len(order)]):
        yield Wave.of(rows.take(order[low:high]), arrays, rank)


@attrs.frozen(eq=False)
class Wave:
    """The rows of one wave: `here` are those that stay on this rank, the others are grouped by the other rank.

    `held` are in this rank's buffers and belong to chunks of other ranks; `foreign` are in the buffers of other ranks
    and belong to chunks of this rank. Both ranks of a message list its pieces in the same order.
    """

    arrays: Sequence[ArrayPlan]
    here: tuple[int, ...]
    held: dict[int, list[int]]
    foreign: dict[int, list[int]]
    #: For each row: numbers of its array, chunk and shard, first element of its fragment, and size in elements.
    array: list[int]
    chunk: list[int]
    shard: list[int]
    run: list[int]
    size: list[int]
    #: Whether it is all of its fragment, as small pieces mostly are.
    is_whole: list[bool]
    #: Corners of regions and fragments, flattened, `width` numbers a row: this takes fewer objects than lists of rows.
    width: int
    start: list[int]
    stop: list[int]
    low: list[int]
    high: list[int]

    @classmethod
    def of(cls, pieces: Pieces, arrays: Sequence[ArrayPlan], rank: int) -> "Wave":
        """Return the wave of `pieces`, all of them with `rank` as source or target."""
        numbers = (pieces.array, pieces.chunk, pieces.shard, pieces.run, pieces.sizes)
        corners = (pieces.start, pieces.stop, pieces.low, pieces.high)
        held: dict[int, list[int]] = {}
        foreign: dict[int, list[int]] = {}
        here: list[int] = []
        for row, (source, target) in enumerate(zip(pieces.source.tolist(), pieces.target.tolist(), strict=True)):
            if target != rank:
                held.setdefault(target, []).append(row)
            elif source != rank:
                foreign.setdefault(source, []).append(row)
            else:
                here.append(row)
        array, chunk, shard, run, size = (column.tolist() for column in numbers)
        start, stop, low, high = (corner.ravel().tolist() for corner in corners)
        width = pieces.start.shape[1]
        is_whole = ((pieces.start == pieces.low) & (pieces.stop == pieces.high)).all(axis=1).tolist()
        return cls(
            arrays, tuple(here), held, foreign, array, chunk, shard, run, size, is_whole, width, start, stop, low, high
        )

    def place_of(self, row: int) -> tuple[int, int]:
        """Return the numbers of a piece's array and chunk."""
        return self.array[row], self.chunk[row]

    def box_of(self, array: int, chunk: int) -> Box:
        """Return the cells of a chunk."""
        plan = self.arrays[array]
        grid = plan.grid
        return plan.spec.box if grid.is_single else grid.box(grid.index(chunk))

    def in_chunk(self, row: int, box: Box) -> tuple[Any, ...]:
        """Return the region of a piece within its chunk, whose cells are `box`."""
        return region_of(box.start, self._of(self.start, row), self._of(self.stop, row))

    def shape_of(self, row: int) -> tuple[int, ...]:
        """Return the shape of a piece."""
        return _between(self._of(self.start, row), self._of(self.stop, row))

    def get(self, row: int, buffers: Sequence[Buffer]) -> Array:
        """Return a piece from this rank's buffers, on the host."""
        return buffers[self.shard[row]].get(self._fragment(row), self.run[row], self._in_fragment(row))

    def put(self, row: int, buffers: Sequence[Buffer], values: Array) -> None:
        """Set a piece in this rank's buffers."""
        buffers[self.shard[row]].put(self._fragment(row), self.run[row], self._in_fragment(row), values)

    def dtype_of(self, row: int) -> Any:
        """Return the numpy data type of a piece's array."""
        return numpy_dtype(self.arrays[self.array[row]].spec.dtype)

    def nbytes_of(self, rows: Sequence[int]) -> int:
        """Return the bytes of pieces together."""
        return sum(self.size[row] * self.arrays[self.array[row]].spec.itemsize for row in rows)

    def parts_of(self, rows: Sequence[int], message: Array) -> Iterator[tuple[int, Array]]:
        """Yield the pieces of a message with their rows: views if they are aligned, else copies."""
        offset = 0
        for row in rows:
            dtype, shape = self.dtype_of(row), self.shape_of(row)
            part = message[offset : offset + self.size[row] * dtype.itemsize]
            offset += len(part)
            yield row, (part if part.ctypes.data % dtype.alignment == 0 else part.copy()).view(dtype).reshape(shape)

    def _fragment(self, row: int) -> tuple[int, ...]:
        """Return the shape of the fragment that a piece is part of."""
        return _between(self._of(self.low, row), self._of(self.high, row))

    def _in_fragment(self, row: int) -> tuple[Any, ...]:
        """Return the region of a piece within its fragment."""
        return (
            WHOLE
            if self.is_whole[row]
            else region_of(self._of(self.low, row), self._of(self.start, row), self._of(self.stop, row))
        )

    def _of(self, corners: list[int], row: int) -> list[int]:
        """Return a corner of a row, without the leading entries that pad arrays with fewer dimensions."""
        end = (row + 1) * self.width
        return corners[end - len(self.arrays[self.array[row]].spec.shape) : end]


def _between(low: Sequence[int], high: Sequence[int]) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(low, high, strict=True))
