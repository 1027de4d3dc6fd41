"""How many bytes the disk delivers when one process loads the column blocks it wants."""

import os
from pathlib import Path

import attrs
import numpy as np

import functional_ckpt
from benchmarks.place import Place
from benchmarks.state import large_tensors


@attrs.frozen
class Fetched:
    """Bytes that the kernel read from the disk for us, and bytes that were asked for."""

    read_nbytes: int
    wanted_nbytes: int


def measure(place: Place, nbytes: int) -> Fetched | None:
    """Load the left half of every matrix from a cold page cache.

    Returns None where the cache cannot be emptied (tmpfs). What the kernel reads ahead counts: it
    is disk traffic too.
    """
    if place.on_tmpfs:
        return None
    path = place.fresh_path()
    state = {"model": {name: tensor.numpy() for name, tensor in large_tensors(nbytes)}}
    policy = functional_ckpt.SavePolicy(durability="fsync")
    functional_ckpt.save(state, path, policy=policy)
    like = {"model": {name: _left_half(name, full) for name, full in state["model"].items()}}
    place.settle()
    evict(path)
    before = disk_read_nbytes()
    loaded = functional_ckpt.load(like, path)
    read = disk_read_nbytes() - before
    wanted = 0
    for name, full in state["model"].items():
        half = loaded["model"][name]
        wanted += half.nbytes
        if not np.array_equal(half.view(np.int32), full[:, : half.shape[1]].view(np.int32)):
            raise RuntimeError(f"{name} is not what was saved")
    place.discard(path, files=0)
    return Fetched(read, wanted) if read > wanted // 2 else None


def _left_half(name: str, full: np.ndarray):
    rows, columns = full.shape
    array = functional_ckpt.ArraySpec(f"model.{name}", (rows, columns), "float32")
    return functional_ckpt.ShardSpec(array, functional_ckpt.Box((0, 0), (rows, columns // 2)))


def evict(root: Path) -> None:
    """Drop the pages of every file under a directory from the page cache, after a sync: dirty ones stay."""
    for path in root.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def disk_read_nbytes() -> int:
    """Bytes that this process has made the kernel read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])
