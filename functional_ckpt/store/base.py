"""The `Store` protocol: named objects under one root, and what a store can do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import attrs

from functional_ckpt.errors import CheckpointError, NotImplementedYet, StorageError

__all__ = ["Capabilities", "Store", "open_store", "storage_errors"]


@attrs.frozen
class Capabilities:
    """What a store can do.

    `shared_chunks`: part of an object is updated atomically. `rename`: a finished directory takes its final
    name in one step. `shared`: other processes see what this one writes.
    """

    shared_chunks: bool
    rename: bool
    shared: bool


class Store(Protocol):
    """Objects by name (``node/c.0.0``) under one root. Names are relative; every failure is a `StorageError`."""

    @property
    def url(self) -> str:
        """Where the root is, for messages."""

    @property
    def capabilities(self) -> Capabilities:
        """What this store can do."""

    def create(self, name: str, parts: Sequence[memoryview], nbytes: int) -> None:
        """Write a new object: `parts` one after the other, then zeros up to `nbytes`. Never replaces one."""

    def read(self, name: str) -> bytes | None:
        """Return the object's bytes, or None if there is none."""

    def nbytes_of(self, name: str) -> int | None:
        """Return the object's size in bytes, or None if there is none."""

    def map(self, name: str) -> memoryview:
        """Return a read-only view of the object, mapped where the store can."""

    def read_into(self, name: str, into: memoryview) -> None:
        """Read the object's first ``len(into)`` bytes into `into`."""

    def names(self) -> Iterator[str]:
        """Yield the names of all objects."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""

    def flush(self) -> None:
        """Make durable what was created, as far as the store was opened to do so."""

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """Return the TensorStore key-value store that holds the objects under `prefix`."""


def open_store(url: str | Path, sync: str = "none") -> Store:
    """Return the store at a path, ``file://`` or ``memory://`` URL; nothing is created.

    `sync` is ``"none"``, ``"fsync"`` or ``"syncfs"`` (file systems only).

    Raises
    ------
    NotImplementedYet
        For a URL scheme without a store.

    Examples
    --------
    >>> open_store("memory://example").capabilities.rename
    False
    """
    text = str(url)
    scheme = urlsplit(text).scheme if "://" in text else "file"
    if scheme == "memory":
        from functional_ckpt.store.zarr import MemoryStore

        return MemoryStore(text.removeprefix("memory://").strip("/"))
    if scheme != "file":
        raise NotImplementedYet("no store for this kind of URL yet", found=text, expected="a path, file:// or memory://")
    from functional_ckpt.store.files import FileStore

    return FileStore(local_path(url), sync)


def local_path(url: str | Path) -> Path:
    """Return the absolute path of a plain path or ``file://`` URL.

    Examples
    --------
    >>> local_path("file:///tmp/a%20b").name
    'a b'
    """
    text = str(url)
    return Path(unquote(urlsplit(text).path) if text.startswith("file://") else text).expanduser().absolute()


@contextmanager
def storage_errors(what: str, name: str) -> Iterator[None]:
    """Turn errors of the storage below into `StorageError`, once, naming the object."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        full = error.errno in (ENOSPC, EDQUOT)
        raise StorageError(
            f"{what} failed", name, found=f"{type(error).__name__}: {error.strerror or error}",
            remedy="Free space; nothing was published" if full else None,
        ) from error  # fmt: skip
    except (ValueError, RuntimeError) as error:  # TensorStore raises these with its status text
        raise StorageError(f"{what} failed", name, found=str(error)) from error
