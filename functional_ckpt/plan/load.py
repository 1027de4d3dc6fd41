"""Load plans: `plan_load` intersects wanted shards with stored arrays, `plan_read_once` gives each chunk one reader."""

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from functional_ckpt.errors import (
    CastError,
    KeyMismatchError,
    ProblemError,
    ShapeError,
    raise_problems,
)
from functional_ckpt.plan.layout import ArrayPlan
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.plan.owner import choose_owners, with_waves
from functional_ckpt.plan.pieces import Pieces, cut_at_chunks
from functional_ckpt.plan.save import padded_chunks
from functional_ckpt.spec.array import can_cast
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.columns import runs
from functional_ckpt.spec.shard import Fragment, ShardSpec, fragments
from functional_ckpt.spec.table import padded, padded_shapes

__all__ = ["ArrayRead", "Fill", "LoadPlan", "plan_load", "plan_read_once", "reads_of", "wanted_pieces"]


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
    """Region `box` of wanted shard number `shard` is not stored and is filled with zeros."""

    key: str
    box: Box
    shard: int
    target: Fragment


@attrs.frozen
class LoadPlan:
    """All reads and fills of one rank, in the order of its shards."""

    reads: tuple[ArrayRead, ...]
    fills: tuple[Fill, ...] = ()


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


def wanted_pieces(plan: LoadPlan, numbers: Mapping[str, int], ndim: int, rank: int) -> Pieces:
    """Return the reads of `rank` as rows, to be sent to the other ranks; `numbers` numbers the stored arrays.

    Examples
    --------
    >>> from functional_ckpt.spec.box import Box
    >>> read = ArrayRead("w", Box((2,), (4,)), 0, Fragment(Box((2,), (4,)), 0))
    >>> wanted_pieces(LoadPlan((read,)), {"w": 7}, 2, 1).start.tolist()
    [[0, 2]]
    """
    reads = plan.reads
    pieces = Pieces.uncut(
        np.array([numbers[read.key] for read in reads], np.int64),
        padded([read.box.start for read in reads], ndim, 0),
        padded([read.box.stop for read in reads], ndim, 1),
        np.full(len(reads), rank),
        np.array([read.shard for read in reads], np.int64),
        np.array([read.target.run for read in reads], np.int64),
    )
    low = padded([read.target.box.start for read in reads], ndim, 0)
    return attrs.evolve(pieces, low=low, high=padded([read.target.box.stop for read in reads], ndim, 1))


def plan_read_once(
    arrays: Sequence[ArrayPlan], wanted: Sequence[Pieces], rank: int, budget_nbytes: int
) -> tuple[Pieces, Pieces]:
    """Plan the reads of all ranks so that each chunk has one reader: return the reads of `rank` alone, and the moves.

    `wanted` are the `wanted_pieces` of all ranks. If several pieces of a chunk are wanted, the reader is a rank that
    wants a largest one; a hash picks among equals. In the moves the reader is the `target` of each piece, and the rank
    that wants the piece its `source`.

    Raises
    ------
    PolicyError
        If the budget is smaller than a chunk and its messages.
    """
    ndim = wanted[0].start.shape[1]
    shapes = padded_shapes([plan.spec for plan in arrays], ndim)
    pieces = cut_at_chunks(Pieces.joined(wanted), shapes, padded_chunks(arrays, ndim))
    _, counts = runs(pieces.array, pieces.chunk)
    shared = np.repeat(counts > 1, counts)
    alone = pieces.take(~shared & (pieces.source == rank))
    moved, owned = choose_owners(pieces.take(shared), arrays)
    moved = with_waves(moved, owned, arrays, budget_nbytes)
    return alone, moved.take((moved.source == rank) | (moved.target == rank))


def reads_of(pieces: Pieces, arrays: Sequence[ArrayPlan]) -> tuple[ArrayRead, ...]:
    """Return rows as reads; the inverse of `wanted_pieces`."""
    reads: list[ArrayRead] = []
    names = ("array", "start", "stop", "low", "high", "shard", "run")
    rows = zip(*(getattr(pieces, name).tolist() for name in names), strict=True)
    for array, start, stop, low, high, shard, run in rows:
        spec = arrays[array].spec
        front = len(start) - len(spec.shape)
        target = Fragment(Box(low[front:], high[front:]), run)
        reads.append(ArrayRead(spec.key, Box(start[front:], stop[front:]), shard, target))
    return tuple(reads)


def _mismatch(entry: ArrayEntry | None, shard: ShardSpec, cast: str, reshape: bool) -> ProblemError | None:
    array = shard.array
    if entry is None:
        return KeyMismatchError("the checkpoint has no such array", array.key, shape=array.shape)
    stored = entry.spec
    if (stored.shape, stored.dtype) == (array.shape, array.dtype):
        return None
    if len(stored.shape) != len(array.shape) or (stored.shape != array.shape and not reshape):
        return ShapeError(
            "the stored array has another shape",
            array.key,
            expected=array.shape,
            found=stored.shape,
            remedy="Pass LoadPolicy(allow_shape_mismatch=True) to align at the origin and fill with zeros"
            if len(stored.shape) == len(array.shape)
            else "Load it in the stored shape and reshape it",
        )
    if not can_cast(stored.dtype, array.dtype, cast):
        wide_enough = "same_kind" if can_cast(stored.dtype, array.dtype, "same_kind") else "any"
        return CastError(
            "loading would change the data type",
            array.key,
            shape=array.shape,
            expected=array.dtype,
            found=stored.dtype,
            remedy=f"Pass LoadPolicy(cast={wide_enough!r})",
        )
    return None
