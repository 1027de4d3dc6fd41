"""Regular grids: the index of a shard among the equal fragments of its array, and the shape of those."""

from collections.abc import Sequence

from functional_ckpt.errors import ShapeError
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.sharding import ShardSpec

__all__ = ["fragment_shape", "grid_index"]


def grid_index(shard: ShardSpec) -> tuple[int, ...]:
    """Return the index of a shard's box in the grid of boxes of its shape; 0 along axes without extent.

    Raises
    ------
    ShapeError
        If the box does not lie on that grid.

    Examples
    --------
    >>> from functional_ckpt.spec.sharding import from_rank_offsets
    >>> grid_index(from_rank_offsets("w", "int8", (2, 3), (0, 1, 4), (1, 2, 3)))
    (1, 2)
    """
    pairs = tuple(zip(shard.box.start, shard.box.shape, strict=True))
    if any(extent and start % extent for start, extent in pairs):
        raise ShapeError(
            "a shard does not lie on a regular grid",
            shard.key,
            shape=shard.array.shape,
            offset=shard.box.start,
            expected=f"multiples of its shape {shard.box.shape}",
            found=shard.box.start,
        )
    return tuple(start // extent if extent else 0 for start, extent in pairs)


def fragment_shape(array: ArraySpec, counts: Sequence[int], exact: bool = True) -> tuple[int, ...]:
    """Return the shape, in elements, of the fragments of an array that is cut into `counts` along its axes.

    Unless `exact`, remainders are ignored.

    Raises
    ------
    ShapeError
        If there is not one positive count per axis, or, when `exact`, a count does not divide its extent.

    Examples
    --------
    >>> fragment_shape(ArraySpec("w", (8, 3), "int8"), (4, 1))
    (2, 3)
    >>> fragment_shape(ArraySpec("w", (9,), "int8"), (4,), exact=False)
    (2,)
    """
    if len(counts) != len(array.shape) or any(count < 1 for count in counts):
        raise ShapeError(
            "a grid needs one positive number of fragments per axis",
            array.key,
            shape=array.shape,
            expected=f"{len(array.shape)} numbers",
            found=tuple(counts),
        )
    pairs = tuple(zip(array.shape, counts, strict=True))
    if exact and any(extent % count for extent, count in pairs):
        raise ShapeError(
            "a grid does not divide its array",
            array.key,
            shape=array.shape,
            expected="numbers of fragments that divide the shape",
            found=tuple(counts),
        )
    return tuple(extent // count for extent, count in pairs)
