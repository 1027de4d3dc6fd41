"""Run a plan against a store: `write_plan`, `digest_shared`, `read_plan`.

A whole plain chunk is digested and written, or read and digested, directly from or to the caller's memory; if only part
of a plain chunk is wanted, only that part is read. A chunk with codecs, and a chunk that this rank writes in part, goes
through TensorStore. An array of one chunk skips the grid: a small tensor costs two file creations and little else.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import mul
from typing import Any, TypeAlias, cast

import attrs
import numpy as np
import xxhash

from functional_ckpt.errors import StorageError
from functional_ckpt.plan.layout import ArrayPlan, ChunkGrid, Layout, subdivide
from functional_ckpt.plan.load import ArrayRead, LoadPlan
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.plan.save import SavePlan
from functional_ckpt.plan.state import ChunkRows
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.columns import Ints
from functional_ckpt.spec.shard import Fragment
from functional_ckpt.store.assemble import Digest, assemble_and_write
from functional_ckpt.store.base import BLOCK_NBYTES, Store
from functional_ckpt.store.buffer import WHOLE, Buffer, region_of
from functional_ckpt.store.chunk import (
    SMALL_CHUNK_NBYTES,
    check_chunks,
    check_digest,
    chunk_digest,
    decoding_nbytes,
    located,
    read_chunk,
    update_chunk,
    write_chunk,
    write_header,
)
from functional_ckpt.store.encoding import (
    Array,
    as_bytes,
    chunk_path,
    digest,
    digest_bytes,
    is_raw,
    numpy_dtype,
)
from functional_ckpt.store.exchange import Exchange, LocalExchange, Traffic
from functional_ckpt.store.part import blocks_of, ranges_of, read_part
from functional_ckpt.store.work import SMALL_NBYTES, Work, most_at_once, run_all

__all__ = ["Receipt", "check_needed", "content_digest", "digest_shared", "read_plan", "write_plan"]

OnBytes = Callable[[int], None]

#: Of a row of the plan's pieces: its number, array, shard and run, and its bytes.
_Row: TypeAlias = tuple[int, int, int, int, int]

#: Most fragments that are written as one task.
_BATCH = 64


@attrs.frozen
class Receipt:
    """What one rank wrote: digests of its chunks (`array` is an index into `keys`), bytes of elements, and traffic."""

    keys: tuple[str, ...]
    chunks: ChunkRows
    nbytes: int
    traffic: Traffic


def write_plan(
    plan: SavePlan,
    buffers: Sequence[Buffer],
    store: Store,
    budget_nbytes: int,
    on_bytes: OnBytes | None = None,
    exchange: Exchange | None = None,
) -> Receipt:
    """Write the part of this rank of `plan` from the rank's `buffers`; shared chunks get their digest later."""
    failure: Exception | None = None
    direct: list[Digest] = []
    work = _direct_work(plan, buffers, store)
    try:
        direct = [
            d
            for found in run_all(work, budget_nbytes, on_bytes, store.capabilities.concurrency)
            for d in cast("list[Digest]", found or ())
        ]
    except Exception as error:
        failure = error
    exchange = exchange or LocalExchange()
    moved, traffic = assemble_and_write(plan, buffers, store, exchange, budget_nbytes, on_bytes, failure)
    keys = tuple(array.spec.key for array in plan.arrays)
    return Receipt(keys, _chunk_rows([*direct, *moved]), plan.written_nbytes(exchange.rank), traffic)


def digest_shared(plan: SavePlan, store: Store, budget_nbytes: int) -> Receipt:
    """Digest the shared chunks of this rank's plan, after all ranks have written."""

    def digested(number: int, chunk: int) -> Digest:
        array = plan.arrays[number]
        return number, chunk, chunk_digest(store, array.spec, array.layout, array.grid.index(chunk))

    rows = zip(plan.digest_rows.array.tolist(), plan.digest_rows.chunk.tolist(), strict=True)
    layouts = [array.layout for array in plan.arrays]
    work = [
        Work(layouts[number].chunk_nbytes, partial(digested, number, chunk), decoding_nbytes(layouts[number]))
        for number, chunk in rows
    ]
    found = cast("list[Digest]", run_all(work, budget_nbytes, None, store.capabilities.concurrency))
    return Receipt(tuple(array.spec.key for array in plan.arrays), _chunk_rows(found), 0, Traffic())


def _chunk_rows(digests: Sequence[Digest]) -> ChunkRows:
    words = np.frombuffer(b"".join([found for _, _, found in digests]), np.int64).reshape(len(digests), 2)
    return ChunkRows([array for array, _, _ in digests], [chunk for _, chunk, _ in digests], words)


def _direct_work(plan: SavePlan, buffers: Sequence[Buffer], store: Store) -> list[Work]:
    """Return the work of all pieces that are written directly, and of metadata of arrays without pieces here.

    Small fragments are written many at a time, with the metadata of their arrays; large ones chunk by chunk.
    """
    pieces = plan.pieces
    rows = np.flatnonzero(pieces.chunk < 0)
    has_header = np.zeros(len(plan.arrays), bool)
    has_header[plan.header_rows.array] = True
    has_header[pieces.array[pieces.chunk >= 0]] = False
    first = np.full(len(plan.arrays), -1)
    first[pieces.array[rows[::-1]]] = rows[::-1]  # of several rows of an array the last one assigned stays
    # Where requests wait for a server, the metadata does not wait for the chunks, nor one chunk for another.
    is_small = plan.nbytes < (0 if store.capabilities.concurrency else SMALL_NBYTES)
    with_first = has_header & np.append(is_small, False)[first]
    apart = np.flatnonzero(has_header & ~with_first)
    work = [Work(0, partial(write_header, plan.arrays[number], store), 0) for number in apart.tolist()]
    write = partial(_write_small, plan, frozenset(first[with_first].tolist()), buffers, store)
    work += [Work(nbytes, partial(write, batch), nbytes) for batch, nbytes in _batches(plan, rows[is_small[rows]])]
    for row in rows[~is_small[rows]].tolist():
        work += _writers(plan, row, buffers, store)
    return work


def _batches(plan: SavePlan, rows: Ints) -> Iterator[tuple[list[_Row], int]]:
    """Yield small rows of the plan, as many at a time as are small together, with their bytes."""
    batch: list[_Row] = []
    total = 0
    columns = (rows, *(column[rows] for column in (plan.pieces.array, plan.pieces.shard, plan.pieces.run, plan.nbytes)))
    for row in zip(*(column.tolist() for column in columns), strict=True):
        nbytes = row[-1]
        if total + nbytes >= SMALL_NBYTES or len(batch) == _BATCH:
            yield batch, total
            batch, total = [], 0
        batch.append(row)
        total += nbytes
    if batch:
        yield batch, total


def _write_small(
    plan: SavePlan, begins: Collection[int], buffers: Sequence[Buffer], store: Store, rows: Sequence[_Row]
) -> list[Digest]:
    """Write fragments of the plan, by their rows; those that are in `begins` with the metadata of their arrays."""
    found: list[Digest] = []
    for row, number, shard, run, nbytes in rows:
        array, buffer = plan.arrays[number], buffers[shard]
        if row in begins:
            write_header(array, store)
        grid = array.grid
        if grid.is_single and nbytes == array.layout.chunk_nbytes:  # most of them, and worth a shortcut
            values = buffer.get(grid.shape, run, WHOLE)
            found.append((number, 0, write_chunk(store, array, grid.index(0), values)))
        else:
            source = plan.fragment(row)
            found += _write_pieces(number, array, source, buffer, store, _pieces(array.grid, source.box))
    return found


def _writers(plan: SavePlan, row: int, buffers: Sequence[Buffer], store: Store) -> list[Work]:
    """Return the work of one large fragment: one item for each chunk."""
    number, source = int(plan.pieces.array[row]), plan.fragment(row)
    array, buffer = plan.arrays[number], buffers[plan.pieces.shard[row]]
    write = partial(_write_pieces, number, array, source, buffer, store)
    # A piece that is not contiguous is copied; part of a chunk is written by rewriting the whole chunk.
    held = decoding_nbytes(array.layout)
    pieces = _pieces(array.grid, source.box)
    return [Work(piece.box.size * array.spec.itemsize, partial(write, (piece,)), held) for piece in pieces]


def _write_pieces(
    number: int, array: ArrayPlan, source: Fragment, buffer: Buffer, store: Store, pieces: Iterable["_Piece"]
) -> list[Digest]:
    """Write pieces of a fragment."""
    found: list[Digest] = []
    for piece in pieces:
        values = buffer.get(source.box.shape, source.run, _region(source.box, piece.box))
        if piece.whole:
            found.append((number, piece.position, write_chunk(store, array, piece.index, values)))
        else:
            update_chunk(store, array.spec, array.layout, piece.box, values)
    return found


def content_digest(buffer: Buffer, spec: ArraySpec, budget_nbytes: int) -> bytes:
    """Return the digest of a whole array in a buffer: in place if it is contiguous, else block by block."""
    view = buffer.view(spec.shape, 0)
    if view is not None and view.flags.c_contiguous and view.dtype.isnative:
        return digest(view)
    free = (False,) * len(spec.shape)
    block = min(16 * BLOCK_NBYTES, budget_nbytes)
    chunk = subdivide(tuple(max(n, 1) for n in spec.shape), free, spec.itemsize, block, 0)
    hasher = xxhash.xxh3_128()
    # Leading axes are split first, so that the pieces one after the other are the array in C order.
    for piece in _pieces(ChunkGrid(spec.shape, chunk), spec.box):
        hasher.update(as_bytes(buffer.get(spec.shape, 0, _region(spec.box, piece.box))))
    return hasher.digest()


def check_needed(
    plan: LoadPlan, entries: Mapping[str, ArrayEntry], store: Store, absent: Collection[str] | None = None
) -> list[StorageError]:
    """Return a problem for each chunk that `plan` reads from and that is missing (`absent`), or has a wrong size."""
    needed = {(entry.spec.key, index): entry for entry, index in _chunks(plan, entries)}
    return list(check_chunks(store, ((entry, index) for (_, index), entry in needed.items()), absent))


def _chunks(plan: LoadPlan, entries: Mapping[str, ArrayEntry]) -> Iterator[tuple[ArrayEntry, tuple[int, ...]]]:
    """Yield the chunks of each read."""
    for read in plan.reads:
        yield from ((entries[read.key], index) for index in entries[read.key].grid.touched(read.box))


def read_plan(
    plan: LoadPlan,
    entries: Mapping[str, ArrayEntry],
    buffers: Sequence[Buffer],
    store: Store,
    budget_nbytes: int,
    verify: str = "covered",
    on_bytes: OnBytes | None = None,
    on_start: OnBytes | None = None,
) -> None:
    """Run `plan`: fill the rank's `buffers`. `verify` is ``"covered"``, ``"full"`` or ``"none"``.

    Before the first read `on_start` is called with the bytes of all.

    Raises
    ------
    CorruptionError
        If stored bytes differ from their digest. The content of `buffers` is then undefined.
    """
    concurrency = store.capabilities.concurrency
    held = (decoding_nbytes(entry.layout) for entry, _ in _chunks(plan, entries))
    store = store.reading(most_at_once(held, budget_nbytes, concurrency))
    work = list(_reading(plan.reads, partial(_read_array, entries, buffers, store, verify), entries, bool(concurrency)))
    if on_start is not None:
        on_start(sum(piece.nbytes for piece in work))
    for fill in plan.fills:
        region = region_of(fill.target.box.start, fill.box.start, fill.box.stop)
        buffers[fill.shard].put(fill.target.box.shape, fill.target.run, region, np.zeros((), np.int8))
    run_all(work, budget_nbytes, on_bytes, concurrency)


@attrs.frozen
class _Piece:
    """The intersection of a region with chunk number `position`; `whole` if it is all of the chunk."""

    index: tuple[int, ...]
    position: int
    box: Box
    whole: bool


def _pieces(grid: ChunkGrid, box: Box) -> Iterable[_Piece]:
    """Return the pieces of `box` by the chunks that it touches, row-major."""
    if grid.is_single:
        return (_Piece((0,) * len(grid.shape), 0, box, box.stop == grid.shape and not any(box.start)),)
    return _several_pieces(grid, box)


def _several_pieces(grid: ChunkGrid, box: Box) -> Iterator[_Piece]:
    for index in grid.touched(box):
        chunk = grid.box(index)
        common = chunk.intersect(box)
        if common is not None:
            yield _Piece(index, grid.position(index), common, common == chunk)


def _region(outer: Box, piece: Box) -> tuple[Any, ...]:
    return WHOLE if piece is outer else region_of(outer.start, piece.start, piece.stop)


def _reading(
    reads: Iterable[ArrayRead], run: Callable[..., None], entries: Mapping[str, ArrayEntry], apart: bool
) -> Iterator[Work]:
    """Yield the work of all reads: one item per chunk; small reads are one item together, unless `apart`.

    `run` is called with a read, and with the pieces of it if these are not all.
    """
    small: list[ArrayRead] = []
    nbytes = 0
    for read in reads:
        entry = entries[read.key]
        wanted = read.box.size * entry.spec.itemsize
        is_small = wanted < SMALL_NBYTES and is_raw(entry.layout)
        if apart or not is_small:
            held = wanted if is_small else decoding_nbytes(entry.layout)
            for piece in _pieces(entry.grid, read.box):
                yield Work(piece.box.size * entry.spec.itemsize, partial(run, read, (piece,)), held)
            continue
        if small and nbytes + wanted >= SMALL_NBYTES:
            yield Work(nbytes, partial(list, map(run, small)), nbytes)
            small, nbytes = [], 0
        small.append(read)
        nbytes += wanted
    if small:
        yield Work(nbytes, partial(list, map(run, small)), nbytes)


def _read_array(
    entries: Mapping[str, ArrayEntry],
    buffers: Sequence[Buffer],
    store: Store,
    verify: str,
    read: ArrayRead,
    pieces: Iterable[_Piece] | None = None,
) -> None:
    """Run one read, or only the given `pieces` of it."""
    entry, target, buffer = entries[read.key], read.target, buffers[read.shard]
    view = buffer.view(target.box.shape, target.run)
    for piece in _pieces(entry.grid, read.box) if pieces is None else pieces:
        region = _region(target.box, piece.box)
        into = None if view is None else view[region]
        name = chunk_path(entry.spec.key, piece.index)
        try:
            if piece.whole and into is not None and _is_direct(into, entry.spec, entry.layout):
                check_digest(entry, piece.position, _read_direct(store, name, as_bytes(into), verify != "none"))
            elif piece.whole or verify == "full" or _is_read_whole(entry.layout):
                buffer.put(target.box.shape, target.run, region, _read_checked(entry, piece, store, verify))
            else:
                _read_part(entry, piece, name, target, buffer, store, into)
        except StorageError as error:
            raise located(error, entry.spec, entry.layout, piece.index) from error.__cause__


def _is_read_whole(layout: Layout) -> bool:
    """Tell whether a piece costs as much as its whole chunk: if that is small, or can only be decoded whole."""
    return not is_raw(layout) or layout.chunk_nbytes <= SMALL_CHUNK_NBYTES


def _read_checked(entry: ArrayEntry, piece: _Piece, store: Store, verify: str) -> Array:
    """Return the cells of a piece; its chunk is read whole, and checked unless `verify` is ``"none"``."""
    values = read_chunk(store, entry.spec, entry.layout, piece.index)
    if verify != "none":
        check_digest(entry, piece.position, digest(values))
    cells: Array = values[region_of(tuple(map(mul, piece.index, entry.layout.chunk)), piece.box.start, piece.box.stop)]
    return cells


def _read_part(
    entry: ArrayEntry, piece: _Piece, name: str, target: Fragment, buffer: Buffer, store: Store, into: Array | None
) -> None:
    """Read only a piece of a plain chunk; directly into its place if its layout there is that of the file."""
    chunk, itemsize, dtype = entry.layout.chunk, entry.spec.itemsize, numpy_dtype(entry.spec.dtype)
    origin = entry.grid.box(piece.index)
    box = piece.box.relative_to(origin)
    ranges = ranges_of(chunk, box, itemsize)
    as_stored = into is not None and into.flags.c_contiguous and into.dtype == dtype
    if into is not None and as_stored and ranges.total_nbytes == into.nbytes:
        store.read_ranges(name, ranges.starts, ranges.nbytes, as_bytes(into))
        return
    shift = [o - t for o, t in zip(origin.start, target.box.start, strict=True)]
    for block in blocks_of(box, ranges, itemsize):
        values = read_part(store, name, ranges_of(chunk, block, itemsize), block.shape, dtype)
        region = tuple(slice(a + s, b + s) for a, b, s in zip(block.start, block.stop, shift, strict=True))
        buffer.put(target.box.shape, target.run, region, values)


def _read_direct(store: Store, name: str, into: memoryview, verify: bool) -> bytes | None:
    """Read a whole plain chunk into its place, and return its digest if `verify`."""
    if not verify or len(into) <= BLOCK_NBYTES:
        store.read_into(name, into)
        return digest_bytes(into) if verify else None
    hasher = xxhash.xxh3_128()
    store.read_into(name, into, hasher.update)
    return hasher.digest()


def _is_direct(into: Array, spec: ArraySpec, layout: Layout) -> bool:
    """Tell whether a chunk's file begins with exactly the bytes of `into`, in the order of its memory."""
    return (
        is_raw(layout)
        and into.flags.c_contiguous
        and into.dtype == numpy_dtype(spec.dtype)
        and into.shape[1:] == layout.chunk[1:]
    )
