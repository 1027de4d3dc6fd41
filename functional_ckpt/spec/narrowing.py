"""Narrowing a flat shard without copying: which runs of its buffer survive, and as which shards."""

from math import prod

import attrs
import numpy as np

from functional_ckpt.spec.box import Box
from functional_ckpt.spec.flat import flat_boxes, flat_runs, joined
from functional_ckpt.spec.sharding import ShardSpec, narrow

__all__ = ["NarrowedRun", "narrow_runs"]


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
