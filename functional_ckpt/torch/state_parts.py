"""A state dict taken apart into its sharded, common and local leaves, and put together again."""

from collections.abc import Callable
from typing import Any

import attrs

from functional_ckpt.errors import SpecError, UnsupportedLeafError, raise_problems
from functional_ckpt.torch.factory import ShardedTensorFactory, built, merged
from functional_ckpt.torch.mapping import LocalNonpersistentObject
from functional_ckpt.torch.sharded_base import ShardedBase, StateDict
from functional_ckpt.torch.sharded_object import ShardedObject
from functional_ckpt.torch.sharded_state import as_ours
from functional_ckpt.torch.state_tree import NOTHING, joined, leaves_of, map_leaves, picked, with_lists

__all__ = ["Parts", "assembled", "objects_of", "tensors_of"]


@attrs.frozen
class Parts:
    """A state dict taken apart: `source` with factories built, and of it the sharded, common and local leaves."""

    source: Any
    sharded: Any
    common: Any
    local: Any
    factories: Any
    is_whole: bool = True

    @classmethod
    def of(cls, state: Any) -> "Parts":
        """Take a state dict apart; Megatron's leaves are understood too."""
        if not isinstance(state, dict):
            raise SpecError("a state dict is a dict", expected="dict", found=type(state).__name__)
        state = as_ours(state)
        source = built(state)
        raise_problems(_hidden(leaf) for leaf in leaves_of(source) if _hides_a_shard(leaf))
        return cls(
            source,
            _part(lambda leaf: isinstance(leaf, ShardedBase), source),
            _part(lambda leaf: not isinstance(leaf, ShardedBase | LocalNonpersistentObject), source, True),
            _part(lambda leaf: isinstance(leaf, LocalNonpersistentObject), source),
            _part(lambda leaf: isinstance(leaf, ShardedTensorFactory), state),
        )

    def without(self, keys: set[str]) -> "Parts":
        """Leave out sharded leaves; a factory that would lack one is left out whole."""
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


def _hides_a_shard(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and any(isinstance(part, ShardedBase) or _hides_a_shard(part) for part in leaf)


def _hidden(leaf: tuple[Any, ...]) -> UnsupportedLeafError:
    keys = [part.key for part in leaf if isinstance(part, ShardedBase)]
    return UnsupportedLeafError(
        "a tuple is one leaf of the common half, and this one holds sharded ones", keys[0] if keys else None,
        remedy="Make it a list",
    )  # fmt: skip


def _keys(factory: ShardedTensorFactory) -> set[str]:
    return {leaf.key for leaf in leaves_of(factory.build())}


def _part(wanted: Callable[[Any], bool], tree: Any, empty: bool = False) -> Any:
    found = picked(wanted, tree, empty)
    return {} if found is NOTHING else found


def objects_of(sharded: Any) -> Any:
    """Return the part of a state dict that is objects."""
    return _part(lambda leaf: isinstance(leaf, ShardedObject), sharded)


def tensors_of(sharded: Any) -> Any:
    """Return the part of a state dict that is no objects."""
    return _part(lambda leaf: not isinstance(leaf, ShardedObject), sharded)


def assembled(common: StateDict, found: list[Any], parts: Parts) -> StateDict:
    """Join what was loaded with the local leaves, and merge what factories built."""
    result = joined(common, map_leaves(lambda leaf: leaf.unwrap(), parts.local))
    for each in found:
        result = joined(result, each)
    result = with_lists(result, parts.source, holes=not parts.is_whole)
    return merged(result, parts.factories)  # type: ignore[no-any-return]
