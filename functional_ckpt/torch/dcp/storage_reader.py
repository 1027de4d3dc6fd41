"""Reading for ``torch.distributed.checkpoint``: `ZarrStorageReader`."""

from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from functional_ckpt.errors import CheckpointError, GapError, ProblemError, ShapeError, SpecError, raise_problems
from functional_ckpt.plan.load import plan_load
from functional_ckpt.plan.manifest import Manifest
from functional_ckpt.run.arguments import check_policy
from functional_ckpt.run.objects import ObjectReader
from functional_ckpt.run.policy import LoadPolicy
from functional_ckpt.spec.array import known_spec
from functional_ckpt.spec.shard import ShardSpec, known_shard
from functional_ckpt.store.access import SCHEMES
from functional_ckpt.store.buffer import Buffer
from functional_ckpt.store.fill import check_needed, read_plan
from functional_ckpt.store.reading import Opened
from functional_ckpt.store.sharing import Memory
from functional_ckpt.store.values import decode_text
from functional_ckpt.torch.dcp.bridge import (
    DefaultLoadPlanner,
    LoadPlan,
    Metadata,
    ReadItem,
    StorageReader,
    Streamed,
    done,
    is_bytes,
    read_box,
    stored_metadata,
)
from functional_ckpt.torch.dcp.packed import packed_load_plan
from functional_ckpt.torch.dcp.planner import check_unused, local_numel
from functional_ckpt.torch.dcp.resolving import is_stock, local_tensor
from functional_ckpt.torch.tensors import fillable

__all__ = ["ZarrStorageReader", "has_store"]

#: Of a planner that has these from DCP, what to fill is a region of the tensor that it looks up, and no more is done.
_STOCK = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")


class ZarrStorageReader(StorageReader):
    """Reads a checkpoint of this format for ``torch.distributed.checkpoint.load``.

    Parameters
    ----------
    path
        The checkpoint. A ``checkpoint_id`` passed to ``load`` takes its place.
    policy
        Of a `LoadPolicy`, `cast`, `verify`, `safe_globals` and `budget_nbytes` count. By default a change of data
        type is an error, and objects are built from plain types only.

    Raises
    ------
    PolicyError
        For a policy that says what to load (`keys`, `rename`, ...): DCP decides that.
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
        check_policy(self, policy, LoadPolicy)
        check_unused(self, policy)
        self.path, self.policy = path, policy
        self._opened: Opened | None = None

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
        return has_store(checkpoint_id)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begin anew, at `checkpoint_id` if there is one."""
        self._opened = None
        if checkpoint_id is not None:
            self.path = checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the manifest as DCP plans with it: one chunk per tensor."""
        self._opened = Opened.at(self.path, self.policy.store)
        return stored_metadata(self._opened.manifest, self.checkpoint_id)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Open the checkpoint, unless `read_metadata` has."""
        self._opened = self._opened or Opened.at(self.path, self.policy.store)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is, to travel in a short form."""
        return packed_load_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are, to travel in a short form."""
        return [packed_load_plan(plan) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        """Check all items, then read all of them at once into their places."""
        opened, self._opened = self._opened or Opened.at(self.path, self.policy.store), None
        with closing(opened):
            self._read(opened, plan, planner)
        return done(None)

    def _read(self, opened: Opened, plan: LoadPlan, planner: Any) -> None:
        tensors = [item for item in plan.items if not is_bytes(item)]
        is_plain = is_stock(planner, DefaultLoadPlanner, _STOCK)
        if is_plain:
            wholes = _wholes(tensors, planner)
            targets = [planner.transform_tensor(item, wholes[item.dest_index]) for item in tensors]
        else:
            targets = [planner.resolve_tensor(item) for item in tensors]
            wholes = _wholes(tensors, planner)
        raise_problems([*_uncovered(tensors, wholes), *_left_out(opened.manifest, plan.items, planner)])
        with opened.guard():
            streams = _streams(opened, [item for item in plan.items if is_bytes(item)], self.policy.safe_globals)
            _fill(opened, tensors, targets, self.policy)
        for item, target in () if is_plain else zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        for item, stream in streams:
            planner.load_bytes(item, stream)
        opened.check()


def _left_out(manifest: Manifest, items: Iterable[ReadItem], planner: Any) -> list[ProblemError]:
    """Return a problem for each key that is stored and wanted whole, and for which the plan reads nothing.

    Needs a planner that shows what it wants, and that may not load in part.
    """
    wanted = getattr(planner, "state_dict", None)
    if not isinstance(wanted, Mapping) or getattr(planner, "allow_partial_load", False):
        return []
    planned = {item.dest_index.fqn for item in items}
    stored = {*manifest.by_key, *(value.key for value in manifest.values)}
    return [
        GapError(
            "the plan reads nothing for a key",
            key,
            expected="1 value" if count is None else f"{count} elements",
            found=0,
            remedy="Leave it out of the state dict, or pass a planner with allow_partial_load=True",
        )
        for key, value in wanted.items()
        if key in stored and key not in planned and (count := local_numel(value)) != 0
    ]


def _fill(source: Opened, items: list[ReadItem], targets: list[Any], policy: LoadPolicy) -> None:
    """Read the region of each item into its target."""
    entries = source.manifest.by_key
    shards: list[ShardSpec] = []
    buffers: list[Buffer] = []
    for item, target in zip(items, targets, strict=True):
        key, box = item.storage_index.fqn, read_box(item)
        if tuple(target.shape) != box.shape:
            raise ShapeError(
                "the planner gives a tensor of another shape than it planned",
                key,
                offset=box.start,
                expected=box.shape,
                found=tuple(target.shape),
            )
        dtype, buffer = fillable(key, target.detach() if target.requires_grad else target)
        stored = entries[key].spec.shape if key in entries else box.stop
        shards.append(known_shard(known_spec(key, stored, dtype), box))
        buffers.append(buffer)
    memory = Memory.of(shards, buffers, entries)
    raise_problems(memory.problems)
    plan = plan_load(entries, shards, policy.cast)
    raise_problems(check_needed(plan, source.store))
    read_plan(plan, buffers, source.store, memory.budget(policy.budget_nbytes), policy.verify)
    memory.check(entries, source.store, policy.cast, False, policy.budget_nbytes)


def _streams(
    source: Opened, items: Iterable[ReadItem], safe_globals: Iterable[Any] | str
) -> list[tuple[ReadItem, Streamed]]:
    """Return the plain values and objects that items ask for.

    Raises
    ------
    CheckpointError
        For all that cannot be read, at once.
    """
    objects = ObjectReader(source.store, safe_globals)
    texts = {value.key: value.text for value in source.manifest.values}
    problems: list[CheckpointError] = []
    found: list[tuple[ReadItem, Streamed]] = []

    def value_of(key: str) -> Any:
        entry = source.manifest.by_key.get(key)
        if entry is None and key not in texts:
            raise SpecError("the checkpoint has no such value", key)
        return decode_text(key, texts[key]) if entry is None else objects.read(entry)

    for item in items:
        try:
            found.append((item, Streamed(value_of(item.storage_index.fqn))))
        except CheckpointError as error:
            problems.append(error)
    raise_problems([*problems, *([objects.problem] if objects.problem else [])])
    return found


def has_store(checkpoint_id: Any) -> bool:
    """Tell whether there is a store for a path or URL.

    Examples
    --------
    >>> has_store("/tmp/a"), has_store("s3://bucket/a"), has_store("hdfs://host/a")
    (True, True, False)
    """
    text = str(checkpoint_id)
    return text.partition("://")[0] in ("file", "memory", *SCHEMES) if "://" in text else bool(text)


def _wholes(items: Iterable[ReadItem], planner: Any) -> dict[Any, torch.Tensor]:
    """Return the local tensors that items read into, by their indexes; none of a planner that does not show them."""
    lookup = getattr(planner, "lookup_tensor", None)
    if lookup is None:
        return {}
    state = planner.state_dict if is_stock(planner, DefaultLoadPlanner, ["lookup_tensor"]) else {}
    found: dict[Any, torch.Tensor] = {}
    for item in items:
        index = item.dest_index
        if index not in found:
            local = local_tensor(state, index.fqn)
            found[index] = lookup(index) if local is None else local
    return found


def _uncovered(items: list[ReadItem], wholes: Mapping[Any, torch.Tensor]) -> list[ProblemError]:
    """Return a problem for each local tensor of which some elements are not read."""
    cells: dict[Any, int] = {}
    for item in items:
        cells[item.dest_index] = cells.get(item.dest_index, 0) + item.lengths.numel()
    return [
        GapError(
            "the plan does not fill a tensor",
            index.fqn,
            offset=tuple(index.offset or ()),
            expected=whole.numel(),
            found=cells[index],
        )
        for index, whole in wholes.items()
        if cells[index] != whole.numel()
    ]
