"""`Box`: a half-open n-dimensional region of an array."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from operator import add, index, le, sub

import attrs

from functional_ckpt.errors import ShapeError

__all__ = ["MAX_NDIM", "Box", "known_box"]

# TensorStore refuses 33 dimensions, and some of its code paths abort the process instead of raising.
MAX_NDIM = 32


def _ints(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(index, values))


@attrs.frozen(order=True)
class Box:
    """The cells ``start <= index < stop`` of an n-d array; ordered row-major by `start`.

    Empty boxes and zero-dimensional boxes (which hold one cell) are legal values.

    Raises
    ------
    ShapeError
        If `start` and `stop` differ in length or have more than `MAX_NDIM` numbers, if a number is negative, or
        if `stop` is less than `start`.

    Examples
    --------
    >>> Box((0, 2), (4, 6)).shape
    (4, 4)
    """

    start: tuple[int, ...] = attrs.field(converter=_ints)
    stop: tuple[int, ...] = attrs.field(converter=_ints)

    def __attrs_post_init__(self) -> None:
        if len(self.start) != len(self.stop) or len(self.start) > MAX_NDIM:
            what = f"start and stop of a box must have one length, at most {MAX_NDIM}"
            raise ShapeError(what, offset=self.start, found=self.stop)
        if not all(map(le, self.start, self.stop)) or min(self.start, default=0) < 0:
            raise ShapeError("a box must have 0 <= start <= stop", offset=self.start, found=self.stop)

    @classmethod
    def from_shape(cls, shape: Sequence[int], offset: Sequence[int] | None = None) -> "Box":
        """Return the box of `shape` at `offset` (the origin by default).

        Examples
        --------
        >>> Box.from_shape((2, 3), (4, 0))
        Box(start=(4, 0), stop=(6, 3))
        """
        if offset is None:
            return cls((0,) * len(shape), tuple(shape))
        if len(offset) != len(shape):
            raise ShapeError(
                "offset and shape differ in length",
                shape=tuple(shape),
                offset=tuple(offset),
            )
        return cls(tuple(offset), tuple(map(add, offset, shape)))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent per dimension, in elements."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """Number of cells (1 for a zero-dimensional box)."""
        return prod(map(sub, self.stop, self.start))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the global array."""
        return tuple(map(slice, self.start, self.stop))

    def intersect(self, other: "Box") -> "Box | None":
        """Return the common cells, or None when there are none.

        Examples
        --------
        >>> Box((0,), (5,)).intersect(Box((3,), (9,)))
        Box(start=(3,), stop=(5,))
        >>> Box((0,), (3,)).intersect(Box((3,), (9,))) is None
        True
        """
        self._check_ndim(other)
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(map(le, stop, start)):
            return None
        return Box(start, stop)

    def contains(self, other: "Box") -> bool:
        """Tell whether every cell of `other` lies in this box (an empty box lies in all).

        Examples
        --------
        >>> Box((0,), (5,)).contains(Box((1,), (5,)))
        True
        """
        return other.size == 0 or self.intersect(other) == other

    def subtract(self, other: "Box") -> "tuple[Box, ...]":
        """Return disjoint boxes that hold this box's cells outside `other`, at most 2 * ndim.

        Examples
        --------
        >>> Box((0,), (9,)).subtract(Box((3,), (5,)))
        (Box(start=(0,), stop=(3,)), Box(start=(5,), stop=(9,)))
        """
        common = self.intersect(other)
        if common is None:
            return (self,) if self.size else ()
        left: list[Box] = []
        start, stop = list(self.start), list(self.stop)
        for axis in range(self.ndim):
            if start[axis] < common.start[axis]:
                below = (*stop[:axis], common.start[axis], *stop[axis + 1 :])
                left.append(Box(tuple(start), below))
            if common.stop[axis] < stop[axis]:
                above = (*start[:axis], common.stop[axis], *start[axis + 1 :])
                left.append(Box(above, tuple(stop)))
            start[axis], stop[axis] = common.start[axis], common.stop[axis]
        return tuple(left)

    def shift(self, offset: Sequence[int]) -> "Box":
        """Return the box moved by `offset` elements per dimension.

        Examples
        --------
        >>> Box((0,), (2,)).shift((3,))
        Box(start=(3,), stop=(5,))
        """
        return Box(
            tuple(a + o for a, o in zip(self.start, offset, strict=True)),
            tuple(a + o for a, o in zip(self.stop, offset, strict=True)),
        )

    def relative_to(self, outer: "Box") -> "Box":
        """Return this box in the coordinates of `outer`, whose start becomes the origin.

        Examples
        --------
        >>> Box((3,), (5,)).relative_to(Box((3,), (9,)))
        Box(start=(0,), stop=(2,))
        """
        return self.shift(tuple(-o for o in outer.start))

    def _check_ndim(self, other: "Box") -> None:
        if self.ndim != other.ndim:
            raise ShapeError(
                "boxes with different numbers of dimensions cannot be combined",
                expected=self.ndim,
                found=other.ndim,
            )


#: ``Box.from_shape``, the same object for the same arguments: thousands of arrays have one shape, or are cut alike.
known_box = lru_cache(maxsize=1024)(Box.from_shape)
