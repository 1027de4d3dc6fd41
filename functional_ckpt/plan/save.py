"""Save plans: `plan_save` for a whole world, `restrict` for the part of one rank."""

from collections.abc import Sequence
from functools import cached_property

import attrs
import numpy as np

from functional_ckpt.errors import ProblemError, ReplicaError, raise_problems
from functional_ckpt.plan.check import check_conflicts, check_cover
from functional_ckpt.plan.derived import Deriving
from functional_ckpt.plan.ladder import array_plans
from functional_ckpt.plan.layout import ArrayPlan, LayoutPolicy
from functional_ckpt.plan.owner import Owners, choose_owners, with_waves
from functional_ckpt.plan.pieces import Pieces, cut_at_chunks, pieces_of, row_order
from functional_ckpt.plan.replica import choose_writers
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.columns import Ints, runs, to_column
from functional_ckpt.spec.shard import Fragment, World
from functional_ckpt.spec.table import ShardTable, padded, padded_shapes, unpadded, widest
from functional_ckpt.spec.tiling import surely_tiled

__all__ = ["ArrayWrite", "Header", "Move", "SavePlan", "SharedDigest", "check_main_replicas", "plan_save", "restrict"]

GIB = 2**30


@attrs.frozen(order=True)
class ArrayWrite:
    """`rank` writes region `box` of array `key` from elements ``[run, run + size)`` of its shard number `shard`."""

    key: str
    box: Box
    rank: int
    shard: int
    run: int


@attrs.frozen(order=True)
class Header:
    """`rank` writes the metadata of array `key`."""

    key: str
    rank: int


@attrs.frozen(order=True)
class SharedDigest:
    """Chunk `index` of `key` is written in several pieces; `rank` digests it after all ranks have written."""

    key: str
    index: tuple[int, ...]
    rank: int


@attrs.frozen(order=True)
class Move:
    """Region `box` of `key`, part of chunk `index`, goes from rank `source` to rank `target`, which may be the same.

    It is part of `fragment` of shard number `shard` of the source; both are None in the plan of another rank.
    """

    key: str
    index: tuple[int, ...]
    box: Box
    source: int
    target: int
    wave: int
    shard: int | None
    fragment: Fragment | None


@attrs.frozen
class SavePlan(Deriving):
    """All writes and moves of a save, by rank, as columns; equal inputs give equal plans.

    `writes`, `moves`, `headers` and `digests` return the rows as values: for people and tests, not for large plans.

    Examples
    --------
    >>> from functional_ckpt.spec.shard import ShardSpec
    >>> w = ArraySpec("w", (4,), "int8")
    >>> plan = plan_save(World(((ShardSpec(w, w.box),),)), LayoutPolicy())
    >>> [(x.rank, x.box) for x in plan.writes]
    [(0, Box(start=(0,), stop=(4,)))]
    """

    arrays: tuple[ArrayPlan, ...]
    pieces: Pieces
    header_rows: Owners
    digest_rows: Owners

    @property
    def writes(self) -> tuple[ArrayWrite, ...]:
        """Regions that their rank writes directly from its buffer."""
        names = ("array", "chunk", "source", "shard", "run")
        return tuple(
            ArrayWrite(self.arrays[array].spec.key, self._box(array, row), source, shard, run)
            for row, (array, chunk, source, shard, run) in enumerate(self._rows(*names))
            if chunk < 0
        )

    @property
    def moves(self) -> tuple[Move, ...]:
        """Regions that go to the rank which owns their chunk; those on that rank itself included."""
        names = ("array", "chunk", "source", "target", "wave", "shard", "run")
        found: list[Move] = []
        for row, (array, chunk, source, target, wave, shard, run) in enumerate(self._rows(*names)):
            if chunk >= 0:
                origin = (shard, self._fragment(array, row, run)) if shard >= 0 else (None, None)
                found.append(Move(*self._chunk(array, chunk), self._box(array, row), source, target, wave, *origin))
        return tuple(found)

    @property
    def headers(self) -> tuple[Header, ...]:
        """The rank that writes the metadata of each array."""
        pairs = zip(self.header_rows.array.tolist(), self.header_rows.rank.tolist(), strict=True)
        return tuple(Header(self.arrays[array].spec.key, rank) for array, rank in pairs)

    @property
    def digests(self) -> tuple[SharedDigest, ...]:
        """The rank that digests each chunk which several ranks write."""
        rows = self.digest_rows
        triples = zip(rows.array.tolist(), rows.chunk.tolist(), rows.rank.tolist(), strict=True)
        return tuple(SharedDigest(*self._chunk(array, chunk), rank) for array, chunk, rank in triples)

    @cached_property
    def nbytes(self) -> Ints:
        """Bytes of elements of each piece."""
        itemsizes = np.array([plan.spec.itemsize for plan in self.arrays], np.int64)
        return to_column(self.pieces.sizes * itemsizes[self.pieces.array])

    def written_nbytes(self, rank: int) -> int:
        """Return the bytes of elements that `rank` writes to storage."""
        return int(self.nbytes[self.pieces.target == rank].sum())

    def fragment(self, row: int) -> Fragment:
        """Return the fragment of the rank's shard that a piece is part of."""
        return self._fragment(int(self.pieces.array[row]), row, int(self.pieces.run[row]))

    def file_count(self, rank: int) -> int:
        """Return how many files `rank` writes: chunks that it writes, wholly or in part, and metadata."""
        mine = self.pieces.take(self.pieces.target == rank)
        ndim = mine.start.shape[1]
        shapes = padded_shapes([plan.spec for plan in self.arrays], ndim)
        direct = cut_at_chunks(mine.take(mine.chunk < 0), shapes, padded_chunks(self.arrays, ndim))
        chunks = [np.stack([rows.array, rows.chunk]) for rows in (direct, mine.take(mine.chunk >= 0))]
        headers = int(np.count_nonzero(self.header_rows.rank == rank))
        return headers + int(np.unique(np.concatenate(chunks, axis=1), axis=1).shape[1])

    def _rows(self, *names: str) -> "zip[tuple[int, ...]]":
        return zip(*(getattr(self.pieces, name).tolist() for name in names), strict=True)

    def _chunk(self, array: int, chunk: int) -> tuple[str, tuple[int, ...]]:
        return self.arrays[array].spec.key, self.arrays[array].grid.index(chunk)

    def _box(self, array: int, row: int) -> Box:
        return unpadded(self.pieces.start[row], self.pieces.stop[row], len(self.arrays[array].spec.shape))

    def _fragment(self, array: int, row: int, run: int) -> Fragment:
        box = unpadded(self.pieces.low[row], self.pieces.high[row], len(self.arrays[array].spec.shape))
        return Fragment(box, run)


def plan_save(
    world: World | ShardTable,
    policy: LayoutPolicy,
    replicas: str = "elect",
    shared_ok: bool = True,
    owned_ok: bool = True,
    budget_nbytes: int = GIB,
) -> SavePlan:
    """Plan the save of a whole world. Pure; the order of the shards on a rank does not matter.

    `replicas` is the rule that picks the written copy (``"declared"`` or ``"elect"``), `shared_ok` whether the store
    updates part of a chunk atomically, `owned_ok` whether ranks can exchange data, `budget_nbytes` the memory that a
    rank may use for assembling chunks.

    Raises
    ------
    SpecError, LayoutError
        With every problem of the world at once: gaps, overlaps, several or missing main replicas, conflicting specs.
    PolicyError
        If the budget is smaller than a chunk that has to be assembled.

    Examples
    --------
    >>> from functional_ckpt.spec.shard import ShardSpec
    >>> w = ArraySpec("w", (4,), "int8")
    >>> plan_save(World(((ShardSpec(w, Box((0,), (3,))),),)), LayoutPolicy())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    functional_ckpt.errors.GapError: no rank holds some cells: key 'w', shape (4,), offset (3,), ...
    """
    table, conflicts = (world, ()) if isinstance(world, ShardTable) else ShardTable.of_world(world)
    problems: list[ProblemError] = check_conflicts(conflicts)
    writers, unwritten = choose_writers(table, replicas)
    problems += unwritten
    pieces = pieces_of(table, writers)
    problems += _uncovered(table, pieces, {problem.key for problem in unwritten})
    empty, ownerless = _writers_of_empty(table, replicas)
    problems += ownerless
    arrays, unfit = array_plans(table.arrays, _faces(table.arrays, pieces), policy, shared_ok, owned_ok)
    known = {problem.key for problem in problems}
    raise_problems([*problems, *(problem for problem in unfit if problem.key not in known)])
    return plan_of_fragments(arrays, pieces, empty, budget_nbytes)


def check_main_replicas(table: ShardTable) -> list[ProblemError]:
    """Return a problem for each array that its main replicas do not cover exactly once; other replicas are ignored.

    Examples
    --------
    >>> from functional_ckpt.spec.shard import ShardSpec
    >>> w = ArraySpec("w", (4,), "int8")
    >>> table = ShardTable.of(0, [ShardSpec(w, w.box, 1), ShardSpec(w, Box((0,), (3,)))])
    >>> [type(problem).__name__ for problem in check_main_replicas(table)]
    ['GapError']
    """
    mains = attrs.evolve(table, rows=table.rows.take(table.rows.main > 0))
    writers, problems = choose_writers(mains, "declared")
    return [*problems, *_uncovered(mains, pieces_of(mains, writers), {problem.key for problem in problems})]


def plan_of_fragments(arrays: tuple[ArrayPlan, ...], fragments: Pieces, empty: Owners, budget_nbytes: int) -> SavePlan:
    """Return the plan that writes `fragments`; `empty` has the writers of the metadata of arrays without cells."""
    ownerships = np.array([plan.layout.ownership for plan in arrays], str)
    ndim = fragments.start.shape[1]
    shapes = padded_shapes([plan.spec for plan in arrays], ndim)
    chunks = padded_chunks(arrays, ndim)
    is_owned = (ownerships == "owned")[fragments.array]
    moved, owned = choose_owners(cut_at_chunks(fragments.take(is_owned), shapes, chunks), arrays)
    moved = with_waves(moved, owned, arrays, budget_nbytes)
    pieces = Pieces.joined([fragments.take(~is_owned), moved])
    pieces = pieces.take(row_order(pieces, shapes)) if len(moved) else pieces
    begin, _ = runs(pieces.array)
    begun = Owners(pieces.array[begin], np.full(len(begin), -1), pieces.target[begin])
    shared = cut_at_chunks(fragments.take((ownerships == "shared")[fragments.array]), shapes, chunks)
    return SavePlan(arrays, pieces, by_array(begun, empty), _shared_digests(shared))


def by_array(*owners: Owners) -> Owners:
    """Return the rows of all `owners`, sorted by array."""
    rows = Owners.joined(owners)
    return rows.take(np.argsort(rows.array, kind="stable"))


def padded_chunks(arrays: Sequence[ArrayPlan], ndim: int) -> Ints:
    """Return the chunk shapes as rows, with ones in front.

    Examples
    --------
    >>> from functional_ckpt.plan.layout import Layout
    >>> plan = ArrayPlan(ArraySpec("w", (5,), "float32"), Layout("exclusive", (4,), (), "float32"))
    >>> padded_chunks([plan], 2).tolist()
    [[1, 4]]
    """
    return padded([plan.layout.chunk for plan in arrays], ndim, 1)


def restrict(plan: SavePlan, rank: int) -> SavePlan:
    """Return the part of `plan` that concerns `rank`: the pieces that it writes, sends or receives.

    Of a piece from another rank only the region is kept, not its place in the buffer of that rank.

    Examples
    --------
    >>> from functional_ckpt.spec.shard import ShardSpec
    >>> w = ArraySpec("w", (4,), "int8")
    >>> plan = plan_save(World(((ShardSpec(w, w.box),), ())), LayoutPolicy())
    >>> len(restrict(plan, 0).writes), len(restrict(plan, 1).writes)
    (1, 0)
    """
    pieces = plan.pieces.take((plan.pieces.source == rank) | (plan.pieces.target == rank))
    headers = plan.header_rows.take(plan.header_rows.rank == rank)
    digests = plan.digest_rows.take(plan.digest_rows.rank == rank)
    kept = np.unique(np.concatenate([pieces.array, headers.array, digests.array]))
    arrays = tuple(plan.arrays[number] for number in kept.tolist())
    ndim = widest(array.spec for array in arrays)
    foreign = pieces.source != rank
    blank = foreign[:, None]
    return SavePlan(
        arrays,
        attrs.evolve(
            pieces,
            array=np.searchsorted(kept, pieces.array),
            start=pieces.start[:, -ndim:],
            stop=pieces.stop[:, -ndim:],
            low=np.where(blank, -1, pieces.low[:, -ndim:]),
            high=np.where(blank, -1, pieces.high[:, -ndim:]),
            shard=np.where(foreign, -1, pieces.shard),
            run=np.where(foreign, -1, pieces.run),
        ),
        attrs.evolve(headers, array=np.searchsorted(kept, headers.array)),
        attrs.evolve(digests, array=np.searchsorted(kept, digests.array)),
    )


def _uncovered(table: ShardTable, pieces: Pieces, known: set[str | None]) -> list[ProblemError]:
    """Return the gaps and overlaps of all arrays with cells, except arrays with `known` problems."""
    tiled = surely_tiled(table.shapes, pieces.array, pieces.start, pieces.stop)
    problems: list[ProblemError] = []
    for number in np.flatnonzero(~tiled).tolist():
        spec = table.arrays[number]
        if spec.key not in known:
            mine = pieces.take(pieces.array == number)
            boxes = (unpadded(lo, hi, len(spec.shape)) for lo, hi in zip(mine.start, mine.stop, strict=True))
            problems += check_cover(spec, list(zip(mine.source.tolist(), boxes, strict=True)))
    return problems


def _writers_of_empty(table: ShardTable, rule: str) -> tuple[Owners, list[ProblemError]]:
    """Return the writers of metadata of arrays without cells: the lowest rank, or the lowest with a main replica.

    The latter by the rule ``"declared"``.
    """
    rows = table.rows
    held: list[tuple[int, int]] = []
    problems: list[ProblemError] = []
    for number in np.flatnonzero(table.shapes.prod(axis=1) == 0).tolist():
        spec, mine = table.arrays[number], rows.array == number
        holders = rows.rank[mine & (rows.main > 0) if rule == "declared" else mine]
        if len(holders):
            held.append((number, int(holders.min())))
        else:
            ranks = np.unique(rows.rank[mine]).tolist()
            problems.append(
                ReplicaError("an empty array has no main replica", spec.key, rank=tuple(ranks), shape=spec.shape)
            )
    return Owners.of_arrays(held), problems


def _faces(specs: Sequence[ArraySpec], pieces: Pieces) -> list[list[int]]:
    """Return for each array per axis the common divisor of the interior faces of its pieces, 0 for none."""
    shapes = padded_shapes(specs, pieces.start.shape[1])
    faces = np.zeros_like(shapes)
    if len(pieces):
        begin, _ = runs(pieces.array)
        stop = np.where(pieces.stop < shapes[pieces.array], pieces.stop, 0)
        both = np.gcd(pieces.start, stop)
        faces[pieces.array[begin]] = np.gcd.reduceat(both, begin, axis=0)
    return [row[len(row) - len(spec.shape) :] for spec, row in zip(specs, faces.tolist(), strict=True)]


def _shared_digests(pieces: Pieces) -> Owners:
    """Return the chunks that are written in several pieces; the rank that writes the first cell digests the chunk."""
    begin, counts = runs(pieces.array, pieces.chunk)
    shared = begin[counts > 1]
    return Owners(pieces.array[shared], pieces.chunk[shared], pieces.source[shared])
