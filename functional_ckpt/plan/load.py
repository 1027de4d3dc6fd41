"""Who reads what: `plan_load` intersects wanted shards with stored arrays."""

from collections.abc import Mapping, Sequence

import attrs

from functional_ckpt.errors import (
    CastError,
    KeyMismatchError,
    ProblemError,
    ShapeError,
    raise_problems,
)
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.plan.save import Move
from functional_ckpt.spec.array import can_cast
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.sharding import Fragment, ShardSpec, fragments

__all__ = ["ArrayRead", "Fill", "LoadPlan", "plan_load"]


@attrs.frozen(order=True)
class ArrayRead:
    """Region `box` of stored array `key` goes to elements ``[run, ...)`` of wanted shard number `shard`.

    `target` is the fragment of the shard that `box` lies in (the whole of it unless shapes differ).
    """

    key: str
    box: Box
    shard: int
    target: Fragment


@attrs.frozen(order=True)
class Fill:
    """Region `box` of wanted shard number `shard` is not stored and becomes zero."""

    key: str
    box: Box
    shard: int
    target: Fragment


@attrs.frozen
class LoadPlan:
    """Everything one rank reads and fills, in the order of its shards."""

    reads: tuple[ArrayRead, ...]
    fills: tuple[Fill, ...] = ()
    moves: tuple[Move, ...] = ()


def plan_load(
    stored: Mapping[str, ArrayEntry],
    wanted: Sequence[ShardSpec],
    cast: str = "error",
    allow_shape_mismatch: bool = False,
) -> LoadPlan:
    """Plan the load of one rank's `wanted` shards from the `stored` arrays of a manifest.

    Reads and fills together cover every wanted cell exactly once. `cast` is ``"error"``, ``"same_kind"`` or
    ``"any"``. With `allow_shape_mismatch` the arrays are aligned at the origin and missing cells become `Fill`.

    Raises
    ------
    KeyMismatchError, ShapeError, CastError
        All problems at once, before anything is read.

    Examples
    --------
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> plan_load({}, [ShardSpec(ArraySpec("w", (1,), "int8"), Box((0,), (1,)))])
    Traceback (most recent call last):
    ...
    functional_ckpt.errors.KeyMismatchError: the checkpoint has no such array: key 'w', shape (1,)
    """
    problems: list[ProblemError] = []
    reads: list[ArrayRead] = []
    fills: list[Fill] = []
    for position, shard in enumerate(wanted):
        entry = stored.get(shard.key)
        problem = _mismatch(entry, shard, cast, allow_shape_mismatch)
        if problem is not None or entry is None:
            problems += [problem] if problem else []
            continue
        if shard.array.shape == entry.spec.shape:
            reads += [ArrayRead(shard.key, target.box, position, target) for target in fragments(shard)]
            continue
        whole = entry.spec.box
        for target in fragments(shard):
            common = target.box.intersect(whole)
            if common is not None:
                reads.append(ArrayRead(shard.key, common, position, target))
            outside = target.box.subtract(whole) if common != target.box else ()
            fills += [Fill(shard.key, box, position, target) for box in outside]
    raise_problems(problems)
    return LoadPlan(tuple(reads), tuple(fills))


def _mismatch(entry: ArrayEntry | None, shard: ShardSpec, cast: str, reshape: bool) -> ProblemError | None:
    array = shard.array
    if entry is None:
        return KeyMismatchError("the checkpoint has no such array", array.key, None, array.shape)
    stored = entry.spec
    if len(stored.shape) != len(array.shape) or (stored.shape != array.shape and not reshape):
        return ShapeError(
            "the stored array has another shape", array.key, None, None, None, array.shape, stored.shape,
            "Pass LoadPolicy(allow_shape_mismatch=True) to align at the origin and fill with zeros"
            if len(stored.shape) == len(array.shape) else None,
        )  # fmt: skip
    if not can_cast(stored.dtype, array.dtype, cast):
        return CastError(
            "loading would change the data type", array.key, None, array.shape, None, array.dtype, stored.dtype,
            f"Pass LoadPolicy(cast={'any' if not can_cast(stored.dtype, array.dtype, 'same_kind') else 'same_kind'!r})",
        )  # fmt: skip
    return None
