"""`staged`: copies of buffers, in memory of a pool, that can be written while the originals change.

A copy gives its memory back piece by piece, as the pieces have been written.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from functional_ckpt.errors import SpecError
from functional_ckpt.plan.save import GIB
from functional_ckpt.spec.strided import View
from functional_ckpt.store.buffer import WHOLE, Buffer, Copier, HostBuffer, copy_cast, fragment_of, native
from functional_ckpt.store.encoding import Array
from functional_ckpt.store.pool import Span, StagingPool, aligned, host_memory
from functional_ckpt.store.work import SMALL_NBYTES, Work, run_all

__all__ = ["StagedBuffer", "staged"]

#: Copies of small buffers share a span of at most this size, and return together.
_SHARED_NBYTES = 4 * 2**20
#: What one thread copies at a time.
_PART_NBYTES = 8 * 2**20


class StagedBuffer:
    """A copy of a buffer, of which a save asks for `wanted` elements, each once.

    It refers to its memory until the last of them is asked for, and then only who asked does. A large copy hands out
    regions that are contiguous as spans of their own, so that one that has been written is free before the next.
    """

    __slots__ = ("_array", "_left", "_lock", "_span")

    def __init__(self, array: Array, wanted: int, lock: Lock, span: Span | None = None) -> None:
        self._array: Array | None = array
        self._left, self._lock, self._span = wanted, lock, span

    def view(self, shape: tuple[int, ...], run: int) -> Array | None:
        """Return None: a view would keep the memory of all pieces."""
        return None

    def get(self, shape: tuple[int, ...], run: int, region: tuple[Any, ...]) -> Array:
        """Return a region, once.

        Raises
        ------
        SpecError
            If all that was wanted has been returned before: others may have the memory by now.
        """
        with self._lock:
            array = self._array
            if array is None:
                raise _gone()
            values: Array = fragment_of(array, shape, run)[region]
            self._left -= values.size
            if self._left <= 0:
                self._array = self._span = None
            elif self._span is not None and values.flags.c_contiguous and values.nbytes >= SMALL_NBYTES:
                values = _own(self._span, array, values)
            return native(values)

    def put(self, shape: tuple[int, ...], run: int, region: tuple[Any, ...], values: Array) -> None:
        """Raise: what is saved does not change."""
        raise SpecError("a copy that is being saved is read-only")

    def form(self) -> Array:
        """Return the copy."""
        if self._array is None:
            raise _gone()
        return self._array

    def copier(self) -> None:
        """Return None: the host copies."""

    def memory(self) -> tuple[Hashable, View | range]:
        """Return where the copy is."""
        return HostBuffer(self.form()).memory()

    def drop(self) -> None:
        """Give back what nobody has asked for: the save is over."""
        with self._lock:
            self._array = self._span = None


def _gone() -> SpecError:
    return SpecError("a copy is asked for more than was planned", expected="each element once")


def staged(
    buffers: Sequence[Buffer], wanted: Sequence[int], pool: StagingPool, keep_nbytes: int | None = None
) -> tuple[StagedBuffer, ...]:
    """Copy buffers to memory of `pool`; of each of them so many elements are `wanted`.

    Returns when the originals may change. Whatever fails, no copy goes on after that.

    Examples
    --------
    >>> state = np.arange(6)
    >>> [copy] = staged([HostBuffer(state)], [6], StagingPool())
    >>> state += 1
    >>> copy.get((6,), 0, WHOLE)
    array([0, 1, 2, 3, 4, 5])
    """
    by_copier: dict[Copier | None, list[int]] = {}
    for row, buffer in enumerate(buffers):
        by_copier.setdefault(buffer.copier(), []).append(row)
    found: dict[int, StagedBuffer] = {}
    lock = Lock()
    with ExitStack() as ending:
        # Devices copy while the host does: it begins last, and is the first that is waited for.
        for copier in sorted(by_copier, key=lambda copier: copier is None):
            rows = by_copier[copier]
            mine = [buffers[row] for row in rows]
            begin, allocate = (_begin, host_memory) if copier is None else (copier.begin, copier.allocate)
            copies, spans = _room_for(mine, partial(pool.take, allocate=allocate, keep_nbytes=keep_nbytes))
            ending.callback(begin(mine, copies))
            for row, copy, span in zip(rows, copies, spans, strict=True):
                found[row] = StagedBuffer(copy, wanted[row], lock, span)
    return tuple(found[row] for row in range(len(buffers)))


def _room_for(
    buffers: Sequence[Buffer], take: Callable[[Sequence[int]], list[Span]]
) -> tuple[list[Array], list[Span | None]]:
    """Return an array of the form of each buffer, and the span that it has for itself, if any."""
    forms = [buffer.form() for buffer in buffers]
    nbytes = [aligned(form.nbytes) for form in forms]
    sizes: list[int] = []
    which: list[int] = []
    starts: list[int] = []
    shared = -1  # the span that is being filled with small ones
    for size in nbytes:
        if size < SMALL_NBYTES and shared >= 0 and sizes[shared] + size <= _SHARED_NBYTES:
            which.append(shared)
            starts.append(sizes[shared])
            sizes[shared] += size
        else:
            shared = shared if size >= SMALL_NBYTES else len(sizes)
            which.append(len(sizes))
            starts.append(0)
            sizes.append(size)
    spans = take(sizes)
    blocks = [np.asarray(span) for span in spans]
    placed = zip(forms, which, starts, strict=True)
    copies = [np.ndarray(form.shape, form.dtype, blocks[number], start) for form, number, start in placed]
    own = [spans[number] if size >= SMALL_NBYTES else None for number, size in zip(which, nbytes, strict=True)]
    return copies, own


def _own(span: Span, whole: Array, values: Array) -> Array:
    """Return a contiguous region of a copy on a span of its own."""
    start = values.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return np.ndarray(values.shape, values.dtype, np.asarray(span.part(start, start + values.nbytes)))


def _begin(buffers: Sequence[Buffer], copies: Sequence[Array]) -> Callable[[], None]:
    """Return a call by which the host copies, large buffers part by part on several threads."""

    def copy_small() -> None:
        for buffer, into in zip(buffers, copies, strict=True):
            if into.nbytes < SMALL_NBYTES:
                _copy(buffer, into)

    def run() -> None:
        pairs = zip(buffers, copies, strict=True)
        large = [part for buffer, into in pairs if into.nbytes >= SMALL_NBYTES for part in _parts(buffer, into)]
        run_all([Work(0, copy_small, 0), *large], GIB)

    return run


def _copy(buffer: Buffer, into: Array) -> None:
    view = buffer.view(into.shape, 0)
    if view is None:
        copy_cast(into, buffer.get(into.shape, 0, WHOLE))
    else:
        into[...] = view


def _parts(buffer: Buffer, into: Array) -> list[Work]:
    """Return the work of one large copy."""
    view = buffer.view(into.shape, 0)
    if view is None:
        return [Work(into.nbytes, partial(_copy, buffer, into), 0)]
    if view.flags.c_contiguous:
        view, into = view.reshape(-1), into.reshape(-1)
    axis = int(np.argmax(into.shape))
    rows = max(1, into.shape[axis] * _PART_NBYTES // into.nbytes)
    cuts = [(*((slice(None),) * axis), slice(low, low + rows)) for low in range(0, into.shape[axis], rows)]
    return [Work(into[cut].nbytes, partial(np.copyto, into[cut], view[cut]), 0) for cut in cuts]
