"""`Buffer`: the local memory of one shard, on the host or elsewhere."""

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import numpy as np

from functional_ckpt.spec.sharding import Fragment
from functional_ckpt.store.encoding import Array

__all__ = ["WHOLE", "Buffer", "HostBuffer", "region_of"]


class Buffer(Protocol):
    """Memory that fragments lie in. Regions are slices within a fragment's box, its start as the origin."""

    def view(self, fragment: Fragment) -> Array | None:
        """Return the fragment as a numpy view of the memory itself, or None where the host cannot address it."""

    def get(self, fragment: Fragment, region: tuple[Any, ...]) -> Array:
        """Return the elements of a region on the host: a view or a copy."""

    def put(self, fragment: Fragment, region: tuple[Any, ...], values: Array) -> None:
        """Set the elements of a region, converting the data type."""

    def staged(self) -> "Buffer":
        """Return a copy on the host that later changes of this memory do not reach."""


@attrs.frozen(eq=False)
class HostBuffer:
    """A numpy array, of any strides unless fragments of it start at a run (then C-contiguous).

    Examples
    --------
    >>> from functional_ckpt.spec.box import Box
    >>> HostBuffer(np.arange(4)).get(Fragment(Box((0,), (2,)), 2), (slice(0, 2),))
    array([2, 3])
    """

    array: Array

    def view(self, fragment: Fragment) -> Array:
        """Return the fragment as a view."""
        shape = fragment.box.shape
        if shape == self.array.shape:
            return self.array
        if fragment.box.size == self.array.size:
            return self.array.reshape(shape)
        flat = self.array.reshape(-1)
        return flat[fragment.run : fragment.run + fragment.box.size].reshape(shape)

    def get(self, fragment: Fragment, region: tuple[Any, ...]) -> Array:
        """Return a region as a view."""
        values: Array = self.view(fragment)[region]
        return values

    def put(self, fragment: Fragment, region: tuple[Any, ...], values: Array) -> None:
        """Copy `values` into a region."""
        copy_cast(self.view(fragment)[region], values)

    def staged(self) -> "HostBuffer":
        """Return a copy."""
        return HostBuffer(np.array(self.array, order="C"))


#: The whole of a fragment, whatever its rank.
WHOLE: tuple[Any, ...] = (...,)


def copy_cast(into: Array, values: Array) -> None:
    """Set `into` to `values` by numpy's unsafe cast, silently: the policy has allowed what gets lost.

    Examples
    --------
    >>> into = np.zeros(1, "f4")
    >>> copy_cast(into, np.array([1 + 2j]))
    >>> into
    array([1.], dtype=float32)
    """
    if into.dtype == values.dtype:
        np.copyto(into, values)
        return
    real = values.real if values.dtype.kind == "c" and into.dtype.kind not in "cb" else values
    with np.errstate(invalid="ignore", over="ignore"):
        np.copyto(into, real, casting="unsafe")


def region_of(outer: Sequence[int], start: Sequence[int], stop: Sequence[int]) -> tuple[Any, ...]:
    """Return global bounds as an index relative to `outer`, one that gives a view at rank 0 too.

    Examples
    --------
    >>> region_of((2,), (3,), (5,)), region_of((), (), ())
    ((slice(1, 3, None),), (Ellipsis,))
    """
    return (*(slice(a - o, b - o) for o, a, b in zip(outer, start, stop, strict=True)), *(() if start else (...,)))
