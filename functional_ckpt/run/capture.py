"""From leaves to a `LocalState` and the buffers behind it: `Describer`, and `capture`, which describes a tree."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

import attrs
import numpy as np

from functional_ckpt.errors import (
    CheckpointError,
    DuplicateKeyError,
    SpecError,
    UnsupportedLeafError,
    raise_problems,
)
from functional_ckpt.plan.manifest import PerRankEntry, RankItem, ValueEntry
from functional_ckpt.plan.record import canonical
from functional_ckpt.plan.state import NO_ATTRIBUTES, ArrayLeaf, CopyDigest, LocalState, is_per_rank
from functional_ckpt.run.comm import Gather
from functional_ckpt.run.leaves import HeldArray, NumpyLeaves, PerRank, adapter_of
from functional_ckpt.run.objects import object_bytes, trust_needed, warn_of_trust
from functional_ckpt.run.policy import SavePolicy
from functional_ckpt.spec.array import MAX_KNOWN, check_key
from functional_ckpt.spec.shard import ShardSpec
from functional_ckpt.spec.sharding import relabelled
from functional_ckpt.spec.tree import DictKey, Path, key_of, place_of, walk
from functional_ckpt.store.buffer import WHOLE, Buffer
from functional_ckpt.store.encoding import Array
from functional_ckpt.store.execute import content_digest
from functional_ckpt.store.values import MAX_INLINE_NBYTES, plain_text

__all__ = ["Captured", "Describer", "capture", "policy_text"]

T = TypeVar("T")

#: A leaf, the same object for the same arguments: so a state like the last one is compared at no cost.
_known_leaf = lru_cache(maxsize=MAX_KNOWN)(ArrayLeaf)

_EACH_RANKS_OWN = ("durability", "budget_nbytes", "staging", "staging_nbytes", "timeout_s")


@attrs.frozen(eq=False)
class Captured:
    """The state of a rank: the part that all ranks may have in common, its `own` part, and the buffers of both.

    `counts` are the numbers of buffers behind the leaves, those of `common` first.
    """

    common: LocalState
    own: LocalState
    buffers: tuple[Buffer, ...]
    counts: tuple[int, ...]


def capture(
    tree: Any, gather: Gather, policy: SavePolicy, overwrite: bool, attributes: Mapping[str, Any] | None
) -> Captured:
    """Describe this rank's leaves.

    Raises
    ------
    CheckpointError
        All leaves that cannot be saved, at once.
    """
    seen = Describer(gather.rank, policy, gather.size > 1, getattr(gather, "members", None))
    taken: dict[str, Path] = {}
    for path, leaf in walk(tree):
        seen.guard(key := key_of(path), _add_leaf, seen, taken, gather.size, key, path, leaf)
    text = seen.guard("attributes", _attributes_text, attributes or {})
    return seen.captured(policy_text(policy, overwrite), text or NO_ATTRIBUTES)


class Describer:
    """Collects the leaves of one rank for one save, of a tree or of DCP's items; `captured` returns them.

    With `compares` copies of plain tensors get digests, which all ranks compare. `members` are the numbers by which
    meshes know the ranks of the group. An array may be added region by region; equal identities become a tie.
    """

    def __init__(self, rank: int, policy: SavePolicy, compares: bool, members: tuple[int, ...] | None = None) -> None:
        self.rank, self.policy, self.members = rank, policy, members
        self.compares = compares and policy.replicated == "check"
        self.per_rank: list[PerRankEntry] = []
        self._problems: list[CheckpointError] = []
        # No object for each leaf that holds what is known of it: the collector looks at all that are alive.
        self._leaves: dict[str, ArrayLeaf] = {}
        self._buffers: list[Buffer] = []
        self._owners: list[str] = []  # the keys of the buffers
        self._identities: dict[str, Hashable] = {}
        self._shards: dict[str, tuple[ShardSpec, ...]] = {}
        self._values: list[ValueEntry] = []
        self._copies: list[CopyDigest] = []
        self._untrusted: dict[str, tuple[str, ...]] = {}

    def guard(self, key: str, function: Callable[..., T], *arguments: Any) -> T | None:
        """Call `function`, and keep its problem for the report of all of them."""
        try:
            return function(*arguments)
        except CheckpointError as error:
            self._problems.append(error)
        except Exception as error:  # a tensor subclass, or pickling an object, can raise any exception
            found = f"{type(error).__name__}: {error}"
            self._problems.append(UnsupportedLeafError("a leaf cannot be described", key, found=found))
        return None

    def add_text(self, key: str, path: Path, text: str) -> None:
        """Collect a plain value: in the manifest if it is short, else as an array of bytes."""
        if len(text) <= MAX_INLINE_NBYTES:
            self._values.append(ValueEntry(key, text, path))
        else:
            self.add_bytes(key, path, np.frombuffer(text.encode(), np.uint8), "json")

    def add_bytes(self, key: str, path: Path, data: Array, codec: str | None) -> None:
        """Collect an object as the bytes that `codec` has made of it."""
        self.add_array(key, path, attrs.evolve(NumpyLeaves().hold(key, data, self.rank), codec=codec))

    def add_array(self, key: str, path: Path, held: HeldArray) -> ArrayLeaf:
        """Collect an array, or some more regions of one; return its leaf.

        Raises
        ------
        SpecError
            If the regions of one array contradict each other.
        """
        if held.codec not in (None, "json"):
            self._untrusted[key] = trust_needed(key, held.buffers[0].get(held.spec.shape, 0, WHOLE))
        sharding = None if held.sharding is None else relabelled(held.sharding, self.members)
        leaf = _known_leaf(held.spec, path, held.codec, None, held.copy, sharding)
        is_new = key not in self._leaves
        first = self._leaves.setdefault(key, leaf)
        if first is not leaf and (first.spec, first.is_copy) != (leaf.spec, leaf.is_copy):
            raise SpecError(
                "the regions of one array disagree about it",
                key,
                rank=self.rank,
                shape=leaf.spec.shape,
                expected=(first.spec.shape, first.spec.dtype),
                found=(leaf.spec.shape, leaf.spec.dtype),
            )
        if leaf.is_copy and not is_new:
            raise SpecError("the plan writes a whole tensor twice", key, rank=self.rank, shape=leaf.spec.shape)
        self._buffers += held.buffers
        self._owners += [key] * len(held.buffers)
        self._identities.setdefault(key, held.identity)
        if not first.is_copy and first.sharding is None:
            self._shards[key] = self._shards.get(key, ()) + held.all_shards(self.rank)
        if self.compares and leaf.is_copy and not is_per_rank(path):
            digest = content_digest(held.buffers[0], held.spec, self.policy.budget_nbytes)
            self._copies.append(CopyDigest(held.spec, digest))
        return leaf

    def captured(self, policy_text: str, attributes: str = NO_ATTRIBUTES) -> Captured:
        """Return everything that was collected, in order of the keys: so ranks that hold the same describe it alike.

        Raises
        ------
        CheckpointError
            The problems of all leaves, at once.
        """
        raise_problems(self._problems)
        warn_of_trust(self._untrusted)
        keys = sorted(self._leaves)
        common, own = LocalState(
            _tied((self._leaves[key], self._identities[key]) for key in keys),
            tuple(chain.from_iterable(self._shards.get(key, ()) for key in keys)),
            tuple(sorted(self._values, key=lambda value: value.key)),
            tuple(sorted(self.per_rank, key=lambda entry: entry.key)),
            attributes,
            policy_text,
            copies=tuple(sorted(self._copies, key=lambda copy: copy.spec.key)),
        ).split_common()
        numbers = {leaf.spec.key: number for number, leaf in enumerate((*common.arrays, *own.arrays))}
        owners = [numbers[key] for key in self._owners]
        counts = np.bincount(np.array(owners, np.int64), minlength=len(numbers)).tolist()
        order = np.argsort(owners, kind="stable").tolist()  # regions of an array stay in their order
        return Captured(common, own, tuple([self._buffers[i] for i in order]), tuple(counts))


def _tied(found: Iterable[tuple[ArrayLeaf, Hashable]]) -> tuple[ArrayLeaf, ...]:
    """Return the leaves; of several keys with one identity the later ones are tied to the first."""
    first: dict[Hashable, str] = {}
    return tuple(
        leaf if (key := first.setdefault(identity, leaf.key)) == leaf.key else attrs.evolve(leaf, tied_to=key)
        for leaf, identity in found
    )


def _add_leaf(seen: Describer, taken: dict[str, Path], size: int, key: str, path: Path, leaf: Any) -> None:
    """Describe one leaf of a tree; `taken` are the keys that other leaves have, by their paths."""
    _take_key(taken, key, path)
    if isinstance(leaf, PerRank):
        seen.per_rank.append(PerRankEntry(key, size, path))
        for inner, value in walk(leaf.value):
            if isinstance(value, PerRank):
                raise UnsupportedLeafError("a PerRank holds another", key_of((*path, *inner)))
            below: Any = (*path, RankItem(seen.rank), *inner)
            seen.guard(name := key_of(below), _add_leaf, seen, taken, size, name, below, value)
        return
    adapter = adapter_of(leaf)
    if adapter is not None:  # the leaf is known from earlier saves, and its path need not be kept twice
        taken[key] = seen.add_array(key, path, adapter.hold(key, leaf, seen.rank)).path
    elif (text := plain_text({} if isinstance(leaf, defaultdict) and not leaf else leaf)) is not None:
        seen.add_text(key, path, text)
    elif seen.policy.object_codec is None:
        raise UnsupportedLeafError(
            "a leaf is neither an array nor a plain value",
            key,
            expected="an array, a number, text, bytes, None, or a tuple of plain values",
            found=_type_name(leaf),
            remedy=_remedy(leaf),
        )
    else:
        seen.add_bytes(key, path, object_bytes(key, leaf), seen.policy.object_codec)


def _take_key(taken: dict[str, Path], key: str, path: Path) -> None:
    if not key.isascii():
        check_key(key)
    for item in path:
        if type(item) is DictKey and not _is_representable(item.value):
            raise SpecError(
                "a dict key of this type has no representation",
                key,
                found=_type_name(item.value),
                remedy="Use text, ints, finite floats, bools or None",
            )
    if key in taken:
        raise DuplicateKeyError(
            "two leaves have one key",
            key,
            expected=place_of(taken[key]),
            found=place_of(path),
            remedy="Rename one: a key is the path joined by dots",
        )
    taken[key] = path


def _attributes_text(attributes: Mapping[str, Any]) -> str:
    """Return the user's attributes as JSON."""
    try:
        text = canonical(dict(attributes))
    except (TypeError, ValueError) as error:
        raise SpecError(
            "attributes must be JSON",
            "attributes",
            found=str(error),
            remedy="Pass text, finite numbers, None, lists and dicts of them",
        ) from None
    if "functional_ckpt" in attributes:
        raise SpecError("this attribute is reserved for functional_ckpt", "functional_ckpt", remedy="Rename it")
    return text


def policy_text(policy: SavePolicy, overwrite: bool) -> str:
    """Return the part of a policy that must be equal on all ranks.

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
    if isinstance(leaf, Iterator) and type(leaf).__module__ == "builtins":  # others may have no end
        return "Make it a list"
    if isinstance(leaf, Mapping):
        return "Make it a dict"
    return "Save what it holds as plain values, or pass SavePolicy(object_codec='torch')"


def _is_representable(key: object) -> bool:
    return key is None or isinstance(key, bool | int | str) or (isinstance(key, float) and math.isfinite(key))


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
