"""Chunks that one rank writes and several hold: pieces are moved wave by wave, and each wave's chunks written whole."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from functional_ckpt.plan.layout import ArrayPlan
from functional_ckpt.plan.pieces import Pieces
from functional_ckpt.plan.save import SavePlan
from functional_ckpt.spec.box import Box
from functional_ckpt.store.base import Store
from functional_ckpt.store.buffer import Buffer, region_of
from functional_ckpt.store.chunk import write_chunk, write_header
from functional_ckpt.store.encoding import Array, as_bytes, numpy_dtype
from functional_ckpt.store.exchange import Exchange, Message, Traffic, deliver
from functional_ckpt.store.work import Work, run_all

__all__ = ["Digest", "assemble_and_write"]

#: Number of an array in the plan, of a chunk in the array, and the digest of its elements.
Digest = tuple[int, int, bytes]


def assemble_and_write(
    plan: SavePlan,
    buffers: Sequence[Buffer],
    store: Store,
    exchange: Exchange,
    budget_nbytes: int,
    on_bytes: Callable[[int], None] | None = None,
    failure: Exception | None = None,
) -> tuple[list[Digest], Traffic]:
    """Move the pieces of `plan` (restricted to this rank) and write the chunks that they make up.

    A rank on which something fails, or has failed before with `failure`, goes on exchanging, so that the others need
    not wait for it; it raises when all waves are through.
    """
    found: list[Digest] = []
    traffic = Traffic()
    headers = frozenset(plan.header_rows.array.tolist())
    for rows in _waves(plan):
        wave = _Wave(plan.arrays, rows, buffers, exchange.rank, failure)
        sent, failed = deliver(exchange, wave.outgoing, wave.incoming)
        failure = failure or failed or wave.failure
        traffic += sent
        if failure is None:
            try:
                found += wave.write(store, headers, budget_nbytes, on_bytes)
            except Exception as error:
                failure = error
    if failure is not None:
        raise failure
    return found, traffic


def _waves(plan: SavePlan) -> Iterator[Pieces]:
    rows = plan.pieces.take(plan.pieces.chunk >= 0)
    order = np.argsort(rows.wave, kind="stable")
    begin = np.flatnonzero(np.diff(rows.wave[order], prepend=-1)).tolist()
    for low, high in pairwise([*begin, len(order)]):
        yield rows.take(order[low:high])


class _Wave:
    """The chunks that this rank assembles at a time, and the messages that make them and others'."""

    def __init__(
        self, arrays: Sequence[ArrayPlan], rows: Pieces, buffers: Sequence[Buffer], rank: int,
        failure: Exception | None,
    ) -> None:  # fmt: skip
        self.arrays, self.buffers, self.failure = arrays, buffers, failure
        self._rows = list(zip(
            rows.array.tolist(), rows.chunk.tolist(), rows.start.tolist(), rows.stop.tolist(), rows.low.tolist(),
            rows.high.tolist(), rows.shard.tolist(), rows.run.tolist(), rows.sizes.tolist(), strict=True,
        ))  # fmt: skip
        self._chunks: dict[tuple[int, int], tuple[Box, Array]] = {}
        leaving: dict[int, list[int]] = {}
        coming: dict[int, list[int]] = {}
        for row, (source, target) in enumerate(zip(rows.source.tolist(), rows.target.tolist(), strict=True)):
            if target != rank:
                leaving.setdefault(target, []).append(row)
            elif source != rank:
                coming.setdefault(source, []).append(row)
            elif self.failure is None:
                self._keep(row)
        self.outgoing = {rank: Message(self._nbytes(rows), partial(self._pack, rows)) for rank, rows in leaving.items()}
        self.incoming = {
            rank: Message(self._nbytes(rows), partial(self._unpack, rows)) for rank, rows in coming.items()
        }

    def write(
        self, store: Store, headers: frozenset[int], budget_nbytes: int, on_bytes: Callable[[int], None] | None
    ) -> list[Digest]:
        """Write the assembled chunks, and the metadata of the arrays that begin with one of them."""
        work = [
            Work(values.nbytes, partial(self._write, store, array, chunk, box, values, array in headers), 0)
            for (array, chunk), (box, values) in self._chunks.items()
        ]
        digests: Any = run_all(work, budget_nbytes, on_bytes)
        return list(digests)

    def _write(self, store: Store, array: int, chunk: int, box: Box, values: Array, header: bool) -> Digest:
        plan = self.arrays[array]
        if header and chunk == 0:
            write_header(plan, store)
        return array, chunk, write_chunk(store, plan.spec, plan.layout, box, values)

    def _keep(self, row: int) -> None:
        """Put a piece that is here already into its chunk; one that is the chunk is taken as it is."""
        try:
            array, chunk, *_, size = self._rows[row]
            values = self._values(row)
            whole = self._box(array, chunk)
            if size == whole.size:
                self._chunks[array, chunk] = whole, values
            else:
                self._region(row)[...] = values
        except Exception as error:
            self.failure = self.failure or error

    def _pack(self, rows: Sequence[int], _: Array) -> Array:
        return np.frombuffer(bytearray().join([as_bytes(self._values(row)) for row in rows]), np.uint8)

    def _unpack(self, rows: Sequence[int], message: Array) -> Array:
        offset = 0
        for row in rows:
            into = self._region(row)
            nbytes = into.nbytes
            # Copied as bytes: what has come is aligned to nothing.
            part = np.empty(into.shape, into.dtype)
            part.reshape(-1).view(np.uint8)[:] = message[offset : offset + nbytes]
            into[...] = part
            offset += nbytes
        return message

    def _values(self, row: int) -> Array:
        """Return a piece of this rank's buffers on the host."""
        array, _, start, stop, low, high, shard, run, _ = self._rows[row]
        front = len(low) - len(self.arrays[array].spec.shape)
        shape = tuple(b - a for a, b in zip(low[front:], high[front:], strict=True))
        region = region_of(low[front:], start[front:], stop[front:])
        values: Array = self.buffers[shard].get(shape, run, region)
        return values

    def _region(self, row: int) -> Array:
        """Return where a piece belongs in its chunk."""
        array, chunk, start, stop, *_ = self._rows[row]
        front = len(start) - len(self.arrays[array].spec.shape)
        known = self._chunks.get((array, chunk))
        if known is None:
            box = self._box(array, chunk)
            known = self._chunks[array, chunk] = box, np.empty(box.shape, numpy_dtype(self.arrays[array].spec.dtype))
        box, values = known
        region: Array = values[region_of(box.start, start[front:], stop[front:])]
        return region

    def _box(self, array: int, chunk: int) -> Box:
        plan = self.arrays[array]
        grid = plan.grid
        return plan.spec.box if grid.is_single else grid.box(grid.index(chunk))

    def _nbytes(self, rows: Sequence[int]) -> int:
        return sum(self._rows[row][-1] * self.arrays[self._rows[row][0]].spec.itemsize for row in rows)
