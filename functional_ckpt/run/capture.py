"""From a state tree to a `LocalState` and the buffers behind it: what a rank says of its leaves."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np

from functional_ckpt.errors import (
    CheckpointError,
    DuplicateKeyError,
    SpecError,
    UnsupportedLeafError,
    raise_problems,
)
from functional_ckpt.plan.manifest import PerRankEntry, RankItem, ValueEntry, canonical
from functional_ckpt.plan.state import ArrayLeaf, CopyDigest, LocalState, is_per_rank
from functional_ckpt.run.comm import Gather
from functional_ckpt.run.leaves import HeldArray, NumpyLeaves, PerRank, adapter_of
from functional_ckpt.run.objects import object_bytes, trust_needed, warn_of_trust
from functional_ckpt.run.policy import SavePolicy
from functional_ckpt.spec.array import check_key
from functional_ckpt.spec.mesh import relabelled
from functional_ckpt.spec.sharding import ShardSpec
from functional_ckpt.spec.tree import DictKey, Path, flatten, key_of
from functional_ckpt.store.buffer import Buffer
from functional_ckpt.store.encoding import Array
from functional_ckpt.store.execute import content_digest
from functional_ckpt.store.values import MAX_INLINE_NBYTES, plain_text

__all__ = ["Captured", "capture", "policy_text"]

_EACH_RANKS_OWN = ("durability", "budget_nbytes", "timeout_s")


@attrs.frozen(eq=False)
class Captured:
    """What a rank holds: what all ranks may hold alike, its `own` part, and the buffers of both, in order of leaves.

    `numbers` are the positions of a key's buffers among them; those of `common` come first.
    """

    common: LocalState
    own: LocalState
    buffers: tuple[Buffer, ...]
    numbers: Mapping[str, range]

    def counts(self, state: LocalState) -> tuple[int, ...]:
        """Return the numbers of buffers behind the leaves of `state`, `common` or `own`."""
        return tuple([len(self.numbers[leaf.key]) for leaf in state.arrays])


def capture(
    tree: Any, gather: Gather, policy: SavePolicy, overwrite: bool, attributes: Mapping[str, Any] | None
) -> Captured:
    """Describe this rank's leaves.

    Raises
    ------
    CheckpointError
        All leaves that cannot be saved, at once.
    """
    seen = _Capture(gather, policy)
    for path, leaf in flatten(tree):
        seen.guard(seen.add, path, leaf)
    seen.guard(seen.set_attributes, attributes or {})
    raise_problems(seen.problems)
    warn_of_trust(seen.untrusted)
    common, own = attrs.evolve(seen.state(), policy_text=policy_text(policy, overwrite)).split_common()
    buffers: list[Buffer] = []
    numbers: dict[str, range] = {}
    for leaf in (*common.arrays, *own.arrays):
        found = seen.buffers[leaf.key]
        numbers[leaf.key] = range(len(buffers), len(buffers) + len(found))
        buffers += found
    return Captured(common, own, tuple(buffers), numbers)


class _Capture:
    """Collects leaves into a `LocalState`; one object per save, gone before the first byte moves."""

    def __init__(self, gather: Gather, policy: SavePolicy) -> None:
        self.gather, self.policy = gather, policy
        self.problems: list[CheckpointError] = []
        self.buffers: dict[str, tuple[Buffer, ...]] = {}
        self._shards: list[ShardSpec] = []
        self._arrays: list[tuple[ArrayLeaf, Any]] = []
        self._values: list[ValueEntry] = []
        self._per_rank: list[PerRankEntry] = []
        self._copies: list[CopyDigest] = []
        self._attributes = "{}"
        self._keys: dict[str, Path] = {}
        self.untrusted: dict[str, tuple[str, ...]] = {}

    def guard(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call `function`, and keep its problem for the report of all of them."""
        try:
            function(*arguments)
        except CheckpointError as error:
            self.problems.append(error)
        except Exception as error:  # a tensor subclass or an object's pickling can raise anything
            key = key_of(arguments[0]) if isinstance(arguments[0], tuple) else None
            found = f"{type(error).__name__}: {error}"
            self.problems.append(UnsupportedLeafError("a leaf cannot be described", key, found=found))

    def state(self) -> LocalState:
        """Return what was collected; equal memory under several keys becomes a tie to the first of them."""
        first: dict[Any, str] = {}
        for leaf, identity in sorted(self._arrays, key=lambda item: item[0].key):
            first.setdefault(identity, leaf.key)
        arrays = tuple(
            attrs.evolve(leaf, tied_to=first[identity]) if first[identity] != leaf.key else leaf
            for leaf, identity in self._arrays
        )
        values, per_rank, copies = tuple(self._values), tuple(self._per_rank), tuple(self._copies)
        return LocalState(arrays, tuple(self._shards), values, per_rank, self._attributes, copies=copies)

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Check and keep the user's attributes."""
        try:
            self._attributes = canonical(dict(attributes))
        except (TypeError, ValueError) as error:
            raise SpecError("attributes must be JSON", "attributes", found=str(error),
                            remedy="Pass text, finite numbers, None, lists and dicts of them") from None  # fmt: skip
        if "functional_ckpt" in attributes:
            raise SpecError("functional_ckpt keeps this attribute for itself", "functional_ckpt", remedy="Rename yours")

    def add(self, path: Path, leaf: Any) -> None:
        """Collect one leaf."""
        key = self._claim_key(path)
        if isinstance(leaf, PerRank):
            self._per_rank.append(PerRankEntry(key, self.gather.size, path))
            below = (*path, RankItem(self.gather.rank))
            for inner, value in flatten(leaf.value):
                if isinstance(value, PerRank):
                    raise UnsupportedLeafError("a PerRank holds another", key_of((*path, *inner)))
                self.guard(self.add, (*below, *inner), value)
            return
        adapter = adapter_of(leaf)
        if adapter is not None:
            held = adapter.hold(key, leaf, self.gather.rank)
            if held.codec is not None:
                self.untrusted[key] = trust_needed(key, held.buffers[0].get(held.spec.shape, 0, (slice(None),)))
            self._add_array(key, path, held, held.codec)
        elif (text := plain_text({} if isinstance(leaf, defaultdict) and not leaf else leaf)) is not None:
            self._add_text(key, path, text)
        elif self.policy.object_codec is None:
            raise UnsupportedLeafError(
                "a leaf is neither an array nor a plain value",
                key,
                expected="an array, a number, text, bytes, None, or a tuple of plain values",
                found=_type_name(leaf),
                remedy=_remedy(leaf),
            )
        else:
            self._add_object(key, path, leaf)

    def _claim_key(self, path: Path) -> str:
        key = key_of(path)
        check_key(key)
        for item in path:
            if isinstance(item, DictKey) and not _is_representable(item.value):
                raise SpecError("a dict key of this type has no representation", key, found=_type_name(item.value),
                                remedy="Use text, ints, finite floats, bools or None")  # fmt: skip
        if key in self._keys:
            raise DuplicateKeyError(
                "two leaves have one key",
                key,
                expected=self._keys[key],
                found=path,
                remedy="Rename one: a key is the path joined by dots",
            )
        self._keys[key] = path
        return key

    def _add_text(self, key: str, path: Path, text: str) -> None:
        if len(text) <= MAX_INLINE_NBYTES:
            self._values.append(ValueEntry(key, text, path))
        else:
            self._add_bytes(key, path, np.frombuffer(text.encode(), np.uint8), "json")

    def _add_object(self, key: str, path: Path, leaf: Any) -> None:
        data = object_bytes(key, leaf)
        self.untrusted[key] = trust_needed(key, data)
        self._add_bytes(key, path, data, self.policy.object_codec)

    def _add_bytes(self, key: str, path: Path, data: Array, codec: str | None) -> None:
        self._add_array(key, path, NumpyLeaves().hold(key, data, self.gather.rank), codec)

    def _add_array(self, key: str, path: Path, held: HeldArray, codec: str | None) -> None:
        self.buffers[key] = held.buffers
        sharding = None if held.sharding is None else relabelled(held.sharding, getattr(self.gather, "members", None))
        self._shards += () if held.copy or sharding is not None else held.all_shards(self.gather.rank)
        checked = held.copy and self.policy.replicated == "check" and self.gather.size > 1
        if checked and not is_per_rank(path):
            digest = content_digest(held.buffers[0], held.spec, self.policy.budget_nbytes)
            self._copies.append(CopyDigest(held.spec, digest))
        leaf = ArrayLeaf(held.spec, path, codec, None, held.copy, sharding)
        self._arrays.append((leaf, held.identity))


def policy_text(policy: SavePolicy, overwrite: bool) -> str:
    """Return what all ranks must want alike: all but what is each rank's own.

    Examples
    --------
    >>> policy_text(SavePolicy(timeout_s=5), False) == policy_text(SavePolicy(), False)
    True
    """
    names = (field.name for field in attrs.fields(SavePolicy))
    alike = {name: getattr(policy, name) for name in names if name not in _EACH_RANKS_OWN}
    return f"{alike} overwrite={overwrite}"


def _remedy(leaf: Any) -> str:
    if callable(getattr(leaf, "state_dict", None)):
        return "Save its state_dict() instead"
    if isinstance(leaf, tuple):
        return "Make the tuple a list"
    if isinstance(leaf, Iterator):
        return "Make it a list"
    if isinstance(leaf, Mapping):
        return "Make it a dict"
    return "Save what it holds as plain values, or pass SavePolicy(object_codec='torch')"


def _is_representable(key: object) -> bool:
    return key is None or isinstance(key, bool | int | str) or (isinstance(key, float) and math.isfinite(key))


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
