"""The `Store` protocol: named objects under one root, and the capabilities of a store."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from errno import EDQUOT, ENOSPC
from typing import Any, Protocol, TypeAlias

import attrs

from functional_ckpt.errors import CheckpointError, CorruptionError, StorageError, add_notes

__all__ = [
    "BLOCK_NBYTES",
    "METADATA_NBYTES",
    "PAGE_NBYTES",
    "SMALL_CHUNK_NBYTES",
    "UNSIZED",
    "Capabilities",
    "OnBlock",
    "SaveClaim",
    "Store",
    "check_limit",
    "storage_error",
    "storage_errors",
]


OnBlock: TypeAlias = Callable[[memoryview], object]

#: Bytes are written and digested in blocks of this size, so that the digest reads them from the processor's cache
#: (measured: 33 GB/s; from memory 11).
BLOCK_NBYTES = 2**20

#: A chunk of up to so many bytes is read whole, by one call, even if only a piece is wanted.
SMALL_CHUNK_NBYTES = 64 * 2**10

#: Default limit of an object that is read whole: a root with the consolidated metadata of a million arrays has 0.6 GB,
#: their manifest 0.2. A larger object is damaged, or was made to exhaust memory.
METADATA_NBYTES = 2**30

#: The unit in which the operating system reads files.
PAGE_NBYTES = 4096

#: In place of a size: there is an object, and only reading tells how large it is.
UNSIZED = -1


@attrs.frozen
class Capabilities:
    """The capabilities of a store.

    `shared_chunks`: part of an object can be updated atomically. `rename`: a finished directory can be renamed to its
    final name in one step. `shared`: other processes see what this one writes. `sized`: the size of an object
    is known at little cost; otherwise one listing tells which objects there are, and reading tells their sizes.
    `lists`: objects can be listed. `concurrency`: how many requests at a time pay, 0 if the processor does the work.
    """

    shared_chunks: bool
    rename: bool
    shared: bool
    sized: bool = True
    lists: bool = True
    concurrency: int = 0


class SaveClaim(Protocol):
    """Says that a live saver writes in a place, until `release`: nobody removes then what it names."""

    @property
    def label(self) -> str:
        """Name of the claim in the store that is written to; empty where it is known in this process only."""

    def name(self, nodes: Sequence[str], durable: bool = False) -> None:
        """Say which nodes are going to be written."""

    def set_aside(self) -> None:
        """Say that the save was given up, and keep what it named: a late rank may still add to that."""

    def is_held(self) -> bool:
        """Tell whether the claim still stands."""

    def release(self) -> str | None:
        """Remove the claim; return what could not be done, in words."""

    def release_after(self, error: BaseException) -> None:
        """Remove the claim of a save that has failed; what could not be done is noted with the error."""

    def drop(self) -> None:
        """Let go of the claim, and leave what names the nodes."""


class Store(Protocol):
    """Objects by name (``node/c.0.0``) under one root. Names are relative; every failure is a `StorageError`."""

    @property
    def url(self) -> str:
        """The address of the root, for messages."""

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of this store."""

    @property
    def sync(self) -> str:
        """How durable a write is when it returns: ``"none"``, ``"fsync"``, or ``"syncfs"`` (at `flush`)."""

    def create(self, name: str, parts: Sequence[memoryview], nbytes: int, each: OnBlock | None = None) -> None:
        """Write a new object: `parts` one after the other, then zeros up to `nbytes`. Never replaces an object.

        `each` is called with all blocks of the parts in order, while they are in the processor's cache.
        """

    def batch(self) -> AbstractContextManager[object]:
        """Return a context: what is created in its ``with`` block is durable at the end of that, not earlier."""

    def publish(self, name: str, data: bytes) -> None:
        """Write a new object atomically: it exists whole or not at all. Never replaces an object."""

    def read(self, name: str, limit: int = METADATA_NBYTES) -> bytes | None:
        """Return the object's bytes, or None if there is none.

        Raises
        ------
        CorruptionError
            If it has more than `limit` bytes; then nothing is read.
        """

    def nbytes_of(self, name: str) -> int | None:
        """Return the object's size in bytes, or None if there is none; `UNSIZED` where only reading tells."""

    def read_into(self, name: str, into: memoryview, each: OnBlock | None = None) -> None:
        """Read the object's first ``len(into)`` bytes into `into`; `each` is called with its blocks in order."""

    def read_ranges(self, name: str, starts: Sequence[int], nbytes: int, into: memoryview) -> None:
        """Read `nbytes` bytes from each of `starts`, in order, one after the other into `into`.

        A store should fetch nothing else.
        """

    def scan(self, name: str, nbytes: int, each: OnBlock) -> None:
        """Call `each` with the object's first `nbytes` bytes, in order, a block at a time."""

    def names(self) -> Iterator[str]:
        """Yield the names of all objects."""

    def children(self) -> Iterator[str]:
        """Yield the names right below the root: of objects, and with a slash at the end of what holds objects."""

    def pinned(self) -> "Store":
        """Return this store for reading what is under the root now, even if the root is replaced later."""

    def read_by(self, count: int) -> "Store":
        """Return this store for `count` processes of this machine that read together: what one fetches, all have."""

    def reading(self, count: int) -> "Store":
        """Return this store for reading `count` objects at a time; one by itself may be worth several requests."""

    def unpin(self) -> None:
        """Close what `pinned` keeps open; nothing can be read after that."""

    def is_current(self) -> bool:
        """Tell whether the root has not been replaced since the store was pinned."""

    def stamp(self, name: str) -> object:
        """Return a value that changes when another object takes this name; None if there is no object.

        If only the content could tell, the value equals no other stamp.
        """

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, in no order."""

    def check_guard(self) -> None:
        """Raise `StorageError` if the save that writes here was abandoned, so that a late rank stops writing."""

    def flush(self) -> None:
        """Make all created objects durable, as far as the store was opened to do so."""

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """Return the TensorStore key-value store that holds the objects under `prefix`."""


class storage_errors:  # noqa: N801 - used as a with statement, on the path of every small file
    """Turns errors of the operating system and of TensorStore into `StorageError`, once, naming the object.

    Examples
    --------
    >>> with storage_errors("reading", "w/c.0"):
    ...     raise FileNotFoundError(2, "No such file")
    Traceback (most recent call last):
    ...
    functional_ckpt.errors.StorageError: reading failed: path w/c.0, found FileNotFoundError: No such file
    """

    __slots__ = ("name", "what")

    def __init__(self, what: str, name: str) -> None:
        self.what, self.name = what, name

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wrap `error` if it is one of the operating system or of TensorStore."""
        if isinstance(error, CheckpointError):
            return
        if isinstance(error, OSError):
            raise storage_error(self.what, self.name, error) from error
        if isinstance(error, ValueError | RuntimeError):  # TensorStore raises these with its status text
            raise StorageError(f"{self.what} failed", path=self.name, found=str(error)) from error


def check_limit(name: str, found: int, limit: int) -> None:
    """Raise `CorruptionError` if an object of `found` bytes is too large to be read whole.

    Examples
    --------
    >>> check_limit("zarr.json", 10, 10)
    """
    if found > limit:
        raise CorruptionError(
            "an object is larger than any that a save writes",
            path=name,
            expected=f"at most {limit} bytes",
            found=f"{found} bytes",
            remedy="Restore the file, or load another checkpoint",
        )


def storage_error(what: str, name: str, error: OSError) -> StorageError:
    """Return the `StorageError` for an error of the operating system."""
    full = error.errno in (ENOSPC, EDQUOT)
    found = f"{type(error).__name__}: {error.strerror or error}"
    remedy = "Free space; nothing was published" if full else None
    wrapped = StorageError(f"{what} failed", path=name, found=found, remedy=remedy)
    add_notes(wrapped, getattr(error, "__notes__", ()))  # the cause is not sent to other ranks
    return wrapped
