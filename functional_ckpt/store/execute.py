"""Run a plan against a store: `write_plan`, `digest_shared`, `read_plan`. Effects take a plan and return a receipt.

A whole plain chunk is digested and written, or read and digested, straight from and to the caller's memory. A chunk
with codecs, or of which this rank holds only a part, goes through TensorStore. Arrays of one chunk take no
detour over the grid: a small tensor costs two file creations and little else.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, cast

import attrs
import numpy as np
import xxhash

from functional_ckpt.errors import CorruptionError, StorageError
from functional_ckpt.plan.layout import ChunkGrid, Layout, subdivide
from functional_ckpt.plan.load import ArrayRead, LoadPlan
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.plan.save import ArrayPlan, ArrayWrite, SavePlan
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.flat import flat_runs
from functional_ckpt.spec.sharding import Fragment
from functional_ckpt.store.base import BLOCK_NBYTES, PAGE_NBYTES, Store
from functional_ckpt.store.buffer import WHOLE, Buffer, region_of
from functional_ckpt.store.encoding import (
    Array,
    array_metadata,
    as_bytes,
    chunk_name,
    digest,
    digest_bytes,
    is_raw,
    node_name,
    numpy_dtype,
)
from functional_ckpt.store.work import SMALL_NBYTES, Work, run_all

__all__ = ["ChunkDigest", "Receipt", "check_chunk", "digest_shared", "read_chunk", "read_plan", "write_plan"]

OnBytes = Callable[[int], None]


@attrs.frozen
class ChunkDigest:
    """The digest of chunk number `position` (row-major) of array `key`."""

    key: str
    position: int
    digest: bytes


@attrs.frozen
class Receipt:
    """What one rank wrote: digests of its chunks, and bytes of elements."""

    digests: tuple[ChunkDigest, ...]
    nbytes: int


def write_plan(
    plan: SavePlan,
    buffers: Sequence[Buffer],
    store: Store,
    budget_nbytes: int,
    on_bytes: OnBytes | None = None,
) -> Receipt:
    """Write what `plan` (restricted to this rank) says, from the rank's `buffers`; shared chunks get no digest yet."""
    arrays = {array.spec.key: array for array in plan.arrays}
    headers = {h.key: None for h in plan.headers}
    work: list[Work] = []
    for write in plan.writes:
        header = write.key in headers
        if header:
            del headers[write.key]
        work += _writers(arrays[write.key], write, buffers[write.shard], store, header)
    work += [Work(0, partial(_write_header, arrays[key], store), 0) for key in headers]  # arrays without cells
    done = run_all(work, budget_nbytes, on_bytes)
    digests = tuple(digest for found in done for digest in cast("list[ChunkDigest]", found or ()))
    return Receipt(digests, sum(piece.nbytes for piece in work))


def content_digest(buffer: Buffer, spec: ArraySpec) -> bytes:
    """Return the digest of a whole array in a buffer, looking at a few MiB at a time wherever it lies."""
    whole = Fragment(spec.box, 0)
    view = buffer.view(whole)
    if view is not None and view.flags.c_contiguous:
        return digest(view)
    free = (False,) * len(spec.shape)
    chunk = subdivide(tuple(max(n, 1) for n in spec.shape), free, spec.itemsize, 16 * BLOCK_NBYTES, 0)
    hasher = xxhash.xxh3_128()
    # Leading axes are split first, so that the pieces in order are the array in C order.
    for piece in _pieces(ChunkGrid(spec.shape, chunk), spec.box):
        hasher.update(as_bytes(buffer.get(whole, _region(spec.box, piece.box))))
    return hasher.digest()


def digest_shared(plan: SavePlan, store: Store, budget_nbytes: int) -> tuple[ChunkDigest, ...]:
    """Digest the chunks that several pieces make up, once all ranks have written."""
    arrays = {array.spec.key: array for array in plan.arrays}

    def digester(array: ArrayPlan, index: tuple[int, ...]) -> Callable[[], ChunkDigest]:
        return lambda: ChunkDigest(
            array.spec.key, array.grid.position(index), digest(read_chunk(store, array.spec, array.layout, index))
        )

    sizes = {key: _chunk_nbytes(array.layout) for key, array in arrays.items()}
    work = [Work(sizes[d.key], digester(arrays[d.key], d.index), sizes[d.key]) for d in plan.digests]
    return tuple(cast("list[ChunkDigest]", run_all(work, budget_nbytes)))


def read_plan(
    plan: LoadPlan,
    entries: Mapping[str, ArrayEntry],
    buffers: Sequence[Buffer],
    store: Store,
    budget_nbytes: int,
    verify: str = "covered",
    on_bytes: OnBytes | None = None,
) -> None:
    """Fill the rank's `buffers` as `plan` says; `verify` is ``"covered"``, ``"full"`` or ``"none"``.

    Raises
    ------
    CorruptionError
        If stored bytes differ from their digest. What was filled before that is undefined.
    """
    for fill in plan.fills:
        region = region_of(fill.target.box.start, fill.box.start, fill.box.stop)
        buffers[fill.shard].put(fill.target, region, np.zeros((), np.int8))
    work: list[Work] = []
    for read in plan.reads:
        work += _readers(entries[read.key], read, buffers[read.shard], store, verify)
    run_all(work, budget_nbytes, on_bytes)


def check_chunk(store: Store, entry: ArrayEntry, index: tuple[int, ...]) -> StorageError | None:
    """Return a problem if a chunk is missing, or a plain one has not the size that its shape says."""
    name = chunk_name(index)
    try:
        found = store.nbytes_of(f"{node_name(entry.spec.key)}/{name}")
    except StorageError as error:
        return attrs.evolve(error, key=entry.spec.key, chunk=name)
    expected = _chunk_nbytes(entry.layout)
    if found is None or (is_raw(entry.layout) and found != expected):
        what = "a stored chunk is missing" if found is None else "a stored chunk has a wrong size"
        offset = entry.grid.box(index).start
        return CorruptionError(
            what, entry.spec.key, None, entry.spec.shape, offset, f"{expected} bytes",
            "nothing" if found is None else f"{found} bytes", "Restore the file, or load another checkpoint",
            chunk=name,
        )  # fmt: skip
    return None


def read_chunk(store: Store, spec: ArraySpec, layout: Layout, index: tuple[int, ...], part: Box | None = None) -> Array:
    """Return the cells of one chunk, clipped to the array: a view of mapped bytes where chunks are plain.

    With `part` (in the chunk's coordinates) only those cells will be looked at, so that nothing else is fetched.
    """
    box = ChunkGrid(spec.shape, layout.chunk).box(index)
    if is_raw(layout):
        mapped = store.map(f"{node_name(spec.key)}/{chunk_name(index)}", _byte_ranges(spec, layout, part))
        if len(mapped) != _chunk_nbytes(layout):
            raise CorruptionError(
                "a stored chunk has a wrong size", spec.key, None, spec.shape, box.start,
                f"{_chunk_nbytes(layout)} bytes", f"{len(mapped)} bytes", chunk=chunk_name(index),
            )  # fmt: skip
        whole = np.frombuffer(mapped, numpy_dtype(spec.dtype)).reshape(layout.chunk)
        clipped: Array = whole[region_of(box.start, box.start, box.stop)]
        return clipped
    from functional_ckpt.store.zarr import open_array, read_box

    _check_memory(spec, layout, index)
    return read_box(open_array(store, spec, layout), spec, box)


def _check_memory(spec: ArraySpec, layout: Layout, index: tuple[int, ...]) -> None:
    """Raise `CorruptionError` unless a chunk can be decoded: TensorStore aborts the process where memory is lacking."""
    nbytes = _chunk_nbytes(layout)
    try:
        np.empty(2 * nbytes, np.uint8)  # decoded, and as the result; never touched
    except (MemoryError, ValueError, OverflowError):
        raise CorruptionError(
            "a stored chunk does not fit into memory", spec.key, None, spec.shape, found=f"{nbytes} bytes",
            chunk=chunk_name(index),
        ) from None  # fmt: skip


def _byte_ranges(spec: ArraySpec, layout: Layout, part: Box | None) -> list[tuple[int, int]]:
    """Return the bytes of a plain chunk that hold `part`; nothing where its rows are shorter than a page."""
    if part is None:
        return []
    runs = flat_runs(layout.chunk, part)
    if not runs or (runs[0][1] - runs[0][0]) * spec.itemsize < PAGE_NBYTES:
        return []
    return [(start * spec.itemsize, stop * spec.itemsize) for start, stop in runs]


def check_digest(entry: ArrayEntry, position: int, found: bytes | None) -> None:
    """Raise `CorruptionError` if `found` is a digest and not the one saved for chunk number `position`."""
    expected = entry.digest(position)
    if found is not None and found != expected:
        index = entry.grid.index(position)
        raise CorruptionError(
            "stored bytes differ from what was saved", entry.spec.key, None,
            entry.spec.shape, entry.grid.box(index).start, expected.hex(), found.hex(),
            "Restore the file, or load another checkpoint", chunk=chunk_name(index),
        )  # fmt: skip


def _write_header(array: ArrayPlan, store: Store) -> None:
    text = array_metadata(array.spec, array.layout)
    store.create(f"{node_name(array.spec.key)}/zarr.json", [memoryview(text)], len(text))


def _writers(array: ArrayPlan, write: ArrayWrite, buffer: Buffer, store: Store, header: bool) -> list[Work]:
    """Return the work of one write: one piece if it is small, else one per chunk."""
    itemsize, pieces = array.spec.itemsize, _pieces(array.grid, write.box)
    nbytes = write.box.size * itemsize
    make = partial(_write_pieces, array, write, buffer, store)
    if nbytes < SMALL_NBYTES:
        return [Work(nbytes, partial(make, pieces, header), nbytes)]
    # A piece is copied where it is not contiguous; part of a chunk is written by rewriting all of it.
    held = _chunk_nbytes(array.layout)
    first = [Work(0, partial(_write_header, array, store), 0)] if header else []
    return first + [Work(piece.box.size * itemsize, partial(make, (piece,), False), held) for piece in pieces]


def _write_pieces(
    array: ArrayPlan, write: ArrayWrite, buffer: Buffer, store: Store, pieces: Iterable["_Piece"], header: bool
) -> list[ChunkDigest]:
    if header:
        _write_header(array, store)
    spec, layout = array.spec, array.layout
    fragment, node = Fragment(write.box, write.run), node_name(spec.key)
    found: list[ChunkDigest] = []
    for piece in pieces:
        values = buffer.get(fragment, _region(write.box, piece.box))
        if piece.whole and is_raw(layout):
            made = _create_chunk(store, f"{node}/{chunk_name(piece.index)}", values, layout)
        else:
            from functional_ckpt.store.zarr import open_array, write_box

            write_box(open_array(store, spec, layout), spec.key, piece.box, values, layout)
            made = digest(values) if piece.whole else b""
        if piece.whole:
            found.append(ChunkDigest(spec.key, piece.position, made))
    return found


@attrs.frozen
class _Piece:
    """What a box and chunk number `position` have in common: `whole` if `box` is all of the chunk."""

    index: tuple[int, ...]
    position: int
    box: Box
    whole: bool


def _pieces(grid: ChunkGrid, box: Box) -> Iterator[_Piece]:
    """Yield the pieces of `box` by the chunks that it touches, row-major."""
    if grid.is_single:
        yield _Piece((0,) * len(grid.shape), 0, box, box.shape == grid.shape)
        return
    for index in grid.touched(box):
        chunk = grid.box(index)
        common = chunk.intersect(box)
        if common is not None:
            yield _Piece(index, grid.position(index), common, common == chunk)


def _region(outer: Box, piece: Box) -> tuple[Any, ...]:
    return WHOLE if piece is outer else region_of(outer.start, piece.start, piece.stop)


def _create_chunk(store: Store, name: str, values: Array, layout: Layout) -> bytes:
    """Write a whole plain chunk and return its digest."""
    nbytes = _chunk_nbytes(layout)
    if values.shape[1:] != layout.chunk[1:]:  # Zarr stores edge chunks whole; the cells outside are zero
        padded = np.zeros(layout.chunk, values.dtype)
        padded[tuple(slice(0, n) for n in values.shape)] = values
        store.create(name, [as_bytes(padded)], nbytes)
        return digest(values)
    data = as_bytes(values)
    if len(data) <= BLOCK_NBYTES:
        store.create(name, [data], nbytes)
        return digest_bytes(data)
    hasher = xxhash.xxh3_128()
    store.create(name, [data], nbytes, hasher.update)
    return hasher.digest()


def _readers(entry: ArrayEntry, read: ArrayRead, buffer: Buffer, store: Store, verify: str) -> list[Work]:
    """Return the work of one read: one piece if it is small, else one per chunk."""
    itemsize, pieces = entry.spec.itemsize, _pieces(entry.grid, read.box)
    nbytes = read.box.size * itemsize
    fill = partial(_read_pieces, entry, read.target, buffer, store, verify)
    if nbytes < SMALL_NBYTES and is_raw(entry.layout):
        return [Work(nbytes, partial(fill, pieces), nbytes)]
    # Read in place or from a map, unless a codec has to be undone or all of a chunk is to be digested.
    held = _chunk_nbytes(entry.layout)
    return [Work(piece.box.size * itemsize, partial(fill, (piece,)), held) for piece in pieces]


def _read_pieces(
    entry: ArrayEntry, target: Fragment, buffer: Buffer, store: Store, verify: str, pieces: Iterable[_Piece]
) -> None:
    view, node = buffer.view(target), node_name(entry.spec.key)
    for piece in pieces:
        region = _region(target.box, piece.box)
        into = view[region] if piece.whole and view is not None else None
        if into is not None and _is_direct(into, entry.spec, entry.layout):
            name = f"{node}/{chunk_name(piece.index)}"
            check_digest(entry, piece.position, _read_direct(store, name, as_bytes(into), verify != "none"))
        else:
            buffer.put(target, region, _read_piece(entry, piece, store, verify))


def _read_piece(entry: ArrayEntry, piece: _Piece, store: Store, verify: str) -> Array:
    """Return the cells of a piece; the whole chunk is read and checked if `verify` wants that or they are all of it."""
    chunk = entry.grid.box(piece.index)
    part = piece.box.relative_to(chunk)
    all_of_it = verify == "full" or piece.whole
    values = read_chunk(store, entry.spec, entry.layout, piece.index, None if all_of_it else part)
    if all_of_it and verify != "none":
        check_digest(entry, piece.position, digest(values))
    cells: Array = values[region_of((0,) * part.ndim, part.start, part.stop)]
    return cells


def _read_direct(store: Store, name: str, into: memoryview, verify: bool) -> bytes | None:
    """Read a whole plain chunk to where it belongs, and return its digest if it is wanted."""
    if not verify:
        store.read_into(name, into)
        return None
    if len(into) <= BLOCK_NBYTES:
        store.read_into(name, into)
        return digest_bytes(into)
    hasher = xxhash.xxh3_128()
    store.read_into(name, into, hasher.update)
    return hasher.digest()


def _is_direct(into: Array, spec: ArraySpec, layout: Layout) -> bool:
    """Tell whether a chunk's file starts with exactly the bytes that `into` wants, in its order."""
    return (
        is_raw(layout)
        and into.flags.c_contiguous
        and into.dtype == numpy_dtype(spec.dtype)
        and into.shape[1:] == layout.chunk[1:]
    )


def _chunk_nbytes(layout: Layout) -> int:
    return prod(layout.chunk) * numpy_dtype(layout.stored).itemsize
