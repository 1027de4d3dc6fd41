"""Several ranks on this machine: spawned processes (never forked) that gloo joins on 127.0.0.1."""

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.measure import Sample, timed


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function(*arguments)` on `size` ranks of a new default group; return what rank 0 returns.

    Raises
    ------
    torch.multiprocessing.ProcessRaisedException
        If a rank raises; the others are ended.
    """
    with tempfile.TemporaryDirectory() as scratch:
        torch.multiprocessing.spawn(_rank_main, (size, Path(scratch), function, arguments), nprocs=size)
        return pickle.loads(Path(scratch, "result").read_bytes())


def timed_by_all(run: Callable[[], object]) -> Sample:
    """Time one call on all ranks: the wall time of the slowest rank after a barrier, the CPU time of all."""
    dist.barrier()
    sample = timed(run)
    everyone = gathered((sample.wall, sample.cpu))
    return Sample(max(wall for wall, _ in everyone), sum(cpu for _, cpu in everyone))


def gathered(value: Any) -> list[Any]:
    """Return the `value` of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _rank_main(rank: int, size: int, scratch: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, (os.cpu_count() or size) // size))
    dist.init_process_group("gloo", init_method=f"file://{scratch}/rendezvous", rank=rank, world_size=size)
    result = function(*arguments)
    if rank == 0:
        Path(scratch, "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    # Threads that gloo leaves behind can abort a process in its last moment, and nothing is left to be done.
    os._exit(0)
