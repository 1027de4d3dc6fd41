"""Who is always compared: ours, raw files and DCP. Each saves a state to a fresh path and loads it.

`durable` means that every file has been through fsync when `save` returns; without it nobody's has.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed.checkpoint as dcp

import functional_ckpt
from benchmarks.state import State, tensors_of

# DCP says so at every call, even with `no_dist=True`.
warnings.filterwarnings("ignore", "torch.distributed is disabled")

OURS = "functional_ckpt"
RAW = "raw, 1 thread"
DCP = "DCP"
DCP_NO_CRC = "DCP, CRC off"
DCP_NO_CRC_THREADS = "DCP, CRC off, 2 threads"


def _itself(state: State) -> Any:
    return state


@attrs.frozen
class Competitor:
    """A way to save and to load; only `save(given, path, durable)` and `load(given, path)` are timed.

    `given` is what `view` makes of the state: the same memory, in the types that the library wants. Both calls
    happen inside of a `session`. `load` fills the tensors of the state.
    """

    name: str
    save: Callable[[Any, Path, bool], object]
    load: Callable[[Any, Path], object]
    view: Callable[[State], Any] = _itself
    session: Callable[[], AbstractContextManager[object]] = nullcontext


def save_ours(state: State, path: Path, durable: bool, **policy: int) -> None:
    chosen = functional_ckpt.SavePolicy(durability="auto" if durable else "none", **policy)
    functional_ckpt.save(state, path, policy=chosen)


def load_ours(into: State, path: Path) -> None:
    functional_ckpt.load(into, path)


def save_raw(state: State, path: Path, durable: bool) -> None:
    """One file per tensor, written by one thread."""
    path.mkdir()
    for name, tensor in tensors_of(state):
        file = os.open(path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        rest = _bytes(tensor)
        while rest:
            rest = rest[os.write(file, rest) :]
        if durable:
            os.fsync(file)
        os.close(file)


def load_raw(into: State, path: Path) -> None:
    for name, tensor in tensors_of(into):
        file = os.open(path / name, os.O_RDONLY)
        rest = _bytes(tensor)
        while rest:
            rest = rest[os.readv(file, [rest]) :]
        os.close(file)


def save_dcp(state: State, path: Path, durable: bool, *, crc: bool = True, threads: int = 1) -> None:
    writer = dcp.FileSystemWriter(path, sync_files=durable, thread_count=threads)
    with _crc32(crc):
        dcp.save(state, storage_writer=writer, no_dist=True)


def load_dcp(into: State, path: Path, *, crc: bool = True) -> None:
    with _crc32(crc):
        dcp.load(into, storage_reader=dcp.FileSystemReader(path), no_dist=True)


COMPETITORS = (
    Competitor(RAW, save_raw, load_raw),
    Competitor(OURS, save_ours, load_ours),
    Competitor(DCP, save_dcp, load_dcp),
    Competitor(DCP_NO_CRC, partial(save_dcp, crc=False), partial(load_dcp, crc=False)),
    Competitor(
        DCP_NO_CRC_THREADS,
        partial(save_dcp, crc=False, threads=2),
        partial(load_dcp, crc=False),
    ),
)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy()).cast("B")


@contextmanager
def _crc32(on: bool) -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(on)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
