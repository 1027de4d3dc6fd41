"""Plans of ``torch.distributed.checkpoint`` from specs, and planners that raise where DCP would lose data silently."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from functional_ckpt.errors import (
    CastError,
    GapError,
    KeyMismatchError,
    ProblemError,
    UnsupportedLeafError,
    raise_problems,
    report,
)
from functional_ckpt.plan.field import refuse
from functional_ckpt.plan.load import ArrayRead, plan_load
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.plan.mismatch import quoted
from functional_ckpt.run.arguments import check_policy
from functional_ckpt.run.objects import object_from_bytes
from functional_ckpt.run.policy import LoadPolicy
from functional_ckpt.spec.array import ArraySpec, can_cast
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.shard import ShardSpec, fragments
from functional_ckpt.torch.dcp.bridge import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    Metadata,
    ReadItem,
    SavePlan,
    Streamed,
    TensorStorageMetadata,
    WriteItem,
    byte_item,
    is_bytes,
    is_whole,
    metadata_of,
    read_item,
    write_item,
    written_box,
)
from functional_ckpt.torch.host_view import DTYPE_NAMES, TORCH_DTYPES

__all__ = [
    "StrictLoadPlanner",
    "StrictSavePlanner",
    "check_unused",
    "global_save_plan",
    "load_plan",
    "local_numel",
    "local_save_plan",
]


def local_save_plan(shards: Iterable[ShardSpec], objects: Iterable[str] = ()) -> SavePlan:
    """Return DCP's plan for a rank that holds `shards`, and an object under each key of `objects`.

    A flat shard becomes one item per box that it is made of. An array without elements becomes one item too.

    Examples
    --------
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> from functional_ckpt.spec.box import Box
    >>> w = ArraySpec("w", (4, 2), "float32")
    >>> [item.index for item in local_save_plan([ShardSpec(w, Box((2, 0), (4, 2)))], ["step"]).items]
    [MetadataIndex(fqn='w', offset=torch.Size([2, 0]), index=0), MetadataIndex(fqn='step', offset=None, index=None)]
    """
    boxes: dict[ArraySpec, list[Box]] = {}
    for shard in shards:
        boxes.setdefault(shard.array, []).extend(fragment.box for fragment in fragments(shard))
    items = [
        write_item(array.key, box, array.shape, TORCH_DTYPES[array.dtype], number)
        for array, found in boxes.items()
        for number, box in enumerate(found if array.nbytes else [array.box])
    ]
    return SavePlan([*items, *map(byte_item, objects)])


def global_save_plan(plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Return the plans with every region written by one rank, and metadata with one chunk per tensor.

    Of the ranks that hold a region, the one with the fewest bytes so far writes it; the bytes are those of the region.

    Examples
    --------
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> w = ArraySpec("w", (4,), "float32")
    >>> mine = local_save_plan([ShardSpec(w, w.box)], ["step"])
    >>> plans, metadata = global_save_plan([mine, mine])
    >>> [len(plan.items) for plan in plans], len(metadata.state_dict_metadata["w"].chunks)
    ([1, 1], 1)
    """
    holders: dict[Any, list[tuple[int, WriteItem]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            region = None if is_bytes(item) else written_box(item)
            holders.setdefault((item.index.fqn, region), []).append((rank, item))
    loads = [0] * len(plans)
    kept: list[list[WriteItem]] = [[] for _ in plans]
    for held in sorted(holders.values(), key=lambda held: len(held)):
        rank, item = min(held, key=lambda pair: (loads[pair[0]], pair[0]))
        loads[rank] += 0 if item.tensor_data is None else _nbytes(item)
        kept[rank].append(item)
    return [replace(plan, items=items) for plan, items in zip(plans, kept, strict=True)], metadata_of(plans)


def load_plan(wanted: Sequence[ShardSpec], stored: Mapping[str, ArrayEntry], cast: str = "error") -> LoadPlan:
    """Return DCP's plan that fills `wanted` from `stored` arrays, each published as one chunk.

    Raises
    ------
    KeyMismatchError, ShapeError, CastError
        All problems at once.

    Examples
    --------
    >>> load_plan([], {}).items
    []
    """
    reads = plan_load(stored, wanted, cast).reads
    return LoadPlan([_read_item(read, wanted[read.shard], stored[wanted[read.shard].key]) for read in reads])


class StrictSavePlanner(DefaultSavePlanner):
    """DCP's planner, but plain tensors and objects under one key on several ranks have to be equal.

    DCP drops all but one of them before any storage sees them. This planner leaves them to `ZarrStorageWriter`, which
    compares digests and writes one. Plans are not cached.
    """

    #: Read by `ZarrStorageWriter`: copies come to it from every rank that holds them.
    keeps_copies = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Let DCP drop duplicate shards, and restore the copies of plain tensors and objects."""
        chosen, metadata = super().create_global_plan(list(all_plans))  # some versions change the list
        kept = [
            replace(ours, items=[*filter(_is_copy, plan.items), *(i for i in ours.items if not _is_copy(i))])
            for plan, ours in zip(all_plans, chosen, strict=True)
        ]
        return kept, metadata


class StrictLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, except that keys and elements which DCP would skip silently are errors, before anything is read.

    Parameters
    ----------
    policy
        `strict` says what to do with keys that only one side has, `cast` which changes of data type are allowed,
        `safe_globals` of which classes objects may be built. By default: errors, none, plain types only.

    Raises
    ------
    KeyMismatchError, CastError, GapError, ObjectCodecError
        Within DCP's ``CheckpointException``: all problems of a rank at once.
    """

    def __init__(self, policy: LoadPolicy = LoadPolicy(), **options: Any) -> None:
        check_policy(self, policy, LoadPolicy)
        check_unused(self, policy)
        options.setdefault("allow_partial_load", policy.strict.missing != "raise")
        super().__init__(**options)
        self.policy = policy

    def create_local_plan(self) -> LoadPlan:
        """Check the request of this rank against the checkpoint, and plan it."""
        wanted: dict[str, Any] = dict(self.state_dict)
        stored = self._metadata().state_dict_metadata
        missing = [
            KeyMismatchError("the checkpoint has no such key", key, remedy="Pass LoadPolicy(strict=...) to allow it")
            for key in wanted
            if key not in stored
        ]
        _act(self.policy.strict.missing, missing)
        raise_problems(problem for key, value in wanted.items() if (problem := self._cast(key, value, stored.get(key))))
        plan = super().create_local_plan()
        raise_problems(_gaps({key: value for key, value in wanted.items() if key in stored}, plan.items))
        plan.planner_data = tuple(wanted)
        return plan

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Check that some rank wants every key that is stored."""
        wanted = {key for plan in global_plan for key in plan.planner_data or ()}
        unexpected = [
            KeyMismatchError(
                "the checkpoint has a key that no rank wants",
                key,
                remedy="Pass LoadPolicy(strict=Strict(unexpected='ignore'))",
            )
            for key in self._metadata().state_dict_metadata
            if key not in wanted
        ]
        _act(self.policy.strict.unexpected, unexpected)
        return super().create_global_plan(global_plan)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Build the object from allowed types (`ZarrStorageReader` has done that already), then let DCP store it."""
        if not isinstance(value, Streamed):
            data = np.frombuffer(value.read(), np.uint8)
            value = Streamed(object_from_bytes(read_item.storage_index.fqn, data, self.policy.safe_globals))
        super().load_bytes(read_item, value)

    def _metadata(self) -> Metadata:
        if self.metadata is None:
            raise UnsupportedLeafError("the planner was not set up")
        return self.metadata

    def _cast(self, key: str, value: Any, stored: Any) -> ProblemError | None:
        if not isinstance(value, torch.Tensor) or not isinstance(stored, TensorStorageMetadata):
            return None
        one, other = stored.properties.dtype, value.dtype
        names = DTYPE_NAMES.get(one), DTYPE_NAMES.get(other)
        if one == other or (names[0] and names[1] and can_cast(names[0], names[1], self.policy.cast)):
            return None
        return CastError(
            "loading would change the data type",
            key,
            shape=tuple(value.shape),
            expected=other,
            found=one,
            remedy="Pass LoadPolicy(cast='same_kind') or 'any', to planner and reader",
        )


def _is_copy(item: WriteItem) -> bool:
    return is_bytes(item) or is_whole(item)


def _nbytes(item: WriteItem) -> int:
    _, box = written_box(item)
    data = item.tensor_data
    return box.size * (data.properties.dtype.itemsize if data is not None else 0)


def _read_item(read: ArrayRead, shard: ShardSpec, entry: ArrayEntry) -> ReadItem:
    number = next(i for i, fragment in enumerate(fragments(shard)) if fragment == read.target)
    return read_item(shard.key, read.box, read.target.box, entry.spec.box, number)


def check_unused(owner: object, policy: LoadPolicy) -> None:
    """Raise `PolicyError` for a field that selects what to load, since ``torch.distributed.checkpoint`` decides that.

    Examples
    --------
    >>> check_unused("a reader", LoadPolicy(cast="any"))
    """
    for name in ("keys", "rename", "per_rank", "allow_shape_mismatch", "device", "read_once"):
        value = getattr(policy, name)
        if value != getattr(LoadPolicy(), name):
            raise refuse(
                owner, name, "the default", value, "DCP decides what is loaded: select and rename in the state"
            )


def _act(action: str, problems: Sequence[ProblemError]) -> None:
    if action == "raise":
        raise_problems(problems)
    elif action == "report" and problems:
        report(f"{problems[0].what}: {quoted([problem.key or '' for problem in problems])}")


def _gaps(wanted: Mapping[str, Any], items: Iterable[ReadItem]) -> list[ProblemError]:
    """Return a problem for each tensor of which the plan leaves some local elements as they are."""
    cells: dict[str, int] = {}
    for item in items:
        if not is_bytes(item):
            cells[item.dest_index.fqn] = cells.get(item.dest_index.fqn, 0) + int(item.lengths.numel())
    problems: list[ProblemError] = []
    for key, value in wanted.items():
        expected = local_numel(value)
        if expected is not None and cells.get(key, 0) != expected:
            shape = tuple(value.shape)
            problems.append(
                GapError(
                    "the checkpoint does not fill a tensor",
                    key,
                    shape=shape,
                    expected=f"{expected} elements",
                    found=f"{cells.get(key, 0)} elements",
                )
            )
    return problems


def local_numel(value: Any) -> int | None:
    """Return how many elements of a tensor this rank holds; None for what is no tensor.

    Examples
    --------
    >>> local_numel(torch.ones(2, 3)), local_numel(3)
    (6, None)
    """
    if not isinstance(value, torch.Tensor):
        return None
    chunks = getattr(value, "__create_chunk_list__", None)
    if chunks is not None and not (isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None):
        return sum(int(chunk.sizes.numel()) for chunk in chunks())
    shards = getattr(value, "local_shards", None)
    if shards is not None:  # the tensors of FSDP's first form
        return sum(int(shard.tensor.numel()) for shard in shards())
    return 0 if isinstance(value, DTensor) else value.numel()
