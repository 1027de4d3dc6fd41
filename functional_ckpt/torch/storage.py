"""Storage for ``torch.distributed.checkpoint``: `ZarrStorageWriter` and `ZarrStorageReader`.

What they write and read is what `functional_ckpt.save` and `functional_ckpt.load` do: the same format, layout ladder
and way to publish. The data never passes through DCP's own files.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist

from functional_ckpt.collector import collector_paused
from functional_ckpt.comm import Gather, agree
from functional_ckpt.errors import GapError, ProblemError, ShapeError, SpecError, raise_problems
from functional_ckpt.loading import read_object
from functional_ckpt.plan.load import plan_load
from functional_ckpt.plan.manifest import ArrayEntry, Manifest
from functional_ckpt.policy import LoadPolicy, SavePolicy
from functional_ckpt.progress import Tracker
from functional_ckpt.saving import (
    Written,
    abandon_written,
    prepare_captured,
    publish_alone,
    publish_written,
    write_parts,
)
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.sharding import ShardSpec
from functional_ckpt.store.base import Store
from functional_ckpt.store.buffer import Buffer
from functional_ckpt.store.chunk import check_chunk
from functional_ckpt.store.execute import read_plan
from functional_ckpt.store.opening import open_store
from functional_ckpt.store.reading import check_identity, read_manifest
from functional_ckpt.store.values import decode_text
from functional_ckpt.torch.dcp import (
    LoadPlan,
    Members,
    Metadata,
    ReadItem,
    SavePlan,
    StorageMeta,
    StorageReader,
    StorageWriter,
    WriteItem,
    WriteResult,
    done,
    is_bytes,
    read_box,
    stamp,
    stored_metadata,
    streamed,
    with_storage_data,
    write_result,
)
from functional_ckpt.torch.group import member_gather
from functional_ckpt.torch.items import captured_plan
from functional_ckpt.torch.tensors import TORCH_LEAVES

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
        return _is_ours(checkpoint_id)

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
        terms = f"dcp {self.policy} overwrite={self.overwrite}"
        with collector_paused():
            prepared = prepare_captured(
                lambda: captured_plan(plan, planner, gather.rank, self.policy, terms, digested),
                self.path, self.policy, gather, self.overwrite,
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
        return member_gather(members, self.policy.timeout_s, "dcp")

    def _drop(self) -> None:
        written, self._written, self._members = self._written, None, None
        if written is not None:
            abandon_written(written)


class ZarrStorageReader(StorageReader):
    """Reads a checkpoint of this format, whoever wrote it, for ``torch.distributed.checkpoint.load``.

    Parameters
    ----------
    path
        The checkpoint. A ``checkpoint_id`` passed to ``load`` takes its place.
    policy
        Of a `LoadPolicy`, `cast`, `verify`, `safe_globals` and `budget_nbytes` count. By default a change of data
        type is an error, and objects are built from plain types only.

    Raises
    ------
    CheckpointError
        Within DCP's ``CheckpointException``: for a chunk that is missing, short or corrupt, an element of a
        destination that nothing is read for, a change of data type, an object of a class that is not allowed.

    Examples
    --------
    >>> import torch, warnings, functional_ckpt
    >>> import torch.distributed.checkpoint as dcp
    >>> _ = functional_ckpt.save({"w": torch.ones(2)}, "memory://reader-example")
    >>> state = {"w": torch.zeros(2)}
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     dcp.load(state, storage_reader=ZarrStorageReader("memory://reader-example"))
    >>> state["w"]
    tensor([1., 1.])
    """

    def __init__(self, path: str | Path, *, policy: LoadPolicy = LoadPolicy()) -> None:
        super().__init__()
        self.path, self.policy = path, policy
        self._opened: _Opened | None = None

    @property
    def checkpoint_id(self) -> str:
        """Where the next load comes from."""
        return str(self.path)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is open."""
        return {**self.__dict__, "_opened": None}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Tell whether there is a store for this path or URL."""
        return _is_ours(checkpoint_id)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begin anew, at `checkpoint_id` if there is one."""
        self._opened = None
        if checkpoint_id is not None:
            self.path = checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the manifest as DCP plans with it: one chunk per tensor."""
        self._opened = _Opened.at(self.path)
        return stored_metadata(self._opened.manifest, self.checkpoint_id)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Open the checkpoint, unless `read_metadata` has."""
        self._opened = self._opened or _Opened.at(self.path)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        """Check all items, then read all of them at once to where they belong."""
        opened, self._opened = self._opened or _Opened.at(self.path), None
        tensors = [item for item in plan.items if not is_bytes(item)]
        with collector_paused():
            targets = [planner.resolve_tensor(item) for item in tensors]
            raise_problems(_uncovered(tensors, planner))
            opened.fill(tensors, [target.detach() for target in targets], self.policy)
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        for item in plan.items:
            if is_bytes(item):
                value = opened.value(item.storage_index.fqn, self.policy.safe_globals)
                planner.load_bytes(item, streamed(value))
        check_identity(opened.store, opened.identity)
        return done(None)


@attrs.frozen(eq=False)
class _Opened:
    """A committed checkpoint while it is read."""

    store: Store
    identity: object
    manifest: Manifest

    @classmethod
    def at(cls, path: str | Path) -> "_Opened":
        """Open the checkpoint at `path`."""
        store = open_store(path)
        identity = store.identity()
        return cls(store, identity, read_manifest(path))

    def fill(self, items: list[ReadItem], targets: list[Any], policy: LoadPolicy) -> None:
        """Read the region of each item into its target."""
        entries = self.manifest.by_key
        shards: list[ShardSpec] = []
        buffers: list[Buffer] = []
        for item, target in zip(items, targets, strict=True):
            key, box = item.storage_index.fqn, read_box(item)
            if tuple(target.shape) != box.shape:
                raise ShapeError("the planner gives a tensor of another shape than it planned", key, None, None,
                                 box.start, box.shape, tuple(target.shape))  # fmt: skip
            held = TORCH_LEAVES.target(key, target, 0, "cpu").held
            stored = entries[key].spec.shape if key in entries else box.stop
            shards.append(ShardSpec(ArraySpec(key, stored, held.spec.dtype), box))
            buffers += held.buffers
        plan = plan_load(entries, shards, policy.cast)
        needed = {
            (entries[read.key].spec.key, index): entries[read.key]
            for read in plan.reads
            for index in entries[read.key].grid.touched(read.box)
        }
        problems = (check_chunk(self.store, entry, index) for (_, index), entry in needed.items())
        raise_problems(problem for problem in problems if problem is not None)
        read_plan(plan, entries, buffers, self.store, policy.budget_nbytes, policy.verify)

    def value(self, key: str, safe_globals: Iterable[Any] | str) -> Any:
        """Return the plain value or object under `key`."""
        entry: ArrayEntry | None = self.manifest.by_key.get(key)
        if entry is not None:
            return read_object(self.store, entry, safe_globals)
        text = next((value.text for value in self.manifest.values if value.key == key), None)
        if text is None:
            raise SpecError("the checkpoint has no such value", key)
        return decode_text(key, text)


def _is_ours(checkpoint_id: Any) -> bool:
    text = str(checkpoint_id)
    return text.partition("://")[0] in ("file", "memory") if "://" in text else bool(text)


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


def _uncovered(items: list[ReadItem], planner: Any) -> list[ProblemError]:
    """Return a problem for each local tensor of which some elements are not read; needs a planner that shows them."""
    lookup = getattr(planner, "lookup_tensor", None)
    if lookup is None:
        return []
    cells: dict[Any, int] = {}
    for item in items:
        cells[item.dest_index] = cells.get(item.dest_index, 0) + int(item.lengths.numel())
    problems: list[ProblemError] = []
    for index, count in cells.items():
        wanted = lookup(index).numel()
        if count != wanted:
            offset = tuple(index.offset or ())
            problems.append(GapError("the plan does not fill a tensor", index.fqn, None, None, offset, wanted, count))
    return problems
