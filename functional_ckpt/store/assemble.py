"""Chunks that one rank writes and several hold: in each wave ranks exchange pieces, then write their chunks whole."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import cast

import numpy as np

from functional_ckpt.plan.save import SavePlan
from functional_ckpt.store.base import Store
from functional_ckpt.store.buffer import Buffer
from functional_ckpt.store.chunk import write_chunk, write_header
from functional_ckpt.store.encoding import Array
from functional_ckpt.store.exchange import Exchange, Message, Traffic, deliver
from functional_ckpt.store.wave import Wave, waves_of
from functional_ckpt.store.work import SMALL_NBYTES, Work, batches, run_all

__all__ = ["Digest", "assemble_and_write", "joined_bytes"]

#: Numbers of an array in the plan, and of a chunk in the array.
Place = tuple[int, int]
#: The same, and the digest of the chunk's elements.
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
    whole = [part if part.flags.c_contiguous else np.ascontiguousarray(part) for part in parts]
    return np.frombuffer(bytearray().join(whole), np.uint8)


class _Chunks:
    """The chunks that this rank assembles in one wave, and the messages from and to other ranks."""

    def __init__(self, wave: Wave, buffers: Sequence[Buffer]) -> None:
        self.wave, self.buffers = wave, buffers
        self._found: dict[Place, Array] = {}

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
                if self.wave.form[row].fills:
                    self._found[self.wave.place_of(row)] = values
                else:
                    self._region(row)[...] = values
        except Exception as error:
            return error
        return None

    def write(
        self, store: Store, headers: frozenset[int], budget_nbytes: int, on_bytes: Callable[[int], None] | None
    ) -> list[Digest]:
        """Write the assembled chunks, and the metadata of the arrays that begin with one of them."""
        waits, found = store.capabilities.concurrency, self._found
        first = [place for place in found if place[1] == 0 and place[0] in headers]
        # Where each request waits for a server, the metadata does not wait for the chunk.
        work = [Work(0, partial(write_header, self.wave.arrays[array], store), 0) for array, _ in first if waits]
        write = partial(self._write, store, frozenset(() if waits else first))
        small = {place: values.nbytes for place, values in found.items() if values.nbytes < SMALL_NBYTES and not waits}
        work += [Work(nbytes, partial(write, batch), 0) for batch, nbytes in batches(small, small.values())]
        large = [place for place in found if place not in small]
        work += [Work(found[place].nbytes, partial(write, [place]), 0) for place in large]
        done = cast("list[list[Digest] | None]", run_all(work, budget_nbytes, on_bytes, waits))
        return [digest for digests in done for digest in digests or ()]

    def _write(self, store: Store, begins: Collection[Place], places: Sequence[Place]) -> list[Digest]:
        """Write chunks; those in `begins` with the metadata of their arrays."""
        digests: list[Digest] = []
        for place in places:
            array, chunk = place
            plan = self.wave.arrays[array]
            if place in begins:
                write_header(plan, store)
            digests.append((array, chunk, write_chunk(store, plan, plan.grid.index(chunk), self._found[place])))
        return digests

    def _pack(self, rows: Sequence[int], _: Array) -> Array:
        return joined_bytes([self.wave.get(row, self.buffers) for row in rows])

    def _unpack(self, rows: Sequence[int], message: Array) -> Array:
        for row, part in self.wave.parts_of(rows, message):
            self._region(row)[...] = part
        return message

    def _region(self, row: int) -> Array:
        """Return the region of a chunk that a piece fills."""
        place, form = self.wave.place_of(row), self.wave.form[row]
        values = self._found.get(place)
        if values is None:
            values = self._found[place] = np.empty(form.chunk, form.dtype)
        region: Array = values[form.place]
        return region
