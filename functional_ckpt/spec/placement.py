"""Shards from a device mesh and placements, as DTensor places them, by arithmetic on intervals.

Placements are applied mesh axis by mesh axis, left to right. Along each array axis a rank's share is a list of
intervals in local order: `Shard` cuts their concatenation, `StridedShard` first cuts it into `split_factor`
parts and takes this rank's share of each. The local tensor is the product of the lists, so a share of several
intervals becomes several shards, each with its box in the local tensor.
"""

from collections.abc import Sequence
from itertools import accumulate, product

import attrs

from functional_ckpt.errors import ShapeError
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.flat import joined
from functional_ckpt.spec.shard import ShardSpec
from functional_ckpt.spec.tiling import chunked_sizes

__all__ = [
    "PlacedShard",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "axis_spans",
    "from_placements",
    "spans_of_places",
]

_Interval = tuple[int, int]


@attrs.frozen
class Shard:
    """Cut array axis `dim` along this mesh axis."""

    dim: int


@attrs.frozen
class StridedShard:
    """Cut array axis `dim` that a later mesh axis cuts into `split_factor` parts first (FSDP over TP)."""

    dim: int
    split_factor: int


@attrs.frozen
class Replicate:
    """Hold a copy at every coordinate of this mesh axis."""


Placement = Shard | StridedShard | Replicate


@attrs.frozen
class PlacedShard:
    """A shard and `local`, the region of the rank's local tensor that holds it."""

    shard: ShardSpec
    local: Box


def from_placements(
    array: ArraySpec,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int] | None,
    placements: Sequence[Placement],
) -> tuple[PlacedShard, ...]:
    """Return what the rank at mesh `coordinate` holds of `array`; nothing for a rank outside the mesh (None).

    The replica id is the coordinate along the replicated mesh axes. An uneven split follows ``torch.chunk``;
    a rank left without elements gets one empty shard, so that it still takes part in checks of shape and data type.

    Raises
    ------
    ShapeError
        If the lengths of mesh, coordinate and placements differ, or a `dim` is out of range.

    Examples
    --------
    >>> w = ArraySpec("w", (5, 2), "float32")
    >>> shard = from_placements(w, (2, 3), (1, 2), (Replicate(), Shard(0)))[0].shard
    >>> shard.box, shard.replica_id
    (Box(start=(4, 0), stop=(5, 2)), (1,))
    """
    if coordinate is None:
        return ()
    if not len(mesh_shape) == len(coordinate) == len(placements):
        raise ShapeError(
            "mesh, coordinate and placements differ in length",
            array.key,
            shape=tuple(mesh_shape),
            offset=tuple(coordinate),
            expected=len(mesh_shape),
            found=len(placements),
        )
    cuts: list[list[tuple[int, int]]] = [[] for _ in array.shape]
    places: list[list[int]] = [[] for _ in array.shape]
    replica: list[int] = []
    for size, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, Replicate):
            replica.append(index)
            continue
        dim = _axis(array, placement.dim)
        cuts[dim].append((placement.split_factor if isinstance(placement, StridedShard) else 1, size))
        places[dim].append(index)
    spans = [axis_spans(n, cut, place) for n, cut, place in zip(array.shape, cuts, places, strict=True)]
    return _placed(array, spans, tuple(replica) or (0,))


def axis_spans(extent: int, cuts: Sequence[tuple[int, int]], index: Sequence[int]) -> list[tuple[int, int]]:
    """Return the intervals of an axis that one place of the mesh holds, in the order of its local tensor.

    Each cut ``(split factor, size)`` is that of a mesh axis, in mesh order, on which the place is ``index[i]``.

    Examples
    --------
    >>> axis_spans(8, ((2, 2),), (1,))
    [(2, 4), (6, 8)]
    """
    spans: list[_Interval] = [(0, extent)] if extent else []
    for (parts, size), place in zip(cuts, index, strict=True):
        spans = _share(spans, parts, size, place)
    return spans


def spans_of_places(extent: int, cuts: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return the `axis_spans` of all places, row-major; in time that grows with their number.

    Examples
    --------
    >>> spans_of_places(8, ((2, 2),))
    [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]
    """
    spans: list[list[_Interval]] = [[(0, extent)] if extent else []]
    for parts, size in cuts:
        spans = [_share(outer, parts, size, place) for outer in spans for place in range(size)]
    return spans


def _axis(array: ArraySpec, dim: int) -> int:
    ndim = len(array.shape)
    if not -ndim <= dim < ndim:
        raise ShapeError(
            "a placement names an axis that the array lacks",
            array.key,
            shape=array.shape,
            expected=f"[0, {ndim})",
            found=dim,
        )
    return dim % ndim


def _share(spans: list[_Interval], parts: int, size: int, index: int) -> list[_Interval]:
    """Cut the concatenation of `spans` into `parts`, each into `size` shares; keep share `index` of each part."""
    extent = sum(hi - lo for lo, hi in spans)
    mine: list[_Interval] = []
    begin = 0
    for part in chunked_sizes(extent, parts):
        share = -(-part // size)  # as `chunked_sizes` has them, without a list of all
        low, high = (begin + min(i * share, part) for i in (index, index + 1))
        mine += _window(spans, low, high)
        begin += part
    return joined(mine)


def _window(spans: list[_Interval], low: int, high: int) -> list[_Interval]:
    """Return elements ``[low, high)`` of the concatenation of `spans`, as intervals."""
    found: list[_Interval] = []
    offset = 0
    for lo, hi in spans:
        a, b = max(low - offset, 0), min(high - offset, hi - lo)
        if a < b:
            found.append((lo + a, lo + b))
        offset += hi - lo
    return found


def _placed(array: ArraySpec, spans: list[list[_Interval]], replica: tuple[int, ...]) -> tuple[PlacedShard, ...]:
    if not all(spans):
        # An empty share lies at the end of its axis: the convention of DTensor's own offsets.
        start = tuple(s[0][0] if s else n for s, n in zip(spans, array.shape, strict=True))
        stop = tuple(s[0][1] if s else n for s, n in zip(spans, array.shape, strict=True))
        box = Box(start, stop)
        return (PlacedShard(ShardSpec(array, box, replica), Box.from_shape(box.shape)),)
    local_starts = [[0, *accumulate(hi - lo for lo, hi in s)][:-1] for s in spans]
    placed: list[PlacedShard] = []
    for pick in product(*(range(len(s)) for s in spans)):
        low = tuple(spans[axis][i][0] for axis, i in enumerate(pick))
        high = tuple(spans[axis][i][1] for axis, i in enumerate(pick))
        local = tuple(local_starts[axis][i] for axis, i in enumerate(pick))
        box = Box(low, high)
        placed.append(PlacedShard(ShardSpec(array, box, replica), Box.from_shape(box.shape, local)))
    return tuple(placed)
