"""Run the plan of a load against a store: `check_needed`, `read_plan`.

A whole plain chunk is read into the caller's memory and digested there; if only part of a plain chunk is wanted, only
that part is read. A chunk with codecs is read whole and decoded by TensorStore.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from math import prod
from operator import mul
from typing import Any, TypeAlias

import attrs
import numpy as np
import xxhash

from functional_ckpt.errors import StorageError
from functional_ckpt.plan.layout import Layout
from functional_ckpt.plan.load import LoadPlan
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.columns import row_keys, runs
from functional_ckpt.spec.table import unpadded
from functional_ckpt.store.base import BLOCK_NBYTES, SMALL_CHUNK_NBYTES, Store
from functional_ckpt.store.buffer import WHOLE, Buffer, region_of
from functional_ckpt.store.chunk import (
    check_chunks,
    check_digest,
    decoding_nbytes,
    is_there,
    located,
    read_chunk,
)
from functional_ckpt.store.encoding import (
    Array,
    as_bytes,
    chunk_name,
    digest,
    digest_bytes,
    is_raw,
    node_name,
    numpy_dtype,
)
from functional_ckpt.store.part import blocks_of, ranges_of, read_part
from functional_ckpt.store.work import SMALL_NBYTES, Work, batches, most_at_once, run_all

__all__ = ["check_needed", "read_plan"]

OnBytes = Callable[[int], None]


def check_needed(plan: LoadPlan, store: Store, absent: Collection[str] | None = None) -> list[StorageError]:
    """Return a problem for each chunk that `plan` reads from and that is missing (`absent`), or has a wrong size."""
    array, chunk = plan.cut.array, plan.cut.chunk
    rows: list[int] = runs(array, chunk)[0].tolist()
    if store.capabilities.sized:
        files, forms = plan.derived(_files), plan.derived(_forms)
        rows = [row for row in rows if not (forms[row].is_plain and is_there(store, files[row], forms[row].nbytes))]
    needed = ((entry := plan.entries[array[row]], entry.grid.index(int(chunk[row]))) for row in rows)
    return list(check_chunks(store, needed, absent))


def read_plan(
    plan: LoadPlan,
    buffers: Sequence[Buffer],
    store: Store,
    budget_nbytes: int,
    verify: str = "covered",
    on_bytes: OnBytes | None = None,
    on_start: OnBytes | None = None,
) -> None:
    """Run `plan`: fill the rank's `buffers`. `verify` is ``"covered"``, ``"full"`` or ``"none"``.

    Before the first read `on_start` is called with the bytes of all.

    Raises
    ------
    CorruptionError
        If stored bytes differ from their digest. The content of `buffers` is then undefined.
    """
    concurrency = store.capabilities.concurrency
    held = (decoding_nbytes(plan.entries[array].layout) for array in plan.cut.array.tolist())
    store = store.reading(most_at_once(held, budget_nbytes, concurrency))
    work = list(_Filling(plan, buffers, store, verify).work())
    if on_start is not None:
        on_start(sum(piece.nbytes for piece in work))
    for fill in plan.fills:
        region = region_of(fill.target.box.start, fill.box.start, fill.box.stop)
        buffers[fill.shard].put(fill.target.box.shape, fill.target.run, region, np.zeros((), np.int8))
    run_all(work, budget_nbytes, on_bytes, concurrency)


#: Where elements are in the bytes of a file: their shape, data type, offset and strides in bytes.
_Cells: TypeAlias = tuple[tuple[int, ...], np.dtype[Any], int, tuple[int, ...]]


@attrs.frozen
class _Form:
    """What a piece of a chunk is like: thousands of pieces, of arrays of one shape, have one in common.

    Region `box` of the array is all of chunk `index` if `is_whole`, and `region` of the fragment `target`, which has
    a `shape`. If it `is_stored_so`, the chunk's file begins with the bytes of the region, in C order. If the chunk
    `is_plain`, its file has `nbytes`; of a small one without padding `cells` are where the region is in these.
    """

    index: tuple[int, ...]
    name: str
    box: Box
    target: Box
    shape: tuple[int, ...]
    region: tuple[Any, ...]
    is_whole: bool
    is_stored_so: bool
    is_plain: bool
    nbytes: int
    cells: _Cells | None

    @classmethod
    def of(cls, plan: LoadPlan, row: int) -> "_Form":
        """Return the form of a row of the plan's cut."""
        cut, entry = plan.cut, plan.entries[plan.cut.array[row]]
        ndim, index = len(entry.spec.shape), entry.grid.index(int(cut.chunk[row]))
        box, chunk = unpadded(cut.start[row], cut.stop[row], ndim), entry.grid.box(index)
        target = unpadded(cut.low[row], cut.high[row], ndim)
        region = WHOLE if box == target else region_of(target.start, box.start, box.stop)
        is_plain, nbytes = is_raw(entry.layout), entry.layout.chunk_nbytes
        is_stored_so = box == chunk and is_plain and box.shape[1:] == entry.layout.chunk[1:]
        has_cells = is_plain and nbytes <= SMALL_CHUNK_NBYTES and chunk.shape == entry.layout.chunk
        cells = _cells(numpy_dtype(entry.spec.dtype), chunk, box) if has_cells else None
        name, shape = chunk_name(index), target.shape
        return cls(index, name, box, target, shape, region, box == chunk, is_stored_so, is_plain, nbytes, cells)


def _cells(dtype: np.dtype[Any], chunk: Box, box: Box) -> _Cells:
    """Return the region `box` of a chunk in the bytes of its file."""
    strides = tuple(dtype.itemsize * prod(chunk.shape[axis + 1 :]) for axis in range(len(chunk.shape)))
    offset = sum(step * (a - o) for step, a, o in zip(strides, box.start, chunk.start, strict=True))
    return box.shape, dtype, offset, strides


def _files(plan: LoadPlan) -> list[str]:
    """Return the name of the file of each row's chunk."""
    nodes = [node_name(entry.spec.key) for entry in plan.entries]
    rows = zip(plan.cut.array.tolist(), plan.derived(_forms), strict=True)
    return [f"{nodes[number]}/{form.name}" for number, form in rows]


def _forms(plan: LoadPlan) -> list[_Form]:
    """Return the form of each row of the plan's cut; it is made of nothing but what makes up the key."""
    cut, (_, like) = plan.cut, plan.kinds
    keys = row_keys(like[cut.array], cut.chunk, cut.start, cut.stop, cut.low, cut.high)
    forms: dict[bytes, _Form] = {}
    for row, key in enumerate(keys):
        if key not in forms:
            forms[key] = _Form.of(plan, row)
    return [forms[key] for key in keys]


class _Filling:
    """The reads of a plan, piece by piece."""

    def __init__(self, plan: LoadPlan, buffers: Sequence[Buffer], store: Store, verify: str) -> None:
        self.plan, self.buffers, self.store, self.verify = plan, buffers, store, verify
        self.forms, self.files = plan.derived(_forms), plan.derived(_files)

    def work(self) -> Iterator[Work]:
        """Yield one task per chunk; small plain pieces are many a task, unless each waits for a server."""
        plan = self.plan
        kinds, like = plan.kinds
        kind = like[plan.cut.array]
        nbytes = plan.cut.sizes * np.array([entry.spec.itemsize for entry in kinds], np.int64)[kind]
        plain = np.array([is_raw(entry.layout) for entry in kinds], bool)[kind]
        small = plain & (nbytes < SMALL_NBYTES)
        together = small & (not self.store.capabilities.concurrency)
        for batch, total in batches(np.flatnonzero(together).tolist(), nbytes[together].tolist()):
            yield Work(total, partial(self.read, batch), total)
        held = np.array([decoding_nbytes(entry.layout) for entry in kinds], np.int64)[kind]
        held = np.where(small, nbytes, held)
        for row in np.flatnonzero(~together).tolist():
            yield Work(int(nbytes[row]), partial(self.read, [row]), int(held[row]))

    def read(self, rows: Sequence[int]) -> None:
        """Read the pieces of some rows."""
        entries, cut = self.plan.entries, self.plan.cut
        columns = (column[rows].tolist() for column in (cut.array, cut.chunk, cut.shard, cut.run))
        for row, number, chunk, shard, run in zip(rows, *columns, strict=True):
            entry, form = entries[number], self.forms[row]
            try:
                if form.cells is not None:
                    self._read_small(entry, chunk, form, form.cells, self.files[row], self.buffers[shard], run)
                else:
                    self._read(entry, chunk, form, self.files[row], self.buffers[shard], run)
            except StorageError as error:
                raise located(error, entry.spec, entry.layout, form.index) from error.__cause__

    def _read_small(
        self, entry: ArrayEntry, chunk: int, form: _Form, cells: _Cells, file: str, buffer: Buffer, run: int
    ) -> None:
        """Read a small chunk, check it, and only then copy its cells."""
        data = self.store.read(file, form.nbytes)
        if data is None or len(data) != form.nbytes:
            values = self._checked(entry, chunk, form)  # which says what is wrong
        else:
            if self.verify != "none":
                check_digest(entry, chunk, digest_bytes(data))
            shape, dtype, offset, strides = cells
            values = np.ndarray(shape, dtype, data, offset, strides)
        buffer.put(form.shape, run, form.region, values)

    def _read(self, entry: ArrayEntry, chunk: int, form: _Form, file: str, buffer: Buffer, run: int) -> None:
        view = buffer.view(form.shape, run)
        into = None if view is None else view[form.region]
        if into is not None and form.is_stored_so and _is_direct(into, entry):
            check_digest(entry, chunk, _read_direct(self.store, file, as_bytes(into), self.verify != "none"))
        elif form.is_whole or self.verify == "full" or _is_read_whole(entry.layout):
            buffer.put(form.shape, run, form.region, self._checked(entry, chunk, form))
        else:
            _read_part(entry, form, file, run, buffer, self.store, into)

    def _checked(self, entry: ArrayEntry, chunk: int, form: _Form) -> Array:
        """Return the cells of a piece; its chunk is read whole, and checked unless `verify` is ``"none"``."""
        values = read_chunk(self.store, entry.spec, entry.layout, form.index)
        if self.verify != "none":
            check_digest(entry, chunk, digest(values))
        start = tuple(map(mul, form.index, entry.layout.chunk))
        cells: Array = values[region_of(start, form.box.start, form.box.stop)]
        return cells


def _is_direct(into: Array, entry: ArrayEntry) -> bool:
    """Tell whether memory holds elements as files do: in C order, in the stored data type and byte order."""
    return into.flags.c_contiguous and into.dtype == numpy_dtype(entry.spec.dtype)


def _is_read_whole(layout: Layout) -> bool:
    """Tell whether a piece costs as much as its whole chunk: if that is small, or can only be decoded whole."""
    return not is_raw(layout) or layout.chunk_nbytes <= SMALL_CHUNK_NBYTES


def _read_part(
    entry: ArrayEntry, form: _Form, name: str, run: int, buffer: Buffer, store: Store, into: Array | None
) -> None:
    """Read only a piece of a plain chunk; directly into its place if its layout there is that of the file."""
    chunk, itemsize = entry.layout.chunk, entry.spec.itemsize
    origin = entry.grid.box(form.index)
    box = form.box.relative_to(origin)
    ranges = ranges_of(chunk, box, itemsize)
    if into is not None and _is_direct(into, entry) and ranges.total_nbytes == into.nbytes:
        store.read_ranges(name, ranges.starts, ranges.nbytes, as_bytes(into))
        return
    shift = [o - t for o, t in zip(origin.start, form.target.start, strict=True)]
    for block in blocks_of(box, ranges, itemsize):
        part = ranges_of(chunk, block, itemsize)
        values = read_part(store, name, part, block.shape, numpy_dtype(entry.spec.dtype))
        region = tuple(slice(a + s, b + s) for a, b, s in zip(block.start, block.stop, shift, strict=True))
        buffer.put(form.shape, run, region, values)


def _read_direct(store: Store, name: str, into: memoryview, verify: bool) -> bytes | None:
    """Read a whole plain chunk into its place, and return its digest if `verify`."""
    if not verify:
        store.read_into(name, into)
        return None
    if len(into) <= BLOCK_NBYTES:
        store.read_into(name, into)
        return digest_bytes(into)
    hasher = xxhash.xxh3_128()
    store.read_into(name, into, hasher.update)
    return hasher.digest()
