"""Run a plan against a store: `write_plan`, `digest_shared`, `read_plan`. Effects take a plan and return a receipt.

A whole plain chunk is digested and written, or read and digested, straight from and to the caller's memory. A chunk
with codecs, or of which this rank holds only a part, goes through TensorStore. Arrays of one chunk take no
detour over the grid: a small tensor costs two file creations and little else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, cast

import attrs
import numpy as np
import xxhash

from functional_ckpt.errors import CorruptionError
from functional_ckpt.plan.layout import ChunkGrid, Layout
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
from functional_ckpt.store.work import Work, run_all

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
    work = [Work(0, _header_writer(arrays[h.key], store)) for h in plan.headers]
    nbytes = 0
    for write in plan.writes:
        pieces = _chunk_writers(arrays[write.key], write, buffers[write.shard], store)
        work += pieces
        nbytes += sum(piece.nbytes for piece in pieces)
    done = run_all(work, budget_nbytes, on_bytes)
    return Receipt(tuple(d for d in done if isinstance(d, ChunkDigest)), nbytes)


def digest_shared(plan: SavePlan, store: Store, budget_nbytes: int) -> tuple[ChunkDigest, ...]:
    """Digest the chunks that several pieces make up, once all ranks have written."""
    arrays = {array.spec.key: array for array in plan.arrays}

    def digester(array: ArrayPlan, index: tuple[int, ...]) -> Callable[[], ChunkDigest]:
        return lambda: ChunkDigest(
            array.spec.key, array.grid.position(index), digest(read_chunk(store, array.spec, array.layout, index))
        )

    work = [Work(_chunk_nbytes(arrays[d.key].layout), digester(arrays[d.key], d.index)) for d in plan.digests]
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
        work += _chunk_readers(entries[read.key], read, buffers[read.shard], store, verify)
    run_all(work, budget_nbytes, on_bytes)


def check_chunk(store: Store, entry: ArrayEntry, index: tuple[int, ...]) -> CorruptionError | None:
    """Return a problem if a chunk is missing, or a plain one has not the size that its shape says."""
    name = chunk_name(index)
    found = store.nbytes_of(f"{node_name(entry.spec.key)}/{name}")
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

    return read_box(open_array(store, spec, layout), spec, box)


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


def _header_writer(array: ArrayPlan, store: Store) -> Callable[[], None]:
    def write() -> None:
        text = array_metadata(array.spec, array.layout)
        store.create(f"{node_name(array.spec.key)}/zarr.json", [memoryview(text)], len(text))

    return write


def _chunk_writers(array: ArrayPlan, write: ArrayWrite, buffer: Buffer, store: Store) -> list[Work]:
    fragment = Fragment(write.box, write.run)
    itemsize, node = array.spec.itemsize, node_name(array.spec.key)
    return [
        Work(chunk.piece.size * itemsize, _chunk_writer(array, chunk, buffer, fragment, f"{node}/{chunk.name}", store))
        for chunk in _pieces(array.grid, write.box)
    ]


@attrs.frozen
class _Piece:
    """The cells that a box and a chunk share: `whole` if these are all of the chunk's."""

    index: tuple[int, ...]
    position: int
    piece: Box
    whole: bool

    @property
    def name(self) -> str:
        return chunk_name(self.index)


def _pieces(grid: ChunkGrid, box: Box) -> Iterator[_Piece]:
    """Yield what `box` and each chunk that it touches have in common, row-major."""
    if grid.is_single:
        yield _Piece((0,) * len(grid.shape), 0, box, box.shape == grid.shape)
        return
    for index in grid.touched(box):
        chunk = grid.box(index)
        piece = chunk.intersect(box)
        if piece is not None:
            yield _Piece(index, grid.position(index), piece, piece == chunk)


def _chunk_writer(
    array: ArrayPlan, chunk: _Piece, buffer: Buffer, fragment: Fragment, name: str, store: Store
) -> Callable[[], ChunkDigest | None]:
    spec, layout, piece, whole = array.spec, array.layout, chunk.piece, chunk.whole

    def write() -> ChunkDigest | None:
        values = buffer.get(fragment, _region(fragment.box, piece))
        if whole and is_raw(layout):
            return ChunkDigest(spec.key, chunk.position, _create_chunk(store, name, values, layout))
        from functional_ckpt.store.zarr import open_array, write_box

        write_box(open_array(store, spec, layout), spec.key, piece, values, layout)
        return ChunkDigest(spec.key, chunk.position, digest(values)) if whole else None

    return write


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


def _chunk_readers(entry: ArrayEntry, read: ArrayRead, buffer: Buffer, store: Store, verify: str) -> list[Work]:
    itemsize, node = entry.spec.itemsize, node_name(entry.spec.key)
    return [
        Work(
            chunk.piece.size * itemsize,
            _chunk_reader(entry, chunk, buffer, read.target, f"{node}/{chunk.name}", store, verify),
        )
        for chunk in _pieces(entry.grid, read.box)
    ]


def _chunk_reader(
    entry: ArrayEntry, chunk: _Piece, buffer: Buffer, target: Fragment, name: str, store: Store, verify: str
) -> Callable[[], None]:
    spec, layout, index, piece, whole = entry.spec, entry.layout, chunk.index, chunk.piece, chunk.whole

    def read() -> None:
        region = _region(target.box, piece)
        view = buffer.view(target)
        into = view[region] if whole and view is not None else None
        if into is not None and _is_direct(into, spec, layout):
            check_digest(entry, chunk.position, _read_direct(store, name, as_bytes(into), verify != "none"))
            return
        cells = entry.grid.box(index)
        part = piece.relative_to(cells)
        all_of_it = verify == "full" or whole
        values = read_chunk(store, spec, layout, index, None if all_of_it else part)
        if all_of_it and verify != "none":
            check_digest(entry, chunk.position, digest(values))
        buffer.put(target, region, values[region_of((0,) * part.ndim, part.start, part.stop)])

    return read


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
