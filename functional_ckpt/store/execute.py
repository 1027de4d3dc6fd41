"""Run the plan of a save against a store: `write_plan`, `digest_shared`.

A whole plain chunk is digested and written directly from the caller's memory. A chunk with codecs, and a chunk that
this rank writes in part, goes through TensorStore. An array of one chunk skips the grid: a small tensor costs two file
creations and little else.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

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
    write_plain,
)
from functional_ckpt.store.encoding import as_bytes, digest
from functional_ckpt.store.exchange import Exchange, LocalExchange, Traffic
from functional_ckpt.store.orders import Batch, orders_of
from functional_ckpt.store.work import Work, run_all

__all__ = ["Receipt", "content_digest", "digest_shared", "write_plan"]

OnBytes = Callable[[int], None]


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
    orders = plan.derived(orders_of, store.capabilities.concurrency > 0)
    work = [Work(0, partial(write_header, plan.arrays[number], store), 0) for number in orders.apart]
    write = partial(_write_small, plan, buffers, store)
    work += [Work(batch.nbytes, partial(write, batch), batch.nbytes) for batch in orders.small]
    for row in orders.large:
        work += _writers(plan, row, buffers, store)
    return work


def _write_small(plan: SavePlan, buffers: Sequence[Buffer], store: Store, batch: Batch) -> ChunkRows:
    """Write small fragments of the plan, and metadata of their arrays."""
    found: list[Digest] = []
    for number, shard, run, shape, name, text, chunk in batch.whole:
        if name:
            store.create(name, (memoryview(text),), len(text))
        found.append((number, 0, write_plain(store, chunk, as_bytes(buffers[shard].get(shape, run, WHOLE)))))
    for row, begins in batch.others:
        number, source = int(plan.pieces.array[row]), plan.fragment(row)
        array, buffer = plan.arrays[number], buffers[plan.pieces.shard[row]]
        if begins:
            write_header(array, store)
        found += _digests(number, array, source, buffer, store, _pieces(array.grid, source.box))
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
