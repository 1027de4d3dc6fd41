"""Chunks that one rank writes and several hold: in each wave ranks exchange pieces, then write their chunks whole."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from functional_ckpt.plan.save import SavePlan
from functional_ckpt.spec.box import Box
from functional_ckpt.store.base import Store
from functional_ckpt.store.buffer import Buffer
from functional_ckpt.store.chunk import write_chunk, write_header
from functional_ckpt.store.encoding import Array, as_bytes
from functional_ckpt.store.exchange import Exchange, Message, Traffic, deliver
from functional_ckpt.store.wave import Wave, waves_of
from functional_ckpt.store.work import Work, run_all

__all__ = ["Digest", "assemble_and_write", "joined_bytes"]

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
    """Move the pieces of `plan` (restricted to this rank) and write the chunks that this rank owns.

    A rank that fails here, or failed before with `failure`, goes on exchanging, so that no other rank waits for it in
    vain; it raises after the last wave.
    """
    found: list[Digest] = []
    traffic = Traffic()
    headers = frozenset(plan.header_rows.array.tolist())
    for wave in waves_of(plan.pieces, plan.arrays, exchange.rank):
        chunks = _Chunks(wave, buffers)
        failure = failure or chunks.keep()
        sent, failure = deliver(exchange, chunks.outgoing(), chunks.incoming(), failure)
        traffic += sent
        if failure is None:
            try:
                found += chunks.write(store, headers, budget_nbytes, on_bytes)
            except Exception as error:
                failure = error
    if failure is not None:
        raise failure
    return found, traffic


def joined_bytes(parts: Sequence[Array]) -> Array:
    """Return the elements of arrays, each in C order, as bytes.

    Examples
    --------
    >>> joined_bytes([np.zeros(2, "i2"), np.ones(1, "i1")]).tolist()
    [0, 0, 0, 0, 1]
    """
    return np.frombuffer(bytearray().join([as_bytes(part) for part in parts]), np.uint8)


class _Chunks:
    """The chunks that this rank assembles in one wave, and the messages from and to other ranks."""

    def __init__(self, wave: Wave, buffers: Sequence[Buffer]) -> None:
        self.wave, self.buffers = wave, buffers
        self._found: dict[tuple[int, int], tuple[Box, Array]] = {}

    # Not cached: messages refer to this object, and a cycle would keep all memory until the garbage collector runs.
    def outgoing(self) -> dict[int, Message]:
        """Return the messages to send, by rank."""
        wave = self.wave
        return {rank: Message(wave.nbytes_of(rows), partial(self._pack, rows)) for rank, rows in wave.held.items()}

    def incoming(self) -> dict[int, Message]:
        """Return the messages to receive, by rank."""
        wave = self.wave
        return {rank: Message(wave.nbytes_of(rows), partial(self._unpack, rows)) for rank, rows in wave.foreign.items()}

    def keep(self) -> Exception | None:
        """Put the pieces of this rank into their chunks, without a copy if one is a whole chunk; return a failure."""
        try:
            for row in self.wave.here:
                values = self.wave.get(row, self.buffers)
                place = self.wave.place_of(row)
                box = self.wave.box_of(*place)
                if self.wave.size[row] == box.size:
                    self._found[place] = box, values
                else:
                    self._region(row)[...] = values
        except Exception as error:
            return error
        return None

    def write(
        self, store: Store, headers: frozenset[int], budget_nbytes: int, on_bytes: Callable[[int], None] | None
    ) -> list[Digest]:
        """Write the assembled chunks, and the metadata of the arrays that begin with one of them."""
        work = [
            Work(values.nbytes, partial(self._write, store, array, chunk, box, values), 0)
            for (array, chunk), (box, values) in self._found.items()
        ]
        firsts = [array for array, chunk in self._found if array in headers and chunk == 0]
        work += [Work(0, partial(write_header, self.wave.arrays[array], store), 0) for array in firsts]
        digests: Any = run_all(work, budget_nbytes, on_bytes, store.capabilities.concurrency)
        return list(digests[: len(self._found)])

    def _write(self, store: Store, array: int, chunk: int, box: Box, values: Array) -> Digest:
        plan = self.wave.arrays[array]
        return array, chunk, write_chunk(store, plan, plan.grid.index(chunk), values)

    def _pack(self, rows: Sequence[int], _: Array) -> Array:
        return joined_bytes([self.wave.get(row, self.buffers) for row in rows])

    def _unpack(self, rows: Sequence[int], message: Array) -> Array:
        for row, part in self.wave.parts_of(rows, message):
            self._region(row)[...] = part
        return message

    def _region(self, row: int) -> Array:
        """Return the region of a chunk that a piece fills."""
        place = self.wave.place_of(row)
        known = self._found.get(place)
        if known is None:
            box = self.wave.box_of(*place)
            known = self._found[place] = box, np.empty(box.shape, self.wave.dtype_of(row))
        box, values = known
        region: Array = values[self.wave.in_chunk(row, box)]
        return region
