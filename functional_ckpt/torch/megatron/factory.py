"""`ShardedTensorFactory`: a tensor that is stored in another form, and the functions that convert it there and back."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch

from functional_ckpt.errors import ShapeError, SpecError
from functional_ckpt.torch.megatron.sharded_base import ReplicaId, ShardedBase, ShardedStateDict, StateDict
from functional_ckpt.torch.megatron.state_tree import assign_in_place, map_leaves

__all__ = [
    "FactoryBuildFn",
    "FactoryMergeFn",
    "ShardedTensorFactory",
    "apply_factories",
    "apply_factory_merges",
    "built",
    "merged",
]

#: ``(key, tensor, replica_id, flattened_range) -> state dict of sharded leaves``
FactoryBuildFn: TypeAlias = Callable[[str, torch.Tensor, ReplicaId, slice | None], ShardedStateDict]
#: ``loaded state dict -> tensor``
FactoryMergeFn: TypeAlias = Callable[[StateDict], torch.Tensor]


@dataclass
class ShardedTensorFactory(ShardedBase):
    """A tensor that is stored as the state dict that `build_fn` returns, and converted back by `merge_fn` on load.

    Parameters
    ----------
    key
        Name of the tensor, passed on to `build_fn`.
    data
        The tensor: a parameter, or, by ``dataclasses.replace``, an optimizer state of its shape.
    build_fn
        Function of ``(key, data, replica_id, flattened_range)``; it must not depend on anything else.
    merge_fn
        Its inverse: from the loaded state dict to a tensor of the shape of `data`.
    replica_id
        See `ShardedTensor`; passed on to `build_fn`.
    flattened_range
        `data` is this range of the flattened tensor; passed on to `build_fn`.

    Examples
    --------
    >>> from functional_ckpt.torch.megatron.sharded_tensor import ShardedTensor
    >>> def halves(key, tensor, replica_id, flattened_range):
    ...     return [ShardedTensor.from_rank_offsets(key, part, (0, i, 2)) for i, part in enumerate(tensor.chunk(2))]
    >>> factory = ShardedTensorFactory("w", torch.arange(4), halves, torch.cat)
    >>> [shard.global_offset for shard in factory.build()]
    [(0,), (2,)]
    """

    key: str
    data: torch.Tensor
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> ShardedStateDict:
        """Return the state dict that is stored in place of the tensor."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Do nothing: the leaves that `build_fn` returns check themselves."""

    def without_data(self) -> "ShardedTensorFactory":
        """Return a copy whose `data` is None."""
        return replace(self, data=cast("torch.Tensor", None))


def built(state: Any) -> Any:
    """Return a state dict with each factory replaced by the state dict that it builds.

    Factories inside tuples (which are leaves) and inside built state dicts stay.

    Examples
    --------
    >>> factory = ShardedTensorFactory("w", torch.ones(1), lambda key, *_: {"part": key}, torch.cat)
    >>> built({"a": [factory, 3]})
    {'a': [{'part': 'w'}, 3]}
    """
    return map_leaves(lambda leaf: leaf.build() if isinstance(leaf, ShardedTensorFactory) else leaf, state)


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replace each factory by the state dict that it builds, in place; nothing changes if one fails.

    Examples
    --------
    >>> state = {"a": ShardedTensorFactory("w", torch.ones(1), lambda key, *_: {"part": key}, torch.cat)}
    >>> apply_factories(state)
    >>> state
    {'a': {'part': 'w'}}
    """
    if isinstance(sharded_state_dict, dict | list):
        assign_in_place(sharded_state_dict, built(sharded_state_dict))


def merged(loaded: Any, factories: Any, key: tuple[Any, ...] = ()) -> Any:
    """Return a loaded state dict with ``factory.merge_fn(subtree)`` in place of each subtree that a factory built.

    `factories` has only the factories, at their places; in it, a dict with positions as keys stands for a list with
    factories at some positions.

    Raises
    ------
    CheckpointingException
        If a place does not exist in `loaded`, holds no factory, or a merge returns a tensor of another shape than the
        factory's data; a ``ValueError`` too.

    Examples
    --------
    >>> factory = ShardedTensorFactory("w", torch.ones(3), lambda *_: {}, torch.cat)
    >>> merged({"a": [torch.ones(1), torch.ones(2)], "b": 3}, {"a": factory})
    {'a': tensor([1., 1., 1.]), 'b': 3}
    """
    if isinstance(factories, ShardedTensorFactory):
        return _merge(factories, loaded, key)
    if isinstance(loaded, dict) and isinstance(factories, dict):
        _refuse([name for name in factories if name not in loaded], loaded, key)
        return {**loaded, **{name: merged(loaded[name], part, (*key, name)) for name, part in factories.items()}}
    if not isinstance(loaded, list) or not isinstance(factories, dict | list):
        raise SpecError(
            "only a factory, a dict or a list of factories can be merged",
            _text(key),
            found=f"{type(factories).__name__} for {type(loaded).__name__}",
        )
    if isinstance(factories, list) and len(factories) != len(loaded):
        raise SpecError("lists differ in length", _text(key), expected=len(loaded), found=len(factories))
    places = dict(enumerate(factories)) if isinstance(factories, list) else factories
    _refuse([place for place in places if type(place) is not int or not 0 <= place < len(loaded)], loaded, key)
    return [merged(child, places[i], (*key, i)) if i in places else child for i, child in enumerate(loaded)]


def apply_factory_merges(x1: StateDict, x2: ShardedStateDict, key: tuple[str, ...] = ()) -> StateDict:
    """Merge in place, in the loaded state dict `x1`, what the factories in `x2` built, and return it.

    Parameters
    ----------
    x1
        Loaded state dict.
    x2
        Part of its structure, with factories as leaves; see `merged`.
    key
        The path of `x1` in a larger state dict, for messages.

    Raises
    ------
    CheckpointingException
        As `merged`; nothing changes then.

    Examples
    --------
    >>> factory = ShardedTensorFactory("w", torch.ones(3), lambda *_: {}, torch.cat)
    >>> apply_factory_merges({"a": [torch.ones(1), torch.ones(2)]}, {"a": factory})
    {'a': tensor([1., 1., 1.])}
    """
    result: StateDict = merged(x1, x2, key)
    if isinstance(x2, ShardedTensorFactory):  # x1 as a whole became one tensor: there is no container to change
        return result
    assign_in_place(x1, result)
    return x1


def _merge(factory: ShardedTensorFactory, loaded: Any, key: tuple[Any, ...]) -> Any:
    result: object = factory.merge_fn(loaded)
    before: object = factory.data
    if isinstance(before, torch.Tensor) and isinstance(result, torch.Tensor) and result.shape != before.shape:
        raise ShapeError(
            f"the merge of a factory at {_text(key)!r} returned another shape",
            factory.key,
            expected=tuple(before.shape),
            found=tuple(result.shape),
        )
    return result


def _refuse(unknown: list[Any], loaded: Any, key: tuple[Any, ...]) -> None:
    if unknown:
        found = list(loaded) if isinstance(loaded, dict) else f"a list of {len(loaded)}"
        raise SpecError("nothing was loaded for a factory", _text(key), expected=unknown, found=found)


def _text(key: tuple[Any, ...]) -> str:
    return ".".join(map(str, key))
