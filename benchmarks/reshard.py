"""Saved by row blocks, loaded by row blocks and by column blocks: two gloo ranks with DTensors."""

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import functional_ckpt
from benchmarks.competitors import DCP, OURS
from benchmarks.measure import Sample, Samples, rotated, timed
from benchmarks.place import Place
from benchmarks.state import large_tensors, same_bits

RANKS = 2
ROWS, COLUMNS = 0, 1

DState = dict[str, dict[str, DTensor]]


def same_layout(library: str) -> str:
    """Name of the samples of loads by row blocks."""
    return f"{library}, rows to rows"


def other_layout(library: str) -> str:
    """Name of the samples of loads by column blocks."""
    return f"{library}, rows to columns"


def time_loads(libraries: tuple[str, ...], place: Place, nbytes: int, rounds: int) -> Samples:
    """Return the samples of `same_layout` and `other_layout` of each library.

    A sample's wall time is that of the slower rank, its CPU time that of all ranks.
    """
    scratch = place.fresh_path()
    scratch.mkdir()
    job = _Job(scratch, libraries, nbytes, rounds)
    torch.multiprocessing.spawn(_rank_main, (job,), nprocs=RANKS)
    found = json.loads((scratch / "samples.json").read_text())
    place.discard(scratch, files=0)
    return {name: [Sample(*one) for one in many] for name, many in found.items()}


@attrs.frozen
class _Job:
    scratch: Path
    libraries: tuple[str, ...]
    nbytes: int
    rounds: int


def _rank_main(rank: int, job: _Job) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or RANKS) // RANKS))
    rendezvous = f"file://{job.scratch}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    states = {axis: _sharded(mesh, job.nbytes, axis) for axis in (ROWS, COLUMNS)}
    runs: dict[str, Callable[[], object]] = {}
    for library in job.libraries:
        save, load = _calls(library, job.scratch / library)
        save(states[ROWS])
        for name, axis in ((same_layout(library), ROWS), (other_layout(library), COLUMNS)):
            runs[name] = partial(load, states[axis])
            _prove(name, runs[name], states[axis], job.nbytes, axis)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(job.rounds):
        for name in rotated(list(runs), number):
            samples[name].append(_timed_by_all(runs[name]))
    if rank == 0:
        (job.scratch / "samples.json").write_text(json.dumps(samples))
    dist.destroy_process_group()


def _calls(library: str, path: Path) -> tuple[Callable[[DState], object], Callable[[DState], object]]:
    if library == OURS:
        policy = functional_ckpt.SavePolicy(durability="none")
        return (
            lambda state: functional_ckpt.save(state, path, policy=policy),
            lambda into: functional_ckpt.load(into, path),
        )
    if library == DCP:
        writer = dcp.FileSystemWriter(path, sync_files=False)
        return (
            lambda state: dcp.save(state, storage_writer=writer),
            lambda into: dcp.load(into, storage_reader=dcp.FileSystemReader(path)),
        )
    raise ValueError(f"no resharding benchmark of {library}")


def _blocks(nbytes: int, axis: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in large_tensors(nbytes):
        yield name, tensor.chunk(RANKS, axis)[dist.get_rank()].contiguous()


def _sharded(mesh: DeviceMesh, nbytes: int, axis: int) -> DState:
    tensors = {
        name: DTensor.from_local(block, mesh, [Shard(axis)], run_check=False) for name, block in _blocks(nbytes, axis)
    }
    return {"model": tensors}


def _prove(name: str, load: Callable[[], object], into: DState, nbytes: int, axis: int) -> None:
    locals_ = {name: tensor.to_local() for name, tensor in into["model"].items()}
    for tensor in locals_.values():
        tensor.fill_(-1.0)
    load()
    if not all(same_bits(locals_[key], block) for key, block in _blocks(nbytes, axis)):
        raise RuntimeError(f"{name} did not load what was saved")


def _timed_by_all(run: Callable[[], object]) -> tuple[float, float]:
    dist.barrier()
    sample = timed(run)
    everyone: list[tuple[float, float]] = [(0.0, 0.0)] * RANKS
    dist.all_gather_object(everyone, (sample.wall, sample.cpu))
    walls, cpus = zip(*everyone, strict=True)
    return max(walls), sum(cpus)
