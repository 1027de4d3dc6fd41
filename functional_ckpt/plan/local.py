"""`plan_local_save`: the part of one rank in a save, planned without the specs of the other ranks.

A rank must know how all ranks hold its arrays: from a mesh and placements. For cells of regular grids, the ranks first
exchange which cells they hold, and derive a mesh. Its cost depends on the rank's own part, not on the
number of ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import attrs
import numpy as np

from functional_ckpt.errors import raise_problems
from functional_ckpt.plan.ladder import array_plans
from functional_ckpt.plan.layout import ArrayPlan, LayoutPolicy
from functional_ckpt.plan.owner import Owners, with_waves
from functional_ckpt.plan.pieces import Pieces, cut_at_chunks, row_order
from functional_ckpt.plan.placed import PlacedGroup
from functional_ckpt.plan.save import GIB, SavePlan, by_array, padded_chunks, restrict
from functional_ckpt.plan.state import LocalState, Part
from functional_ckpt.spec.columns import Ints
from functional_ckpt.spec.mesh import Mesh
from functional_ckpt.spec.placement import Replicate
from functional_ckpt.spec.sharding import PlacedArray, Sharding
from functional_ckpt.spec.split import common_face, is_even
from functional_ckpt.spec.table import key_hashes, padded_shapes, widest

__all__ = ["local_array_plans", "placed_arrays", "plan_local_save"]


def plan_local_save(
    rank: int,
    local: Sequence[PlacedArray],
    policy: LayoutPolicy,
    replicas: str = "elect",
    shared_ok: bool = True,
    owned_ok: bool = True,
    budget_nbytes: int = GIB,
    arrays: tuple[ArrayPlan, ...] | None = None,
) -> SavePlan:
    """Plan the part of `rank` from its own specs alone: equal to ``restrict(plan_save(world, ...), rank)``.

    `local` are arrays placed on meshes. Shards are numbered in this order; an array counts as one shard per box that
    the rank holds, at least one. `arrays` is the result of `local_array_plans` for the same arguments, if the caller
    has it.

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
    arrays = local_array_plans(local, policy, shared_ok, owned_ok) if arrays is None else arrays
    numbers = {plan.spec.key: number for number, plan in enumerate(arrays)}
    groups, empty = _grouped(rank, local, arrays, numbers, replicas)
    shards = _first_shards(rank, local, groups)
    ndim = widest(plan.spec for plan in arrays)
    chunks = padded_chunks(arrays, ndim)
    parts, owned = [Pieces.none(ndim)], [Owners.of_arrays([])]
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


def placed_arrays(
    common: LocalState, owns: Sequence[Part], size: int, tied: Iterable[str], shardings: Mapping[str, Sharding]
) -> list[PlacedArray]:
    """Return the input of `plan_local_save`, where `size` ranks have the same `common` part, and some have `owns`.

    `shardings` tell how ranks hold the arrays of which `common` has this rank's shards only. Keys in `tied` are left
    out.
    """
    skipped = {*tied}
    everywhere = Sharding(Mesh.line(size), (Replicate(),))
    items = [
        PlacedArray(leaf.spec, leaf.sharding or shardings.get(leaf.key, everywhere))
        for leaf in common.arrays
        if leaf.key not in skipped
    ]
    for rank, own in owns:
        here = Sharding(Mesh((1,), (rank,)), (Replicate(),))
        items += [PlacedArray(leaf.spec, here) for leaf in own.arrays if leaf.key not in skipped]
    return items


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
    local: Sequence[PlacedArray],
    arrays: Sequence[ArrayPlan],
    numbers: dict[str, int],
    rule: str,
) -> tuple[list[_Group], Owners]:
    """Return the placed arrays in groups, each sorted by number, and the metadata writers of arrays without cells."""
    members: dict[Any, list[int]] = {}
    kinds: dict[Any, Any] = {}
    for position, item in enumerate(local):
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
    local: Sequence[PlacedArray], policy: LayoutPolicy, shared_ok: bool = True, owned_ok: bool = True
) -> tuple[ArrayPlan, ...]:
    """Return the layout of every array, sorted by key; faces are computed once for arrays of equal shape and placement.

    Raises
    ------
    LayoutError
        As `functional_ckpt.plan.ladder.layout_of_faces`.

    Examples
    --------
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> from functional_ckpt.spec.mesh import Mesh
    >>> from functional_ckpt.spec.placement import Shard
    >>> placed = PlacedArray(ArraySpec("w", (8,), "int8"), Sharding(Mesh.line(2), [Shard(0)]))
    >>> local_array_plans([placed], LayoutPolicy())[0].layout.ownership
    'owned'
    """
    first = {item.key: item for item in reversed(local)}
    items = [item for _, item in sorted(first.items())]
    known = {(item.array.shape, item.sharding): item for item in items}
    faces = {alike: _faces(item) for alike, item in known.items()}
    cuts = [faces[item.array.shape, item.sharding] for item in items]
    plans, problems = array_plans([item.array for item in items], cuts, policy, shared_ok, owned_ok)
    raise_problems(problems)
    return plans


def _first_shards(rank: int, local: Sequence[PlacedArray], groups: Sequence[_Group]) -> Ints:
    """Return the number of the first shard of each item."""
    counts = np.zeros(len(local), np.int64)
    for group, members, ownership in groups:
        boxes = group.held if ownership else []
        full = sum(((stop > start).all(axis=1) for start, stop in boxes), np.zeros(len(members), np.int64))
        is_there = bool(group.sharding.mesh.coordinates(rank))
        counts[members] = np.maximum(full, 1) if is_there else 0
    return np.cumsum(counts) - counts


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


def _faces(item: PlacedArray) -> list[int]:
    shape = item.array.shape
    if not prod(shape):
        return [0] * len(shape)
    cuts = (item.sharding.cuts_of(dim, len(shape)) for dim in range(len(shape)))
    return [common_face(extent, cut) for extent, cut in zip(shape, cuts, strict=True)]
