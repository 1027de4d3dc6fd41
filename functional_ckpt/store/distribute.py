"""Chunks that one rank reads and several want: in each wave ranks read their chunks whole and send the pieces."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from functional_ckpt.plan.layout import Layout
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.plan.pieces import Pieces
from functional_ckpt.store.assemble import joined_bytes
from functional_ckpt.store.base import Store
from functional_ckpt.store.buffer import Buffer
from functional_ckpt.store.chunk import check_digest, read_chunk
from functional_ckpt.store.encoding import Array, digest
from functional_ckpt.store.exchange import Exchange, Message, Traffic, deliver
from functional_ckpt.store.wave import Wave, waves_of
from functional_ckpt.store.work import Work, run_all

__all__ = ["nbytes_read", "read_and_distribute"]


def read_and_distribute(
    pieces: Pieces,
    entries: Sequence[ArrayEntry],
    buffers: Sequence[Buffer],
    store: Store,
    exchange: Exchange,
    budget_nbytes: int,
    verify: str = "covered",
    on_bytes: Callable[[int], None] | None = None,
    failure: Exception | None = None,
) -> Traffic:
    """Read the chunks of which this rank is the reader (`target`), and send their pieces to the ranks that want them.

    `pieces` are those that this rank wants (as `source`; they go to `buffers`) or reads (as `target`). A rank that
    fails here, or failed before with `failure`, goes on exchanging; it raises after the last wave.
    """
    arrays = [entry.plan for entry in entries]
    traffic = Traffic()
    for wave in waves_of(pieces, arrays, exchange.rank):
        chunks = _Chunks(wave, entries, buffers)
        if failure is None:
            try:
                chunks.read(store, budget_nbytes, verify, on_bytes)
            except Exception as error:
                failure = error
        sent, failure = deliver(exchange, chunks.outgoing(), chunks.incoming(), failure)
        traffic += sent
    if failure is not None:
        raise failure
    return traffic


def nbytes_read(layouts: Sequence[Layout], pieces: Pieces, rank: int) -> int:
    """Return the bytes of the chunks that `rank` reads, for itself and others.

    Examples
    --------
    >>> row = Pieces([0], [2], [[0]], [[1]], [[0]], [[1]], [3], [0], [0], [1], [0])
    >>> nbytes_read([Layout("owned", (4,), (), "float32")], row, 1)
    16
    """
    mine = pieces.target == rank
    places = set(zip(pieces.array[mine].tolist(), pieces.chunk[mine].tolist(), strict=True))
    return sum(layouts[array].chunk_nbytes for array, _ in places)


class _Chunks:
    """The chunks that this rank reads in one wave, and the messages to and from other ranks."""

    def __init__(self, wave: Wave, entries: Sequence[ArrayEntry], buffers: Sequence[Buffer]) -> None:
        self.wave, self.entries, self.buffers = wave, entries, buffers
        self._found: dict[tuple[int, int], Array] = {}

    # Not cached: messages refer to this object, and a cycle would keep all memory until the garbage collector runs.
    def incoming(self) -> dict[int, Message]:
        """Return the messages to receive, by rank."""
        wave = self.wave
        return {rank: Message(wave.nbytes_of(rows), partial(self._unpack, rows)) for rank, rows in wave.held.items()}

    def outgoing(self) -> dict[int, Message]:
        """Return the messages to send, by rank."""
        wave = self.wave
        return {rank: Message(wave.nbytes_of(rows), partial(self._pack, rows)) for rank, rows in wave.foreign.items()}

    def read(self, store: Store, budget_nbytes: int, verify: str, on_bytes: Callable[[int], None] | None) -> None:
        """Read and check the chunks, and put the pieces that this rank wants."""
        rows = [*self.wave.here, *(row for foreign in self.wave.foreign.values() for row in foreign)]
        wanted = dict.fromkeys(map(self.wave.place_of, rows))
        # The whole budget is free: the chunks of a wave take a third of it, and decoding them three times as much.
        work = [
            Work(self.entries[array].layout.chunk_nbytes, partial(self._read, store, verify, array, chunk), 0)
            for array, chunk in wanted
        ]
        found: Any = run_all(work, budget_nbytes, on_bytes, store.capabilities.concurrency)
        self._found = dict(zip(wanted, found, strict=True))
        for row in self.wave.here:
            self.wave.put(row, self.buffers, self._values(row))

    def _read(self, store: Store, verify: str, array: int, chunk: int) -> Array:
        entry = self.entries[array]
        values = read_chunk(store, entry.spec, entry.layout, entry.grid.index(chunk))
        if verify != "none":
            check_digest(entry, chunk, digest(values))
        return values

    def _values(self, row: int) -> Array:
        values: Array = self._found[self.wave.place_of(row)][self.wave.form[row].place]
        return values

    def _pack(self, rows: Sequence[int], _: Array) -> Array:
        return joined_bytes([self._values(row) for row in rows])

    def _unpack(self, rows: Sequence[int], message: Array) -> Array:
        for row, part in self.wave.parts_of(rows, message):
            self.wave.put(row, self.buffers, part)
        return message
