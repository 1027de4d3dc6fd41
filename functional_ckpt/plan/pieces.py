"""`Pieces`: regions to write and to move, as columns; cutting shards into fragments and fragments at chunks."""

import attrs
import numpy as np

from functional_ckpt.spec.columns import Columns, Ints, ravelled, spread, to_column, unravelled
from functional_ckpt.spec.flat import flat_rows
from functional_ckpt.spec.table import ShardTable

__all__ = ["Pieces", "cut_at_chunks", "flattened", "pieces_of", "row_order"]


@attrs.frozen(eq=False)
class Pieces(Columns):
    """One row per region that is copied out of a shard's buffer.

    Region ``[start, stop)`` of array number `array` is part of the fragment ``[low, high)``, which begins at element
    `run` of shard number `shard` of rank `source`. If `chunk` is a (row-major) number, the region is the part of the
    fragment in that chunk, and `target` writes the chunk in wave `wave`, after it has received all pieces. If `chunk`
    is -1, the region is the whole fragment, and `source`, which equals `target`, writes it.
    """

    array: Ints = attrs.field(converter=to_column)
    chunk: Ints = attrs.field(converter=to_column)
    start: Ints = attrs.field(converter=to_column)
    stop: Ints = attrs.field(converter=to_column)
    low: Ints = attrs.field(converter=to_column)
    high: Ints = attrs.field(converter=to_column)
    source: Ints = attrs.field(converter=to_column)
    shard: Ints = attrs.field(converter=to_column)
    run: Ints = attrs.field(converter=to_column)
    target: Ints = attrs.field(converter=to_column)
    wave: Ints = attrs.field(converter=to_column)

    @classmethod
    def uncut(cls, array: Ints, start: Ints, stop: Ints, source: Ints, shard: Ints, run: Ints) -> "Pieces":
        """Return whole fragments, which their rank writes directly to storage."""
        nothing = np.zeros(len(array), np.int64)
        return cls(array, nothing - 1, start, stop, start, stop, source, shard, run, source, nothing)

    @classmethod
    def none(cls, ndim: int) -> "Pieces":
        """Return no rows, of arrays with `ndim` axes."""
        ends = np.zeros((0, ndim), np.int64)
        return cls.uncut(ends[:, 0], ends, ends, ends[:, 0], ends[:, 0], ends[:, 0])

    @property
    def sizes(self) -> Ints:
        """Elements of each region."""
        sizes: Ints = (self.stop - self.start).prod(axis=1)
        return sizes


def pieces_of(table: ShardTable, writers: Ints) -> Pieces:
    """Return the fragments of the rows `writers` of `table`; like these rows they are sorted by array and region.

    Examples
    --------
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> from functional_ckpt.spec.shard import ShardSpec
    >>> table = ShardTable.of(0, [ShardSpec(a := ArraySpec("w", (2, 3), "int8"), a.box, 0, (1, 6))])
    >>> pieces_of(table, np.array([0])).start.tolist()
    [[0, 1], [1, 0]]
    """
    rows = table.rows.take(writers)
    boxes = Pieces.uncut(rows.array, rows.start, rows.stop, rows.rank, rows.shard, np.zeros(len(rows), np.int64))
    pieces = flattened(boxes, rows.low, rows.high)
    return pieces if pieces is boxes else pieces.take(row_order(pieces, table.shapes))


def flattened(boxes: Pieces, low: Ints, high: Ints) -> Pieces:
    """Return the fragments of shards that hold elements ``[low, high)`` of their flattened `boxes`, by row and run.

    Examples
    --------
    >>> box = Pieces.uncut(*(np.array(column) for column in ([0], [[0, 0]], [[2, 3]], [0], [0], [0])))
    >>> flattened(box, np.array([1]), np.array([6])).run.tolist()
    [0, 2]
    """
    extents = boxes.stop - boxes.start
    if np.all((low == 0) & (high == extents.prod(axis=1))):
        return boxes
    row, first, last, run = flat_rows(extents, low, high)
    boxes = boxes.take(row)
    return Pieces.uncut(boxes.array, boxes.start + first, boxes.start + last, boxes.source, boxes.shard, run)


def row_order(pieces: Pieces, shapes: Ints) -> Ints:
    """Return the order of rows by array, chunk and region."""
    return np.lexsort((ravelled(pieces.start, shapes[pieces.array]), pieces.chunk, pieces.array))


def cut_at_chunks(pieces: Pieces, shapes: Ints, chunks: Ints) -> Pieces:
    """Return `pieces` cut at the borders of chunks, each with its chunk's number, sorted by array, chunk and region.

    Examples
    --------
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> from functional_ckpt.spec.shard import ShardSpec
    >>> table = ShardTable.of(0, [ShardSpec(a := ArraySpec("w", (4,), "int8"), a.box)])
    >>> cut = cut_at_chunks(pieces_of(table, np.array([0])), table.shapes, np.array([[3]]))
    >>> cut.chunk.tolist(), cut.stop.tolist()
    ([0, 1], [[3], [4]])
    """
    extent = chunks[pieces.array]
    first = pieces.start // extent
    counts = np.where(pieces.stop > pieces.start, -(-pieces.stop // extent) - first, 0)
    row, within = spread(counts.prod(axis=1))
    index = first[row] + unravelled(within, counts[row])
    cut = pieces.take(row)
    extent, shape = chunks[cut.array], shapes[cut.array]
    begin = index * extent
    cut = attrs.evolve(
        cut,
        chunk=ravelled(index, -(-shape // extent)),
        start=np.maximum(cut.start, begin),
        stop=np.minimum(cut.stop, begin + extent),
    )
    return cut.take(row_order(cut, shapes))
