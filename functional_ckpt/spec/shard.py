"""`ShardSpec`: which part of which array one rank holds; `World`: all ranks together."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from operator import le

import attrs
import numpy as np

from functional_ckpt.errors import ShapeError
from functional_ckpt.spec.array import MAX_KNOWN, ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.flat import flat_boxes, flat_runs, joined

__all__ = [
    "Fragment",
    "NarrowedRun",
    "ShardSpec",
    "World",
    "fragments",
    "from_rank_offsets",
    "known_shard",
    "narrow",
    "narrow_runs",
]


@attrs.frozen(order=True)
class Fragment:
    """Region `box` of the global array, lying at elements ``[run, run + box.size)`` of a local C-order buffer.

    Examples
    --------
    >>> Fragment(Box((2, 0), (3, 4)), 8).box.size
    4
    """

    box: Box
    run: int


def _replica(replica_id: int | Iterable[int]) -> tuple[int, ...]:
    return (int(replica_id),) if isinstance(replica_id, int) else tuple(map(int, replica_id))


@attrs.frozen
class ShardSpec:
    """One local buffer of an array.

    `box` is where the (unflattened) shard lies in the global array, prepended axes included as extents
    of 1. `flat` (half-open, elements of the flattened box) says that the buffer holds only that range.
    `replica_id` tells copies of one shard apart; all zeros is the main one. `grid` is the number of
    equal fragments per axis when the array is cut regularly, else None.

    Raises
    ------
    ShapeError
        If the box leaves the array, or `flat` leaves the box.

    Examples
    --------
    >>> ShardSpec(ArraySpec("w", (4, 4), "float32"), Box((0, 0), (2, 4))).is_main
    True
    """

    array: ArraySpec
    box: Box
    replica_id: tuple[int, ...] = attrs.field(default=(0,), converter=_replica)
    flat: tuple[int, int] | None = None
    grid: tuple[int, ...] | None = None

    def __attrs_post_init__(self) -> None:
        inside = len(self.box.stop) == len(self.array.shape) and all(map(le, self.box.stop, self.array.shape))
        if not inside:
            raise ShapeError(
                "a shard leaves its array",
                self.key,
                shape=self.array.shape,
                offset=self.box.start,
                expected=f"a box within {self.array.shape}",
                found=f"{self.box.start} to {self.box.stop}",
            )
        if self.flat is not None and not 0 <= self.flat[0] <= self.flat[1] <= self.box.size:
            raise ShapeError(
                "a flattened range leaves its shard",
                self.key,
                shape=self.box.shape,
                offset=self.box.start,
                expected=f"0 <= start <= stop <= {self.box.size}",
                found=self.flat,
            )

    @property
    def key(self) -> str:
        """Key of the array."""
        return self.array.key

    @property
    def is_main(self) -> bool:
        """Whether a save with ``replicas="declared"`` writes this copy."""
        return not any(self.replica_id)

    @property
    def size(self) -> int:
        """Elements in the local buffer."""
        return self.box.size if self.flat is None else self.flat[1] - self.flat[0]

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of the local buffer: that of the box, or one axis for a flat shard."""
        return self.box.shape if self.flat is None else (self.size,)

    @property
    def identity(self) -> tuple[Box, tuple[int, int]]:
        """What replicas have in common: box and flat range."""
        return self.box, self.flat or (0, self.box.size)


#: A `ShardSpec`, the same object for the same arguments: checked once, for the thousands that a state has.
known_shard = lru_cache(maxsize=MAX_KNOWN)(ShardSpec)


def fragments(shard: ShardSpec) -> tuple[Fragment, ...]:
    """Return the shard as boxes that are contiguous runs of its buffer, in buffer order, none empty.

    Examples
    --------
    >>> w = ArraySpec("w", (4, 4), "float32")
    >>> [f.run for f in fragments(ShardSpec(w, Box((0, 0), (2, 4)), 0, (3, 8)))]
    [0, 1]
    """
    if shard.flat is None:
        return (Fragment(shard.box, 0),) if shard.box.size else ()
    found: list[Fragment] = []
    run = 0
    for box in flat_boxes(shard.box.shape, *shard.flat):
        found.append(Fragment(box.shift(shard.box.start), run))
        run += box.size
    return tuple(found)


def _tuples(ranks: Iterable[Iterable[ShardSpec]]) -> tuple[tuple[ShardSpec, ...], ...]:
    return tuple(map(tuple, ranks))


@attrs.frozen
class World:
    """What every rank holds: ``ranks[r]`` are the shards of rank r, in the order of its buffers.

    Examples
    --------
    >>> w = ArraySpec("w", (4,), "int8")
    >>> World(((ShardSpec(w, Box((0,), (2,))),), (ShardSpec(w, Box((2,), (4,))),))).size
    2
    """

    ranks: tuple[tuple[ShardSpec, ...], ...] = attrs.field(converter=_tuples)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def by_key(self) -> dict[str, list[tuple[int, int, ShardSpec]]]:
        """Return ``key -> [(rank, position among the rank's shards, shard), ...]``, keys sorted.

        Examples
        --------
        >>> w = ArraySpec("w", (4,), "int8")
        >>> list(World(((ShardSpec(w, Box((0,), (4,))),),)).by_key())
        ['w']
        """
        found: dict[str, list[tuple[int, int, ShardSpec]]] = {}
        for rank, shards in enumerate(self.ranks):
            for position, shard in enumerate(shards):
                found.setdefault(shard.key, []).append((rank, position, shard))
        return dict(sorted(found.items()))


def from_rank_offsets(
    key: str,
    dtype: str,
    local_shape: Sequence[int],
    *rank_offsets: tuple[int, int, int],
    replica_id: int | Iterable[int] = 0,
    prepend_axes: int = 0,
) -> ShardSpec:
    """Return the shard of a regular grid from ``(axis, index, fragments)`` triples, axes global.

    Parameters
    ----------
    key, dtype
        The array's key, and its data type by name.
    local_shape
        Shape of what the rank holds, in elements.
    rank_offsets
        For each global axis that is cut: into how many equal fragments, and which of them this is, from 0. Axes not
        named are not cut.
    replica_id
        Which copy this is; 0 is the main one.
    prepend_axes
        So many first axes of the array are absent from `local_shape`; the shard has extent 1 on them.

    Raises
    ------
    ShapeError
        If an axis is out of range or repeated, or not ``0 <= index < fragments``.

    Examples
    --------
    >>> from_rank_offsets("w", "float32", (2, 3), (0, 1, 4)).box
    Box(start=(2, 0), stop=(4, 3))
    """
    local = (1,) * prepend_axes + tuple(local_shape)
    counts, offsets = [1] * len(local), [0] * len(local)
    seen: list[int] = []
    for axis, index, count in rank_offsets:
        if not 0 <= axis < len(local) or axis in seen or not 0 <= index < count:
            raise ShapeError(
                "a rank offset is invalid",
                key,
                shape=local,
                expected=f"(axis, index, fragments), each axis in [0, {len(local)}) once, 0 <= index < fragments",
                found=(axis, index, count),
            )
        seen.append(axis)
        counts[axis], offsets[axis] = count, index * local[axis]
    shape = tuple(n * c for n, c in zip(local, counts, strict=True))
    array = ArraySpec(key, shape, dtype)
    return ShardSpec(array, Box.from_shape(local, offsets), replica_id, None, tuple(counts))


def narrow(shard: ShardSpec, axis: int, start: int, length: int) -> tuple[ShardSpec, ...]:
    """Narrow a shard as every rank narrows its own: elements ``[start, start + length)`` of local `axis`.

    The array keeps `length` elements per fragment, so its extent and the shard's offset along `axis` scale by
    ``length / local extent``. A flat shard gives one shard per contiguous piece of its buffer that survives
    (possibly none); otherwise the answer has one element.

    Raises
    ------
    ShapeError
        If the range leaves the shard, or extent and offset are not multiples of the local extent.

    Examples
    --------
    >>> narrow(from_rank_offsets("w", "int8", (4,), (0, 1, 3)), 0, 1, 2)[0].box
    Box(start=(2,), stop=(4,))
    """
    local = shard.box.shape
    if not 0 <= axis < len(local) or start < 0 or length < 0 or start + length > local[axis]:
        raise ShapeError(
            "a narrowed range leaves the shard",
            shard.key,
            shape=local,
            offset=shard.box.start,
            expected="0 <= start, start + length <= local extent of an existing axis",
            found=(axis, start, length),
        )
    extent = local[axis]
    if extent and (shard.array.shape[axis] % extent or shard.box.start[axis] % extent):
        raise ShapeError(
            "narrowing needs a regular grid along the axis",
            shard.key,
            shape=shard.array.shape,
            offset=shard.box.start,
            expected=f"multiples of {extent} along axis {axis}",
        )
    array = attrs.evolve(shard.array, shape=_scaled(shard.array.shape, axis, length, extent))
    offset = _scaled(shard.box.start, axis, length, extent)
    box = Box.from_shape((*local[:axis], length, *local[axis + 1 :]), offset)
    plain = ShardSpec(array, box, shard.replica_id, None, shard.grid)
    if shard.flat is None:
        return (plain,)
    ranges = joined(run.shard.flat or (0, 0) for run in narrow_runs(shard, axis, start, length))
    return tuple(attrs.evolve(plain, flat=flat) for flat in ranges)


@attrs.frozen
class NarrowedRun:
    """A flat shard of a narrowed array, and the elements ``[start, stop)`` of the original buffer that hold it."""

    shard: ShardSpec
    start: int
    stop: int


def narrow_runs(shard: ShardSpec, axis: int, start: int, length: int) -> tuple[NarrowedRun, ...]:
    """Narrow a flat shard as `narrow` does, into one shard per contiguous run of its buffer that survives.

    `narrow` returns the shards of a new buffer; here every shard is a run of the original buffer, so it can be a view.
    Runs are in the order of the buffer and never adjacent; along axis 0 there is at most one.

    Raises
    ------
    ShapeError
        As `narrow`.

    Examples
    --------
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> w = ArraySpec("w", (2, 3), "int8")
    >>> for run in narrow_runs(ShardSpec(w, w.box, 0, (1, 6)), 1, 1, 2):
    ...     print(run.start, run.stop, run.shard.flat)
    0 2 (0, 2)
    3 5 (2, 4)
    """
    whole = narrow(attrs.evolve(shard, flat=None), axis, start, length)[0]
    local = shard.box.shape
    low, high = shard.flat or (0, shard.box.size)
    begin = tuple(start if i == axis else 0 for i in range(len(local)))
    kept = Box.from_shape(whole.box.shape, begin)
    runs = joined(
        run
        for piece in flat_boxes(local, low, high)
        if (common := piece.intersect(kept)) is not None
        for run in flat_runs(local, common)
    )
    strides = tuple(prod(kept.shape[i + 1 :]) for i in range(len(local)))
    found: list[NarrowedRun] = []
    for a, b in runs:
        # All cells of a run are kept, so it is contiguous in the narrowed box too, from the place of its first cell.
        cell = np.unravel_index(a, local)
        first = sum((int(c) - o) * n for c, o, n in zip(cell, begin, strides, strict=True))
        found.append(NarrowedRun(attrs.evolve(whole, flat=(first, first + b - a)), a - low, b - low))
    return tuple(found)


def _scaled(values: tuple[int, ...], axis: int, length: int, extent: int) -> tuple[int, ...]:
    scaled = values[axis] // extent * length if extent else 0
    return (*values[:axis], scaled, *values[axis + 1 :])
