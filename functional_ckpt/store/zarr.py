"""The uses of TensorStore: codecs, chunks with several writers, and the in-memory store."""

import json
import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import attrs
import numpy as np
import tensorstore as ts

from functional_ckpt.errors import AlreadyExistsError, CorruptionError, StorageError
from functional_ckpt.plan.layout import ChunkGrid, Layout
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.store.base import METADATA_NBYTES, Capabilities, Store, check_limit, storage_errors
from functional_ckpt.store.encoding import Array, array_metadata, chunk_name, node_name, numpy_dtype
from functional_ckpt.store.whole import WholeStore

__all__ = ["MemoryStore", "decode_chunk", "encode_chunk", "open_array", "refuse_forked", "write_box"]

#: Id of the process that has loaded TensorStore.
_PROCESS = os.getpid()


def refuse_forked() -> None:
    """Raise in a forked process, which TensorStore would abort."""
    if os.getpid() != _PROCESS:
        raise StorageError(
            "TensorStore cannot be used in a process that was forked from one that had loaded it",
            remedy="Start the process by 'spawn'; or use a file system, no codecs and no shared chunks there",
        )


@cache
def _context(sync: bool) -> ts.Context:
    # One context for all of `memory://`: it holds the objects for the life of the process. Locking "os" prevents two
    # processes from updating one chunk file at once (measured: nothing is lost; "none" loses rows).
    return ts.Context({"file_io_locking": {"mode": "os"}, "file_io_sync": sync})


@attrs.frozen
class MemoryStore(WholeStore):
    r"""Objects in the memory of this process, under `prefix`; for tests and notebooks.

    Examples
    --------
    >>> store = MemoryStore("doc")
    >>> store.create("a", [memoryview(b"xy")], 3)
    >>> store.read("a")
    b'xy\x00'
    """

    prefix: str
    sync: str = "none"

    @property
    def url(self) -> str:
        """The root as a URL."""
        return f"memory://{self.prefix}"

    @property
    def capabilities(self) -> Capabilities:
        """Conditional writes, no rename, invisible to other processes."""
        return Capabilities(shared_chunks=True, rename=False, shared=False)

    def put(self, name: str, data: bytes) -> None:
        """Write a new object."""
        with storage_errors("writing", name):
            kv = self._kv()
            before = kv.read(name).result()
            if before.state == "value":
                raise AlreadyExistsError("an object exists already", path=name, found=self.url)
            stamp = kv.write(name, data, if_equal=before.stamp.generation).result()
        if not stamp.generation:  # TensorStore's sign that the condition did not hold
            raise AlreadyExistsError("an object exists already", path=name, found=self.url)

    def read(self, name: str, limit: int = METADATA_NBYTES) -> bytes | None:
        """Return an object's bytes, or None."""
        with storage_errors("reading", name):
            found = self._kv().read(name).result()
        if found.state != "value":
            return None
        check_limit(f"{self.url}/{name}", len(found.value), limit)
        return bytes(found.value)

    def names(self) -> Iterator[str]:
        """Yield the names of all objects."""
        with storage_errors("listing", self.url):
            found = self._kv().list().result()
        yield from (key.decode() for key in found)

    def stamp(self, name: str) -> object:
        """Return the generation of an object."""
        with storage_errors("looking at", name):
            found = self._kv().read(name).result()
        return found.stamp.generation if found.state == "value" else None

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        kv = self._kv()
        for name in names:
            kv.delete_range(ts.KvStore.KeyRange(name, name + "\0")).result()

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """Return TensorStore's memory driver at `prefix`."""
        return {"driver": "memory", "path": f"{self.prefix}/{prefix}"}

    def _kv(self) -> ts.KvStore:
        refuse_forked()
        return ts.KvStore.open(self.kvstore(""), context=_context(True)).result()


def open_array(store: Store, spec: ArraySpec, layout: Layout) -> ts.TensorStore:
    """Open an array from known metadata, without reading its ``zarr.json``.

    Reading a missing chunk is an error, and a chunk of zeros is stored: a missing chunk never means zeros.
    """
    context = _context(store.sync == "fsync" or not store.capabilities.shared)
    return _opened(store.kvstore(f"{node_name(spec.key)}/"), context, spec, layout)


def _opened(kvstore: dict[str, Any], context: ts.Context, spec: ArraySpec, layout: Layout) -> ts.TensorStore:
    # Data types and numbers of dimensions were checked before: TensorStore aborts the process on some others.
    with storage_errors("opening", spec.key):
        return ts.open(
            {
                "driver": "zarr3",
                "kvstore": kvstore,
                "metadata": json.loads(array_metadata(spec, layout)),
                "fill_missing_data_reads": False,
                "store_data_equal_to_fill_value": True,
            },
            context=context,
            open=True,
            assume_metadata=True,
        ).result()


def encode_chunk(spec: ArraySpec, layout: Layout, box: Box, values: Array) -> bytes:
    """Return the bytes of the file of the whole chunk whose cells are `box`.

    The chunk is encoded in memory and written by the store: TensorStore would replace an existing file.

    Examples
    --------
    >>> spec, layout = ArraySpec("w", (3,), "int8"), Layout("exclusive", (2,), ("crc32c",), "int8")
    >>> encode_chunk(spec, layout, Box((2,), (3,)), np.array([7], "i1"))[:2].hex()
    '0700'
    """
    refuse_forked()
    kvstore, context = {"driver": "memory", "path": "chunk/"}, ts.Context()
    write_box(_opened(kvstore, context, spec, layout), spec.key, box, values, layout)
    index = tuple(lo // c for lo, c in zip(box.start, layout.chunk, strict=True))
    with storage_errors("encoding", spec.key):
        return bytes(ts.KvStore.open(kvstore, context=context).result().read(chunk_name(index)).result().value)


def write_box(array: ts.TensorStore, key: str, box: Box, values: Array, layout: Layout) -> None:
    """Write a region; a chunk that it covers in part is read, modified and written under a lock."""
    with storage_errors("writing", key):
        array[box.slices].write(np.asarray(values, order="C").view(numpy_dtype(layout.stored))).result()


def decode_chunk(data: bytes, spec: ArraySpec, layout: Layout, index: tuple[int, ...]) -> Array:
    """Return the cells that the bytes of a chunk with codecs hold, clipped to the array.

    Raises
    ------
    CorruptionError
        If the codecs cannot decode them.
    """
    refuse_forked()
    context = ts.Context()  # a separate memory store, which ends with the context
    box = ChunkGrid(spec.shape, layout.chunk).box(index)
    memory = {"driver": "memory"}
    try:
        with storage_errors("decoding", spec.key):
            ts.KvStore.open(memory, context=context).result().write(chunk_name(index), data).result()
            del data
            values: Array = _opened(memory, context, spec, layout)[box.slices].read().result()
    except StorageError as error:
        raise CorruptionError(
            "a stored chunk cannot be decoded",
            spec.key,
            shape=spec.shape,
            offset=box.start,
            found=error.found,
            remedy="Restore the file, or load another checkpoint",
            chunk=chunk_name(index),
        ) from error
    return np.asarray(values, order="C").view(numpy_dtype(spec.dtype))
