"""States of DTensors, cut along one axis as FSDP2 does, and the libraries that save and load them on all ranks."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import functional_ckpt
from benchmarks.competitors import DCP, OURS, RAW, load_raw, save_raw
from benchmarks.state import same_bits

DState = dict[str, dict[str, DTensor]]
Tensors = Iterable[tuple[str, torch.Tensor]]


@attrs.frozen
class Library:
    """Calls that all ranks make together; `save_async` waits for the end of the save that it starts."""

    name: str
    save: Callable[[DState, Path], object]
    save_async: Callable[[DState, Path], object]
    load: Callable[[DState, Path], object]


def library(name: str, budget_nbytes: int | None = None, durable: bool = False) -> Library:
    """Return ours, with a budget, DCP as it comes, or plain files; they sync what they save if it is to be durable."""
    if name == DCP:
        return Library(
            DCP,
            lambda state, path: dcp.save(state, storage_writer=_writer(path, durable)),
            lambda state, path: dcp.async_save(state, storage_writer=_writer(path, durable)).result(),
            lambda into, path: dcp.load(into, storage_reader=dcp.FileSystemReader(path)),
        )
    if name == RAW:
        return Library(RAW, partial(_save_raw, durable=durable), partial(_save_raw, durable=durable), _load_raw)
    budget = {} if budget_nbytes is None else {"budget_nbytes": budget_nbytes}
    policy = functional_ckpt.SavePolicy(durability="auto" if durable else "none", **budget)
    reading = functional_ckpt.LoadPolicy(**budget)
    # Looked up now: names of the package are imported on first use, and an import is no part of a save.
    save, async_save, load = functional_ckpt.save, functional_ckpt.async_save, functional_ckpt.load
    return Library(
        OURS,
        lambda state, path: save(state, path, policy=policy),
        lambda state, path: async_save(state, path, policy=policy).result(),
        lambda into, path: load(into, path, policy=reading),
    )


def all_ranks() -> DeviceMesh:
    """The mesh of one dimension over the default group."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(mesh: DeviceMesh, tensors: Tensors, axis: int) -> DState:
    """A state of DTensors from whole tensors, which are made one at a time and dropped."""
    return {
        "model": {
            name: DTensor.from_local(block, mesh, [Shard(axis)], run_check=False)
            for name, block in _blocks(tensors, axis)
        }
    }


def local_tensors(state: DState) -> dict[str, torch.Tensor]:
    """What this rank holds."""
    return {name: tensor.to_local() for name, tensor in state["model"].items()}


def prove(load: Callable[[], object], into: DState, tensors: Tensors, axis: int, who: str) -> None:
    """Load once, and compare with the tensors that were saved.

    Raises
    ------
    RuntimeError
        If a local tensor differs in a bit.
    """
    found = local_tensors(into)
    for tensor in found.values():
        tensor.fill_(-1.0)
    load()
    if not all(same_bits(found[key], block) for key, block in _blocks(tensors, axis)):
        raise RuntimeError(f"{who} did not load what was saved")


def _blocks(tensors: Tensors, axis: int) -> Iterator[tuple[str, torch.Tensor]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, tensor in tensors:
        # A copy, so that the whole tensor can go.
        yield name, tensor.chunk(size, axis)[rank].clone(memory_format=torch.contiguous_format)


def _writer(path: Path, durable: bool) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(path, sync_files=durable)


def _save_raw(state: DState, path: Path, durable: bool) -> None:
    path.mkdir(exist_ok=True)
    save_raw({"model": local_tensors(state)}, path / f"{dist.get_rank()}", durable)


def _load_raw(into: DState, path: Path) -> None:
    load_raw({"model": local_tensors(into)}, path / f"{dist.get_rank()}")
