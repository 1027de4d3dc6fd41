"""`WholeStore`: what a store needs besides its own way to write, read, list and delete whole objects."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from functional_ckpt.errors import AlreadyExistsError, CorruptionError, StorageError
from functional_ckpt.store.base import METADATA_NBYTES, Capabilities, OnBlock
from functional_ckpt.store.lease import is_taken

__all__ = ["WholeStore"]

_NO_LIMIT = 2**62


class WholeStore:
    """A store whose objects are written and read whole. A subclass has `url`, and says how to do what raises here.

    Where other processes see what this one writes (`Capabilities.shared`), it has `replace` too. It may do the rest in
    a better way: read ranges, say sizes, write without a copy.

    Attributes
    ----------
    guard
        Name of the claim of the save that writes here, or None; nothing is written any more once that is gone.

    Examples
    --------
    >>> class Nothing(WholeStore):
    ...     url = "nothing://"
    ...     def read(self, name, limit=0):
    ...         return None
    >>> Nothing().nbytes_of("zarr.json") is None
    True
    """

    sync: str = "none"
    guard: str | None = None

    @property
    def url(self) -> str:
        """The address of the root, for messages."""
        raise NotImplementedError

    @property
    def capabilities(self) -> Capabilities:
        """Shared with other processes; nothing else."""
        return Capabilities(shared_chunks=False, rename=False, shared=True)

    @property
    def lease_s(self) -> float:
        """How long a claim counts that is not renewed, in seconds: 60."""
        return 60.0

    @property
    def alone(self) -> bool:
        """Whether the caller says that nobody else saves or sweeps here meanwhile: no."""
        return False

    def put(self, name: str, data: bytes) -> None:
        """Write a new object in one step; raise `AlreadyExistsError` if there is one, and leave that as it is."""
        raise NotImplementedError

    def create(self, name: str, parts: Sequence[memoryview], nbytes: int, each: OnBlock | None = None) -> None:
        """Write a new object by `put`, unless the save that writes here was given up."""
        self.check_guard()
        for part in parts if each is not None else ():
            each(part)  # type: ignore[misc]
        self.put(name, b"".join(parts).ljust(nbytes, b"\0"))

    def publish(self, name: str, data: bytes) -> None:
        """Write a new object like `create`: all writes here are whole."""
        self.create(name, [memoryview(data)], len(data))

    def read(self, name: str, limit: int = METADATA_NBYTES) -> bytes | None:
        """Return an object's bytes, or None; call `check_limit` with what it has."""
        raise NotImplementedError

    def names(self) -> Iterator[str]:
        """Yield the names of all objects that were written before."""
        raise NotImplementedError

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; one that is not there is no error."""
        raise NotImplementedError

    def stamp(self, name: str) -> object:
        """Return a value that changes when other bytes take this name; None if there is no object."""
        raise NotImplementedError

    def replace(self, name: str, data: bytes, stamp: object) -> object:
        """Write over an object whose stamp is still `stamp`, in one step; return the new one, None if it is another.

        If `stamp` is None there must be no object, and one is created.
        """
        raise NotImplementedError

    def refuses(self, name: str, data: bytes) -> bool:
        """Try to create an object that is there already; tell whether it is refused."""
        try:
            self.put(name, data)
        except AlreadyExistsError:
            return True
        return False

    def batch(self) -> AbstractContextManager[object]:
        """Return what does nothing: a write is durable when it returns."""
        return nullcontext()

    def nbytes_of(self, name: str) -> int | None:
        """Return an object's size, or None, by reading it."""
        data = self.read(name, _NO_LIMIT)
        return None if data is None else len(data)

    def read_into(self, name: str, into: memoryview, each: OnBlock | None = None) -> None:
        """Read an object's head."""
        self.read_ranges(name, (0,), len(into), into)
        if each is not None:
            each(into)

    def read_ranges(self, name: str, starts: Sequence[int], nbytes: int, into: memoryview) -> None:
        """Read an object, and copy ranges of it."""
        data = self.read(name, _NO_LIMIT)
        if data is None:
            raise CorruptionError("an object is missing", path=name, found=self.url)
        if len(data) < max(starts) + nbytes:
            raise CorruptionError("an object is too short", path=name, expected=max(starts) + nbytes, found=len(data))
        into[:] = b"".join([data[start : start + nbytes] for start in starts])

    def scan(self, name: str, nbytes: int, each: OnBlock) -> None:
        """Read an object's head at once."""
        self.read_into(name, memoryview(bytearray(nbytes)), each)

    def children(self) -> Iterator[str]:
        """Yield what `names` has before the first slash."""
        found = (name.partition("/") for name in self.names())
        yield from dict.fromkeys(head + slash for head, slash, _ in found)

    def pinned(self) -> Any:
        """Return the store itself: nothing is replaced here once it is committed."""
        return self

    def read_by(self, count: int) -> Any:
        """Return the store itself: what one process fetches, others do not have."""
        return self

    def reading(self, count: int) -> Any:
        """Return the store itself, which reads one object like many."""
        return self

    def unpin(self) -> None:
        """Do nothing."""

    def is_current(self) -> bool:
        """Return True."""
        return True

    def check_guard(self) -> None:
        """Look for the claim `guard`; raise `StorageError` if it is gone."""
        if self.guard is None:
            return
        data = self.read(self.guard)
        if data is None or is_taken(data):
            raise StorageError(
                "the save was abandoned or swept while this rank was writing", path=self.url,
                expected=f"the claim {self.guard}", found="none", remedy="Save again under a new path",
            )  # fmt: skip

    def flush(self) -> None:
        """Do nothing: what is written is durable."""

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """Raise: only stores that share chunks are asked for a key-value store of TensorStore."""
        raise NotImplementedError
