"""Which of several copies of a shard is written: deterministic rules, evaluated for all arrays at once.

`declared`: exactly one copy has an all-zero replica id. `elect`: a hash of key and region picks among the copies
sorted by (replica id, rank), so that writing spreads over the ranks and every rank computes the same answer.
"""

import numpy as np

from functional_ckpt.errors import ReplicaError
from functional_ckpt.spec.columns import Ints, mix, ravelled, runs
from functional_ckpt.spec.table import ShardTable, key_hashes

__all__ = ["choose_writers", "elect_copy"]


def choose_writers(table: ShardTable, rule: str) -> tuple[Ints, list[ReplicaError]]:
    """Return the rows of `table` that are written, sorted by array and region, and the problems found.

    `rule` is ``"declared"`` or ``"elect"``. There is one row per distinct shard, and none for an empty shard.

    Examples
    --------
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> from functional_ckpt.spec.shard import ShardSpec, World
    >>> a = ArraySpec("w", (2,), "int8")
    >>> table, _ = ShardTable.of_world(World([[ShardSpec(a, a.box, 1)], [ShardSpec(a, a.box, 0)]]))
    >>> choose_writers(table, "declared")
    (array([1]), [])
    """
    rows = table.rows
    order, begin = _copies(table)
    counts = np.diff(np.append(begin, len(order)))
    if rule == "declared":
        mains = np.add.reduceat(rows.main[order], begin) if len(begin) else begin
        problems = [_problem(table, order[begin[i] : begin[i] + counts[i]]) for i in np.flatnonzero(mains != 1)]
        lone = np.repeat(mains == 1, counts)
        return order[lone & (rows.main[order] > 0)], problems
    if len(begin) == len(order):
        return order, []
    first = order[begin]
    offset = ravelled(rows.start[first], table.shapes[rows.array[first]])
    return order[begin + elect_copy(key_hashes(table.arrays)[rows.array[first]], offset, rows.low[first], counts)], []


def elect_copy(key_hash: Ints, offset: Ints, low: Ints, counts: Ints) -> Ints:
    """Return which of the `counts` copies of a shard is written; it begins at cell `offset` and flat element `low`.

    Examples
    --------
    >>> bool(elect_copy(np.array([5]), np.array([0]), np.array([0]), np.array([3]))[0] in (0, 1, 2))
    True
    """
    return (mix(key_hash, offset, low) % counts.astype(np.uint64)).astype(np.int64)


def _copies(table: ShardTable) -> tuple[Ints, Ints]:
    """Return the rows with elements sorted by shard, replica id and rank, and where each shard's copies begin."""
    rows = table.rows
    live = np.flatnonzero(rows.high > rows.low)
    cells = table.cells[live]
    order = np.argsort(cells, kind="stable")
    begin, _ = runs(cells[order])
    if len(begin) < len(order):
        last = ravelled(rows.stop[live] - 1, table.shapes[rows.array[live]])
        shard = (rows.high[live], rows.low[live], last, cells)
        order = np.lexsort((rows.replica[live], *shard))
        begin, _ = runs(*(part[order] for part in shard))
    return live[order], begin


def _problem(table: ShardTable, copies: Ints) -> ReplicaError:
    rows = table.rows
    shard = table.shard(int(copies[0]))
    mains = copies[rows.main[copies] > 0]
    what = "a shard has two main replicas" if len(mains) else "a shard has no main replica"
    ranks = tuple(sorted(rows.rank[mains if len(mains) else copies].tolist()))
    ids = sorted(table.replicas[i] for i in rows.replica[copies])
    return ReplicaError(
        what,
        shard.key,
        rank=ranks,
        shape=shard.array.shape,
        offset=shard.box.start,
        found=f"replica ids {ids}",
        remedy="Give exactly one copy the replica id 0, or pass replicas='elect'",
    )
