"""Waiting for rank 0, which alone checks the shards of all ranks in Megatron's code and may have raised there.

The other ranks go on, and would wait for rank 0 until their timeout. The time of the check, and of writing the file of
the common half, is bounded, so after that time they know that rank 0 has failed.
"""

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import Any

import torch.distributed as dist

from functional_ckpt.errors import CheckpointError, RankFailedError
from functional_ckpt.torch.group.link import torch_gather

__all__ = ["Expectation", "has_been_checked", "wait_for_rank_0"]

#: How long rank 0 may take, besides checking, without a change of the file that it writes, in seconds: enough for a
#: slow rank on a file system that stalls. The death of rank 0 is noticed at once, by its connections.
PATIENCE_S = 60.0
#: How long rank 0 may take to check one shard of one rank, in seconds: about fifty times what was measured.
PER_SHARD_S = 0.0005

_SWITCH = "validate_access_integrity"


def has_been_checked(entrances: Iterable[CodeType]) -> bool:
    """Tell whether one of these functions is a caller, direct or not, and was asked to check the shards.

    Examples
    --------
    >>> def save(validate_access_integrity=True):
    ...     return has_been_checked([save.__code__])
    >>> save(), save(False), has_been_checked([save.__code__])
    (True, False, False)
    """
    known = frozenset(entrances)
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code in known:
            return bool(frame.f_locals.get(_SWITCH))
        frame = frame.f_back
    return False


class Expectation:
    """A deadline for another rank; `is_over` tells whether it is past.

    A change of the file `sign`, if one is given, shows that the rank is still working, and restarts the time.

    Examples
    --------
    >>> Expectation(0.0).is_over(), Expectation(60.0).is_over()
    (True, False)
    """

    def __init__(self, seconds: float, sign: Path | None = None) -> None:
        self._seconds, self._sign = seconds, sign
        self._seen = self._look()
        self._ends_s = time.monotonic() + seconds

    def is_over(self) -> bool:
        """Tell whether the deadline is past."""
        found = self._look()
        if found != self._seen:
            self._seen, self._ends_s = found, time.monotonic() + self._seconds
        return time.monotonic() >= self._ends_s

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = self._sign.stat() if self._sign is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)


def wait_for_rank_0(process_group: Any, timeout_s: float, what: str, shards: int, sign: Path | None = None) -> None:
    """Return once all ranks of a group have called this; `shards` is the approximate number of shards of a rank.

    Raises
    ------
    RankFailedError
        On the other ranks, if rank 0 does not call it in time.
    """
    if not dist.is_initialized():
        return
    seconds = min(timeout_s, PATIENCE_S + PER_SHARD_S * shards * dist.get_world_size())
    is_over = Expectation(seconds, sign).is_over if dist.get_rank() else None
    try:
        torch_gather(process_group, timeout_s, "arrival", what, is_over=is_over).all_gather(None)
    except CheckpointError as error:
        if is_over is None:
            raise
        raise RankFailedError(
            "rank 0 did not reach this call: it probably failed in Megatron's check, which it makes alone",
            rank=0,
            found=str(error),
            remedy="Read the error of rank 0",
        ) from error
