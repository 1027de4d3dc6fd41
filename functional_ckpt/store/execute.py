"""Run the plan of a save against a store: `write_plan`, `digest_shared`.

A whole plain chunk is digested and written directly from the caller's memory. A chunk with codecs, and a chunk that
this rank writes in part, goes through TensorStore. An array of one chunk skips the grid: a small tensor costs two file
creations and little else.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import attrs
import numpy as np
import xxhash

from functional_ckpt.plan.layout import ArrayPlan, ChunkGrid, subdivide
from functional_ckpt.plan.save import SavePlan
from functional_ckpt.plan.state import ChunkRows
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.shard import Fragment
from functional_ckpt.store.assemble import Digest, assemble_and_write
from functional_ckpt.store.base import BLOCK_NBYTES, Store
from functional_ckpt.store.buffer import WHOLE, Buffer, region_of
from functional_ckpt.store.chunk import (
    chunk_digest,
    decoding_nbytes,
    update_chunk,
    write_chunk,
    write_header,
)
from functional_ckpt.store.encoding import as_bytes, digest
from functional_ckpt.store.exchange import Exchange, LocalExchange, Traffic
from functional_ckpt.store.work import SMALL_NBYTES, Work, batches, run_all

__all__ = ["Receipt", "content_digest", "digest_shared", "write_plan"]

OnBytes = Callable[[int], None]

#: Of a row of the plan's pieces: its number, array, shard and run, and its bytes.
_Row: TypeAlias = tuple[int, int, int, int, int]


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
    failure: Exception | None = None,
) -> Receipt:
    """Write the part of this rank of `plan` from the rank's `buffers`; shared chunks get their digest later.

    A rank that has met a `failure` before writes nothing and raises it, once no other rank waits for its pieces.
    """
    direct: list[object] = []
    work = [] if failure else _direct_work(plan, buffers, store)
    try:
        direct = run_all(work, budget_nbytes, on_bytes, store.capabilities.concurrency)
    except Exception as error:
        failure = error
    exchange = exchange or LocalExchange()
    moved, traffic = assemble_and_write(plan, buffers, store, exchange, budget_nbytes, on_bytes, failure)
    keys = tuple(array.spec.key for array in plan.arrays)
    written = [found for found in direct if isinstance(found, ChunkRows)]
    chunks = ChunkRows.joined([*written, _chunk_rows(moved)])
    return Receipt(keys, chunks, plan.written_nbytes(exchange.rank), traffic)


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
    small = rows[is_small[rows]]
    work += [
        Work(nbytes, partial(write, batch), nbytes)
        for batch, nbytes in batches(small.tolist(), plan.nbytes[small].tolist())
    ]
    for row in rows[~is_small[rows]].tolist():
        work += _writers(plan, row, buffers, store)
    return work


def _rows(plan: SavePlan, rows: Sequence[int]) -> Iterator[_Row]:
    """Yield rows of the plan."""
    columns = (plan.pieces.array, plan.pieces.shard, plan.pieces.run, plan.nbytes)
    return zip(rows, *(column[rows].tolist() for column in columns), strict=True)


def _write_small(
    plan: SavePlan, begins: Collection[int], buffers: Sequence[Buffer], store: Store, rows: Sequence[int]
) -> ChunkRows:
    """Write fragments of the plan, by their rows; those that are in `begins` with the metadata of their arrays."""
    found: list[Digest] = []
    for row, number, shard, run, nbytes in _rows(plan, rows):
        array, buffer = plan.arrays[number], buffers[shard]
        if row in begins:
            write_header(array, store)
        grid = array.grid
        if grid.is_single and nbytes == array.layout.chunk_nbytes:  # most of them, and worth a shortcut
            values = buffer.get(grid.shape, run, WHOLE)
            found.append((number, 0, write_chunk(store, array, grid.index(0), values)))
        else:
            source = plan.fragment(row)
            found += _digests(number, array, source, buffer, store, _pieces(grid, source.box))
    return _chunk_rows(found)


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
) -> ChunkRows:
    """Write pieces of a fragment."""
    return _chunk_rows(_digests(number, array, source, buffer, store, pieces))


def _digests(
    number: int, array: ArrayPlan, source: Fragment, buffer: Buffer, store: Store, pieces: Iterable["_Piece"]
) -> list[Digest]:
    """Write pieces of a fragment, and return the digests of those that are whole chunks."""
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
