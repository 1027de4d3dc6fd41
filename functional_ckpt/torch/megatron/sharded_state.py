"""Conversion of state dicts with sharded leaves to leaves of `functional_ckpt.save` and `load`, and back.

Leaves may be of this library or of ``megatron.core.dist_checkpointing``. The stored tree is a flat dict: a tensor has
its own key, an object its `unique_key`. So the place of a leaf in the state dict does not matter.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import attrs
import torch

from functional_ckpt.errors import CheckpointError, DuplicateKeyError, SpecError, UnsupportedLeafError, raise_problems
from functional_ckpt.plan.manifest import Manifest
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.shard import ShardSpec, fragments
from functional_ckpt.torch.host_view import TORCH_DTYPES
from functional_ckpt.torch.local import LocalTensors, OpaqueObject
from functional_ckpt.torch.megatron.factory import ShardedTensorFactory
from functional_ckpt.torch.megatron.mapping import LocalNonpersistentObject
from functional_ckpt.torch.megatron.sharded_base import ShardedBase, is_main_replica
from functional_ckpt.torch.megatron.sharded_object import ShardedObject
from functional_ckpt.torch.megatron.sharded_tensor import ShardedTensor
from functional_ckpt.torch.megatron.state_tree import leaves_of, map_leaves

__all__ = [
    "Request",
    "as_object",
    "as_ours",
    "as_tensor",
    "is_object",
    "is_tensor",
    "leaf_as_ours",
    "leaves_to_save",
    "stored_leaves",
]

_KINDS: dict[type, str | None] = {}
_THEIRS = "megatron.core.dist_checkpointing.mapping"
_FIELDS = (
    "key",
    "data",
    "dtype",
    "local_shape",
    "global_shape",
    "global_offset",
    "axis_fragmentations",
    "replica_id",
    "prepend_axis_num",
    "allow_shape_mismatch",
    "flattened_range",
)


def is_tensor(leaf: Any) -> bool:
    """Tell whether `leaf` is a `ShardedTensor` of this library or of Megatron.

    Examples
    --------
    >>> is_tensor(ShardedTensor.from_rank_offsets("w", torch.ones(2))), is_tensor(torch.ones(2))
    (True, False)
    """
    return _kind(type(leaf)) == "ShardedTensor"


def is_object(leaf: Any) -> bool:
    """Tell whether `leaf` is a `ShardedObject` of this library or of Megatron.

    Examples
    --------
    >>> is_object(ShardedObject("rng", 5, (1,), (0,)))
    True
    """
    return _kind(type(leaf)) == "ShardedObject"


def _kind(cls: type) -> str | None:
    if cls not in _KINDS:
        known = (b for b in cls.__mro__ if b is ShardedTensor or b is ShardedObject or b.__module__ == _THEIRS)
        _KINDS[cls] = next((base.__name__ for base in known), None)
    return _KINDS[cls]


def as_tensor(leaf: Any) -> ShardedTensor:
    """Return a sharded tensor as one of this library.

    Raises
    ------
    CheckpointingException
        If its fields contradict each other; the error names the key.
    """
    if isinstance(leaf, ShardedTensor):
        return leaf
    return ShardedTensor(*(getattr(leaf, name, None) for name in _FIELDS))  # type: ignore[arg-type]


def as_object(leaf: Any) -> ShardedObject:
    """Return a sharded object as one of this library.

    Raises
    ------
    CheckpointingException
        If its fields contradict each other; the error names the key.
    """
    if isinstance(leaf, ShardedObject):
        return leaf
    return ShardedObject(leaf.key, leaf.data, leaf.global_shape, leaf.global_offset, leaf.replica_id)


def as_ours(state: Any) -> Any:
    """Return a state dict with leaves of Megatron, and those that its factories build, as leaves of this library.

    Raises
    ------
    CheckpointingException
        All leaves whose fields contradict each other, at once.

    Examples
    --------
    >>> as_ours({"step": 3, "more": [None]})
    {'step': 3, 'more': [None]}
    """
    problems: list[CheckpointError] = []

    def convert(leaf: Any) -> Any:
        try:
            return leaf_as_ours(leaf)
        except CheckpointError as problem:
            problems.append(problem)

    result = map_leaves(convert, state)
    raise_problems(problems)
    return result


def leaf_as_ours(leaf: Any) -> Any:
    """Return a leaf of Megatron as one of this library, any other as it is.

    Raises
    ------
    CheckpointingException
        If its fields contradict each other; the error names the key.

    Examples
    --------
    >>> leaf_as_ours(3)
    3
    """
    return _CONVERSIONS.get(_kind(type(leaf)), _unchanged)(leaf)


def _as_factory(leaf: Any) -> ShardedTensorFactory:
    def build(*arguments: Any) -> Any:
        return as_ours(leaf.build_fn(*arguments))

    return ShardedTensorFactory(leaf.key, leaf.data, build, leaf.merge_fn, leaf.replica_id, leaf.flattened_range)


def _as_local(leaf: Any) -> LocalNonpersistentObject:
    return LocalNonpersistentObject(leaf.unwrap())


def _unchanged(leaf: Any) -> Any:
    return leaf


_CONVERSIONS: dict[str | None, Callable[[Any], Any]] = {
    "ShardedTensor": as_tensor,
    "ShardedObject": as_object,
    "ShardedTensorFactory": _as_factory,
    "LocalNonpersistentObject": _as_local,
}


def _checked(leaves: Iterable[Any]) -> Iterator[ShardedObject | tuple[ShardedTensor, ShardSpec]]:
    """Yield the leaves as those of this library, tensors with their specs, and raise all problems at the end."""
    problems: list[CheckpointError] = []
    for leaf in leaves:
        try:
            if is_tensor(leaf):
                tensor = as_tensor(leaf)
                yield tensor, tensor.spec
            elif is_object(leaf):
                yield as_object(leaf)
            else:
                raise UnsupportedLeafError(
                    "the sharded half may contain only sharded tensors and objects",
                    getattr(leaf, "key", None),
                    found=type(leaf).__name__,
                    remedy="Apply factories first, and pass common leaves to a common strategy",
                )
        except CheckpointError as problem:
            problems.append(problem)
    raise_problems(problems)


def leaves_to_save(sharded_state_dict: Any) -> dict[str, LocalTensors | OpaqueObject]:
    """Return key -> the main copies that this rank holds, for `functional_ckpt.save`.

    Raises
    ------
    CheckpointingException
        All leaves that cannot be saved, at once.

    Examples
    --------
    >>> tensor = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 1, 3))
    >>> list(leaves_to_save({"any": [tensor, ShardedObject("o", 5, (1,), (0,))]}))
    ['w', 'o/shard_0_1']
    """
    shards: dict[str, list[tuple[ShardSpec, torch.Tensor]]] = {}
    objects: dict[str, OpaqueObject] = {}
    problems: list[CheckpointError] = []
    for leaf in _checked(leaves_of(sharded_state_dict)):
        if isinstance(leaf, ShardedObject):
            if is_main_replica(leaf.replica_id):
                if leaf.unique_key in objects:
                    problems.append(DuplicateKeyError("two objects have one name", leaf.unique_key))
                objects[leaf.unique_key] = OpaqueObject(leaf.data)
            continue
        tensor, spec = leaf
        if not spec.is_main:
            continue
        if tensor.data is None:
            problems.append(
                SpecError(
                    "a shard has no data to save", spec.key, shape=spec.array.shape, remedy="Call its init_data first"
                )
            )
        else:
            shards.setdefault(spec.key, []).append((spec, _view(tensor, tensor.data)))
    problems += [
        DuplicateKeyError("a tensor and an object have one name", key) for key in sorted({*shards} & {*objects})
    ]
    raise_problems(problems)
    return {**{key: _local_tensors(pairs) for key, pairs in shards.items()}, **objects}


def _local_tensors(pairs: Iterable[tuple[ShardSpec, torch.Tensor]]) -> LocalTensors:
    shards, data = zip(*pairs, strict=True)
    return LocalTensors(shards, data)


def _view(leaf: ShardedTensor, data: torch.Tensor) -> torch.Tensor:
    """Return the data in the shape of the shard's box; the data of a flat shard keep their single axis."""
    count = 0 if leaf.flattened_range is not None else leaf.prepend_axis_num
    plain = data.detach() if data.requires_grad else data
    return plain[(None,) * count] if count else plain


@attrs.frozen
class _Place:
    """A placeholder in the state dict for a leaf to load: `data` is the tensor to fill, None for an object."""

    key: str
    data: torch.Tensor | None


class Request:
    """The request of one rank: `like` is the argument of `functional_ckpt.load`, `result` returns the state dict.

    Tensors are filled in place, and allocated (on the CPU) if a leaf has no data. With `stored`, the shapes of the
    arrays in the checkpoint, a tensor that allows another shape gets the common part, and zeros elsewhere.

    Examples
    --------
    >>> import functional_ckpt
    >>> whole = ShardedTensor.from_rank_offsets("w", torch.arange(4))
    >>> _ = functional_ckpt.save(leaves_to_save([whole]), "memory://request-example")
    >>> request = Request({"tail": ShardedTensor("w", None, torch.int64, (2,), (4,), (2,), None)})
    >>> request.result(functional_ckpt.load(request.like, "memory://request-example",
    ...                                     policy=functional_ckpt.LoadPolicy(strict="ignore")))
    {'tail': tensor([2, 3])}
    """

    def __init__(self, sharded_state_dict: Any, stored: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self._stored = stored or {}
        self._pairs: dict[str, list[tuple[ShardSpec, torch.Tensor]]] = {}
        self._objects: dict[str, None] = {}
        self._outside: list[torch.Tensor] = []
        wanted = iter(list(_checked(leaves_of(sharded_state_dict))))
        self._skeleton = map_leaves(lambda _: self._place(next(wanted)), sharded_state_dict)

    @property
    def like(self) -> dict[str, Any]:
        """The argument for `functional_ckpt.load`."""
        return {**{key: _local_tensors(pairs) for key, pairs in self._pairs.items()}, **self._objects}

    def result(self, loaded: Mapping[str, Any]) -> Any:
        """Return the state dict with tensors and objects as leaves."""
        for part in self._outside:
            part.zero_()
        return map_leaves(lambda place: loaded[place.key] if place.data is None else place.data, self._skeleton)

    def _place(self, leaf: ShardedObject | tuple[ShardedTensor, ShardSpec]) -> _Place:
        if isinstance(leaf, ShardedObject):
            self._objects[leaf.unique_key] = None
            return _Place(leaf.unique_key, None)
        tensor, spec = leaf
        data = _memory(tensor)
        view = _view(tensor, data)
        stored = self._stored.get(spec.key, spec.array.shape)
        reshaped = stored != spec.array.shape and len(stored) == len(spec.array.shape)
        if tensor.allow_shape_mismatch and reshaped:
            self._align(spec, view, ArraySpec(spec.key, stored, spec.array.dtype))
        else:
            self._pairs.setdefault(spec.key, []).append((spec, view))
        return _Place(spec.key, data)

    def _align(self, spec: ShardSpec, view: torch.Tensor, stored: ArraySpec) -> None:
        """Request the common part of the shard and an array of another shape; the rest is set to zero."""
        for fragment in fragments(spec):
            box = fragment.box
            part = view if spec.flat is None else view[fragment.run : fragment.run + box.size].view(box.shape)
            common = box.intersect(stored.box)
            if common is not None:
                inner = part[common.relative_to(box).slices]
                self._pairs.setdefault(stored.key, []).append((ShardSpec(stored, common), inner))
            self._outside += [part[outer.relative_to(box).slices] for outer in box.subtract(stored.box)]


def _memory(leaf: ShardedTensor) -> torch.Tensor:
    """Return the leaf's data, or new memory; the caller's leaf does not change."""
    if leaf.data is not None:
        return leaf.data.detach()
    copy = leaf.without_data()
    copy.init_data("cpu")
    return cast("torch.Tensor", copy.data)


def stored_leaves(manifest: Manifest) -> dict[str, ShardedBase]:
    """Return the leaves of a checkpoint: key -> whole tensor, unique key -> object, without data.

    Examples
    --------
    >>> import functional_ckpt
    >>> manifest = functional_ckpt.save(leaves_to_save([ShardedObject("o", 5, (1,), (0,))]), "memory://stored-leaves")
    >>> stored_leaves(manifest)["o/shard_0_1"].key
    'o'
    """
    found: dict[str, ShardedBase] = {}
    for key, entry in manifest.by_key.items():
        if entry.codec is not None:
            found[key] = ShardedObject.empty_from_unique_key(key)
            continue
        shape = entry.spec.shape
        found[key] = ShardedTensor(
            key, None, TORCH_DTYPES[entry.spec.dtype], shape, shape, (0,) * len(shape), (1,) * len(shape)
        )
    return found
