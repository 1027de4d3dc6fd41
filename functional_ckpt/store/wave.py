"""What a rank does with the pieces of one wave: which are here, which leave and which come, and where each one lies."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs
import numpy as np

from functional_ckpt.plan.layout import ArrayPlan
from functional_ckpt.plan.pieces import Pieces
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.columns import runs
from functional_ckpt.store.buffer import Buffer, region_of
from functional_ckpt.store.encoding import Array, numpy_dtype

__all__ = ["Wave", "waves_of"]


def waves_of(pieces: Pieces, arrays: Sequence[ArrayPlan], rank: int) -> Iterator["Wave"]:
    """Yield the waves of the pieces that move, as `rank` sees them, in order."""
    rows = pieces.take(pieces.chunk >= 0)
    order = np.argsort(rows.wave, kind="stable")
    begin, _ = runs(rows.wave[order])
    for low, high in pairwise([*begin.tolist(), len(order)]):
        yield Wave.of(rows.take(order[low:high]), arrays, rank)


@attrs.frozen
class _Row:
    """A piece: part of a chunk of an array, and of the fragment from element `run` on of a shard's buffer."""

    array: int
    chunk: int
    start: list[int]
    stop: list[int]
    low: list[int]
    high: list[int]
    shard: int
    run: int
    size: int


@attrs.frozen(eq=False)
class Wave:
    """Rows of one wave by what happens to them: `here` stay on this rank, the others are listed by the other rank.

    `held` are in this rank's buffers and belong to chunks of others; `foreign` are in others' buffers and belong to
    chunks of this rank. Both sides of a message list its pieces in the same order.
    """

    arrays: Sequence[ArrayPlan]
    rows: tuple[_Row, ...]
    here: tuple[int, ...]
    held: dict[int, list[int]]
    foreign: dict[int, list[int]]

    @classmethod
    def of(cls, pieces: Pieces, arrays: Sequence[ArrayPlan], rank: int) -> "Wave":
        """Return the wave of `pieces`, all of them with `rank` as source or target."""
        ends = (pieces.start, pieces.stop, pieces.low, pieces.high)
        numbers = (pieces.shard, pieces.run, pieces.sizes)
        columns = (column.tolist() for column in (pieces.array, pieces.chunk, *ends, *numbers))
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
        return cls(arrays, tuple(map(_Row, *columns)), tuple(here), held, foreign)

    def box_of(self, array: int, chunk: int) -> Box:
        """Return the cells of a chunk."""
        plan = self.arrays[array]
        grid = plan.grid
        return plan.spec.box if grid.is_single else grid.box(grid.index(chunk))

    def in_chunk(self, row: int, box: Box) -> tuple[Any, ...]:
        """Return where a piece lies in its chunk, whose cells are `box`."""
        piece = self.rows[row]
        front = len(piece.start) - box.ndim
        return region_of(box.start, piece.start[front:], piece.stop[front:])

    def shape_of(self, row: int) -> tuple[int, ...]:
        """Return the shape of a piece."""
        piece = self.rows[row]
        front = len(piece.start) - len(self.arrays[piece.array].spec.shape)
        return tuple(b - a for a, b in zip(piece.start[front:], piece.stop[front:], strict=True))

    def get(self, row: int, buffers: Sequence[Buffer]) -> Array:
        """Return a piece from this rank's buffers, on the host."""
        piece, shape, region = self._in_fragment(row)
        return buffers[piece.shard].get(shape, piece.run, region)

    def put(self, row: int, buffers: Sequence[Buffer], values: Array) -> None:
        """Set a piece in this rank's buffers."""
        piece, shape, region = self._in_fragment(row)
        buffers[piece.shard].put(shape, piece.run, region, values)

    def dtype_of(self, row: int) -> Any:
        """Return the numpy data type of a piece's array."""
        return numpy_dtype(self.arrays[self.rows[row].array].spec.dtype)

    def nbytes_of(self, rows: Sequence[int]) -> int:
        """Return the bytes of pieces together."""
        return sum(self.rows[row].size * self.arrays[self.rows[row].array].spec.itemsize for row in rows)

    def parts_of(self, rows: Sequence[int], message: Array) -> Iterator[tuple[int, Array]]:
        """Yield the pieces of a message with their rows: views where they are aligned, else copies."""
        offset = 0
        for row in rows:
            dtype, shape = self.dtype_of(row), self.shape_of(row)
            part = message[offset : offset + self.rows[row].size * dtype.itemsize]
            offset += len(part)
            yield row, (part if part.ctypes.data % dtype.alignment == 0 else part.copy()).view(dtype).reshape(shape)

    def _in_fragment(self, row: int) -> tuple[_Row, tuple[int, ...], tuple[Any, ...]]:
        piece = self.rows[row]
        front = len(piece.low) - len(self.arrays[piece.array].spec.shape)
        low, high = piece.low[front:], piece.high[front:]
        shape = tuple(b - a for a, b in zip(low, high, strict=True))
        return piece, shape, region_of(low, piece.start[front:], piece.stop[front:])
