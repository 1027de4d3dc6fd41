"""The part of one rank for arrays with equal placements on one mesh: its pieces, and those it receives as an owner.

All arrays of a group are computed together, and only those other ranks that hold part of a chunk which this rank owns.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import product
from math import prod

import attrs
import numpy as np

from functional_ckpt.plan.owner import Owners, pick_owner
from functional_ckpt.plan.pieces import Pieces, cut_at_chunks
from functional_ckpt.plan.replica import elect_copy
from functional_ckpt.spec.columns import Ints, ravelled, spread, unravelled
from functional_ckpt.spec.mesh import Mesh
from functional_ckpt.spec.sharding import Sharding
from functional_ckpt.spec.split import Split, split_of

__all__ = ["PlacedGroup"]


@attrs.frozen(eq=False)
class PlacedGroup:
    """Arrays with one number of axes and the same `sharding`, as seen by `rank`; one row per array.

    `numbers` are the arrays' numbers in the plan, `hashes` the hashes of their keys. For arrays without cells only
    `lowest_rank` may be called.
    """

    rank: int
    sharding: Sharding
    rule: str
    numbers: Ints
    shapes: Ints
    hashes: Ints

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """How each axis is cut."""
        ndim = self.shapes.shape[1]
        return tuple(split_of(self.shapes[:, dim], self.sharding.cuts_of(dim, ndim)) for dim in range(ndim))

    @cached_property
    def held(self) -> list[tuple[Ints, Ints]]:
        """The rank's boxes in the order of its shards: start and stop per array; a box may be empty."""
        found: list[tuple[Ints, Ints]] = []
        for coordinate in self.sharding.mesh.coordinates(self.rank):
            found += self._held_at(coordinate)
        return found

    def _held_at(self, coordinate: tuple[int, ...]) -> list[tuple[Ints, Ints]]:
        """Return the boxes that belong to one place of the mesh."""
        ndim, sizes = self.shapes.shape[1], self.sharding.mesh.shape
        found = []
        for dim, split in enumerate(self.splits):
            axes = self.sharding.axes_of(dim, ndim)
            place = 0
            for axis in axes:
                place = place * sizes[axis] + coordinate[axis]
            found.append([(number, *split.bounds(number)) for number in split.held(place)])
        boxes = []
        for combination in product(*found):
            numbers, starts, stops = ([self._column(c[i]) for c in combination] for i in range(3))
            there = np.all([number >= 0 for number in numbers], axis=0)
            start = np.stack(starts, axis=1)
            boxes.append((start, np.where(there[:, None], np.stack(stops, axis=1), start)))
        return boxes

    def pieces(self, shards: Ints) -> Pieces:
        """Return the fragments that the rank writes; `shards` is the number of its first shard of each array."""
        nothing = np.zeros(len(self.numbers), np.int64)
        parts = [Pieces.none(self.shapes.shape[1])]
        for place, (start, stop) in enumerate(self.held):
            writer = self.writers(np.arange(len(self.numbers)), start)
            writes = (writer == self.rank) & (stop > start).all(axis=1)
            parts.append(Pieces.uncut(self.numbers, start, stop, writer, shards + place, nothing).take(writes))
        return Pieces.joined(parts)

    def writers(self, rows: Ints, start: Ints) -> Ints:
        """Return which rank writes the shard of array ``rows[i]`` that begins at ``start[i]``."""
        ndim = self.shapes.shape[1]
        mesh_place = np.zeros(len(rows), np.int64)
        for dim, split in enumerate(self.splits):
            if axes := self.sharding.axes_of(dim, ndim):
                at = split.at(rows)
                extent = np.maximum(self.shapes[rows, dim] - 1, 0)
                begin = np.minimum(start[:, dim], extent)  # an empty share may start at the end; it is not written
                mesh_place += self._mesh_offset(at.places(at.touched(begin, begin + 1)[0]), axes)
        if self.sharding.copies > 1 and self.rule == "elect":
            copies = np.full(len(rows), self.sharding.copies)
            copy = elect_copy(self.hashes[rows], ravelled(start, self.shapes[rows]), np.zeros_like(rows), copies)
            mesh_place += self._mesh_offset(copy, self.sharding.replicated)
        ranks: Ints = _rank_table(self.sharding.mesh)[mesh_place]
        return ranks

    def owned(self, chunks: Ints, mine: Pieces) -> tuple[Pieces, Owners]:
        """Return the pieces that the rank sends or receives, and the owners of chunks; chunks have shapes `chunks`.

        `mine` are its `pieces`.
        """
        counts = -(-self.shapes // chunks)
        total = counts.prod(axis=1)
        rows, chunk = spread(total)
        low = unravelled(chunk, counts[rows]) * chunks[rows]
        high = np.minimum(low + chunks[rows], self.shapes[rows])
        owner = self._owners(rows, chunk, low, high)
        cut = cut_at_chunks(attrs.evolve(mine, array=np.searchsorted(self.numbers, mine.array)), self.shapes, chunks)
        first = np.cumsum(total) - total
        leaving = attrs.evolve(cut, array=self.numbers[cut.array], target=owner[first[cut.array] + cut.chunk])
        here = owner == self.rank
        coming = self._coming(rows[here], chunk[here], low[here], high[here])
        return Pieces.joined([leaving, coming]), Owners(self.numbers[rows], chunk, owner)

    def lowest_rank(self) -> int:
        """Return the rank that writes the metadata of an array without cells."""
        places = _rank_table(self.sharding.mesh).reshape(self.sharding.mesh.shape)
        if self.rule == "declared":
            replicated = self.sharding.replicated
            places = places[tuple(0 if axis in replicated else slice(None) for axis in range(places.ndim))]
        return int(places.min())

    def _owners(self, rows: Ints, chunk: Ints, low: Ints, high: Ints) -> Ints:
        splits = [split.at(rows) for split in self.splits]
        rivals = [split.largest(low[:, dim], high[:, dim]) for dim, split in enumerate(splits)]
        counts = np.stack([count for count, _ in rivals], axis=1)
        picked = unravelled(pick_owner(self.hashes[rows], chunk, counts.prod(axis=1)), counts)
        starts = [
            split.bounds(nth(picked[:, dim]))[0]
            for dim, (split, (_, nth)) in enumerate(zip(splits, rivals, strict=True))
        ]
        return self.writers(rows, np.stack(starts, axis=1))

    def _coming(self, rows: Ints, chunk: Ints, low: Ints, high: Ints) -> Pieces:
        """Return the pieces of other ranks in the given chunks, which this rank owns."""
        spans = [split.at(rows).touched(low[:, dim], high[:, dim]) for dim, split in enumerate(self.splits)]
        first = np.stack([begin for begin, _ in spans], axis=1)
        counts = np.stack([end for _, end in spans], axis=1) - first
        each, within = spread(counts.prod(axis=1))
        numbers = first[each] + unravelled(within, counts[each])
        ends = [split.at(rows[each]).bounds(numbers[:, dim]) for dim, split in enumerate(self.splits)]
        start, stop = (np.stack([end[i] for end in ends], axis=1) for i in range(2))
        source = self.writers(rows[each], start)
        low, high = np.maximum(start, low[each]), np.minimum(stop, high[each])
        nothing = np.zeros(len(each), np.int64)
        pieces = Pieces.uncut(self.numbers[rows[each]], low, high, source, nothing, nothing)
        return attrs.evolve(pieces, chunk=chunk[each], target=nothing + self.rank).take(source != self.rank)

    def _mesh_offset(self, place: Ints, axes: Sequence[int]) -> Ints:
        """Return what `place`, a row-major number on the mesh `axes`, contributes to the number of a mesh position."""
        sizes = self.sharding.mesh.shape
        offset = np.zeros_like(place)
        for axis in reversed(axes):
            place, index = np.divmod(place, sizes[axis])
            offset = offset + index * prod(sizes[axis + 1 :])
        return offset

    def _column(self, values: Ints) -> Ints:
        return np.broadcast_to(values, len(self.numbers))


@lru_cache(maxsize=64)
def _rank_table(mesh: Mesh) -> Ints:
    return np.array(mesh.ranks, np.int64)
