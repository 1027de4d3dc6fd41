"""Storage for ``torch.distributed.checkpoint``: `ZarrStorageWriter` and `ZarrStorageReader`.

What they write and read is what `functional_ckpt.save` and `functional_ckpt.load` do: the same format, layout ladder
and way to publish. The data never passes through DCP's own files.
"""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from functional_ckpt.collector import collector_paused
from functional_ckpt.comm import Gather, agree
from functional_ckpt.errors import GapError, ProblemError, SpecError, raise_problems
from functional_ckpt.plan.manifest import Manifest
from functional_ckpt.policy import SavePolicy
from functional_ckpt.progress import Tracker
from functional_ckpt.saving import (
    Written,
    abandon_written,
    prepare_captured,
    publish_alone,
    publish_written,
    write_parts,
)
from functional_ckpt.torch.dcp import (
    Members,
    Metadata,
    SavePlan,
    StorageMeta,
    StorageReader,
    StorageWriter,
    WriteItem,
    WriteResult,
    done,
    is_bytes,
    stamp,
    with_storage_data,
    write_result,
)
from functional_ckpt.torch.group import member_gather
from functional_ckpt.torch.items import captured_plan
from functional_ckpt.torch.rank_local import GatherOnly, with_pure_grid
from functional_ckpt.torch.storage_reader import ZarrStorageReader, has_store

__all__ = ["StorageReader", "StorageWriter", "WriteResult", "ZarrStorageReader", "ZarrStorageWriter"]

#: Objects that are no plain values are written too, as with DCP's own storage.
_SAVE_POLICY = SavePolicy(object_codec="torch")


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
        self.path, self.policy, self.overwrite = path, policy, overwrite
        self._members: tuple[int, ...] | None = None
        self._is_coordinator, self._with_collectives = False, True
        self._written: Written | None = None

    @property
    def checkpoint_id(self) -> str:
        """Where the next save goes."""
        return str(self.path)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to a save under way: another process starts afresh."""
        return {**self.__dict__, "_members": None, "_is_coordinator": False, "_written": None}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Tell whether there is a store for this path or URL."""
        return has_store(checkpoint_id)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begin anew, at `checkpoint_id` if there is one; a save that was never finished is removed."""
        self._drop()
        if checkpoint_id is not None:
            self.path = checkpoint_id

    def storage_meta(self) -> StorageMeta:
        """Return where the checkpoint goes."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the role of this rank."""
        self._drop()
        self._is_coordinator = is_coordinator
        self._with_collectives = bool(kwargs.get("use_collectives", True))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Say who this rank is: a plan does not tell, and DCP does not say which group saves."""
        return with_storage_data(plan, Members((_number(),)))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell every rank who saves. Chunks are planned later, by all ranks: cached plans do not come past here."""
        if not self._with_collectives:  # each rank sees its own plan only
            return plans
        members = _members_of(plans)
        self._members = members
        return [with_storage_data(plan, Members(members)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        """Agree with all ranks on the chunks, and write this rank's; nothing is visible yet."""
        gather = self._gather(plan)
        keeps_copies = bool(getattr(planner, "keeps_copies", False)) or not self._with_collectives
        digested = keeps_copies and gather.size > 1
        policy = self.policy if self._with_collectives else with_pure_grid(self.policy)
        terms = f"dcp {(policy.layout, policy.replicas, policy.replicated, policy.commit, policy.object_codec)}"
        terms = f"{terms} {policy.consolidate} overwrite={self.overwrite}"
        with collector_paused():
            prepared = prepare_captured(
                lambda: captured_plan(plan, planner, gather.rank, policy, terms, digested),
                self.path, policy, gather, self.overwrite,
            )  # fmt: skip
            written = write_parts(prepared, Tracker())
        self._written = written if gather.rank == 0 or not self._with_collectives else None
        return done([write_result(item, _nbytes(item, written.manifest)) for item in plan.items])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish in one step what all ranks have written; without collectives, all ranks come here."""
        written = self._written
        if written is None:
            raise SpecError("there is nothing to publish here", remedy="Leave coordinator_rank=0")

        def check() -> None:
            raise_problems(_unwritten(metadata, results, written.manifest))

        try:
            if self._with_collectives:
                check()
                publish_alone(written)
            else:
                agree(written.prepared.gather, check)
                publish_written(written)
        except BaseException:
            self._drop()
            raise
        self._written = None
        stamp(metadata, self.checkpoint_id)

    def _gather(self, plan: SavePlan) -> Gather:
        told = plan.storage_data.ranks if isinstance(plan.storage_data, Members) else None
        members = self._members if self._is_coordinator else told
        if members is None or not self._with_collectives:
            # Nobody says who saves: a plan cached while another storage was in use, or no exchange of plans at all.
            members = tuple(range(dist.get_world_size())) if _is_joined() else (0,)
        gather = member_gather(members, self.policy.timeout_s, "dcp")
        return gather if self._with_collectives else GatherOnly(gather)

    def _drop(self) -> None:
        written, self._written, self._members = self._written, None, None
        if written is not None:
            abandon_written(written)


def _is_joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def _number() -> int:
    return dist.get_rank() if _is_joined() else 0


def _members_of(plans: list[SavePlan]) -> tuple[int, ...]:
    """Return the ranks that made these plans."""
    if len(plans) == 1:
        return (_number(),)
    told = [plan.storage_data.ranks for plan in plans if isinstance(plan.storage_data, Members)]
    if len(told) == len(plans) and all(len(ranks) == 1 for ranks in told):
        return tuple(ranks[0] for ranks in told)
    if len(plans) == dist.get_world_size():  # some plans are cached, and say nothing
        return tuple(range(len(plans)))
    raise SpecError(
        "cached plans do not say which ranks save", expected=f"{dist.get_world_size()} plans", found=len(plans),
        remedy="Turn plan caching off, or save with the default process group",
    )  # fmt: skip


def _nbytes(item: WriteItem, manifest: Manifest) -> int:
    entry = manifest.by_key.get(item.index.fqn)
    if entry is None:
        return 0
    if is_bytes(item) or item.tensor_data is None:
        return entry.spec.nbytes
    return int(item.tensor_data.chunk.sizes.numel()) * entry.spec.itemsize


def _unwritten(metadata: Metadata, results: list[list[WriteResult]], manifest: Manifest) -> list[ProblemError]:
    """Return a problem for each key that DCP has planned and some step has lost."""
    reported = {result.index.fqn for each in results for result in each}
    stored = {*manifest.by_key, *(value.key for value in manifest.values)}
    return [
        GapError("a planned item was not written", key)
        for key in metadata.state_dict_metadata
        if key not in stored or key not in reported
    ]
