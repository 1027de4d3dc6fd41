"""From DCP's write items to what a save plans with: the specs of shards, plain values, and the buffers behind them."""

import io
from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np
import torch

from functional_ckpt.errors import CheckpointError, ShapeError, SpecError, UnsupportedLeafError, raise_problems
from functional_ckpt.plan.manifest import ValueEntry
from functional_ckpt.plan.state import ArrayLeaf, CopyDigest, LocalState
from functional_ckpt.run.capture import Captured
from functional_ckpt.run.leaves import NumpyLeaves
from functional_ckpt.run.objects import object_bytes, trust_needed, warn_of_trust
from functional_ckpt.run.policy import SavePolicy
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.sharding import ShardSpec
from functional_ckpt.spec.tree import DictKey, Path, unflatten
from functional_ckpt.store.buffer import Buffer
from functional_ckpt.store.execute import content_digest
from functional_ckpt.store.values import MAX_INLINE_NBYTES, plain_text
from functional_ckpt.torch.dcp.bridge import SavePlan, WriteItem, is_bytes, is_whole, tree_path, written_box
from functional_ckpt.torch.dcp.resolving import PlannedBuffer, Resolver

__all__ = ["captured_plan"]


def captured_plan(
    plan: SavePlan, planner: Any, rank: int, policy: SavePolicy, policy_text: str, digested: bool
) -> Captured:
    """Describe what a rank is told to write; the data itself is taken from `planner` item by item.

    `digested` says that whole tensors and objects were left on every rank that has them, and are to be compared.

    Raises
    ------
    CheckpointError
        All items that cannot be saved, at once.
    """
    seen = _Items(plan, planner, rank, policy, digested)
    problems: list[CheckpointError] = []
    for item in plan.items:
        try:
            seen.add(item)
        except CheckpointError as error:
            problems.append(error)
    raise_problems(problems)
    warn_of_trust(seen.untrusted)
    return seen.captured(policy_text)


@attrs.frozen(eq=False)
class _Item:
    """One region of an array, and where its elements are."""

    buffer: Buffer
    box: Box


class _Items:
    """Collects write items; one object per save."""

    def __init__(self, plan: SavePlan, planner: Any, rank: int, policy: SavePolicy, digested: bool) -> None:
        self.resolver, self.rank, self.policy, self.digested = Resolver(planner, rank), rank, policy, digested
        self._paths = _tidy_paths([item.index.fqn for item in plan.items], plan.planner_data)
        self._leaves: dict[str, ArrayLeaf] = {}
        self._regions: dict[str, list[_Item]] = {}
        self._values: list[ValueEntry] = []
        self.untrusted: dict[str, tuple[str, ...]] = {}
        self._copies: list[CopyDigest] = []

    def add(self, item: WriteItem) -> None:
        """Collect one item."""
        key = item.index.fqn
        if is_bytes(item):
            self._add_object(key, item)
            return
        held = self.resolver.held(item)
        shape, box = written_box(item)
        if held.spec.shape != box.shape:
            raise ShapeError(
                "the planner gives a tensor of another shape than it planned",
                key,
                rank=self.rank,
                shape=shape,
                offset=box.start,
                expected=box.shape,
                found=held.spec.shape,
            )
        # What the tensor is counts, not what the plan says: a cached plan does not notice another data type.
        spec = attrs.evolve(held.spec, shape=shape)
        buffer = PlannedBuffer(self.resolver, item, held.spec) if self.resolver.makes_tensors else held.buffers[0]
        self._add(ArrayLeaf(spec, self._paths[key], None, None, is_whole(item)), _Item(buffer, box))

    def captured(self, policy_text: str) -> Captured:
        """Return everything that was collected."""
        buffers: list[Buffer] = []
        numbers: dict[str, range] = {}
        shards: list[ShardSpec] = []
        leaves = tuple(leaf for _, leaf in sorted(self._leaves.items()))
        for leaf in leaves:
            regions = self._regions[leaf.key]
            numbers[leaf.key] = range(len(buffers), len(buffers) + len(regions))
            buffers += [region.buffer for region in regions]
            shards += () if leaf.is_copy else [ShardSpec(leaf.spec, region.box) for region in regions]
        common = LocalState(
            leaves, tuple(shards), tuple(self._values), policy_text=policy_text, copies=tuple(self._copies)
        )
        return Captured(common, LocalState(policy_text=policy_text), tuple(buffers), numbers)

    def _add(self, leaf: ArrayLeaf, region: _Item) -> None:
        first = self._leaves.setdefault(leaf.key, leaf)
        if (first.spec, first.is_copy) != (leaf.spec, leaf.is_copy):
            raise SpecError(
                "the items of one tensor disagree",
                leaf.key,
                rank=self.rank,
                shape=leaf.spec.shape,
                offset=region.box.start,
                expected=(first.spec.shape, first.spec.dtype),
                found=(leaf.spec.shape, leaf.spec.dtype),
            )
        if leaf.is_copy and leaf.key in self._regions:
            raise SpecError("the plan writes a whole tensor twice", leaf.key, rank=self.rank, shape=leaf.spec.shape)
        if leaf.is_copy and self.digested and self.policy.replicated == "check":
            digest = content_digest(region.buffer, leaf.spec, self.policy.budget_nbytes)
            self._copies.append(CopyDigest(leaf.spec, digest))
        self._regions.setdefault(leaf.key, []).append(region)

    def _add_object(self, key: str, item: WriteItem) -> None:
        held = self.resolver.value(item)
        data = b"" if held is not None else _bytes_of(self.resolver.data(item))
        found = _plain(data) if held is None else held
        text = None if found is None else plain_text(found[0])
        if text is not None and len(text) <= MAX_INLINE_NBYTES:
            self._values.append(ValueEntry(key, text, self._paths[key]))
        elif text is not None:
            self._add_bytes(key, text.encode(), "json")
        else:
            self._add_untrusted(key, data if held is None else object_bytes(key, held[0]).tobytes())

    def _add_untrusted(self, key: str, data: bytes) -> None:
        # Before all else: with another policy a PerRank would be lost all the same.
        self.untrusted[key] = trust_needed(key, np.frombuffer(data, np.uint8))
        if self.policy.object_codec is None:
            raise UnsupportedLeafError(
                "a value is neither a tensor nor plain",
                key,
                rank=self.rank,
                remedy="Pass SavePolicy(object_codec='torch'), which is the default of ZarrStorageWriter",
            )
        self._add_bytes(key, data, self.policy.object_codec)

    def _add_bytes(self, key: str, data: bytes, codec: str) -> None:
        held = NumpyLeaves().hold(key, np.frombuffer(data, np.uint8), self.rank)
        leaf = ArrayLeaf(held.spec, self._paths[key], codec, None, True)
        self._add(leaf, _Item(held.buffers[0], held.spec.box))


def _bytes_of(stream: Any) -> bytes:
    return stream.getvalue() if isinstance(stream, io.BytesIO) else bytes(stream.read())


def _plain(data: bytes) -> tuple[Any] | None:
    """Return the value in a stream of ``torch.save`` if it takes no more than plain types to build it."""
    try:
        value = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:  # anything else stays the bytes that it is
        return None
    return (value,)


def _tidy_paths(keys: Iterable[str], planner_data: Any) -> dict[str, Path]:
    """Return the paths of keys; as dict keys those positions of lists that make no whole list (DCP drops empty dicts).

    All that the planner has mapped counts, not only the items that were left to this rank.
    """
    mapped = planner_data if isinstance(planner_data, dict) else {}
    keys = tuple(dict.fromkeys(keys))
    paths = {key: tree_path(key, mapped) for key in (*mapped, *keys) if isinstance(key, str)}
    try:
        unflatten((path, None) for path in paths.values())
    except SpecError:
        paths = {
            key: tuple(DictKey(item) if isinstance(item, int) else item for item in path) for key, path in paths.items()
        }
    return {key: paths[key] for key in keys}
