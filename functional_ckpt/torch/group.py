"""A torch process group as a `Gather`."""

from datetime import timedelta
from functools import cache
from typing import Any

import attrs
import torch.distributed as dist

from functional_ckpt.comm import Gather, LocalGather
from functional_ckpt.errors import SpecError

__all__ = ["TorchGather", "torch_gather"]


@attrs.frozen(eq=False)
class TorchGather:
    """Exchanges small picklable values over a gloo group; data never passes through it."""

    group: Any
    rank: int
    size: int

    def all_gather(self, value: Any) -> list[Any]:
        """Return the `value` of each rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


def torch_gather(process_group: Any, timeout_s: float, purpose: str) -> Gather:
    """Return a `Gather` over the members of `process_group` (the default group for None).

    Uses a gloo group of its own per parent, timeout and `purpose` (``"sync"`` or ``"async"``), made on first use and
    kept: gloo since what travels lives on the host, its own so that neither the caller's collectives nor a save in the
    background can come between ours.

    Raises
    ------
    SpecError
        If this process is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return LocalGather()
    parent = process_group if process_group is not None else dist.group.WORLD
    rank = dist.get_rank(parent)
    if rank < 0:
        raise SpecError("this process is not a member of the process group", rank=dist.get_rank())
    size = dist.get_world_size(parent)
    if size == 1:
        return LocalGather()
    return TorchGather(_own_group(parent, timeout_s, purpose), rank, size)


@cache
def _own_group(parent: Any, timeout_s: float, purpose: str) -> Any:
    ranks = dist.get_process_group_ranks(parent)
    return dist.new_group(
        ranks,
        timeout=timedelta(seconds=timeout_s),
        backend="gloo",
        use_local_synchronization=True,
        group_desc=f"functional_ckpt:{purpose}",
    )
