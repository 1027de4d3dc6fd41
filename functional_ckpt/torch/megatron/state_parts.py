"""Splitting a state dict into its sharded, common and local leaves, and joining it again."""

from collections.abc import Callable
from typing import Any

import attrs

from functional_ckpt.errors import CheckpointError, SpecError, UnsupportedLeafError, raise_problems
from functional_ckpt.torch.megatron.factory import ShardedTensorFactory, merged
from functional_ckpt.torch.megatron.mapping import LocalNonpersistentObject
from functional_ckpt.torch.megatron.sharded_base import ShardedBase, StateDict
from functional_ckpt.torch.megatron.sharded_object import ShardedObject
from functional_ckpt.torch.megatron.sharded_state import leaf_as_ours
from functional_ckpt.torch.megatron.state_tree import NOTHING, joined, leaves_of, map_leaves, picked, with_lists

__all__ = ["Parts", "assembled", "objects_of", "tensors_of"]

#: Positions in the result of `_sorted`.
_SOURCE, _COMMON = 0, 2


@attrs.frozen
class Parts:
    """The parts of a state dict: `source` is the whole with factories built, the others its leaves of each kind."""

    source: Any
    sharded: Any
    common: Any
    local: Any
    factories: Any
    is_whole: bool = True

    @classmethod
    def of(cls, state: Any) -> "Parts":
        """Split a state dict; its leaves may be Megatron's."""
        if not isinstance(state, dict):
            raise SpecError("a state dict must be a dict", expected="dict", found=type(state).__name__)
        problems: list[CheckpointError] = []
        parts = _sorted(state, problems)
        raise_problems(problems)
        return cls(*({} if part is NOTHING else part for part in parts))

    def without(self, keys: set[str]) -> "Parts":
        """Return the parts without the sharded leaves `keys`; a factory that would lack a leaf is left out whole."""
        if not keys:
            return self
        dropped = {leaf.key for leaf in leaves_of(self.factories) if _keys(leaf) & keys}
        gone = keys | {key for leaf in leaves_of(self.factories) if leaf.key in dropped for key in _keys(leaf)}
        return attrs.evolve(
            self,
            is_whole=False,
            sharded=_part(lambda leaf: leaf.key not in gone, self.sharded),
            factories=_part(lambda leaf: leaf.key not in dropped, self.factories),
        )


def _sorted(tree: Any, problems: list[CheckpointError], of_factory: bool = False) -> tuple[Any, ...]:
    """Return a tree with factories built, then its sharded, common and local leaves, and the factories.

    All in one traversal: a state may have a million leaves. Factories inside built state dicts stay.
    """
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        found = [(place, _sorted(child, problems, of_factory)) for place, child in items]
        return tuple(_container(tree, [(place, parts[kind]) for place, parts in found], kind) for kind in range(5))
    try:
        leaf = leaf_as_ours(tree)
    except CheckpointError as problem:
        problems.append(problem)
        return (NOTHING,) * 5
    if isinstance(leaf, ShardedTensorFactory) and not of_factory:
        return (*_sorted(leaf.build(), problems, True)[:4], leaf)
    if isinstance(leaf, ShardedBase):
        return leaf, leaf, NOTHING, NOTHING, NOTHING
    if isinstance(leaf, LocalNonpersistentObject):
        return leaf, NOTHING, NOTHING, leaf, NOTHING
    if _hides_a_shard(leaf):
        problems.append(_hidden(leaf))
    return leaf, NOTHING, leaf, NOTHING, NOTHING


def _container(tree: Any, children: list[tuple[Any, Any]], kind: int) -> Any:
    """Return the part of a container that is of one kind, as `picked` does; empty containers are common."""
    parts = {place: part for place, part in children if part is not NOTHING}
    if not parts and (tree or kind not in (_SOURCE, _COMMON)):
        return NOTHING
    return list(parts.values()) if isinstance(tree, list) and len(parts) == len(tree) else parts


def _hides_a_shard(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and any(isinstance(part, ShardedBase) or _hides_a_shard(part) for part in leaf)


def _hidden(leaf: tuple[Any, ...]) -> UnsupportedLeafError:
    keys = [part.key for part in leaf if isinstance(part, ShardedBase)]
    return UnsupportedLeafError(
        "a tuple holds sharded leaves, but a tuple is a single leaf of the common half",
        keys[0] if keys else None,
        remedy="Use a list instead of the tuple",
    )


def _keys(factory: ShardedTensorFactory) -> set[str]:
    return {leaf.key for leaf in leaves_of(factory.build())}


def _part(wanted: Callable[[Any], bool], tree: Any, empty: bool = False) -> Any:
    found = picked(wanted, tree, empty)
    return {} if found is NOTHING else found


def objects_of(sharded: Any) -> Any:
    """Return the sharded objects of a state dict."""
    return _part(lambda leaf: isinstance(leaf, ShardedObject), sharded)


def tensors_of(sharded: Any) -> Any:
    """Return the sharded tensors of a state dict."""
    return _part(lambda leaf: not isinstance(leaf, ShardedObject), sharded)


def assembled(common: StateDict, found: list[Any], parts: Parts) -> StateDict:
    """Join the loaded parts with the local leaves, and merge the state dicts that factories built."""
    result = joined(common, map_leaves(lambda leaf: leaf.unwrap(), parts.local))
    for each in found:
        result = joined(result, each)
    result = with_lists(result, parts.source, holes=not parts.is_whole)
    return merged(result, parts.factories)  # type: ignore[no-any-return]
