"""`ShardTable`: the shards of many ranks as columns of integers, for vectorised planning."""

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from zlib import crc32

import attrs
import numpy as np

from functional_ckpt.errors import ShapeError
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.columns import Columns, Ints, ravelled, to_column
from functional_ckpt.spec.shard import ShardSpec, World

__all__ = [
    "Conflict",
    "ShardRows",
    "ShardTable",
    "key_hashes",
    "padded",
    "padded_shapes",
    "unpadded",
    "widened",
    "widest",
]

#: Cells are numbered through all arrays in 64 bits.
_MAX_CELLS = 2**62


@attrs.frozen(eq=False)
class ShardRows(Columns):
    """One row per shard: `array` (number), `rank`, `shard` (position on the rank), box, flat range, `replica`, `main`.

    `start` and `stop` have as many columns as the array of the table with the most axes; the others get axes of extent
    1 in front. `low` and `high` are the flat range in elements of the box, all of it for a shard that is not flat.
    `replica` is an index into the table's replica ids.
    """

    array: Ints = attrs.field(converter=to_column)
    rank: Ints = attrs.field(converter=to_column)
    shard: Ints = attrs.field(converter=to_column)
    start: Ints = attrs.field(converter=to_column)
    stop: Ints = attrs.field(converter=to_column)
    low: Ints = attrs.field(converter=to_column)
    high: Ints = attrs.field(converter=to_column)
    replica: Ints = attrs.field(converter=to_column)
    main: Ints = attrs.field(converter=to_column)


@attrs.frozen
class Conflict:
    """Two ranks describe the array of one key differently."""

    rank: int
    spec: ArraySpec
    other_rank: int
    other: ArraySpec


@attrs.frozen
class ShardTable:
    """Shards of `arrays`, ordered by rank and position; `replicas` are the replica ids that occur, sorted.

    Examples
    --------
    >>> w = ArraySpec("w", (4,), "int8")
    >>> table = ShardTable.of(3, [ShardSpec(w, Box((0,), (2,))), ShardSpec(w, Box((2,), (4,)), 1)])
    >>> table.rows.start[:, 0].tolist(), table.rows.main.tolist()
    ([0, 2], [1, 0])
    """

    arrays: tuple[ArraySpec, ...]
    replicas: tuple[tuple[int, ...], ...]
    rows: ShardRows

    @classmethod
    def of(cls, rank: int, shards: Sequence[ShardSpec]) -> "ShardTable":
        """Return the table of one rank; `arrays` are the distinct specs, sorted by key."""
        arrays = tuple(sorted({shard.array for shard in shards}, key=lambda spec: (spec.key, spec.shape, spec.dtype)))
        numbers = {spec: number for number, spec in enumerate(arrays)}
        replicas = tuple(sorted({shard.replica_id for shard in shards}))
        places = {replica: number for number, replica in enumerate(replicas)}
        ndim = widest(arrays)
        flats = [shard.identity[1] for shard in shards]
        rows = ShardRows(
            [numbers[shard.array] for shard in shards],
            np.full(len(shards), rank),
            np.arange(len(shards)),
            padded([shard.box.start for shard in shards], ndim, 0),
            padded([shard.box.stop for shard in shards], ndim, 1),
            [low for low, _ in flats],
            [high for _, high in flats],
            [places[shard.replica_id] for shard in shards],
            [shard.is_main for shard in shards],
        )
        return cls(arrays, replicas, rows)

    @classmethod
    def of_world(cls, world: World) -> "tuple[ShardTable, tuple[Conflict, ...]]":
        """Return the table of all ranks of a world."""
        return cls.join([cls.of(rank, shards) for rank, shards in enumerate(world.ranks)])

    @classmethod
    def join(
        cls, tables: "Sequence[ShardTable]", copied: Collection[str] = (), ranks: Sequence[int] | None = None
    ) -> "tuple[ShardTable, tuple[Conflict, ...]]":
        """Return one table of all ranks, from `tables` in rank order, and the conflicts between them.

        Arrays with a conflict are left out. The main replica of a `copied` key is that of the lowest rank. `ranks` are
        the ranks of the tables, if some rank has several. Tables that share one tuple of arrays read it once.

        Raises
        ------
        ShapeError
            If the arrays have 2**62 elements or more in all.
        """
        seen: dict[str, tuple[int, ArraySpec]] = {}
        conflicts: dict[str, Conflict] = {}
        pairs = list(zip(range(len(tables)) if ranks is None else ranks, tables, strict=True))
        distinct = {id(table.arrays): (rank, table.arrays) for rank, table in reversed(pairs)}
        for rank, arrays in sorted(distinct.values(), key=lambda item: item[0]):
            for spec in arrays:
                first_rank, first = seen.setdefault(spec.key, (rank, spec))
                if first != spec:
                    conflicts.setdefault(spec.key, Conflict(first_rank, first, rank, spec))
        arrays = tuple(spec for key, (_, spec) in sorted(seen.items()) if key not in conflicts)
        _check_cells(arrays)
        numbers = {spec: number for number, spec in enumerate(arrays)}
        replicas = tuple(sorted({replica for table in tables for replica in table.replicas}))
        places = {replica: number for number, replica in enumerate(replicas)}
        ndim = widest(arrays)
        maps = {key: _ints([numbers.get(spec, -1) for spec in specs]) for key, (_, specs) in distinct.items()}
        parts = [
            attrs.evolve(
                table.rows,
                array=maps[id(table.arrays)][table.rows.array],
                replica=_ints([places[replica] for replica in table.replicas])[table.rows.replica],
                start=widened(table.rows.start, ndim, 0),
                stop=widened(table.rows.stop, ndim, 1),
            )
            for table in tables
        ]
        rows = ShardRows.joined(parts) if parts else cls.of(0, ()).rows
        rows = rows.take(rows.array >= 0) if conflicts else rows
        return cls(arrays, replicas, _with_main_copies(rows, arrays, copied)), tuple(conflicts.values())

    def without(self, keys: Collection[str]) -> "ShardTable":
        """Return the table without the arrays of the given keys."""
        if not keys:
            return self
        kept = np.array([spec.key not in keys for spec in self.arrays], bool)
        rows = self.rows.take(kept[self.rows.array])
        arrays = tuple(spec for spec, is_kept in zip(self.arrays, kept.tolist(), strict=True) if is_kept)
        ndim = widest(arrays)
        start, stop = widened(rows.start, ndim, 0), widened(rows.stop, ndim, 1)
        array = (np.cumsum(kept) - 1)[rows.array]
        return ShardTable(arrays, self.replicas, attrs.evolve(rows, array=array, start=start, stop=stop))

    @property
    def shapes(self) -> Ints:
        """Shape of each array, padded in front with ones."""
        return padded_shapes(self.arrays, self.rows.start.shape[1])

    @property
    def cells(self) -> Ints:
        """Number of the first cell of each shard's box, counted through all arrays: orders by array, then row-major."""
        shapes = self.shapes
        first = np.cumsum(np.concatenate([[0], shapes.prod(axis=1)[:-1]])) if len(shapes) else _ints([])
        return first[self.rows.array] + ravelled(self.rows.start, shapes[self.rows.array])

    def shard(self, row: int) -> ShardSpec:
        """Return one row as a `ShardSpec` (a shard that is its whole box comes back as not flat)."""
        rows = self.rows
        spec = self.arrays[rows.array[row]]
        box = unpadded(rows.start[row], rows.stop[row], len(spec.shape))
        flat = (int(rows.low[row]), int(rows.high[row]))
        return ShardSpec(spec, box, self.replicas[rows.replica[row]], None if flat == (0, box.size) else flat)


def key_hashes(arrays: Sequence[ArraySpec]) -> Ints:
    """Return a number for each key, the same in every process.

    Examples
    --------
    >>> key_hashes([ArraySpec("w", (), "int8")]).tolist()
    [476252946]
    """
    return _ints([crc32(spec.key.encode()) for spec in arrays])


def padded(ends: Sequence[Sequence[int]], ndim: int, fill: int) -> Ints:
    """Return tuples of up to `ndim` numbers as rows of `ndim`, filled in front.

    Examples
    --------
    >>> padded([(5,), (6, 7)], 2, 1).tolist()
    [[1, 5], [6, 7]]
    """
    if not ends:
        return np.zeros((0, ndim), np.int64)
    groups = ((width, list(group)) for width, group in groupby(ends, len))
    return np.concatenate([widened(_ints(group).reshape(len(group), width), ndim, fill) for width, group in groups])


def padded_shapes(arrays: Sequence[ArraySpec], ndim: int | None = None) -> Ints:
    """Return the shapes of `arrays` as rows, with ones in front.

    Examples
    --------
    >>> padded_shapes([ArraySpec("b", (), "int8"), ArraySpec("w", (5, 6), "int8")]).tolist()
    [[1, 1], [5, 6]]
    """
    return padded([spec.shape for spec in arrays], widest(arrays) if ndim is None else ndim, 1)


def widest(arrays: Iterable[ArraySpec]) -> int:
    """Return the largest number of axes of any array, at least 1: the width of rows for all.

    Examples
    --------
    >>> widest([ArraySpec("b", (), "int8")]), widest([ArraySpec("w", (5, 6), "int8")])
    (1, 2)
    """
    return max((len(spec.shape) for spec in arrays), default=1) or 1


def unpadded(start: Ints, stop: Ints, ndim: int) -> Box:
    """Return a row's box, of an array with `ndim` axes.

    Examples
    --------
    >>> unpadded(np.array([0, 2]), np.array([1, 4]), 1)
    Box(start=(2,), stop=(4,))
    """
    front = len(start) - ndim
    return Box(tuple(start[front:].tolist()), tuple(stop[front:].tolist()))


def _ints(values: Sequence[object]) -> Ints:
    return np.array(values, np.int64)


def widened(ends: Ints, ndim: int, fill: int) -> Ints:
    """Return rows with `ndim` columns, filled in front.

    Examples
    --------
    >>> widened(np.array([[5], [6]]), 2, 1).tolist()
    [[1, 5], [1, 6]]
    """
    front = ndim - ends.shape[1]
    if front < 0:  # the wide arrays of the table have been left out
        return ends[:, -front:]
    return np.pad(ends, ((0, 0), (front, 0)), constant_values=fill) if front else ends


def _with_main_copies(rows: ShardRows, arrays: Sequence[ArraySpec], copied: Collection[str]) -> ShardRows:
    if not copied:
        return rows
    lowest = np.full(len(arrays), np.iinfo(np.int64).max)
    np.minimum.at(lowest, rows.array, rows.rank)
    is_copied = np.array([spec.key in copied for spec in arrays], bool)[rows.array]
    return attrs.evolve(rows, main=np.where(is_copied, rows.rank == lowest[rows.array], rows.main))


def _check_cells(arrays: Sequence[ArraySpec]) -> None:
    cells = [spec.nbytes // spec.itemsize for spec in arrays]
    if sum(cells) >= _MAX_CELLS:
        largest = arrays[max(range(len(arrays)), key=cells.__getitem__)]
        raise ShapeError(
            "the arrays have too many elements",
            largest.key,
            shape=largest.shape,
            expected=f"less than {_MAX_CELLS} in all",
            found=sum(cells),
        )
