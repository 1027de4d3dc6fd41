"""Leaves that hold arrays, behind one protocol; numpy's own. Torch's come from `functional_ckpt.torch.tensors`.

A leaf is *held* to be saved, and *targeted* to be loaded: filled in place where it has memory, allocated where it is
a spec.
"""

import importlib
import sys
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, Protocol

import attrs
import numpy as np

from functional_ckpt.errors import SpecError, UnsupportedLeafError
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.sharding import ShardSpec
from functional_ckpt.store.buffer import Buffer, HostBuffer
from functional_ckpt.store.encoding import Array, dtype_name, numpy_dtype

__all__ = ["HeldArray", "LeafAdapter", "NumpyLeaves", "PerRank", "Target", "adapter_of"]


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


@attrs.frozen(eq=False)
class HeldArray:
    """An array leaf: its spec and this rank's parts of it.

    `copy` says that the rank holds all of it and other ranks under the same key hold copies. Leaves with equal
    `identity` share one memory.
    """

    spec: ArraySpec
    parts: tuple[tuple[ShardSpec, Buffer], ...]
    copy: bool
    identity: Hashable


@attrs.frozen(eq=False)
class Target:
    """Where a leaf is loaded to, and `result`, called afterwards, which returns the loaded leaf."""

    held: HeldArray
    result: Callable[[], Any]


class LeafAdapter(Protocol):
    """Knows one family of array types."""

    def accepts(self, leaf: object) -> bool:
        """Tell whether `leaf` is an array of this family."""

    def hold(self, key: str, leaf: Any, rank: int) -> HeldArray:
        """Describe a leaf that is saved."""

    def target(self, key: str, leaf: Any, rank: int, device: str) -> Target:
        """Describe a leaf that is loaded; allocates where it has no memory."""

    def blueprint(self, leaf: Any) -> Hashable | None:
        """Return what a leaf without memory asks to be allocated; equal for equal wishes. None if it has memory."""

    def empty(self, leaf: Any, spec: ArraySpec) -> Any:
        """Return a new leaf of the family of `leaf`, with the shape and data type of `spec`."""


class NumpyLeaves:
    """numpy arrays and scalars; on load also `ArraySpec` (allocated whole) and `ShardSpec` (its part)."""

    def accepts(self, leaf: object) -> bool:
        """Tell whether `leaf` is a numpy array or scalar, or a spec."""
        return isinstance(leaf, _NUMPY_TYPES)

    def hold(self, key: str, leaf: Any, rank: int) -> HeldArray:
        """Describe a leaf that is saved."""
        if isinstance(leaf, ArraySpec | ShardSpec):
            raise UnsupportedLeafError("a spec has no data to save", key, found=type(leaf).__name__)
        if isinstance(leaf, np.ndarray) and type(leaf) not in (np.ndarray, np.memmap):
            raise UnsupportedLeafError(
                "a subclass of numpy.ndarray would lose what it adds", key, found=type(leaf).__name__,
                remedy="Save numpy.asarray of it",
            )  # fmt: skip
        name = dtype_name(leaf.dtype, key)
        array = np.asarray(leaf, dtype=numpy_dtype(name))  # copies only another byte order
        return _whole(key, array, rank, _identity(leaf))

    def target(self, key: str, leaf: Any, rank: int, device: str) -> Target:
        """Describe a leaf that is loaded."""
        if isinstance(leaf, ShardSpec):
            if leaf.flat is not None:
                array = np.empty(leaf.size, numpy_dtype(leaf.array.dtype))
            else:
                array = np.empty(leaf.box.shape, numpy_dtype(leaf.array.dtype))
            shard = attrs.evolve(leaf, array=attrs.evolve(leaf.array, key=key))
            held = HeldArray(shard.array, ((shard, HostBuffer(array)),), False, id(array))
            return Target(held, lambda: array)
        if isinstance(leaf, ArraySpec):
            array = self.empty(leaf, leaf)
            return Target(_whole(key, array, rank, id(array)), lambda: array)
        if isinstance(leaf, np.generic):
            scalar = np.empty((), leaf.dtype)
            return Target(_whole(key, scalar, rank, id(scalar)), lambda: scalar[()])
        if not leaf.flags.writeable:
            raise SpecError("an array to load into is read-only", key, None, leaf.shape, remedy="Pass a writable copy")
        return Target(_whole(key, leaf, rank, _identity(leaf)), lambda: leaf)

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
    if _NUMPY.accepts(leaf):
        return _NUMPY
    if "torch" in sys.modules and _torch_leaves().accepts(leaf):
        return _torch_leaves()
    return None


@cache
def _torch_leaves() -> LeafAdapter:
    adapter: LeafAdapter = importlib.import_module("functional_ckpt.torch.tensors").TORCH_LEAVES
    return adapter


def _whole(key: str, array: Array, rank: int, identity: Hashable) -> HeldArray:
    spec = ArraySpec(key, array.shape, dtype_name(array.dtype, key))
    return HeldArray(spec, ((ShardSpec(spec, spec.box, rank), HostBuffer(array)),), True, identity)


def _identity(array: Any) -> Hashable:
    if not isinstance(array, np.ndarray) or not array.size:
        return id(array)
    return array.__array_interface__["data"][0], array.dtype, array.shape, array.strides


_NUMPY_TYPES = (np.ndarray, np.generic, ArraySpec, ShardSpec)
_NUMPY = NumpyLeaves()
