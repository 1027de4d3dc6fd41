"""Directories of a local file system: made, exchanged, synced, removed, and what tells one from another."""

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
from typing import TypeAlias

from functional_ckpt.errors import StorageError

__all__ = [
    "Identity",
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

#: Numbers of a directory, and of the root in it: inode numbers alone are used again.
Identity: TypeAlias = tuple[int, ...]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_RENAME_SWAP = 2
# Files may vanish or come while a tree is removed: by others who remove it, and by ranks that are late. What does not
# end is an error.
_TRIES = 20


def identity_of(path: Path) -> Identity | None:
    """Return what tells the checkpoint at a path from another that takes its place; None if there is no directory."""
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
    """Tell whether there is a directory; other than `Path.is_dir` it raises if that cannot be known."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_mount_point(path: Path) -> bool:
    """Tell whether something is mounted at an existing path: the system lets nothing take its place."""
    if os.path.ismount(path):
        return True
    try:  # a directory mounted from the same file system looks like any other
        mounts = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return False
    names = (line.split()[4].decode("unicode_escape").encode("latin-1") for line in mounts)
    return os.fsencode(path.resolve()) in names


def make_directories(path: Path, durable: bool) -> None:
    """Make a directory and those above it that are missing; `durable` makes each new name so."""
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
    """Remove a directory and all that it holds; nothing happens if there is none."""
    for attempt in range(_TRIES):
        try:
            os.rmdir(path)  # an empty one goes even where no file can be opened any more
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
        with suppress(OSError):  # nothing was written through it, and it must not hide what failed
            os.close(file)


def sync_directory(path: str | Path) -> None:
    """Make the names in a directory durable."""
    with _opened(path) as file:
        os.fsync(file)


def sync_file_system(path: Path) -> None:
    """Make everything durable that the file system of `path` holds."""
    if not hasattr(_libc(), "syncfs"):
        os.sync()
        return
    with _opened(path) as file:
        call_system("syncfs", file)


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
            "two directories could not be exchanged", path=str(one), found=error.strerror,
            remedy="If the file system cannot do it: save under a new path, and delete the old checkpoint afterwards",
        ) from error  # fmt: skip


def check_exchange(work: Path) -> None:
    """Try in the directory `work` whether directories can be exchanged there.

    Raises
    ------
    StorageError
        If they cannot.
    """
    one, other = work / "one", work / "other"
    one.mkdir()
    other.mkdir()
    exchange_paths(one, other)
    one.rmdir()
    other.rmdir()


def why_fixed(path: Path) -> str | None:
    """Return what keeps another directory from taking the place of an existing one, in words; None for nothing."""
    if os.path.samefile(path, "."):
        return "the working directory of this process"
    return "a mount point" if is_mount_point(path) else None


def call_system(name: str, *arguments: int | bytes) -> None:
    """Call a function of the C library that Python does not offer; raise OSError if it says that it has failed."""
    if getattr(_libc(), name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
