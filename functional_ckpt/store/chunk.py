"""One chunk of an array: checking that it exists, reading it, its digest, and writing it."""

from collections.abc import Collection, Iterable, Iterator
from functools import partial

import numpy as np
import xxhash

from functional_ckpt.errors import CorruptionError, StorageError, changed
from functional_ckpt.plan.layout import ArrayPlan, ChunkGrid, Layout
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.store.base import BLOCK_NBYTES, SMALL_CHUNK_NBYTES, UNSIZED, Store
from functional_ckpt.store.encoding import (
    Array,
    array_metadata,
    as_bytes,
    chunk_name,
    chunk_path,
    digest,
    digest_bytes,
    is_raw,
    metadata_path,
    numpy_dtype,
)
from functional_ckpt.store.work import at_once

__all__ = [
    "absent_chunks",
    "check_chunk",
    "check_chunks",
    "check_digest",
    "chunk_digest",
    "create_chunk",
    "decoding_nbytes",
    "encoded_limit",
    "is_there",
    "located",
    "only_chunk",
    "read_chunk",
    "stored_nbytes",
    "update_chunk",
    "write_chunk",
    "write_header",
    "write_plain",
]


def check_chunk(store: Store, entry: ArrayEntry | ArrayPlan, index: tuple[int, ...]) -> StorageError | None:
    """Return a problem if a chunk is missing or has a wrong size."""
    spec, layout = entry.spec, entry.layout
    try:
        found = store.nbytes_of(chunk_path(spec.key, index))
    except StorageError as error:
        return located(error, spec, layout, index)
    if found == UNSIZED or (found == layout.chunk_nbytes and is_raw(layout)):  # nearly all of thousands
        return None
    fits = found is not None and found <= encoded_limit(layout) and not is_raw(layout)
    return None if fits else _bad_size(spec, layout, index, found)


def check_chunks(
    store: Store,
    wanted: Iterable[tuple[ArrayEntry | ArrayPlan, tuple[int, ...]]],
    absent: Collection[str] | None = None,
) -> Iterator[StorageError]:
    """Yield a problem for each chunk that is missing, or has not its size where that costs little to know.

    Elsewhere those count as missing that `absent` names (see `absent_chunks`); without it, reading tells.
    """
    if store.capabilities.sized:
        for entry, index in wanted:
            if (problem := check_chunk(store, entry, index)) is not None:
                yield problem
        return
    for entry, index in wanted if absent else ():
        if chunk_path(entry.spec.key, index) in (absent or ()):
            yield _bad_size(entry.spec, entry.layout, index, None)


def only_chunk(array: ArrayPlan) -> tuple[str, int]:
    """Return name and size of the object that has all elements of a plain array; no name if there is none or several.

    Examples
    --------
    >>> only_chunk(ArrayPlan(ArraySpec("w", (4,), "int8"), Layout("exclusive", (4,), (), "int8")))
    ('w/c.0', 4)
    """
    name = chunk_path(array.spec.key, array.grid.index(0)) if array.grid.is_single and is_raw(array.layout) else ""
    return name, array.layout.chunk_nbytes


def is_there(store: Store, name: str, nbytes: int) -> bool:
    """Tell whether a chunk is certainly there; if not, `check_chunks` says why."""
    try:
        return bool(name) and store.nbytes_of(name) == nbytes
    except StorageError:
        return False


def absent_chunks(store: Store, entries: Iterable[ArrayEntry | ArrayPlan]) -> frozenset[str] | None:
    """Return the names of the chunks that one listing lacks; None where sizes cost little, or nothing is listed.

    Each of them is looked for once more: a server may list what was there a moment ago.
    """
    if store.capabilities.sized or not store.capabilities.lists:
        return None
    there = frozenset(store.names())
    chunks = ((entry, entry.grid.index(number)) for entry in entries for number in range(entry.grid.size))
    unlisted = [name for entry, index in chunks if (name := chunk_path(entry.spec.key, index)) not in there]
    found = at_once([partial(store.nbytes_of, name) for name in unlisted], store.capabilities.concurrency)
    return frozenset(name for name, nbytes in zip(unlisted, found, strict=True) if nbytes is None)


def stored_nbytes(store: Store, name: str, layout: Layout) -> int | None:
    """Return the size of a chunk's object, or None if there is none; an encoded one is read if nothing else tells."""
    found = store.nbytes_of(name)
    if found != UNSIZED:
        return found
    return layout.chunk_nbytes if is_raw(layout) else len(store.read(name, encoded_limit(layout)) or b"")


def encoded_limit(layout: Layout) -> int:
    """Return an upper bound on the bytes of an encoded chunk: a save never writes a larger file.

    Examples
    --------
    >>> encoded_limit(Layout("exclusive", (4,), ("zstd",), "float32"))
    65568
    """
    return 2 * layout.chunk_nbytes + 2**16


def decoding_nbytes(layout: Layout) -> int:
    """Return the most memory that decoding a chunk takes: its bytes, with codecs also the encoded bytes and a copy.

    Examples
    --------
    >>> decoding_nbytes(Layout("exclusive", (4,), (), "float32"))
    16
    """
    return layout.chunk_nbytes if is_raw(layout) else 3 * layout.chunk_nbytes


def read_chunk(store: Store, spec: ArraySpec, layout: Layout, index: tuple[int, ...]) -> Array:
    """Return the cells of one chunk, clipped to the array."""
    name = chunk_path(spec.key, index)
    raw = is_raw(layout)
    if not raw or layout.chunk_nbytes > SMALL_CHUNK_NBYTES:
        _check_memory(spec, layout, index)
    try:
        data = store.read(name, layout.chunk_nbytes if raw else encoded_limit(layout))
    except StorageError as error:
        raise located(error, spec, layout, index) from error.__cause__
    if data is None or (raw and len(data) != layout.chunk_nbytes):
        raise _bad_size(spec, layout, index, None if data is None else len(data))
    if not raw:
        from functional_ckpt.store.zarr import decode_chunk

        return decode_chunk(data, spec, layout, index)
    whole = np.frombuffer(data, numpy_dtype(spec.dtype)).reshape(layout.chunk)
    ends = zip(spec.shape, index, layout.chunk, strict=True)
    clipped: Array = whole[tuple(slice(n - i * c) for n, i, c in ends)] if spec.shape != layout.chunk else whole
    return clipped


def chunk_digest(store: Store, spec: ArraySpec, layout: Layout, index: tuple[int, ...]) -> bytes:
    """Return the digest of the cells of one stored chunk; if they are contiguous in the file, it is read by blocks."""
    box = ChunkGrid(spec.shape, layout.chunk).box(index)
    if not is_raw(layout) or box.shape[1:] != layout.chunk[1:]:
        return digest(read_chunk(store, spec, layout, index))
    hasher = xxhash.xxh3_128()
    try:
        store.scan(chunk_path(spec.key, index), box.size * spec.itemsize, hasher.update)
    except StorageError as error:
        raise located(error, spec, layout, index) from error.__cause__
    return hasher.digest()


def located(error: StorageError, spec: ArraySpec, layout: Layout, index: tuple[int, ...]) -> StorageError:
    """Return `error` with the key and offset of its chunk."""
    if error.chunk is not None:
        return error
    offset = ChunkGrid(spec.shape, layout.chunk).box(index).start
    return changed(error, key=spec.key, shape=spec.shape, offset=offset, chunk=chunk_name(index))


def _bad_size(spec: ArraySpec, layout: Layout, index: tuple[int, ...], found: int | None) -> CorruptionError:
    what = "a stored chunk is missing" if found is None else "a stored chunk has a wrong size"
    raw, offset = is_raw(layout), ChunkGrid(spec.shape, layout.chunk).box(index).start
    most = layout.chunk_nbytes if raw else encoded_limit(layout)
    return CorruptionError(
        what,
        spec.key,
        shape=spec.shape,
        offset=offset,
        expected=f"{'' if raw else 'at most '}{most} bytes",
        found="nothing" if found is None else f"{found} bytes",
        remedy="Restore the file, or load another checkpoint",
        chunk=chunk_name(index),
    )


def write_header(array: ArrayPlan, store: Store) -> None:
    """Write the metadata of an array."""
    text = array_metadata(array.spec, array.layout)
    store.create(metadata_path(array.spec.key), [memoryview(text)], len(text))


def write_chunk(store: Store, array: ArrayPlan, index: tuple[int, ...], values: Array) -> bytes:
    """Write the cells of a whole chunk, and return their digest."""
    name = chunk_path(array.spec.key, index)
    if is_raw(array.layout):
        return create_chunk(store, name, values, array.layout)
    from functional_ckpt.store.zarr import encode_chunk

    data = encode_chunk(array.spec, array.layout, array.grid.box(index), values)
    store.create(name, [memoryview(data)], len(data))
    return digest(values)


def update_chunk(store: Store, spec: ArraySpec, layout: Layout, box: Box, values: Array) -> None:
    """Write the cells `box` of a chunk that other ranks write too."""
    from functional_ckpt.store.zarr import open_array, write_box

    store.check_guard()  # as `create` does: the file is replaced
    write_box(open_array(store, spec, layout), spec.key, box, values, layout)


def create_chunk(store: Store, name: str, values: Array, layout: Layout) -> bytes:
    """Write a whole plain chunk and return its digest."""
    nbytes = layout.chunk_nbytes
    # Zarr stores edge chunks in full; cells outside the array are zero.
    if values.shape != layout.chunk and values.shape[1:] != layout.chunk[1:]:
        padded = np.zeros(layout.chunk, values.dtype)
        padded[tuple(slice(0, n) for n in values.shape)] = values
        store.create(name, [as_bytes(padded)], nbytes)
        return digest(values)
    return write_plain(store, name, as_bytes(values), nbytes)


def write_plain(store: Store, name: str, data: memoryview, nbytes: int | None = None) -> bytes:
    """Write the bytes of a plain chunk, zeros up to `nbytes` after them, and return their digest."""
    nbytes = len(data) if nbytes is None else nbytes
    if len(data) <= BLOCK_NBYTES:
        store.create(name, (data,), nbytes)
        return digest_bytes(data)
    hasher = xxhash.xxh3_128()
    store.create(name, (data,), nbytes, hasher.update)
    return hasher.digest()


def check_digest(entry: ArrayEntry, position: int, found: bytes | None) -> None:
    """Raise `CorruptionError` if `found` is a digest and not the one saved for chunk number `position`."""
    expected = entry.digest(position)
    if found is not None and found != expected:
        index = entry.grid.index(position)
        raise CorruptionError(
            "stored bytes differ from what was saved",
            entry.spec.key,
            shape=entry.spec.shape,
            offset=entry.grid.box(index).start,
            expected=expected.hex(),
            found=found.hex(),
            remedy="Restore the file, or load another checkpoint",
            chunk=chunk_name(index),
        )


def _check_memory(spec: ArraySpec, layout: Layout, index: tuple[int, ...]) -> None:
    """Raise `CorruptionError` unless memory for decoding a chunk can be had: TensorStore aborts the process without."""
    nbytes = layout.chunk_nbytes
    try:
        np.empty(2 * nbytes, np.uint8)  # decoded, and as the result; never touched
    except (MemoryError, ValueError, OverflowError):
        raise CorruptionError(
            "a stored chunk does not fit into memory",
            spec.key,
            shape=spec.shape,
            found=f"{nbytes} bytes",
            chunk=chunk_name(index),
        ) from None
