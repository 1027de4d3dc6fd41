"""What one rank knows of arrays that are placed alike on one mesh: its pieces, and what comes to the chunks it owns.

All arrays of a group are worked on together, and of other ranks only those are looked at that hold part of a chunk
which this rank owns.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import attrs
import numpy as np

from functional_ckpt.plan.owner import OwnedChunks, pick_owner
from functional_ckpt.plan.pieces import Pieces, cut_at_chunks
from functional_ckpt.plan.replica import elected
from functional_ckpt.spec.columns import Ints, ravelled
from functional_ckpt.spec.mesh import Mesh, Sharding, Split, split_of

__all__ = ["PlacedGroup"]


@attrs.frozen(eq=False)
class PlacedGroup:
    """Arrays with cells, of one number of axes, that `sharding` cuts alike; a row per array.

    `numbers` are the arrays' numbers in the plan, `hashes` those of their keys.
    """

    sharding: Sharding
    rule: str
    numbers: Ints
    shapes: Ints
    hashes: Ints

    @property
    def splits(self) -> tuple[Split, ...]:
        """How each axis is cut."""
        ndim = self.shapes.shape[1]
        return tuple(split_of(self.shapes[:, dim], self.sharding.cuts_of(dim, ndim)) for dim in range(ndim))

    def held(self, rank: int) -> list[tuple[Ints, Ints]]:
        """Return the boxes of `rank` in the order of its shards: start and stop per array; all alike, or none."""
        coordinate = self.sharding.mesh.coordinate(rank)
        if coordinate is None:
            return []
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

    def pieces(self, rank: int, shards: Ints) -> Pieces:
        """Return what `rank` writes, uncut; `shards` is the number of its first shard of each array."""
        parts = []
        for place, (start, stop) in enumerate(self.held(rank)):
            writes = (self.writers(np.arange(len(self.numbers)), start) == rank) & (stop > start).all(axis=1)
            parts.append(_pieces(self.numbers, start, stop, rank, shards + place, rank).take(writes))
        return Pieces.joined(parts) if parts else _pieces(self.numbers, self.shapes, self.shapes, 0, 0, 0).take([])

    def writers(self, rows: Ints, start: Ints) -> Ints:
        """Return which rank writes the shard of array ``rows[i]`` that begins at ``start[i]``."""
        ndim = self.shapes.shape[1]
        mesh_place = np.zeros(len(rows), np.int64)
        for dim, split in enumerate(self.splits):
            if axes := self.sharding.axes_of(dim, ndim):
                at = split.at(rows)
                extent = np.maximum(self.shapes[rows, dim] - 1, 0)
                begin = np.minimum(start[:, dim], extent)  # of an empty share, which nobody writes
                mesh_place += self._mesh_offset(at.places(at.touched(begin, begin + 1)[0]), axes)
        if self.sharding.copies > 1 and self.rule == "elect":
            copies = np.full(len(rows), self.sharding.copies)
            copy = elected(self.hashes[rows], ravelled(start, self.shapes[rows]), np.zeros_like(rows), copies)
            mesh_place += self._mesh_offset(copy, self.sharding.replicated)
        ranks: Ints = _rank_table(self.sharding.mesh)[mesh_place]
        return ranks

    def owned(self, rank: int, chunks: Ints, mine: Pieces) -> tuple[Pieces, OwnedChunks]:
        """Return the pieces that leave or come to `rank`, and who owns which chunk of the group; chunks have `chunks`.

        `mine` are its `pieces`.
        """
        counts = -(-self.shapes // chunks)
        total = counts.prod(axis=1)
        rows = np.repeat(np.arange(len(total)), total)
        chunk = np.arange(len(rows)) - np.repeat(np.cumsum(total) - total, total)
        low = _unravelled(chunk, counts[rows]) * chunks[rows]
        high = np.minimum(low + chunks[rows], self.shapes[rows])
        owner = self._owners(rows, chunk, low, high)
        cut = cut_at_chunks(attrs.evolve(mine, array=np.searchsorted(self.numbers, mine.array)), self.shapes, chunks)
        first = np.cumsum(total) - total
        leaving = attrs.evolve(cut, array=self.numbers[cut.array], target=owner[first[cut.array] + cut.chunk])
        here = owner == rank
        coming = self._coming(rank, rows[here], chunk[here], low[here], high[here])
        return Pieces.joined([leaving, coming]), OwnedChunks(self.numbers[rows], chunk, owner)

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
        picked = _unravelled(pick_owner(self.hashes[rows], chunk, counts.prod(axis=1)), counts)
        starts = [
            split.bounds(nth(picked[:, dim]))[0]
            for dim, (split, (_, nth)) in enumerate(zip(splits, rivals, strict=True))
        ]
        return self.writers(rows, np.stack(starts, axis=1))

    def _coming(self, rank: int, rows: Ints, chunk: Ints, low: Ints, high: Ints) -> Pieces:
        """Return the pieces of other ranks in the given chunks."""
        spans = [split.at(rows).touched(low[:, dim], high[:, dim]) for dim, split in enumerate(self.splits)]
        first = np.stack([begin for begin, _ in spans], axis=1)
        counts = np.stack([end for _, end in spans], axis=1) - first
        each = np.repeat(np.arange(len(rows)), counts.prod(axis=1))
        total = counts.prod(axis=1)
        within = np.arange(len(each)) - np.repeat(np.cumsum(total) - total, total)
        numbers = first[each] + _unravelled(within, counts[each])
        ends = [split.at(rows[each]).bounds(numbers[:, dim]) for dim, split in enumerate(self.splits)]
        start, stop = (np.stack([end[i] for end in ends], axis=1) for i in range(2))
        source = self.writers(rows[each], start)
        pieces = _pieces(
            self.numbers[rows[each]], np.maximum(start, low[each]), np.minimum(stop, high[each]), source, -1, rank
        )
        return attrs.evolve(pieces, chunk=chunk[each]).take(source != rank)

    def _mesh_offset(self, place: Ints, axes: Sequence[int]) -> Ints:
        """Return what `place`, a row-major number on mesh `axes`, adds to the number of a mesh place."""
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


def _unravelled(flat: Ints, shape: Ints) -> Ints:
    """Return the index of each row-major number in the shape of its row."""
    index = np.zeros_like(shape)
    for axis in range(shape.shape[1] - 1, -1, -1):
        flat, index[:, axis] = np.divmod(flat, shape[:, axis])
    return index


def _pieces(array: Ints, start: Ints, stop: Ints, source: Any, shard: Any, target: Any) -> Pieces:
    zero = np.zeros(len(array), np.int64)
    return Pieces(array, zero - 1, start, stop, start, stop, zero + source, zero + shard, zero, zero + target, zero)
