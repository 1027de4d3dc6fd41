"""Leaves that hold arrays, behind one protocol; numpy's own. Torch's come from `functional_ckpt.torch.tensors`.

A leaf is *held* to be saved, and *targeted* to be loaded: filled in place where it has memory, allocated where it is
a spec.
"""

import importlib
import sys
from collections.abc import Callable, Hashable
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any, Protocol

import attrs
import numpy as np

from functional_ckpt.errors import ShapeError, SpecError, UnsupportedLeafError
from functional_ckpt.spec.array import ArraySpec, known_spec
from functional_ckpt.spec.shard import ShardSpec, known_shard
from functional_ckpt.spec.sharding import Sharding
from functional_ckpt.store.buffer import Buffer, HostBuffer, address_of
from functional_ckpt.store.encoding import Array, dtype_name, has_dtype, numpy_dtype

__all__ = ["HeldArray", "LeafAdapter", "LocalShards", "NumpyLeaves", "PerRank", "Target", "adapter_of"]


@attrs.frozen
class PerRank:
    """A value (or a whole subtree) that differs by rank, such as random state or a data loader's position.

    Saved for every rank. Loaded by as many ranks, each gets its own; by another number, `LoadPolicy.per_rank` decides.

    Examples
    --------
    >>> PerRank({"seed": 3}).value
    {'seed': 3}
    """

    value: Any


def _tupled(values: Any) -> tuple[Any, ...]:
    return (values,) if isinstance(values, ShardSpec | np.ndarray) else tuple(values)


@attrs.frozen(eq=False)
class LocalShards:
    """A leaf that is this rank's shards of one array: where each lies, and a numpy array of the shape of its box.

    The data of a flat shard has one axis. The key of the array is the leaf's, whatever the specs say. A rank that holds
    nothing of an array leaves the leaf out. One shard needs no tuples.

    Examples
    --------
    >>> from functional_ckpt.spec.box import Box
    >>> w = ArraySpec("w", (4,), "float32")
    >>> LocalShards(ShardSpec(w, Box((0,), (2,))), np.zeros(2, "f4")).shards[0].box.size
    2
    """

    shards: tuple[ShardSpec, ...] = attrs.field(converter=_tupled)
    data: tuple[Array, ...] = attrs.field(converter=_tupled)


# Not frozen: to make a frozen one, once for each of thousands of leaves, takes three times as long.
@attrs.define(eq=False)
class HeldArray:
    """An array leaf: its spec, and the buffers of this rank's shards of it. Nobody changes it.

    `sharding` says how all ranks hold it, if that is known, this process as rank `place` of its mesh; else `shards` are
    the rank's own. With `copy` it is neither: the rank holds all of it, and other ranks under the same key hold copies.
    Leaves with equal `identity` share one memory. `codec` says that the elements are the bytes of an object.
    """

    spec: ArraySpec
    buffers: tuple[Buffer, ...]
    copy: bool
    identity: Hashable
    sharding: Sharding | None = None
    shards: tuple[ShardSpec, ...] = ()
    place: int = 0
    codec: str | None = None

    def all_shards(self, rank: int) -> tuple[ShardSpec, ...]:
        """Return the shards of this rank of the group, one per buffer."""
        if self.copy:
            return (known_shard(self.spec, self.spec.box, rank),)
        if self.sharding is None:
            return self.shards
        places = self.sharding.places(self.spec.shape, self.place)
        return tuple([known_shard(self.spec, box, replica) for box, replica, _ in places])


@attrs.frozen(eq=False)
class Target:
    """Where a leaf is loaded to: this rank's `shards`, the `buffers` that hold them, and the `leaf` that this fills.

    With `finish` the loaded leaf is what that makes of `leaf`. Targets with equal `identity` share one memory.
    """

    identity: Hashable
    shards: tuple[ShardSpec, ...]
    buffers: tuple[Buffer, ...]
    leaf: Any
    finish: Callable[[Any], Any] | None = None

    @classmethod
    def of(cls, held: HeldArray, rank: int, leaf: Any, finish: Callable[[Any], Any] | None = None) -> "Target":
        """Return the target that is a leaf which could be saved, too."""
        return cls(held.identity, held.all_shards(rank), held.buffers, leaf, finish)


class LeafAdapter(Protocol):
    """Knows one family of array types."""

    def hold(self, key: str, leaf: Any, rank: int) -> HeldArray:
        """Describe a leaf that is saved."""

    def target(self, key: str, leaf: Any, rank: int, device: str) -> Target:
        """Describe a leaf that is loaded; allocates where it has no memory."""

    def blueprint(self, leaf: Any) -> Hashable | None:
        """Return a description of the memory that a leaf without memory needs, equal for equal leaves, else None."""

    def empty(self, leaf: Any, spec: ArraySpec) -> Any:
        """Return a new leaf of the family of `leaf`, with the shape and data type of `spec`."""


class NumpyLeaves:
    """numpy arrays and scalars, `LocalShards`; on load `ArraySpec` (allocated whole) and `ShardSpec` (its part) too."""

    def accepts(self, leaf: object) -> bool:
        """Tell whether `leaf` is a numpy array, a scalar of a type that arrays of the format may have, or a spec."""
        return isinstance(leaf, _NUMPY_TYPES) or (isinstance(leaf, np.generic) and has_dtype(leaf.dtype))

    def hold(self, key: str, leaf: Any, rank: int) -> HeldArray:
        """Describe a leaf that is saved."""
        if isinstance(leaf, ArraySpec | ShardSpec):
            raise UnsupportedLeafError("a spec has no data to save", key, found=type(leaf).__name__)
        if isinstance(leaf, LocalShards):
            return _local_shards(key, leaf)
        if isinstance(leaf, np.ndarray) and type(leaf) not in (np.ndarray, np.memmap):
            raise UnsupportedLeafError(
                "a subclass of numpy.ndarray cannot be saved",
                key,
                found=type(leaf).__name__,
                remedy="Save numpy.asarray(...) of it",
            )
        return _whole(key, leaf)

    def target(self, key: str, leaf: Any, rank: int, device: str) -> Target:
        """Describe a leaf that is loaded."""
        if isinstance(leaf, ShardSpec):
            array = np.empty(leaf.data_shape, numpy_dtype(leaf.array.dtype))
            shard = attrs.evolve(leaf, array=attrs.evolve(leaf.array, key=key))
            held = HeldArray(shard.array, (HostBuffer(array),), False, id(array), None, (shard,))
            return Target.of(held, rank, array)
        if isinstance(leaf, LocalShards):
            held = _local_shards(key, leaf)
            for data in leaf.data:
                _check_writable(key, data)
            return Target.of(held, rank, leaf)
        if isinstance(leaf, ArraySpec):
            array = self.empty(leaf, leaf)
            return Target.of(_whole(key, array), rank, array)
        if isinstance(leaf, np.generic):
            scalar = np.empty((), leaf.dtype)
            return Target.of(_whole(key, scalar), rank, scalar, itemgetter(()))
        _check_writable(key, leaf)
        return Target.of(_whole(key, leaf), rank, leaf)

    def blueprint(self, leaf: Any) -> Hashable | None:
        """Return a spec itself."""
        return leaf if isinstance(leaf, ArraySpec | ShardSpec) else None

    def empty(self, leaf: Any, spec: ArraySpec) -> Array:
        """Return a new numpy array."""
        return np.empty(spec.shape, numpy_dtype(spec.dtype))


def adapter_of(leaf: object) -> LeafAdapter | None:
    """Return the adapter for an array leaf, or None for any other leaf; torch is looked at only once imported.

    Examples
    --------
    >>> adapter_of(3.5) is None, adapter_of(np.zeros(2)) is None
    (True, False)
    """
    kind: Any = type(leaf)
    adapter = _adapter_of_type(kind)
    return _NUMPY if adapter is None and _NUMPY.accepts(leaf) else adapter


@lru_cache(maxsize=256)  # a state has thousands of leaves of a few types
def _adapter_of_type(kind: type) -> LeafAdapter | None:
    """Return the adapter for all leaves of a type; None if there is none, or it depends on the leaf.

    A type of torch exists only once torch is imported, so that the answer for a type stays right.
    """
    if issubclass(kind, _NUMPY_TYPES):
        return _NUMPY
    return _torch_leaves() if "torch" in sys.modules and _torch_leaves().accepts_type(kind) else None


@cache
def _torch_leaves() -> Any:
    return importlib.import_module("functional_ckpt.torch.tensors").TORCH_LEAVES


def _whole(key: str, leaf: Any) -> HeldArray:
    """Describe an array or a scalar, which every rank holds whole."""
    array = np.asarray(leaf)
    spec = known_spec(key, array.shape, dtype_name(array.dtype, key))
    # A scalar has no memory, and nothing shares that of an array without elements: the leaf itself tells them apart.
    if not isinstance(leaf, np.ndarray) or not array.size:
        return HeldArray(spec, (HostBuffer(array),), True, id(leaf))
    buffer = HostBuffer(array, address_of(array))
    return HeldArray(spec, (buffer,), True, buffer)


def _local_shards(key: str, leaf: LocalShards) -> HeldArray:
    if not leaf.shards or len({shard.array for shard in leaf.shards}) > 1 or len(leaf.shards) != len(leaf.data):
        raise SpecError(
            "local shards must be of one array, with one buffer each",
            key,
            expected="a buffer for each of at least one shard",
            found=(len(leaf.shards), len(leaf.data)),
        )
    array = attrs.evolve(leaf.shards[0].array, key=key)
    shards = tuple(attrs.evolve(shard, array=array) for shard in leaf.shards)
    for shard, data in zip(shards, leaf.data, strict=True):
        found = dtype_name(data.dtype, key)
        if data.shape != shard.data_shape or found != array.dtype:
            raise ShapeError(
                "a shard's data does not fit its spec",
                key,
                shape=array.shape,
                offset=shard.box.start,
                expected=(shard.data_shape, array.dtype),
                found=(data.shape, found),
            )
        if shard.flat is not None and not data.flags.c_contiguous:
            raise SpecError(
                "the data of a flat shard must be contiguous", key, shape=array.shape, offset=shard.box.start
            )
    return HeldArray(array, tuple(map(HostBuffer, leaf.data)), False, id(leaf), None, shards)


def _check_writable(key: str, array: Array) -> None:
    if not array.flags.writeable:
        raise SpecError("an array to load into is read-only", key, shape=array.shape, remedy="Pass a writable copy")


_NUMPY_TYPES = (np.ndarray, LocalShards, ArraySpec, ShardSpec)
_NUMPY = NumpyLeaves()
