"""Regular grids: where a shard stands among the equal fragments of its array, and which ranks hold the whole grid."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from operator import floordiv, mod, mul, sub

import attrs
import numpy as np

from functional_ckpt.errors import ShapeError
from functional_ckpt.spec.array import MAX_KNOWN, ArraySpec
from functional_ckpt.spec.box import Box, known_box
from functional_ckpt.spec.mesh import CellMesh
from functional_ckpt.spec.placement import Replicate, Shard
from functional_ckpt.spec.shard import ShardSpec
from functional_ckpt.spec.sharding import Sharding

__all__ = ["Block", "block_of", "fragment_shape", "grid_index", "shard_at", "sharding_of_blocks"]


@attrs.frozen
class Block:
    """The cells of a regular grid from index `start` up to `stop`, which a rank holds as copy `replica_id`."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    replica_id: tuple[int, ...]


def block_of(shards: Sequence[ShardSpec]) -> tuple[tuple[int, ...], Block] | None:
    """Return the grid of which a rank's `shards` of one array are cells, and which cells: all of a block, row-major.

    None for any other shards: of several shapes or replica ids, flat, in another order, off the grid, without elements.

    Examples
    --------
    >>> from functional_ckpt.spec.shard import from_rank_offsets
    >>> block_of([from_rank_offsets("w", "int8", (2,), (0, i, 4)) for i in (1, 2)])
    ((4,), Block(start=(1,), stop=(3,), replica_id=(0,)))
    """
    return _block(shards[0].array.shape, tuple([(shard.box, shard.replica_id, shard.flat) for shard in shards]))


@lru_cache(maxsize=1024)  # thousands of arrays are cut alike
def _block(
    shape: tuple[int, ...], held: tuple[tuple[Box, tuple[int, ...], tuple[int, int] | None], ...]
) -> tuple[tuple[int, ...], Block] | None:
    """Return what `block_of` does; `held` are box, replica id and flat range of each shard."""
    first, replica_id, _ = held[0]
    extents = first.shape
    if not first.size or any(map(mod, shape, extents)):
        return None
    for box, replica, flat in held:
        alike = box.shape == extents and replica == replica_id and flat is None
        if not alike or any(map(mod, box.start, extents)):
            return None
    cells = [tuple(map(floordiv, box.start, extents)) for box, _, _ in held]
    start, stop = cells[0], tuple(index + 1 for index in cells[-1])
    if prod(map(sub, stop, start)) != len(cells) or cells != [*product(*map(range, start, stop))]:
        return None
    return tuple(map(floordiv, shape, extents)), Block(start, stop, replica_id)


@lru_cache(maxsize=MAX_KNOWN)
def shard_at(
    array: ArraySpec,
    extents: tuple[int, ...],
    offset: tuple[int, ...],
    replica_id: int | tuple[int, ...],
    flat: tuple[int, int] | None,
    counts: tuple[int, ...] | None,
) -> ShardSpec:
    """Return a shard, the same object for the same arguments: a training describes its shards anew for each save.

    `counts` are its grid if fragments of these `extents` are so many along each axis.

    Examples
    --------
    >>> shard_at(ArraySpec("w", (6,), "int8"), (2,), (4,), 0, None, (3,)).grid
    (3,)
    """
    is_grid = counts is not None and len(counts) == len(extents) and tuple(map(mul, extents, counts)) == array.shape
    return ShardSpec(array, known_box(extents, offset), replica_id, flat, counts if is_grid else None)


def sharding_of_blocks(grid: tuple[int, ...], blocks: Sequence[Block], replicas: str) -> Sharding | None:
    """Return how ranks hold arrays cut by `grid`, of which rank i holds the i-th block.

    None unless every cell has the same number of copies and, under the rule ``"declared"``, one main copy.

    Examples
    --------
    >>> halves = [Block((i,), (i + 1,), (0,)) for i in (1, 0)]
    >>> sharding_of_blocks((2,), halves, "declared").mesh.ranks, sharding_of_blocks((3,), halves, "declared")
    ((1, 0), None)
    """
    volume = sum(prod(map(sub, block.stop, block.start)) for block in blocks)
    copies, rest = divmod(volume, prod(grid))
    if rest or not copies:
        return None
    declared = replicas == "declared"
    holders = np.zeros((*grid, copies), np.int64)
    taken, mains = np.zeros(grid, np.int64), np.zeros(grid, np.int64)
    # The order in which writers are elected; a declared main copy comes first.
    order = sorted((declared and any(block.replica_id), block.replica_id, rank) for rank, block in enumerate(blocks))
    for _, replica_id, rank in order:
        region = tuple(map(slice, blocks[rank].start, blocks[rank].stop))
        if np.any(taken[region] >= copies):
            return None
        np.put_along_axis(holders[region], taken[region][..., None], rank, axis=-1)
        taken[region] += 1
        mains[region] += not any(replica_id)
    if declared and np.any(mains != 1):
        return None
    return Sharding(CellMesh((*grid, copies), holders.ravel().tolist()), (*map(Shard, range(len(grid))), Replicate()))


def grid_index(shard: ShardSpec) -> tuple[int, ...]:
    """Return the index of a shard's box in the grid of boxes of its shape; 0 along axes without extent.

    Raises
    ------
    ShapeError
        If the box does not lie on that grid.

    Examples
    --------
    >>> from functional_ckpt.spec.shard import from_rank_offsets
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
