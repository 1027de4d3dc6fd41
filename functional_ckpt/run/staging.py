"""`stage`: copy what a save in the background writes, so that the caller's memory is free to change."""

import attrs
import numpy as np

from functional_ckpt.run.comm import Gather, agree
from functional_ckpt.run.progress import Tracker
from functional_ckpt.run.saving import Prepared
from functional_ckpt.store.buffer import Buffer, HostBuffer
from functional_ckpt.store.pool import the_pool
from functional_ckpt.store.staging import StagedBuffer, staged

__all__ = ["release_staging", "stage", "unstage"]

# Replaces buffers that this rank does not write, so that a save in the background does not keep them alive.
_NOTHING = HostBuffer(np.empty(0, np.uint8))


def stage(prepared: Prepared, background: Gather, tracker: Tracker) -> Prepared:
    """Copy what this rank will write or send, unless the policy says not to; `background` takes over."""
    mine, rank = prepared.plan.mine, prepared.gather.rank
    copies: list[Buffer] = []

    def copy() -> None:
        tracker.enter("stage", mine.written_nbytes(rank))
        pieces = mine.pieces.take(mine.pieces.source == rank)
        wanted = np.zeros(len(prepared.buffers), np.int64)
        np.add.at(wanted, pieces.shard, pieces.sizes)
        held = np.unique(pieces.shard).tolist()
        sources = [prepared.buffers[shard] for shard in held]
        policy = prepared.policy
        made = sources if policy.staging == "none" else staged(
            sources, wanted[held].tolist(), the_pool(), policy.staging_nbytes
        )  # fmt: skip
        of = dict(zip(held, made, strict=True))
        copies.extend(of.get(shard, _NOTHING) for shard in range(len(prepared.buffers)))

    try:
        agree(prepared.gather, copy)
    except BaseException:  # its traceback may live on, and refers to the copies
        _drop(copies)
        raise
    return attrs.evolve(prepared, buffers=tuple(copies), gather=background)


def unstage(prepared: Prepared) -> None:
    """Give back the memory of a save that is over."""
    _drop(prepared.buffers)


def release_staging() -> int:
    """Give back the memory that `async_save` keeps for the next copy of a state; return how many bytes it was.

    What a running save still writes from follows as it is written. The next `async_save` takes new memory, and keeps it
    again unless `SavePolicy.staging_nbytes` says otherwise.

    Examples
    --------
    >>> import functional_ckpt
    >>> _ = release_staging()
    >>> _ = functional_ckpt.async_save({"w": np.ones(1000)}, "memory://release-example").result()
    >>> release_staging(), release_staging()
    (8000, 0)
    """
    return the_pool().release()


def _drop(copies: list[Buffer] | tuple[Buffer, ...]) -> None:
    for copy in copies:
        if isinstance(copy, StagedBuffer):
            copy.drop()
