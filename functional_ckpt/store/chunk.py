"""One chunk of an array: whether it is there, its bytes, its digest, and writing it whole."""

from operator import mul

import attrs
import numpy as np
import xxhash

from functional_ckpt.errors import CorruptionError, StorageError
from functional_ckpt.plan.layout import ArrayPlan, ChunkGrid, Layout
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.flat import flat_runs
from functional_ckpt.store.base import BLOCK_NBYTES, PAGE_NBYTES, Store
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
from functional_ckpt.store.files import FileStore

__all__ = [
    "SMALL_CHUNK_NBYTES",
    "check_chunk",
    "check_digest",
    "create_chunk",
    "read_chunk",
    "update_chunk",
    "write_chunk",
    "write_header",
]

#: Up to here a chunk is read whole even where only a piece is wanted.
SMALL_CHUNK_NBYTES = 64 * 2**10


def check_chunk(store: Store, entry: ArrayEntry, index: tuple[int, ...]) -> StorageError | None:
    """Return a problem if a chunk is missing, or a plain one has not the size that its shape says."""
    name = chunk_name(index)
    try:
        found = store.nbytes_of(f"{node_name(entry.spec.key)}/{name}")
    except StorageError as error:
        return attrs.evolve(error, key=entry.spec.key, chunk=name)
    expected = entry.layout.chunk_nbytes
    if found is None or (is_raw(entry.layout) and found != expected):
        what = "a stored chunk is missing" if found is None else "a stored chunk has a wrong size"
        offset = entry.grid.box(index).start
        return CorruptionError(
            what, entry.spec.key, None, entry.spec.shape, offset, f"{expected} bytes",
            "nothing" if found is None else f"{found} bytes", "Restore the file, or load another checkpoint",
            chunk=name,
        )  # fmt: skip
    return None


def read_chunk(
    store: Store,
    spec: ArraySpec,
    layout: Layout,
    index: tuple[int, ...],
    part: Box | None = None,
    copied: bool = False,
) -> Array:
    """Return the cells of one chunk, clipped to the array: a view of mapped bytes where chunks are plain.

    With `part` (in the chunk's coordinates) only those cells will be looked at, so that nothing else is fetched. With
    `copied` a plain chunk is read rather than mapped, which takes fewer calls.
    """
    if is_raw(layout):
        name = f"{node_name(spec.key)}/{chunk_name(index)}"
        data = store.read(name) if copied else None
        mapped = data if data is not None else store.map(name, _byte_ranges(spec, layout, part))
        if len(mapped) != layout.chunk_nbytes:
            raise CorruptionError(
                "a stored chunk has a wrong size", spec.key, None, spec.shape, tuple(map(mul, index, layout.chunk)),
                f"{layout.chunk_nbytes} bytes", f"{len(mapped)} bytes", chunk=chunk_name(index),
            )  # fmt: skip
        whole = np.frombuffer(mapped, numpy_dtype(spec.dtype)).reshape(layout.chunk)
        ends = zip(spec.shape, index, layout.chunk, strict=True)
        clipped: Array = whole[tuple(slice(n - i * c) for n, i, c in ends)] if spec.shape != layout.chunk else whole
        return clipped
    from functional_ckpt.store.zarr import open_array, read_box

    _check_memory(spec, layout, index)
    return read_box(open_array(store, spec, layout), spec, ChunkGrid(spec.shape, layout.chunk).box(index))


def write_header(array: ArrayPlan, store: Store) -> None:
    """Write the metadata of an array."""
    text = array_metadata(array.spec, array.layout)
    store.create(f"{node_name(array.spec.key)}/zarr.json", [memoryview(text)], len(text))


def write_chunk(store: Store, spec: ArraySpec, layout: Layout, box: Box, values: Array) -> bytes:
    """Write the whole chunk whose cells are `box`, and return its digest."""
    index = tuple(lo // c for lo, c in zip(box.start, layout.chunk, strict=True))
    name = f"{node_name(spec.key)}/{chunk_name(index)}"
    if is_raw(layout):
        return create_chunk(store, name, values, layout)
    from functional_ckpt.store.zarr import encoded_chunk

    data = encoded_chunk(spec, layout, box, values)
    store.create(name, [memoryview(data)], len(data))
    return digest(values)


def update_chunk(store: Store, spec: ArraySpec, layout: Layout, box: Box, values: Array) -> None:
    """Write the cells `box` of a chunk that others write too."""
    from functional_ckpt.store.zarr import open_array, write_box

    if isinstance(store, FileStore):
        store.check_guard()  # as `create` does: the file is replaced
    write_box(open_array(store, spec, layout), spec.key, box, values, layout)


def create_chunk(store: Store, name: str, values: Array, layout: Layout) -> bytes:
    """Write a whole plain chunk and return its digest."""
    nbytes = layout.chunk_nbytes
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


def _check_memory(spec: ArraySpec, layout: Layout, index: tuple[int, ...]) -> None:
    """Raise `CorruptionError` unless a chunk can be decoded: TensorStore aborts the process where memory is lacking."""
    nbytes = layout.chunk_nbytes
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
