"""Megatron's ``dist_checkpointing`` with its default strategy, ``torch_dist``.

What makes it fair:

* It wants `ShardedTensor`s. They are made anew for each call, outside of the timing; Megatron's models make them.
* It wants a process group: one rank of gloo, joined outside of the timing.
* It synchronises a CUDA device that this machine may not have. The tensors lie on the host, so there is
  nothing to synchronise, and the flags that ranks exchange are put on the host as well.
* It syncs each file, always. Where nobody syncs, ``os.fsync`` does nothing during the call.
* It writes from two forked processes, whose CPU time counts (their memory does not: it is shared until written to).
  jax warns that a fork may hang in a process with threads like its own; that was not seen, and is not shown.
"""

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.competitors import Competitor
from benchmarks.state import State, tensors_of

with warnings.catch_warnings(action="ignore"):
    from megatron.core import dist_checkpointing

MEGATRON = "megatron torch_dist"

Sharded = dict[str, dist_checkpointing.ShardedTensor]


def _sharded(state: State) -> Sharded:
    return {
        key: dist_checkpointing.ShardedTensor.from_rank_offsets(key, tensor, replica_id=0)
        for key, tensor in tensors_of(state)
    }


@contextmanager
def _one_rank_without_cuda() -> Iterator[None]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with (
        tempfile.TemporaryDirectory() as directory,
        warnings.catch_warnings(action="ignore"),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
        # Each new group puts one more hook before it.
        mock.patch.object(sys, "excepthook"),
    ):
        rendezvous = f"file://{directory}/rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _save(sharded: Sharded, path: Path, durable: bool) -> None:
    path.mkdir()
    with nullcontext() if durable else mock.patch("os.fsync"):
        dist_checkpointing.save(sharded, str(path))


def _load(into: Sharded, path: Path) -> None:
    dist_checkpointing.load(into, str(path))


COMPETITORS = (Competitor(MEGATRON, _save, _load, _sharded, _one_rank_without_cuda),)
