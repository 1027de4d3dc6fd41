"""Where a benchmark writes: a fresh path for every run, on tmpfs or on a disk."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs


@attrs.frozen
class Place:
    """A directory, and whether every file written there goes through fsync."""

    directory: Path
    on_tmpfs: bool
    durable: bool = False

    @property
    def title(self) -> str:
        kind = "tmpfs" if self.on_tmpfs else "disk"
        return f"{kind}, every file fsynced" if self.durable else f"{kind}, no fsync"

    def fresh_path(self) -> Path:
        """A path that does not exist, in a directory of its own."""
        return Path(tempfile.mkdtemp(dir=self.directory)) / "checkpoint"

    def settle(self) -> None:
        """Wait until the disk has what earlier runs left in the page cache."""
        if not self.on_tmpfs:
            os.sync()

    def discard(self, path: Path, files: int) -> None:
        """Remove a fresh path, or leave it to the end where that would slow down the next run.

        For a while after many files were deleted, ext4 creates files up to 20 times slower.
        """
        if self.on_tmpfs or files < 100:
            shutil.rmtree(path.parent)


@contextmanager
def scratch_place(directory: Path) -> Iterator[Place]:
    """A place in a new directory under `directory`, removed at the end with all that was left in it."""
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=directory.resolve()) as scratch:
        yield Place(Path(scratch), is_tmpfs(Path(scratch)))


def default_directories() -> tuple[Path, ...]:
    """/dev/shm where there is one, and the directory for temporary files."""
    directories = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return tuple(one for one in directories if one.is_dir())


def is_tmpfs(directory: Path) -> bool:
    """Whether a directory lies on tmpfs, by the longest mount point above it."""
    where = directory.resolve()
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    above = [(len(mount[1]), mount[2]) for mount in mounts if where.is_relative_to(Path(mount[1]))]
    return max(above)[1] == "tmpfs"


@attrs.frozen
class Footprint:
    """What a checkpoint is made of: files, and the sum of their lengths in bytes."""

    files: int
    nbytes: int


def footprint(path: Path) -> Footprint:
    """Measure a checkpoint, be it a file or a directory."""
    sizes = [file.stat().st_size for file in _files(path)]
    return Footprint(len(sizes), sum(sizes))


def fsync_all(path: Path) -> None:
    """Sync each file of a checkpoint to the disk."""
    for one in _files(path):
        file = os.open(one, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for folder, _, names in os.walk(path):
        yield from (Path(folder, name) for name in names)
