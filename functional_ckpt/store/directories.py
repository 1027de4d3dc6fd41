"""Directories of a local file system: creating, exchanging, syncing, removing and identifying them."""

import ctypes
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ENOENT, ENOSYS, ENOTEMPTY
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from functional_ckpt.errors import StorageError
from functional_ckpt.store.base import storage_errors

__all__ = [
    "Identity",
    "OpenDirectory",
    "begin_sync",
    "check_exchange",
    "exchange_paths",
    "identity_of",
    "is_directory",
    "is_mount_point",
    "make_directories",
    "remove_tree",
    "sync_directory",
    "sync_file_system",
    "why_fixed",
]

#: Inode numbers of a directory and of the root in it: the number of a directory alone may be reused.
Identity: TypeAlias = tuple[int, ...]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_RENAME_SWAP = 2
_SYNC_FILE_RANGE_WRITE = 2
# While a tree is removed, others may remove files too, and late ranks may add some. After so many attempts it is an
# error.
_TRIES = 20


class OpenDirectory:
    """A directory that is kept open until `close`, or until the last reference to it is gone."""

    def __init__(self, path: str) -> None:
        self.path, self.file = path, -1
        with storage_errors("opening", path):
            self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)

    def close(self) -> None:
        """Close the directory; reading and writing fail after that."""
        file, self.file = self.file, -1
        if file >= 0:
            with suppress(OSError):  # of a directory: nothing that was written can be lost
                os.close(file)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the path again; the reader checks whether it is still the same directory.
        return OpenDirectory, (self.path,)


def identity_of(path: Path) -> Identity | None:
    """Return a value that identifies the checkpoint at a path; None if there is no directory."""
    try:
        directory = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        root = os.stat(path / "zarr.json")
    except (FileNotFoundError, NotADirectoryError):
        return directory.st_dev, directory.st_ino
    return directory.st_dev, directory.st_ino, root.st_ino, root.st_mtime_ns, root.st_size


def is_directory(path: Path) -> bool:
    """Tell whether there is a directory; unlike `Path.is_dir` it raises if that cannot be known."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_mount_point(path: Path) -> bool:
    """Tell whether something is mounted at an existing path, which therefore cannot be replaced."""
    if os.path.ismount(path):
        return True
    try:  # a directory mounted from the same file system looks like any other
        mounts = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return False
    names = (line.split()[4].decode("unicode_escape").encode("latin-1") for line in mounts)
    return os.fsencode(path.resolve()) in names


def make_directories(path: Path, durable: bool) -> None:
    """Create a directory and its missing parents; with `durable` each new name is synced."""
    missing: list[Path] = []
    while not _exists(path):
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(directory)
        if durable:
            sync_directory(directory.parent)


def _exists(path: Path) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def remove_tree(path: Path) -> None:
    """Remove a directory and everything in it; nothing happens if there is none."""
    for attempt in range(_TRIES):
        try:
            os.rmdir(path)  # an empty one can be removed even if the process has no free file descriptor
            return
        except FileNotFoundError:
            return
        except OSError:
            pass
        try:
            shutil.rmtree(path)
            return
        except OSError as error:
            if error.errno not in (ENOENT, ENOTEMPTY) or attempt + 1 == _TRIES:
                raise


@contextmanager
def _opened(path: str | Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        with suppress(OSError):  # nothing was written through it, and an error here must not hide an earlier one
            os.close(file)


def sync_directory(path: str | Path) -> None:
    """Make the names in a directory durable."""
    with _opened(path) as file:
        os.fsync(file)


def begin_sync(file: int) -> bool:
    """Let the disk begin to write an open file, without waiting; return False where the system cannot.

    Nothing is durable by that, and no error is seen: a sync has to follow.
    """
    if not hasattr(_libc(), "sync_file_range"):
        return False
    try:
        call_system("sync_file_range", file, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)
    except OSError:
        return False
    return True


def sync_file_system(directory: int) -> None:
    """Sync the whole file system of an open directory.

    An error of the disk since it was opened is raised. One from before is not, if another program was told of it.
    """
    if not hasattr(_libc(), "syncfs"):
        os.sync()
        return
    call_system("syncfs", directory)


def exchange_paths(one: Path, other: Path) -> None:
    """Swap two directories in one atomic step.

    Raises
    ------
    StorageError
        If the system or the file system cannot do it.
    """
    a, b = os.fsencode(one), os.fsencode(other)
    try:
        if sys.platform == "darwin":
            call_system("renamex_np", a, b, _RENAME_SWAP)
        elif hasattr(_libc(), "renameat2"):
            call_system("renameat2", _AT_FDCWD, a, _AT_FDCWD, b, _RENAME_EXCHANGE)
        else:
            raise OSError(ENOSYS, os.strerror(ENOSYS))
    except OSError as error:
        raise StorageError(
            "two directories could not be exchanged",
            path=str(one),
            found=error.strerror,
            remedy="If the file system does not support it: save under a new path, then delete the old checkpoint",
        ) from error


def check_exchange(work: Path) -> None:
    """Exchange two directories inside the directory `work`, to see whether the file system supports it.

    Raises
    ------
    StorageError
        If it does not.
    """
    one, other = work / "one", work / "other"
    one.mkdir()
    other.mkdir()
    exchange_paths(one, other)
    one.rmdir()
    other.rmdir()


def why_fixed(path: Path) -> str | None:
    """Return as text why an existing directory cannot be replaced; None if it can."""
    if os.path.samefile(path, "."):
        return "the working directory of this process"
    return "a mount point" if is_mount_point(path) else None


def call_system(name: str, *arguments: int | bytes | ctypes.c_int64) -> None:
    """Call a function of the C library that Python does not offer; raise OSError if it reports a failure."""
    if getattr(_libc(), name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
