"""The pieces of one wave, from the point of view of a rank: which it keeps, sends and receives, and their places."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs
import numpy as np

from functional_ckpt.plan.layout import ArrayPlan
from functional_ckpt.plan.pieces import Pieces
from functional_ckpt.spec.columns import row_keys, runs
from functional_ckpt.spec.table import unpadded
from functional_ckpt.store.buffer import WHOLE, Buffer, address_of, region_of
from functional_ckpt.store.encoding import Array, numpy_dtype

__all__ = ["Form", "Wave", "forms_of", "waves_of"]


def waves_of(pieces: Pieces, arrays: Sequence[ArrayPlan], rank: int) -> Iterator["Wave"]:
    """Yield the waves of the pieces that move, as `rank` sees them, in order."""
    rows = pieces.take(pieces.chunk >= 0)
    order = np.argsort(rows.wave, kind="stable")
    begin, _ = runs(rows.wave[order])
    for low, high in pairwise([*begin.tolist(), len(order)]):
        yield Wave.of(rows.take(order[low:high]), arrays, rank)


@attrs.frozen
class Form:
    """What a piece is like: thousands of pieces, of arrays of one kind, have one in common.

    The piece has a `shape`, elements of `dtype` and `nbytes` bytes. It is region `inside` of a fragment of shape
    `fragment`, and region `place` of a chunk whose cells have the shape `chunk`.
    """

    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    fragment: tuple[int, ...]
    inside: tuple[Any, ...]
    chunk: tuple[int, ...]
    place: tuple[Any, ...]

    @classmethod
    def of(cls, pieces: Pieces, arrays: Sequence[ArrayPlan], row: int) -> "Form":
        """Return the form of a row."""
        array = arrays[pieces.array[row]]
        ndim, dtype = len(array.spec.shape), numpy_dtype(array.spec.dtype)
        piece = unpadded(pieces.start[row], pieces.stop[row], ndim)
        # Of a fragment in the memory of another rank nothing is known, nor asked.
        is_known = pieces.low[row].min(initial=0) >= 0
        fragment = unpadded(pieces.low[row], pieces.high[row], ndim) if is_known else piece
        chunk = array.grid.box(array.grid.index(int(pieces.chunk[row])))
        inside = WHOLE if piece == fragment else region_of(fragment.start, piece.start, piece.stop)
        place = region_of(chunk.start, piece.start, piece.stop)
        return cls(piece.shape, dtype, piece.size * dtype.itemsize, fragment.shape, inside, chunk.shape, place)

    @property
    def fills(self) -> bool:
        """Whether the piece is all of its chunk."""
        return self.shape == self.chunk


def forms_of(pieces: Pieces, arrays: Sequence[ArrayPlan]) -> list[Form]:
    """Return the form of each row; it is made of nothing but what makes up the key."""
    used, which = np.unique(pieces.array, return_inverse=True)
    kinds: dict[object, int] = {}
    plans = [arrays[number] for number in used.tolist()]
    like = [kinds.setdefault((p.spec.shape, p.spec.dtype, p.layout.chunk), len(kinds)) for p in plans]
    kind = np.array(like, np.int64)[which.ravel()]
    keys = row_keys(kind, pieces.chunk, pieces.start, pieces.stop, pieces.low, pieces.high)
    forms: dict[bytes, Form] = {}
    for row, key in enumerate(keys):
        if key not in forms:
            forms[key] = Form.of(pieces, arrays, row)
    return [forms[key] for key in keys]


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
    #: For each row: numbers of its array, chunk and shard, first element of its fragment, and form.
    array: list[int]
    chunk: list[int]
    shard: list[int]
    run: list[int]
    form: list[Form]

    @classmethod
    def of(cls, pieces: Pieces, arrays: Sequence[ArrayPlan], rank: int) -> "Wave":
        """Return the wave of `pieces`, all of them with `rank` as source or target."""
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
        columns = (column.tolist() for column in (pieces.array, pieces.chunk, pieces.shard, pieces.run))
        return cls(arrays, tuple(here), held, foreign, *columns, forms_of(pieces, arrays))

    def place_of(self, row: int) -> tuple[int, int]:
        """Return the numbers of a piece's array and chunk."""
        return self.array[row], self.chunk[row]

    def get(self, row: int, buffers: Sequence[Buffer]) -> Array:
        """Return a piece from this rank's buffers, on the host."""
        form = self.form[row]
        return buffers[self.shard[row]].get(form.fragment, self.run[row], form.inside)

    def put(self, row: int, buffers: Sequence[Buffer], values: Array) -> None:
        """Set a piece in this rank's buffers."""
        form = self.form[row]
        buffers[self.shard[row]].put(form.fragment, self.run[row], form.inside, values)

    def nbytes_of(self, rows: Sequence[int]) -> int:
        """Return the bytes of pieces together."""
        return sum(self.form[row].nbytes for row in rows)

    def parts_of(self, rows: Sequence[int], message: Array) -> Iterator[tuple[int, Array]]:
        """Yield the pieces of a message with their rows: views if they are aligned, else copies."""
        offset, address = 0, address_of(message)
        for row in rows:
            form = self.form[row]
            part = message[offset : offset + form.nbytes]
            if (address + offset) % form.dtype.alignment:
                part = part.copy()
            offset += form.nbytes
            yield row, part.view(form.dtype).reshape(form.shape)
