"""`Buffer`: the local memory of one shard, on the host or elsewhere.

A fragment of it is given by its `shape` and the element `run` at which it begins; a region is slices within a fragment.
"""

from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any, Protocol

import attrs
import numpy as np

from functional_ckpt.spec.strided import View
from functional_ckpt.store.encoding import Array

__all__ = ["WHOLE", "Buffer", "Copier", "HostBuffer", "address_of", "fragment_of", "native", "region_of"]


class Copier(Protocol):
    """Copies memory of one kind, such as that of a device, to the host."""

    def allocate(self, nbytes: int) -> Array:
        """Return new memory of the host as bytes, of the kind that is best to copy to.

        Raises
        ------
        MemoryError
            If there is none.
        """

    def begin(self, buffers: Sequence["Buffer"], copies: Sequence[Array]) -> Callable[[], None]:
        """Begin to copy each buffer to an array of its form; call the result to wait for the end.

        It is called whatever else fails, and until then nobody else is given that memory.
        """


class Buffer(Protocol):
    """Memory that holds fragments."""

    def view(self, shape: tuple[int, ...], run: int) -> Array | None:
        """Return the fragment as a numpy view of the memory itself, or None if the host cannot address it.

        The view may have another byte order than the host.
        """

    def get(self, shape: tuple[int, ...], run: int, region: tuple[Any, ...]) -> Array:
        """Return the elements of a region on the host, in the host's byte order: a view or a copy."""

    def put(self, shape: tuple[int, ...], run: int, region: tuple[Any, ...], values: Array) -> None:
        """Set the elements of a region, converting the data type."""

    def form(self) -> Array:
        """Return an array of the shape and data type that a copy on the host has; its elements may be any."""

    def copier(self) -> Copier | None:
        """Return who copies this memory to the host: None if the host itself does."""

    def memory(self) -> tuple[Hashable, View | range]:
        """Return where the memory is: an address space (None for the host's), and its bytes, a range if contiguous."""


@attrs.define(eq=False)  # not frozen, like `HeldArray`: there are as many
class HostBuffer:
    """A numpy array of any byte order. Its strides are arbitrary if its only fragment is the whole; else C-contiguous.

    `address` is that of its first element: whoever knows it passes it, since numpy makes a dict to tell it. Buffers of
    the same elements, in the same order, are equal if their addresses are known.

    Examples
    --------
    >>> HostBuffer(np.arange(4)).get((2,), 2, (slice(0, 2),))
    array([2, 3])
    """

    array: Array
    address: int | None = None

    def view(self, shape: tuple[int, ...], run: int) -> Array:
        """Return the fragment as a view."""
        return fragment_of(self.array, shape, run)

    def get(self, shape: tuple[int, ...], run: int, region: tuple[Any, ...]) -> Array:
        """Return a region as a view, or as a copy if the byte order differs from the host's."""
        return native(fragment_of(self.array, shape, run)[region])

    def put(self, shape: tuple[int, ...], run: int, region: tuple[Any, ...], values: Array) -> None:
        """Copy `values` into a region."""
        copy_cast(self.view(shape, run)[region], values)

    def form(self) -> Array:
        """Return the array."""
        return self.array

    def copier(self) -> None:
        """Return None: the host copies."""

    def memory(self) -> tuple[Hashable, View | range]:
        """Return where the array is."""
        array = self.array
        address = address_of(array) if self.address is None else self.address
        if array.flags.c_contiguous:
            return None, range(address, address + array.nbytes)
        return None, View(address, array.shape, array.strides, array.itemsize)

    def __hash__(self) -> int:
        """Return the hash of the address."""
        return hash(self.address)

    def __eq__(self, other: object) -> bool:
        """Compare address, data type, shape and strides."""
        if not isinstance(other, HostBuffer) or self.address is None or self.address != other.address:
            return self is other
        one, two = self.array, other.array
        return (one.dtype, one.shape, one.strides) == (two.dtype, two.shape, two.strides)


def address_of(array: Array) -> int:
    """Return the address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


#: The region that is a whole fragment, whatever its number of dimensions.
WHOLE: tuple[Any, ...] = (...,)


def fragment_of(array: Array, shape: tuple[int, ...], run: int) -> Array:
    """Return the fragment of `shape` that begins at element `run` of an array, as a view.

    Examples
    --------
    >>> fragment_of(np.arange(6), (1, 2), 3)
    array([[3, 4]])
    """
    if shape == array.shape:
        return array
    size = prod(shape)
    if size == array.size:
        return array.reshape(shape)
    return array.reshape(-1)[run : run + size].reshape(shape)


def native(values: Array) -> Array:
    """Return an array as it is, or as a copy if its byte order differs from the host's.

    Examples
    --------
    >>> native(np.zeros(1, ">i2")).dtype.isnative
    True
    """
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))


def copy_cast(into: Array, values: Array) -> None:
    """Set `into` to `values` by numpy's unsafe cast, without warnings: the policy has allowed any loss.

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
    """Return global bounds as an index relative to `outer`; it gives a view of a zero-dimensional array too.

    Examples
    --------
    >>> region_of((2,), (3,), (5,)), region_of((), (), ())
    ((slice(1, 3, None),), (Ellipsis,))
    """
    return (*(slice(a - o, b - o) for o, a, b in zip(outer, start, stop, strict=True)), *(() if start else (...,)))
