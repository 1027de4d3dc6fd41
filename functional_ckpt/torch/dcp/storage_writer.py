"""Storage for ``torch.distributed.checkpoint``: `ZarrStorageWriter` and `ZarrStorageReader`.

What they write and read is what `functional_ckpt.save` and `functional_ckpt.load` do: the same format, layout ladder
and way to publish. The data never passes through DCP's own files.
"""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist

from functional_ckpt.api import named
from functional_ckpt.errors import GapError, ProblemError, SpecError, raise_problems
from functional_ckpt.plan.manifest import Manifest
from functional_ckpt.run.arguments import check_flag, check_policy
from functional_ckpt.run.capture import Captured, policy_text
from functional_ckpt.run.comm import Gather, GatherOnly, LocalGather, agree, turn_of
from functional_ckpt.run.planning import PlanMemory
from functional_ckpt.run.policy import SavePolicy
from functional_ckpt.run.progress import Tracker
from functional_ckpt.run.saving import (
    Written,
    prepare_captured,
    publish_alone,
    publish_written,
    write_parts,
)
from functional_ckpt.run.timed import timed
from functional_ckpt.show.bar import displayed
from functional_ckpt.torch.dcp.bridge import (
    Members,
    Metadata,
    SavePlan,
    StorageMeta,
    StorageReader,
    StorageWriter,
    WriteResult,
    done,
    planned,
    stamp,
    with_planner_data,
    with_storage_data,
)
from functional_ckpt.torch.dcp.items import captured_plan
from functional_ckpt.torch.dcp.packed import pack_metadata, packed_save_plan
from functional_ckpt.torch.dcp.results import PackedResults, reported
from functional_ckpt.torch.dcp.storage_reader import ZarrStorageReader, has_store
from functional_ckpt.torch.dcp.writing import Writing, abandon_left
from functional_ckpt.torch.group.link import Link, announce, announced, member_link

__all__ = ["StorageReader", "StorageWriter", "WriteResult", "ZarrStorageReader", "ZarrStorageWriter"]

#: As with DCP's own storage, objects that are not plain values are written too.
_SAVE_POLICY = SavePolicy(object_codec="torch")
_PLANS = PlanMemory()
_PURPOSE = "dcp"
# No chunk with one writer is ever this large, so that arrays with several writers always get shared chunks.
_UNREACHABLE_NBYTES = 2**62


class ZarrStorageWriter(StorageWriter):
    """Writes what ``torch.distributed.checkpoint.save`` and ``async_save`` save, as one checkpoint of this format.

    Parameters
    ----------
    path
        Where to save: a path, ``file://`` or ``memory://``. A ``checkpoint_id`` passed to ``save`` takes its place.
    policy
        How to save, see `SavePolicy`; by default objects are written with ``torch.save``.
    overwrite
        Replace a checkpoint at the path, in one step: it is the old one or the new one at any moment, never a mix.

    Raises
    ------
    CheckpointError
        Within DCP's ``CheckpointException`` on every rank, whatever rank failed; the path keeps what it held.

    Examples
    --------
    >>> import tempfile, torch, warnings
    >>> import torch.distributed.checkpoint as dcp
    >>> path = tempfile.mkdtemp() + "/checkpoint"
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     _ = dcp.save({"w": torch.ones(2)}, storage_writer=ZarrStorageWriter(path))
    >>> import functional_ckpt
    >>> functional_ckpt.open_checkpoint(path)["w"][:]
    array([1., 1.], dtype=float32)
    """

    def __init__(self, path: str | Path, *, policy: SavePolicy = _SAVE_POLICY, overwrite: bool = True) -> None:
        super().__init__()
        check_policy(self, policy, SavePolicy)
        check_flag(self, "overwrite", overwrite)
        self.path, self.policy, self.overwrite = path, policy, overwrite
        self._members: Members | None = None
        self._is_coordinator, self._with_collectives = False, True
        self._count = 0
        self._writing: Writing | None = None

    @property
    def checkpoint_id(self) -> str:
        """Where the next save goes."""
        return str(self.path)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the state of a running save: another process starts without one."""
        return {**self.__dict__, "_members": None, "_is_coordinator": False, "_writing": None}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Tell whether there is a store for this path or URL."""
        return has_store(checkpoint_id)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Prepare a new save, to `checkpoint_id` if it is given; the files of an unfinished save are removed."""
        self._drop()
        if checkpoint_id is not None:
            self.path = checkpoint_id

    def storage_meta(self) -> StorageMeta:
        """Return where the checkpoint goes."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Store the role of this rank."""
        self._drop()
        self._is_coordinator = is_coordinator
        self._with_collectives = bool(kwargs.get("use_collectives", True))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add this rank to the plan: the plan does not contain it, and DCP does not pass the group that saves."""
        return packed_save_plan(with_storage_data(plan, Members((_number(),))))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Add all members to the plans. Chunks are planned later, by all ranks: DCP skips this for cached plans."""
        if not self._with_collectives:  # each rank sees its own plan only
            return plans
        ranks, self._count = _members_of(plans), len(plans)
        if ranks is None:
            return plans
        save_id = secrets.token_hex(8)
        self._members = Members(ranks, save_id)
        if len(ranks) > 1 and not all(getattr(plan, "usable", True) for plan in plans):
            # DCP passes nothing to a rank that keeps its cached plan.
            announce(ranks, _PURPOSE, save_id, self.policy.timeout_s)
        return [packed_save_plan(with_storage_data(plan, self._members)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        """Begin to write this rank's part, on a thread where others take part; nothing is visible yet."""
        return done(self._begun(plan, planner))

    def _begun(self, plan: SavePlan, planner: Any) -> list[WriteResult]:
        link = self._link(plan)
        results: list[PackedResults] = []
        policy = self.policy if self._with_collectives else _with_pure_grid(self.policy)

        def describe() -> Captured:
            captured, mine = self._captured(plan, planner, policy, link)
            results.append(mine)
            return captured

        def write(gather: Gather, described: Callable[[], Captured], tracker: Tracker) -> Written:
            gather = timed(gather, tracker)
            # No bar: other threads of the program may print.
            told = displayed(f"saving {named(self.path)}", tracker.count, gather.rank == 0, bar=False)
            with told, turn_of(gather):
                prepared = prepare_captured(described, self.path, policy, gather, self.overwrite, _PLANS)
                return write_parts(prepared, tracker)

        what, timeout_s = f"DCP save of {named(self.path)}", policy.timeout_s
        if isinstance(link, Link) and self._with_collectives:
            mine = describe()  # here, so that a failure is raised on this rank: DCP reports it to the others

            def work(tracker: Tracker) -> Written:
                return write(link.gather(timeout_s, what, tracker.cancelled.is_set), lambda: mine, tracker)

            begun = Writing.begun(work, link.rank == 0, link.lane)
            self._writing = begun if link.rank == 0 else None
        else:
            gather: Gather = link.gather(timeout_s, what) if isinstance(link, Link) else link
            gather = gather if self._with_collectives else GatherOnly(gather)
            self._writing = Writing.done(write(gather, describe, Tracker()))
        return results[0]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish in one step what all ranks have written; without collectives, all ranks come here."""
        if self._writing is None:
            raise SpecError("this rank has no save to publish", remedy="Leave coordinator_rank=0")
        written = self._writing.result()

        def checked() -> Written:
            raise_problems(_unwritten(metadata, results, written.manifest))
            return attrs.evolve(written, manifest=with_planner_data(written.manifest, metadata.planner_data))

        try:
            if self._with_collectives:
                publish_alone(checked())
            else:
                publish_written(agree(written.prepared.gather, checked))
        except BaseException:
            self._drop()
            raise
        self._writing = None
        stamp(metadata, self.checkpoint_id)
        if self._with_collectives and written.prepared.gather.size > 1:  # DCP now sends it to the other ranks
            pack_metadata(metadata)

    def _captured(
        self, plan: SavePlan, planner: Any, policy: SavePolicy, link: Link | LocalGather
    ) -> tuple[Captured, PackedResults]:
        """Describe what this rank is to write, and the results."""
        keeps_copies = bool(getattr(planner, "keeps_copies", False)) or not self._with_collectives
        agreed = f"dcp {policy_text(policy, self.overwrite)}"
        return captured_plan(plan, planner, link.rank, policy, agreed, keeps_copies and link.size > 1)

    def _link(self, plan: SavePlan) -> Link | LocalGather:
        """Return the link to the other ranks that save."""
        told = plan.storage_data if isinstance(plan.storage_data, Members) else None
        found = self._members or told
        if found is None or not self._with_collectives:
            # The members are unknown: the plan was cached with another storage, or plans are not exchanged.
            found = Members(tuple(range(dist.get_world_size())) if _is_joined() else (0,))
        members, save_id = found.ranks, found.save_id
        # A cached plan has the name of the save for which it was made.
        is_new = save_id is not None and save_id not in _SEEN
        _SEEN.update([save_id] if save_id is not None else [])
        if self._is_coordinator and self._with_collectives and len(members) != self._count:
            raise SpecError(
                "cached plans do not contain the ranks that save",
                expected=f"{self._count} ranks",
                found=members,
                remedy="Turn plan caching off, or save with the default process group",
            )
        # Other ranks may still wait in a save that failed on this one: the next save uses its own connections.
        if not self._with_collectives:
            return member_link(members, f"{_PURPOSE} without collectives")
        if not is_new and len(members) > 1:
            save_id = announced(members, _PURPOSE, self.policy.timeout_s)
        return member_link(members, _PURPOSE, save_id)

    def _drop(self) -> None:
        writing, self._writing, self._members = self._writing, None, None
        if writing is not None:
            writing.abandon()
        abandon_left()


#: Names of saves in the plans that this process has been given.
_SEEN: set[str] = set()


def _is_joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def _number() -> int:
    return dist.get_rank() if _is_joined() else 0


def _members_of(plans: list[SavePlan]) -> tuple[int, ...] | None:
    """Return the ranks that made these plans; None if some are cached and do not contain their rank."""
    if len(plans) == 1:
        return (_number(),)
    told = [plan.storage_data.ranks for plan in plans if isinstance(plan.storage_data, Members)]
    if len(told) == len(plans) and all(len(ranks) == 1 for ranks in told):
        return tuple(ranks[0] for ranks in told)
    return tuple(range(len(plans))) if len(plans) == dist.get_world_size() else None


def _with_pure_grid(policy: SavePolicy) -> SavePolicy:
    """Return a policy under which the grid of an array depends on its key, shape and data type only.

    Without its collectives DCP exchanges no plans. Each rank finds the place of its part without the specs of the
    others, and several ranks may write into one chunk under a lock.
    """
    one_size = policy.layout.shared_chunk_nbytes
    layout = attrs.evolve(policy.layout, min_chunk_nbytes=_UNREACHABLE_NBYTES, target_chunk_nbytes=one_size)
    return attrs.evolve(policy, layout=layout)


def _unwritten(metadata: Metadata, results: list[list[WriteResult]], manifest: Manifest) -> list[ProblemError]:
    """Return a problem for each item that DCP has planned and that was not written."""
    found = reported(results)
    stored = {*manifest.by_key, *(value.key for value in manifest.values)}
    return [
        GapError("a planned item was not written", key, offset=None if offset is None else tuple(offset))
        for key, offset in planned(metadata)
        if key not in stored or key not in found.get(offset, ())
    ]
