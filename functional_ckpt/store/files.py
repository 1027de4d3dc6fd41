"""`FileStore`: objects as files. Plain chunks are written and read here, without TensorStore.

Measured (docs/adr): for whole plain chunks TensorStore's zarr3 driver gains nothing; for many small ones opening each
array costs more than the data; and a parallel read into the caller's memory is twice as fast as its fastest way.
"""

import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from errno import EINVAL, EMFILE, ENFILE
from pathlib import Path
from typing import Any

import attrs

from functional_ckpt.errors import AlreadyExistsError, StorageError
from functional_ckpt.store.base import (
    BLOCK_NBYTES,
    METADATA_NBYTES,
    Capabilities,
    OnBlock,
    check_limit,
    storage_error,
    storage_errors,
)
from functional_ckpt.store.directories import OpenDirectory, begin_sync, sync_directory, sync_file_system
from functional_ckpt.store.readahead import advise_ranges
from functional_ckpt.store.transfer import fill, read_fully, read_small
from functional_ckpt.store.unsynced import EARLY_NBYTES, Unsynced

__all__ = ["NEW", "FileStore"]

#: Suffix of a file that was written but not yet linked to its final name.
NEW = ".new"

_READ = os.O_RDONLY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


# The clock of file times advances only every few milliseconds.
_SETTLED_NS = 2 * 10**9


@attrs.frozen
class FileStore:
    """Objects as files below `root`; `sync` is ``"none"``, ``"fsync"`` (each file) or ``"syncfs"`` (at `flush`).

    Writing fails once the file `guard` is gone.

    Examples
    --------
    >>> FileStore(Path("somewhere")).capabilities.shared_chunks
    True
    """

    root: Path
    sync: str = "none"
    guard: str | None = None
    #: How many processes of this machine read much the same files together.
    _readers: int = attrs.field(default=1, kw_only=True, eq=False, repr=False)
    _at: "OpenDirectory | None" = attrs.field(default=None, kw_only=True, eq=False, repr=False)
    _prefix: str = attrs.field(init=False, eq=False, repr=False)
    # The directories written to; True if names in them are not synced yet.
    _directories: dict[str, bool] = attrs.field(factory=dict, init=False, eq=False, repr=False)
    _unsynced: Unsynced = attrs.field(factory=Unsynced, init=False, eq=False, repr=False)

    @_prefix.default
    def _root_as_text(self) -> str:
        return f"{self.root}/"

    @property
    def url(self) -> str:
        """The root as text."""
        return str(self.root)

    @property
    def capabilities(self) -> Capabilities:
        """File systems share chunks (TensorStore locks the file) and rename directories."""
        return Capabilities(shared_chunks=True, rename=True, shared=True)

    def create(
        self,
        name: str,
        parts: Sequence[memoryview],
        nbytes: int,
        each: OnBlock | None = None,
        synced: bool | None = None,
    ) -> None:
        """Write a new file; an existing one is never opened, since a hard link may share it.

        It is synced where the store syncs each file, or if `synced` says so. Thousands of small files are written one
        after the other, so few functions are called: a call costs some per cent of what the system takes for a file.
        """
        if self.guard is not None:
            self.check_guard()
        synced = self.sync == "fsync" if synced is None else synced
        try:
            directory = name.rpartition("/")[0]
            if not self._directories.get(directory):
                self._make(directory)
            file = self._open(name, _CREATE)
            try:
                is_simple = each is None and len(parts) == 1 and nbytes <= BLOCK_NBYTES
                written = os.write(file, parts[0]) if is_simple else 0
                if written < nbytes:
                    fill(file, parts, nbytes, each, written)
                if synced and self._unsynced.keep(self._prefix + name, file, nbytes):
                    return
                if synced:
                    os.fsync(file)
                elif nbytes >= EARLY_NBYTES and self.sync == "syncfs":
                    begin_sync(file)
            except BaseException:
                with suppress(OSError):  # it must not hide the first error
                    os.close(file)
                raise
            os.close(file)
        except FileExistsError:
            raise AlreadyExistsError("an object exists already", path=name, found=self.url) from None
        except OSError as error:
            raise storage_error("writing", self._prefix + name, error) from error

    def batch(self) -> Unsynced:
        """Return what keeps the files that are created in its ``with`` block, and syncs them at the end."""
        return self._unsynced

    def _make(self, directory: str) -> None:
        # Never the root itself: a late rank must not create the directory of an abandoned save again.
        if directory:
            try:  # not `suppress`, which costs a fifth of what the system does here
                if self._at is None:
                    os.mkdir(self._prefix + directory)
                else:
                    os.mkdir(directory, dir_fd=self._at.file)
            except FileExistsError:
                pass
            self._directories[""] = True
        self._directories[directory] = True

    def check_guard(self) -> None:
        """Raise `StorageError` if the save that writes here was abandoned, so that a late rank stops writing."""
        if self.guard is None:
            return
        with storage_errors("looking at the claim", self.guard):
            try:
                os.lstat(self._prefix + self.guard)
            except FileNotFoundError:
                what = "the save was abandoned or swept while this rank was writing"
                expected, remedy = f"the claim {self.guard}", "Save again under a new path"
                raise StorageError(what, path=self.url, expected=expected, found="none", remedy=remedy) from None

    def publish(self, name: str, data: bytes) -> None:
        """Write a file under another name, then link it to `name` in one step, which fails if `name` exists."""
        new = name + NEW
        # Synced here: a power cut must not leave the name without the content.
        self.create(new, [memoryview(data)], len(data), None, self.sync != "none")
        with storage_errors("publishing", self._prefix + name):
            try:
                os.link(self._prefix + new, self._prefix + name)
            except OSError as error:
                if not self._is_linked(new, name):
                    if not isinstance(error, FileExistsError):
                        raise
                    self.delete([new])
                    raise AlreadyExistsError("an object exists already", path=name, found=self.url) from None
            with suppress(OSError):  # the final name exists, or `sweep` removes this one
                os.unlink(self._prefix + new)

    def _is_linked(self, new: str, name: str) -> bool:
        """Tell whether a link was made although the system reported an error, as on network file systems."""
        try:
            return os.path.samefile(self._prefix + new, self._prefix + name)
        except OSError:
            return False

    def read(self, name: str, limit: int = METADATA_NBYTES) -> bytes | None:
        """Return a file's bytes, or None."""
        try:
            # Without O_NONBLOCK, opening a pipe waits for a writer.
            file = self._open(name, _READ | os.O_NONBLOCK)
            try:
                if (small := read_small(file, limit)) is not None:
                    return small
                found = os.fstat(file)
                if not stat.S_ISREG(found.st_mode):
                    raise _not_plain()
                check_limit(self._prefix + name, found.st_size, limit)
                os.lseek(file, 0, os.SEEK_SET)
                data = os.read(file, found.st_size + 1)  # a small file is complete now
                if len(data) == found.st_size:
                    return data
                with open(file, "rb", closefd=False) as rest:
                    return data + rest.read()
            finally:
                os.close(file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise storage_error("reading", self._prefix + name, error) from error

    def nbytes_of(self, name: str) -> int | None:
        """Return a file's size, or None."""
        try:
            found = self._stat(name)
            if not stat.S_ISREG(found.st_mode):
                raise _not_plain()
            return found.st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise storage_error("looking at", self._prefix + name, error) from error

    def read_into(self, name: str, into: memoryview, each: OnBlock | None = None) -> None:
        """Read the beginning of a file directly into the caller's memory."""
        try:
            file = self._open(name)
            try:
                read_fully(file, name, 0, into, each)
            finally:
                os.close(file)
        except OSError as error:
            raise storage_error("reading", self._prefix + name, error) from error

    def read_ranges(self, name: str, starts: Sequence[int], nbytes: int, into: memoryview) -> None:
        """Read ranges of a file directly into the caller's memory, and no other pages that nobody here wants."""
        with storage_errors("reading", self._prefix + name):
            file = self._open(name)
            try:
                advise_ranges(file, starts, nbytes, self._readers)
                for position, start in enumerate(starts):
                    read_fully(file, name, start, into[position * nbytes : (position + 1) * nbytes])
            finally:
                os.close(file)

    def scan(self, name: str, nbytes: int, each: OnBlock) -> None:
        """Read the beginning of a file block by block, in the memory of one block."""
        block = memoryview(bytearray(min(nbytes, BLOCK_NBYTES)))
        with storage_errors("reading", self._prefix + name):
            file = self._open(name)
            try:
                for start in range(0, nbytes, BLOCK_NBYTES):
                    part = block[: nbytes - start]
                    read_fully(file, name, start, part)
                    each(part)
            finally:
                os.close(file)

    def names(self) -> Iterator[str]:
        """Yield the names of all files below the root."""
        with storage_errors("listing", self.url):
            for directory, _, files in os.walk(self.root, onerror=_raise_unless_gone):
                below = os.path.relpath(directory, self.root)
                yield from (name if below == "." else f"{below}/{name}" for name in files)

    def children(self) -> Iterator[str]:
        """Yield the names in the root's directory; of directories, with a slash."""
        with storage_errors("listing", self.url):
            try:
                with os.scandir(self.root) as found:
                    yield from (f"{entry.name}/" if entry.is_dir() else entry.name for entry in found)
            except OSError as error:
                _raise_unless_gone(error)

    def pinned(self) -> "FileStore":
        """Return this store bound to the directory that is at the root now, which is kept open."""
        try:
            return attrs.evolve(self, at=OpenDirectory(self._prefix))
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                return self
            raise

    def read_by(self, count: int) -> "FileStore":
        """Return this store for reading together with other processes of this machine, `count` in all."""
        return attrs.evolve(self, readers=count)

    def reading(self, count: int) -> "FileStore":
        """Return the store itself, which reads one file like many."""
        return self

    def unpin(self) -> None:
        """Close the directory."""
        if self._at is not None:
            self._at.close()

    def is_current(self) -> bool:
        """Tell whether the path still leads to the directory that is kept open."""
        if self._at is None:
            return True
        with storage_errors("looking at", self.url), suppress(FileNotFoundError, NotADirectoryError):
            # While it is open, no other directory gets its inode number.
            return os.path.samestat(os.stat(self.root), os.fstat(self._at.file))
        return False

    def stamp(self, name: str) -> object:
        """Return inode number, size and time of a file; a stamp of a file written just now equals no other stamp."""
        with storage_errors("looking at", self._prefix + name), suppress(FileNotFoundError, NotADirectoryError):
            found = self._stat(name)
            young = time.time_ns() - found.st_mtime_ns < _SETTLED_NS
            return object() if young else (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        return None

    def _open(self, name: str, flags: int = _READ) -> int:
        """Open a file; if there are no more descriptors, the files that are kept open give theirs back."""
        while True:
            try:
                if self._at is None:
                    return os.open(self._prefix + name, flags, 0o666)
                return os.open(name, flags, 0o666, dir_fd=self._at.file)
            except OSError as error:
                if error.errno not in (EMFILE, ENFILE) or not self._unsynced.give_back():
                    raise

    def _stat(self, name: str) -> os.stat_result:
        return os.stat(self._prefix + name) if self._at is None else os.stat(name, dir_fd=self._at.file)

    def delete(self, names: Sequence[str]) -> None:
        """Delete files, and directories that become empty; a name with a slash at its end is that of a directory."""
        for name in names:
            with storage_errors("deleting", self._prefix + name):
                if not name.endswith("/"):
                    (self.root / name).unlink(missing_ok=True)
        for directory in {os.path.dirname(name): None for name in names if "/" in name}:
            with suppress(OSError):  # it holds other files
                (self.root / directory).rmdir()
                self._directories.pop(directory, None)

    def flush(self) -> None:
        """Sync the directories of synced files, or the whole file system, depending on `sync`."""
        if self.sync == "none":
            return
        with storage_errors("syncing", self.url):
            if self.sync == "syncfs":
                if self._at is None:
                    raise StorageError(
                        "a store that syncs a file system must be pinned before it writes", path=self.url
                    )
                sync_file_system(self._at.file)  # which was opened before anything was written
                return
            # The root last; directories synced before are not synced again.
            for directory in sorted((d for d, is_new in self._directories.items() if is_new), reverse=True):
                sync_directory(self._prefix + directory)
                self._directories[directory] = False

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """Return TensorStore's file driver at `prefix`."""
        return {"driver": "file", "path": f"{self.root}/{prefix}"}


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _not_plain() -> OSError:
    return OSError(EINVAL, "not a regular file")
