"""`plan_local_save`: the part of one rank in a save, planned without the specs of the other ranks.

It is possible if a rank knows how the whole world holds its arrays: from a mesh with placements, or from a regular
grid of shards whose main replicas are declared. Its cost depends on the rank's own part, not on the number of ranks.
"""

from collections.abc import Sequence
from math import prod
from operator import mod, mul
from typing import Any

import attrs
import numpy as np

from functional_ckpt.errors import SpecError, raise_problems
from functional_ckpt.plan.layout import ArrayPlan, Layout, LayoutPolicy, layout_of_faces
from functional_ckpt.plan.owner import Owners, with_waves
from functional_ckpt.plan.pieces import Pieces, cut_at_chunks, row_order
from functional_ckpt.plan.placed import PlacedGroup
from functional_ckpt.plan.save import GIB, SavePlan, by_array, padded_chunks, restrict
from functional_ckpt.spec.columns import Ints
from functional_ckpt.spec.mesh import PlacedArray, Sharding, common_face, is_even
from functional_ckpt.spec.sharding import ShardSpec
from functional_ckpt.spec.table import key_hashes, padded, padded_shapes, widest

__all__ = ["local_array_plans", "needs_gathering", "plan_local_save"]


def plan_local_save(
    rank: int,
    local: Sequence[ShardSpec | PlacedArray],
    policy: LayoutPolicy,
    replicas: str = "elect",
    shared_ok: bool = True,
    owned_ok: bool = True,
    budget_nbytes: int = GIB,
    arrays: tuple[ArrayPlan, ...] | None = None,
) -> SavePlan:
    """Plan the part of `rank` from its own specs alone: equal to ``restrict(plan_save(world, ...), rank)``.

    `local` are arrays placed on meshes, and shards that know their regular grid (then main replicas must be
    declared). Shards are numbered in this order; a placed array counts as one shard per box that the rank holds, at
    least one. `arrays` is the result of `local_array_plans` for the same arguments, if the caller has it.

    Raises
    ------
    SpecError
        For a shard that needs gathering: one without a grid, a flat one, one of an array without cells, or one so
        small that its pieces would have to move.

    Examples
    --------
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> from functional_ckpt.spec.mesh import Mesh
    >>> from functional_ckpt.spec.placement import Shard
    >>> placed = PlacedArray(ArraySpec("w", (8,), "int8"), Sharding(Mesh.line(2), [Shard(0)]))
    >>> plan = plan_local_save(1, [placed], LayoutPolicy(min_chunk_nbytes=0))
    >>> plan.writes[0].box, plan.headers
    (Box(start=(4,), stop=(8,)), ())
    """
    raise_problems(p for item in local if (p := needs_gathering(rank, item, replicas)) is not None)
    arrays = local_array_plans(local, policy, shared_ok, owned_ok) if arrays is None else arrays
    numbers = {plan.spec.key: number for number, plan in enumerate(arrays)}
    specs = (item for item in local if isinstance(item, ShardSpec))
    raise_problems(_must_move(rank, item) for item in specs if arrays[numbers[item.key]].layout.ownership == "owned")
    groups, empty = _grouped(rank, local, arrays, numbers, replicas)
    shards = _first_shards(rank, local, groups)
    ndim = widest(plan.spec for plan in arrays)
    chunks = padded_chunks(arrays, ndim)
    parts, owned = [_grid_pieces(rank, local, numbers, shards, ndim)], [Owners.of_arrays([])]
    for group, members, ownership in groups:
        if not ownership:
            continue
        pieces = group.pieces(shards[members])
        if ownership == "owned":
            pieces, owners = group.owned(chunks[group.numbers][:, ndim - group.shapes.shape[1] :], pieces)
            owned.append(owners)
        parts.append(_widened(pieces, ndim))
    pieces = Pieces.joined(parts)
    return restrict(_finished(arrays, pieces, Owners.joined(owned), empty, budget_nbytes), rank)


def _finished(
    arrays: tuple[ArrayPlan, ...], pieces: Pieces, owned: Owners, empty: Owners, budget_nbytes: int
) -> SavePlan:
    """Return the plan of `pieces`, sorted, with waves, headers and digests."""
    shapes = padded_shapes([plan.spec for plan in arrays], pieces.start.shape[1])
    pieces = pieces.take(row_order(pieces, shapes))
    owned = owned.take(np.lexsort((owned.chunk, owned.array)))
    is_owned = pieces.chunk >= 0
    wave = np.zeros(len(pieces), np.int64)
    wave[is_owned] = with_waves(pieces.take(is_owned), owned, arrays, budget_nbytes).wave
    first = owned.take(owned.chunk == 0)
    begun = pieces.take(~is_owned & ~pieces.start.any(axis=1))
    headers = by_array(
        attrs.evolve(first, chunk=first.chunk - 1), Owners(begun.array, begun.chunk, begun.source), empty
    )
    return SavePlan(arrays, attrs.evolve(pieces, wave=wave), headers, _first_cell_digests(arrays, pieces, shapes))


#: Arrays placed alike, their positions among the items, and their ownership; "" for arrays without cells.
_Group = tuple[PlacedGroup, Ints, str]


def _grouped(
    rank: int,
    local: Sequence[ShardSpec | PlacedArray],
    arrays: Sequence[ArrayPlan],
    numbers: dict[str, int],
    rule: str,
) -> tuple[list[_Group], Owners]:
    """Return the placed arrays in groups, each sorted by number, and the metadata writers of arrays without cells."""
    members: dict[Any, list[int]] = {}
    kinds: dict[Any, Any] = {}
    for position, item in enumerate(local):
        if isinstance(item, PlacedArray):
            alike = (item.sharding, item.array.shape)
            if alike not in kinds:
                kinds[alike] = _kind(*alike)
            ownership = arrays[numbers[item.key]].layout.ownership
            members.setdefault((item.sharding, len(item.array.shape), kinds[alike], ownership), []).append(position)
    hashes = key_hashes([plan.spec for plan in arrays])
    groups: list[_Group] = []
    empty: list[tuple[int, int]] = []
    for (sharding, _, kind, ownership), positions in members.items():
        at = np.array([numbers[local[i].key] for i in positions], np.int64)
        order = np.argsort(at)
        shapes = np.array([local[i].array.shape or (1,) for i in positions], np.int64)[order]
        group = PlacedGroup(rank, sharding, rule, at[order], shapes, hashes[at[order]])
        groups.append((group, np.array(positions, np.int64)[order], ownership if kind else ""))
        if not kind:
            empty += [(number, group.lowest_rank()) for number in at.tolist()]
    return groups, Owners.of_arrays(empty)


def _kind(sharding: Sharding, shape: tuple[int, ...]) -> tuple[object, ...]:
    """Return what arrays of one group have in common: for each axis that its split is even, or its extent."""
    if not prod(shape):
        return ()
    whole = shape or (1,)
    cuts = [(extent, sharding.cuts_of(dim, len(whole))) for dim, extent in enumerate(whole)]
    return tuple("even" if is_even(extent, cut) else extent for extent, cut in cuts)


def local_array_plans(
    local: Sequence[ShardSpec | PlacedArray], policy: LayoutPolicy, shared_ok: bool = True, owned_ok: bool = True
) -> tuple[ArrayPlan, ...]:
    """Return the layout of every array, sorted by key; it is computed once for arrays of equal shape and placement.

    Examples
    --------
    >>> from functional_ckpt.spec.sharding import from_rank_offsets
    >>> local_array_plans([from_rank_offsets("w", "int8", (4,), (0, 1, 2))], LayoutPolicy())[0].layout.ownership
    'owned'
    """
    known: dict[object, Layout] = {}
    found: dict[str, ArrayPlan] = {}
    for item in local:
        if item.key not in found:
            array, cut = item.array, item.grid if isinstance(item, ShardSpec) else item.sharding
            alike = (array.shape, array.dtype, policy.codecs_of(array.key), cut)
            if alike not in known:
                known[alike] = layout_of_faces(array, _faces(item), policy, shared_ok, owned_ok)
            found[item.key] = ArrayPlan(array, known[alike])
    return tuple(plan for _, plan in sorted(found.items()))


def needs_gathering(rank: int, item: ShardSpec | PlacedArray, replicas: str) -> SpecError | None:
    """Return a problem if planning needs to know what other ranks hold of `item`.

    Examples
    --------
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> w = ArraySpec("w", (8,), "int8")
    >>> needs_gathering(0, ShardSpec(w, w.box), "declared").what
    'planning without the other ranks needs a regular grid'
    """
    if isinstance(item, PlacedArray):
        return None
    shape, extents, grid = item.array.shape, item.box.shape, item.grid
    if grid is not None and item.flat is None and replicas == "declared":
        # A product that is not zero proves that no extent is zero.
        regular = len(grid) == len(shape) and tuple(map(mul, extents, grid)) == shape and item.array.nbytes
        if regular and not any(map(mod, item.box.start, extents)):
            return None
    return SpecError(
        "planning without the other ranks needs a regular grid",
        item.key,
        rank=rank,
        shape=item.array.shape,
        offset=item.box.start,
        expected="a grid of equal, non-empty shards with declared main replicas",
        found=item.grid,
        remedy="Use plan_save on the gathered world",
    )


def _first_shards(rank: int, local: Sequence[ShardSpec | PlacedArray], groups: Sequence[_Group]) -> Ints:
    """Return the number of the first shard of each item."""
    counts = np.array([isinstance(item, ShardSpec) for item in local], np.int64)
    for group, members, ownership in groups:
        boxes = group.held if ownership else []
        full = sum(((stop > start).all(axis=1) for start, stop in boxes), np.zeros(len(members), np.int64))
        is_there = group.sharding.mesh.coordinate(rank) is not None
        counts[members] = np.maximum(full, 1) if is_there else 0
    return np.cumsum(counts) - counts


def _grid_pieces(
    rank: int, local: Sequence[ShardSpec | PlacedArray], numbers: dict[str, int], first: Ints, ndim: int
) -> Pieces:
    """Return the main replicas among the shards of regular grids."""
    numbered = zip(local, first.tolist(), strict=True)
    mains = [(item, shard) for item, shard in numbered if isinstance(item, ShardSpec) and item.is_main]
    start = padded([item.box.start for item, _ in mains], ndim, 0)
    stop = padded([item.box.stop for item, _ in mains], ndim, 1)
    array = np.array([numbers[item.key] for item, _ in mains], np.int64)
    shard = np.array([shard for _, shard in mains], np.int64)
    return Pieces.uncut(array, start, stop, np.full(len(mains), rank), shard, np.zeros(len(mains), np.int64))


def _first_cell_digests(arrays: Sequence[ArrayPlan], pieces: Pieces, shapes: Ints) -> Owners:
    """Return the shared chunks in which a piece has the first cell but not every cell: its rank digests them."""
    chunks = padded_chunks(arrays, shapes.shape[1])
    ownerships = np.array([plan.layout.ownership for plan in arrays], str)
    cut = cut_at_chunks(pieces.take((ownerships == "shared")[pieces.array]), shapes, chunks)
    extent = chunks[cut.array]
    whole = np.minimum(cut.start // extent * extent + extent, shapes[cut.array])
    first = (cut.start % extent == 0).all(axis=1) & (cut.stop < whole).any(axis=1)
    return Owners(cut.array[first], cut.chunk[first], cut.source[first])


def _widened(pieces: Pieces, ndim: int) -> Pieces:
    """Return `pieces` with axes of extent 1 in front, up to `ndim`."""
    front = ((0, 0), (ndim - pieces.start.shape[1], 0))
    fills = {"start": 0, "stop": 1, "low": 0, "high": 1}
    ends = {name: np.pad(getattr(pieces, name), front, constant_values=fill) for name, fill in fills.items()}
    return attrs.evolve(pieces, **ends)


def _faces(item: ShardSpec | PlacedArray) -> list[int]:
    shape = item.array.shape
    if not prod(shape):
        return [0] * len(shape)
    if isinstance(item, PlacedArray):
        cuts = (item.sharding.cuts_of(dim, len(shape)) for dim in range(len(shape)))
        return [common_face(extent, cut) for extent, cut in zip(shape, cuts, strict=True)]
    return [n // count if count > 1 else 0 for n, count in zip(shape, item.grid or (), strict=True)]


def _must_move(rank: int, item: ShardSpec) -> SpecError:
    return SpecError(
        "shards of this grid are smaller than a chunk, and the ranks that hold the other shards are not known",
        item.key,
        rank=rank,
        shape=item.array.shape,
        offset=item.box.start,
        found=item.grid,
        remedy="Use plan_save on the gathered world, or pass owned_ok=False",
    )
