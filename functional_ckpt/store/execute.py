"""Run a plan against a store: `write_plan`, `digest_shared`, `read_plan`. Effects take a plan and return a receipt.

A whole plain chunk is digested and written, or read and digested, straight from and to the caller's memory. A chunk
with codecs, or of which this rank holds only a part, goes through TensorStore. The `WORK`ed calls are closures over
values, so that a small tensor costs two file creations and little else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import cast

import attrs
import numpy as np

from functional_ckpt.errors import CorruptionError
from functional_ckpt.plan.layout import ChunkGrid, Layout
from functional_ckpt.plan.load import ArrayRead, LoadPlan
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.plan.save import ArrayPlan, ArrayWrite, SavePlan
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.sharding import Fragment
from functional_ckpt.store.base import Store
from functional_ckpt.store.buffer import Buffer, region_of
from functional_ckpt.store.encoding import (
    Array,
    array_metadata,
    as_bytes,
    chunk_name,
    digest,
    is_raw,
    node_name,
    numpy_dtype,
    to_json,
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
    headers = [Work(0, _header_writer(arrays[h.key], store)) for h in plan.headers]
    work = headers + [w for write in plan.writes for w in _chunk_writers(arrays[write.key], write, buffers, store)]
    done = run_all(work, budget_nbytes, on_bytes)
    digests = tuple(d for d in done if isinstance(d, ChunkDigest))
    itemsizes = {key: array.spec.itemsize for key, array in arrays.items()}
    return Receipt(digests, sum(w.box.size * itemsizes[w.key] for w in plan.writes))


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
    work = [w for read in plan.reads for w in _chunk_readers(entries[read.key], read, buffers, store, verify)]
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
            f"{what}: {name}", entry.spec.key, None, entry.spec.shape, offset, f"{expected} bytes",
            "nothing" if found is None else f"{found} bytes", "Restore the file, or load another checkpoint",
        )  # fmt: skip
    return None


def read_chunk(store: Store, spec: ArraySpec, layout: Layout, index: tuple[int, ...]) -> Array:
    """Return the cells of one chunk, clipped to the array: a view of mapped bytes where chunks are plain."""
    box = ChunkGrid(spec.shape, layout.chunk).box(index)
    if is_raw(layout):
        mapped = store.map(f"{node_name(spec.key)}/{chunk_name(index)}")
        if len(mapped) != _chunk_nbytes(layout):
            raise CorruptionError(f"a stored chunk has a wrong size: {chunk_name(index)}", spec.key, None, spec.shape,
                                  box.start, f"{_chunk_nbytes(layout)} bytes", f"{len(mapped)} bytes")  # fmt: skip
        whole = np.frombuffer(mapped, numpy_dtype(spec.dtype)).reshape(layout.chunk)
        clipped: Array = whole[region_of(box.start, box.start, box.stop)]
        return clipped
    from functional_ckpt.store.zarr import open_array, read_box

    return read_box(open_array(store, spec, layout), spec, box)


def check_digest(entry: ArrayEntry, index: tuple[int, ...], values: Array) -> None:
    """Raise `CorruptionError` unless `values`, the whole chunk, have the digest that was saved."""
    found, expected = digest(values), entry.digest(index)
    if found != expected:
        raise CorruptionError(
            f"stored bytes differ from what was saved: chunk {chunk_name(index)}", entry.spec.key, None,
            entry.spec.shape, entry.grid.box(index).start, expected.hex(), found.hex(),
            "Restore the file, or load another checkpoint",
        )  # fmt: skip


def _header_writer(array: ArrayPlan, store: Store) -> Callable[[], None]:
    def write() -> None:
        text = to_json(array_metadata(array.spec, array.layout))
        store.create(f"{node_name(array.spec.key)}/zarr.json", [memoryview(text)], len(text))

    return write


def _chunk_writers(array: ArrayPlan, write: ArrayWrite, buffers: Sequence[Buffer], store: Store) -> Iterator[Work]:
    grid = array.grid
    fragment = Fragment(write.box, write.run)
    buffer = buffers[write.shard]
    for index in grid.touched(write.box):
        box = grid.box(index)
        piece = box.intersect(write.box)
        if piece is not None:
            call = _chunk_writer(array, index, box, piece, buffer, fragment, store)
            yield Work(piece.size * array.spec.itemsize, call)


def _chunk_writer(
    array: ArrayPlan, index: tuple[int, ...], box: Box, piece: Box, buffer: Buffer, fragment: Fragment, store: Store
) -> Callable[[], ChunkDigest | None]:
    whole = piece == box
    spec, layout = array.spec, array.layout

    def write() -> ChunkDigest | None:
        values = buffer.get(fragment, region_of(fragment.box.start, piece.start, piece.stop))
        if whole and is_raw(layout):
            values = np.asarray(values, order="C")
            name = f"{node_name(spec.key)}/{chunk_name(index)}"
            store.create(name, *_padded(values, layout))
        else:
            from functional_ckpt.store.zarr import open_array, write_box

            write_box(open_array(store, spec, layout), spec.key, piece, values, layout)
        return ChunkDigest(spec.key, array.grid.position(index), digest(values)) if whole else None

    return write


def _padded(values: Array, layout: Layout) -> tuple[list[memoryview], int]:
    """Return a chunk's parts and its size: Zarr stores edge chunks whole, the cells outside are zero."""
    nbytes = _chunk_nbytes(layout)
    if values.shape[1:] == layout.chunk[1:]:
        return [as_bytes(values)], nbytes
    padded = np.zeros(layout.chunk, values.dtype)
    padded[tuple(slice(0, n) for n in values.shape)] = values
    return [as_bytes(padded)], nbytes


def _chunk_readers(
    entry: ArrayEntry, read: ArrayRead, buffers: Sequence[Buffer], store: Store, verify: str
) -> Iterator[Work]:
    grid = entry.grid
    for index in grid.touched(read.box):
        box = grid.box(index)
        piece = box.intersect(read.box)
        if piece is not None:
            call = _chunk_reader(entry, index, box, piece, buffers[read.shard], read.target, store, verify)
            yield Work(piece.size * entry.spec.itemsize, call)


def _chunk_reader(
    entry: ArrayEntry,
    index: tuple[int, ...],
    box: Box,
    piece: Box,
    buffer: Buffer,
    target: Fragment,
    store: Store,
    verify: str,
) -> Callable[[], None]:
    whole = piece == box
    spec, layout = entry.spec, entry.layout
    region = region_of(target.box.start, piece.start, piece.stop)

    def read() -> None:
        view = buffer.view(target)
        into = view[region] if whole and view is not None else None
        if into is not None and _is_direct(into, spec, layout):
            store.read_into(f"{node_name(spec.key)}/{chunk_name(index)}", as_bytes(into))
            if verify != "none":
                check_digest(entry, index, into)
            return
        values = read_chunk(store, spec, layout, index)
        if verify == "full" or (whole and verify == "covered"):
            check_digest(entry, index, values)
        buffer.put(target, region, values[region_of(box.start, piece.start, piece.stop)])

    return read


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
