"""`Orders`: what a rank writes directly by its plan, compiled once: a remembered plan is written save after save.

Thousands of small files cost little but Python's own work: their names and texts are made beforehand, and are in memory
in the order in which they are written.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import attrs
import numpy as np

from functional_ckpt.plan.save import SavePlan
from functional_ckpt.store.chunk import only_chunk
from functional_ckpt.store.encoding import array_metadata, metadata_path
from functional_ckpt.store.work import SMALL_NBYTES, batches

__all__ = ["Batch", "Orders", "Whole", "orders_of"]

#: A small array of one plain chunk: its number, shard, run and shape; the name of its metadata, empty if they are
#: not written with it, and their text; the name of its chunk.
Whole: TypeAlias = tuple[int, int, int, tuple[int, ...], str, bytes, str]


@attrs.frozen(eq=False)
class Batch:
    """Small fragments that are written one after the other: `nbytes` of elements.

    `others` are rows of the plan's pieces, with True if the metadata of their arrays are written with them.
    """

    whole: tuple[Whole, ...]
    others: tuple[tuple[int, bool], ...]
    nbytes: int


@attrs.frozen(eq=False)
class Orders:
    """The arrays whose metadata are written `apart`, small fragments many at a time, and the rows of `large` ones."""

    apart: tuple[int, ...]
    small: tuple[Batch, ...]
    large: tuple[int, ...]


def orders_of(plan: SavePlan, waits: bool) -> Orders:
    """Return what is written directly; where each request `waits` for a server no fragment counts as small.

    Examples
    --------
    >>> from functional_ckpt.plan.layout import LayoutPolicy
    >>> from functional_ckpt.plan.save import plan_save
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> from functional_ckpt.spec.shard import ShardSpec, World
    >>> w = ArraySpec("w", (4,), "int8")
    >>> orders = orders_of(plan_save(World(((ShardSpec(w, w.box),),)), LayoutPolicy()), False)
    >>> [(names[4], names[6]) for names in orders.small[0].whole], orders.apart, orders.large
    ([('w/zarr.json', 'w/c.0')], (), ())
    """
    pieces = plan.pieces
    rows = np.flatnonzero(pieces.chunk < 0)
    has_header = np.zeros(len(plan.arrays), bool)
    has_header[plan.header_rows.array] = True
    has_header[pieces.array[pieces.chunk >= 0]] = False
    first = np.full(len(plan.arrays), -1)
    first[pieces.array[rows[::-1]]] = rows[::-1]  # of several rows of an array the last one assigned stays
    # Where requests wait for a server, the metadata does not wait for the chunks, nor one chunk for another.
    is_small = plan.nbytes < (0 if waits else SMALL_NBYTES)
    with_first = has_header & np.append(is_small, False)[first]
    begins = frozenset(first[with_first].tolist())
    small = rows[is_small[rows]]
    return Orders(
        tuple(np.flatnonzero(has_header & ~with_first).tolist()),
        tuple(_batch(plan, *batch, begins) for batch in batches(small.tolist(), plan.nbytes[small].tolist())),
        tuple(rows[~is_small[rows]].tolist()),
    )


def _batch(plan: SavePlan, rows: Sequence[int], nbytes: int, begins: frozenset[int]) -> Batch:
    whole = {row: order for row, order in zip(rows, _wholes(plan, rows, begins), strict=True) if order is not None}
    others = tuple((row, row in begins) for row in rows if row not in whole)
    return Batch(tuple(whole.values()), others, nbytes)


def _wholes(plan: SavePlan, rows: Sequence[int], begins: frozenset[int]) -> Iterator[Whole | None]:
    """Yield for each row what is written, or None if it is not all of an array of one plain chunk."""
    columns = (plan.pieces.array, plan.pieces.shard, plan.pieces.run, plan.nbytes)
    for row, number, shard, run, nbytes in zip(rows, *(column[rows].tolist() for column in columns), strict=True):
        array = plan.arrays[number]
        chunk, chunk_nbytes = only_chunk(array)
        if not chunk or nbytes != chunk_nbytes:
            yield None
            continue
        name = metadata_path(array.spec.key) if row in begins else ""
        text = array_metadata(array.spec, array.layout) if name else b""
        yield number, shard, run, array.spec.shape, name, text, chunk
