"""Load plans: `plan_load` intersects wanted shards with stored arrays, `plan_read_once` gives each chunk one reader."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property, partial

import attrs
import numpy as np

from functional_ckpt.errors import (
    CastError,
    KeyMismatchError,
    ProblemError,
    ShapeError,
    raise_problems,
)
from functional_ckpt.plan.derived import Deriving
from functional_ckpt.plan.layout import ArrayPlan
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.plan.owner import choose_owners, with_waves
from functional_ckpt.plan.pieces import Pieces, cut_at_chunks, flattened
from functional_ckpt.plan.save import padded_chunks
from functional_ckpt.spec.array import can_cast
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.columns import Ints, runs
from functional_ckpt.spec.shard import Fragment, ShardSpec
from functional_ckpt.spec.table import padded, padded_shapes, unpadded, widened, widest

__all__ = ["ArrayRead", "Fill", "LoadPlan", "plan_load", "plan_read_once", "wanted_pieces"]


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
class LoadPlan(Deriving):
    """All reads and fills of one rank; the reads as columns, in the order of its shards.

    Each row of `pieces` is a region of array number `array` of `entries`, of which one shard wants a fragment.

    Examples
    --------
    >>> LoadPlan().reads
    ()
    """

    entries: tuple[ArrayEntry, ...] = ()
    pieces: Pieces = attrs.field(factory=partial(Pieces.none, 1))
    fills: tuple[Fill, ...] = ()

    @property
    def reads(self) -> tuple[ArrayRead, ...]:
        """The rows of `pieces` as values: for people and tests, not for large plans."""
        rows, reads = self.pieces, list[ArrayRead]()
        for row, (array, shard, run) in enumerate(zip(rows.array, rows.shard.tolist(), rows.run.tolist(), strict=True)):
            spec = self.entries[array].spec
            ndim = len(spec.shape)
            target = Fragment(unpadded(rows.low[row], rows.high[row], ndim), run)
            reads.append(ArrayRead(spec.key, unpadded(rows.start[row], rows.stop[row], ndim), shard, target))
        return tuple(reads)

    @cached_property
    def kinds(self) -> tuple[tuple[ArrayEntry, ...], Ints]:
        """An entry of each shape, data type and layout, and for each of `entries` the number of the one like it."""
        numbers: dict[Hashable, int] = {}
        like = [numbers.setdefault((e.spec.shape, e.spec.dtype, e.layout), len(numbers)) for e in self.entries]
        first = np.unique(like, return_index=True)[1]
        return tuple(self.entries[number] for number in first.tolist()), np.array(like, np.int64)

    @cached_property
    def cut(self) -> Pieces:
        """The reads cut at the borders of chunks, sorted by array, chunk and region."""
        kinds, like = self.kinds
        ndim = self.pieces.start.shape[1]
        shapes, chunks = padded_shapes([e.spec for e in kinds], ndim), padded_chunks([e.plan for e in kinds], ndim)
        return cut_at_chunks(self.pieces, shapes[like], chunks[like])


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
    entries: list[ArrayEntry] = []
    numbers: dict[str, int] = {}
    array: list[int] = []
    for shard in wanted:
        wish = shard.array
        entry = stored.get(wish.key)
        if entry is None or entry.spec is not wish:  # one object for nearly all of thousands
            problem = _mismatch(entry, shard, cast, allow_shape_mismatch)
            if problem is not None or entry is None:
                problems += [problem] if problem else []
                continue
        number = numbers.setdefault(entry.spec.key, len(entries))
        entries += [entry] if number == len(entries) else []
        array.append(number)
    raise_problems(problems)
    ndim = widest(entry.spec for entry in entries)
    fragments = _fragments(wanted, np.array(array, np.int64), ndim)
    stop = np.minimum(fragments.stop, padded_shapes([entry.spec for entry in entries], ndim)[fragments.array])
    reads = attrs.evolve(fragments, stop=stop).take(np.all(fragments.start < stop, axis=1))
    partly = fragments.take(np.any(stop < fragments.stop, axis=1))
    fills = [fill for row in range(len(partly)) for fill in _fills(wanted, entries, partly, row)]
    return LoadPlan(tuple(entries), reads, tuple(fills))


def _fragments(wanted: Sequence[ShardSpec], array: Ints, ndim: int) -> Pieces:
    """Return the fragments of all shards, none empty; `array` numbers the array of each."""
    start = padded([shard.box.start for shard in wanted], ndim, 0)
    stop = padded([shard.box.stop for shard in wanted], ndim, 1)
    nothing, position = np.zeros(len(wanted), np.int64), np.arange(len(wanted))
    whole = Pieces.uncut(array, start, stop, nothing, position, nothing)
    flat = [shard.flat or (0, -1) for shard in wanted]
    low, high = np.array(flat, np.int64).reshape(-1, 2).T
    pieces = flattened(whole, low, np.where(high < 0, whole.sizes, high))
    return pieces.take(pieces.sizes > 0)


def _fills(wanted: Sequence[ShardSpec], entries: Sequence[ArrayEntry], pieces: Pieces, row: int) -> Iterator[Fill]:
    """Yield what of a fragment is not stored."""
    spec, shard = entries[pieces.array[row]].spec, int(pieces.shard[row])
    target = Fragment(unpadded(pieces.start[row], pieces.stop[row], len(spec.shape)), int(pieces.run[row]))
    for box in target.box.subtract(spec.box):
        yield Fill(wanted[shard].key, box, shard, target)


def wanted_pieces(plan: LoadPlan, numbers: Mapping[str, int], ndim: int, rank: int) -> Pieces:
    """Return the reads of `rank`, to be sent to the other ranks; `numbers` numbers the stored arrays of the manifest.

    Examples
    --------
    >>> from functional_ckpt.plan.layout import Layout
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> w = ArraySpec("w", (4,), "int8")
    >>> stored = {"w": ArrayEntry(w, Layout("exclusive", (4,), (), "int8"), bytes(16))}
    >>> wanted_pieces(plan_load(stored, [ShardSpec(w, Box((2,), (4,)))]), {"w": 7}, 2, 1).start.tolist()
    [[0, 2]]
    """
    pieces = plan.pieces
    return attrs.evolve(
        pieces,
        array=np.array([numbers[entry.spec.key] for entry in plan.entries], np.int64)[pieces.array],
        start=widened(pieces.start, ndim, 0),
        stop=widened(pieces.stop, ndim, 1),
        low=widened(pieces.low, ndim, 0),
        high=widened(pieces.high, ndim, 1),
        source=np.full(len(pieces), rank),
        target=np.full(len(pieces), rank),
    )


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
