"""Who writes what: `plan_save` over a whole world, `restrict` to a rank, `plan_local_save` without the others."""

from collections.abc import Sequence

import attrs

from functional_ckpt.errors import (
    LayoutError,
    ProblemError,
    ReplicaError,
    SpecError,
    raise_problems,
)
from functional_ckpt.plan.check import check_agreement, check_cover
from functional_ckpt.plan.layout import ChunkGrid, Layout, LayoutPolicy, choose_layout
from functional_ckpt.plan.replica import Holder, choose_writers
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.sharding import ShardSpec, World, fragments

__all__ = [
    "ArrayPlan",
    "ArrayWrite",
    "Header",
    "Move",
    "SavePlan",
    "SharedDigest",
    "plan_local_save",
    "plan_save",
    "restrict",
]


@attrs.frozen
class ArrayPlan:
    """One array of the checkpoint and its layout."""

    spec: ArraySpec
    layout: Layout

    @property
    def grid(self) -> ChunkGrid:
        """The chunk grid."""
        return ChunkGrid(self.spec.shape, self.layout.chunk)


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
    """Chunk `index` of `key` is written in several pieces; `rank` digests it when all have written."""

    key: str
    index: tuple[int, ...]
    rank: int


@attrs.frozen(order=True)
class Move:
    """Region `box` of `key` travels from rank `source` to rank `target` (the owned rung; none are planned yet)."""

    key: str
    box: Box
    source: int
    target: int


@attrs.frozen
class SavePlan:
    """Everything that is written, by rank; all tuples sorted, so equal inputs give equal plans.

    Examples
    --------
    >>> w = ArraySpec("w", (4,), "int8")
    >>> plan = plan_save(World(((ShardSpec(w, w.box),),)), LayoutPolicy())
    >>> [(x.rank, x.box) for x in plan.writes]
    [(0, Box(start=(0,), stop=(4,)))]
    """

    arrays: tuple[ArrayPlan, ...]
    writes: tuple[ArrayWrite, ...]
    headers: tuple[Header, ...]
    digests: tuple[SharedDigest, ...] = ()
    moves: tuple[Move, ...] = ()


def plan_save(world: World, policy: LayoutPolicy, replicas: str = "elect", shared_ok: bool = True) -> SavePlan:
    """Plan the save of a whole world; pure, and the same for every order of ranks' shards.

    `replicas` is the writer rule (``"declared"`` or ``"elect"``), `shared_ok` whether the store updates part of
    a chunk atomically.

    Raises
    ------
    SpecError, LayoutError
        With every problem of the world at once: gaps, overlaps, doubled or missing main replicas, disagreements.

    Examples
    --------
    >>> w = ArraySpec("w", (4,), "int8")
    >>> plan_save(World(((ShardSpec(w, Box((0,), (3,))),),)), LayoutPolicy())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    functional_ckpt.errors.GapError: no rank holds some cells: key 'w', shape (4,), offset (3,), ...
    """
    arrays: list[ArrayPlan] = []
    writes: list[ArrayWrite] = []
    headers: list[Header] = []
    digests: list[SharedDigest] = []
    problems: list[ProblemError] = []
    layouts: dict[object, Layout] = {}
    for key, holders in world.by_key().items():
        pieces, found = _pieces(key, holders, replicas)
        problems += found
        if found:
            continue
        array = holders[0][2].array
        try:
            layout = _layout(array, pieces, policy, shared_ok, layouts)
        except LayoutError as error:
            problems.append(error)
            continue
        plan = ArrayPlan(array, layout)
        arrays.append(plan)
        writes += [w for w in pieces if w.box.size]
        headers.append(Header(key, pieces[0].rank))
        digests += _shared(plan, pieces)
    raise_problems(problems)
    return SavePlan(tuple(arrays), tuple(writes), tuple(headers), tuple(sorted(digests)))


def restrict(plan: SavePlan, rank: int) -> SavePlan:
    """Return the part of `plan` that `rank` does; the restrictions to all ranks partition the plan.

    Examples
    --------
    >>> w = ArraySpec("w", (4,), "int8")
    >>> plan = plan_save(World(((ShardSpec(w, w.box),), ())), LayoutPolicy())
    >>> len(restrict(plan, 0).writes), len(restrict(plan, 1).writes)
    (1, 0)
    """
    writes = tuple(w for w in plan.writes if w.rank == rank)
    headers = tuple(h for h in plan.headers if h.rank == rank)
    digests = tuple(d for d in plan.digests if d.rank == rank)
    moves = tuple(m for m in plan.moves if rank in (m.source, m.target))
    mine = {w.key for w in writes} | {h.key for h in headers}
    arrays = tuple(a for a in plan.arrays if a.spec.key in mine)
    return SavePlan(arrays, writes, headers, digests, moves)


def plan_local_save(rank: int, local: Sequence[ShardSpec], policy: LayoutPolicy, shared_ok: bool = True) -> SavePlan:
    """Plan what `rank` does from its own shards alone: ``restrict(plan_save(world, policy, "declared"), rank)``.

    Every shard must know its regular grid, and main replicas must be declared; then layout, writers and
    digests follow from local facts. Costs O(local shards), whatever the number of ranks.

    Raises
    ------
    SpecError
        For a shard without a grid, flat, or of an array without cells: those worlds need gathering.

    Examples
    --------
    >>> from functional_ckpt.spec.sharding import from_rank_offsets
    >>> plan = plan_local_save(1, [from_rank_offsets("w", "int8", (4,), (0, 1, 2))], LayoutPolicy())
    >>> plan.writes[0].box, plan.headers
    (Box(start=(4,), stop=(8,)), ())
    """
    problems = [p for shard in local if (p := _needs_gathering(rank, shard)) is not None]
    raise_problems(problems)
    arrays: dict[str, ArrayPlan] = {}
    writes: list[ArrayWrite] = []
    digests: list[SharedDigest] = []
    for position, shard in enumerate(local):
        if not shard.is_main:
            continue
        plan = arrays.get(shard.key)
        if plan is None:
            layout = choose_layout(shard.array, _grid_faces(shard), policy, shared_ok)
            plan = arrays[shard.key] = ArrayPlan(shard.array, layout)
        write = ArrayWrite(shard.key, shard.box, rank, position, 0)
        writes.append(write)
        digests += _shared(plan, [write])
    headers = tuple(Header(w.key, rank) for w in sorted(writes) if not any(w.box.start))
    return SavePlan(tuple(a for _, a in sorted(arrays.items())), tuple(sorted(writes)), headers, tuple(sorted(digests)))


def _layout(
    array: ArraySpec, pieces: Sequence[ArrayWrite], policy: LayoutPolicy, shared_ok: bool, known: dict[object, Layout]
) -> Layout:
    """Return the layout; arrays alike in all that decides it share one (optimizer states come by the thousand)."""
    boxes = tuple(w.box for w in pieces)
    alike = (array.shape, array.dtype, policy.codecs_of(array.key), boxes)
    layout = known.get(alike)
    if layout is None:
        layout = known[alike] = choose_layout(array, boxes, policy, shared_ok)
    return layout


def _pieces(key: str, holders: Sequence[Holder], rule: str) -> tuple[list[ArrayWrite], list[ProblemError]]:
    """Return the writes of one array in row-major order (an empty one stands for an array without cells)."""
    rank, position, shard = holders[0]
    whole = shard.flat is None and shard.box.shape == shard.array.shape and shard.box.size
    if len(holders) == 1 and whole and (rule == "elect" or shard.is_main):
        return [ArrayWrite(key, shard.box, rank, position, 0)], []
    problems: list[ProblemError] = check_agreement(holders)
    if problems:
        return [], problems
    writers, doubled = choose_writers(holders, rule)
    if doubled:
        return [], list(doubled)
    array = holders[0][2].array
    pieces = sorted(
        ArrayWrite(key, f.box, rank, position, f.run) for rank, position, shard in writers for f in fragments(shard)
    )
    problems = check_cover(array, [(w.rank, w.box) for w in pieces])
    if problems or pieces:
        return pieces, problems
    if not writers:
        return [], [
            ReplicaError("an empty array has no main replica", key, tuple(sorted({h[0] for h in holders})), array.shape)
        ]
    rank, position, shard = min(writers, key=lambda h: (h[2].identity, h[0]))
    return [ArrayWrite(key, shard.box, rank, position, 0)], []


def _shared(plan: ArrayPlan, pieces: Sequence[ArrayWrite]) -> list[SharedDigest]:
    """Return the chunks written in several pieces, each digested by whoever writes its first cell."""
    if plan.layout.rung != "shared":
        return []
    grid = plan.grid
    found: list[SharedDigest] = []
    for piece in pieces:
        for index in grid.touched(piece.box):
            chunk = grid.box(index)
            first = Box.from_shape((1,) * chunk.ndim, chunk.start)
            if piece.box.contains(first) and not piece.box.contains(chunk):
                found.append(SharedDigest(piece.key, index, piece.rank))
    return found


def _grid_faces(shard: ShardSpec) -> list[Box]:
    """Return boxes whose faces are those of the shard's regular grid: its first cells along each axis."""
    shape = shard.array.shape
    cell = tuple(n // count for n, count in zip(shape, shard.grid or (), strict=True))
    return [Box.from_shape(cell)]


def _needs_gathering(rank: int, shard: ShardSpec) -> SpecError | None:
    regular = (
        shard.grid is not None
        and shard.flat is None
        and len(shard.grid) == len(shard.array.shape)
        and all(c >= 1 and n % c == 0 for n, c in zip(shard.array.shape, shard.grid, strict=True))
        and all(e * c == n for e, c, n in zip(shard.box.shape, shard.grid, shard.array.shape, strict=True))
    )
    if regular and shard.array.nbytes:
        return None
    return SpecError(
        "planning without the other ranks needs a regular grid", shard.key, rank, shard.array.shape,
        shard.box.start, "a grid of equal, non-empty shards", shard.grid, "Use plan_save on the gathered world",
    )  # fmt: skip
