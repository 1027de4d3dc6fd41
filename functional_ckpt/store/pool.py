"""`StagingPool`: memory for copies of a state, kept for the next save.

Bytes are free again when no array refers to them any more. So while anybody reads them, nobody else is given them.
"""

import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from functional_ckpt.errors import SpecError
from functional_ckpt.store.encoding import Array

__all__ = ["Allocate", "Span", "StagingPool", "aligned", "host_memory", "the_pool"]

# Spans begin and end at multiples of this: any element is aligned there, and no two share a cache line.
_ALIGNMENT_NBYTES = 64
# What so many calls of `take` needed stays: a program may save a part of its state between saves of all of it.
_REMEMBERED = 8


#: Returns new memory of so many bytes, which is given back when no array refers to it; raises MemoryError.
Allocate = Callable[[int], Array]


def host_memory(nbytes: int) -> Array:
    """Return new memory of this process alone, in huge pages where the system has them.

    A forked child does not get it: the pages would be copied, one by one, when the parent writes to them again.

    Examples
    --------
    >>> host_memory(10).nbytes
    10
    """
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"no memory for a copy of {nbytes} bytes: {error}") from error
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if hasattr(mmap, advice):
            _advise(pages, getattr(mmap, advice))
    memory = np.frombuffer(pages, np.uint8)
    _MAPPED[memory.__array_interface__["data"][0]] = memory
    return memory


def _advise(pages: mmap.mmap, advice: int) -> None:
    try:
        pages.madvise(advice)
    except OSError:  # a kernel without it
        return


class Span:
    """Bytes of a slab for one user; free again when this object, and every array made of it, are gone.

    Examples
    --------
    >>> pool = StagingPool()
    >>> [span] = pool.take([100])
    >>> array = np.asarray(span)
    >>> del span
    >>> pool.used_nbytes
    128
    >>> del array
    >>> pool.used_nbytes, pool.nbytes
    (0, 128)
    """

    __slots__ = ("_left", "_slab", "high", "low")

    def __init__(self, slab: "_Slab", low: int, high: int) -> None:
        self._slab, self.low, self.high = slab, low, high
        self._left = [(low, high)] if low < high else []

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """How numpy makes an array of these bytes, which refers to this object."""
        address = self._slab.address + self.low
        return {"version": 3, "shape": (self.high - self.low,), "typestr": "|u1", "data": (address, False)}

    def part(self, start: int, stop: int) -> "Span":
        """Return bytes ``[start, stop)`` of this span as one of its own: they become free when that is gone.

        Raises
        ------
        SpecError
            If some of them were given away before.
        """
        low, high = self.low + start, self.low + stop
        for number, (first, last) in enumerate(self._left):
            if first <= low and high <= last:
                self._left[number : number + 1] = [(a, b) for a, b in ((first, low), (high, last)) if a < b]
                return Span(self._slab, low, high)
        raise SpecError("bytes of a copy are asked for twice", offset=(start,), expected="each byte once")

    def __del__(self) -> None:
        # No lock: this may run wherever the last reference goes, also within `StagingPool.take`.
        self._slab.returned.extend(self._left)


class _Slab:
    """Memory that is allocated at once. `free` are the byte ranges without a user, in order, none beside another."""

    def __init__(self, allocate: Allocate, nbytes: int) -> None:
        self.allocate, self.memory = allocate, allocate(nbytes)
        self.address: int = self.memory.__array_interface__["data"][0]
        self.free = [(0, nbytes)]
        self.returned: deque[tuple[int, int]] = deque()

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def is_idle(self) -> bool:
        return self.free == [(0, self.nbytes)]

    def collect(self) -> None:
        """Add what users have returned to what is free."""
        if not self.returned:
            return
        ranges = list(self.free)
        while self.returned:
            ranges.append(self.returned.popleft())
        self.free = []
        for low, high in sorted(ranges):
            if self.free and self.free[-1][1] == low:
                self.free[-1] = self.free[-1][0], high
            else:
                self.free.append((low, high))

    def take(self, nbytes: int) -> Span | None:
        """Return a span from the first free range that holds it."""
        for number, (low, high) in enumerate(self.free):
            start = aligned(low)
            stop = start + nbytes
            if stop <= high:
                self.free[number : number + 1] = [(a, b) for a, b in ((low, start), (stop, high)) if a < b]
                return Span(self, start, stop)
        return None


class StagingPool:
    """Gives spans of memory, and keeps the memory for later ones; any thread may call it.

    It holds at most a limit: what `take` is told, or else as much as users had at once in the last few calls. What is
    beyond comes from the system and goes back there.

    Examples
    --------
    >>> pool = StagingPool()
    >>> spans = pool.take([1000, 24])
    >>> [span.high - span.low for span in spans], pool.nbytes
    ([1024, 64], 1088)
    >>> pool.release(), pool.nbytes
    (1088, 0)
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._slabs: list[_Slab] = []
        self._needs: deque[int] = deque(maxlen=_REMEMBERED)

    @property
    def nbytes(self) -> int:
        """Bytes that this holds, with a user or without."""
        return sum(slab.nbytes for slab in self._slabs)

    @property
    def used_nbytes(self) -> int:
        """Bytes of it that have a user."""
        with self._lock:
            return self._used()

    def take(
        self, sizes: Sequence[int], allocate: Allocate = host_memory, keep_nbytes: int | None = None
    ) -> list[Span]:
        """Return a span for each size, rounded up; of what `allocate` gives the pool keeps `keep_nbytes` at most.

        Raises
        ------
        MemoryError
            If there is not so much memory.
        """
        rounded = [aligned(size or 1) for size in sizes]
        with self._lock:
            self._needs.append(self._used() + sum(rounded))
            limit = max(self._needs) if keep_nbytes is None else keep_nbytes
            self._shrink(limit)
            spans = self._placed(rounded, allocate)
            missing = [size for size, span in zip(rounded, spans, strict=True) if span is None]
            if missing:
                more = iter(self._new(missing, allocate, limit))
                spans = [next(more) if span is None else span for span in spans]
            return [span for span in spans if span is not None]

    def release(self) -> int:
        """Give everything back to the system, what has a user as soon as it has none; return how much it was."""
        with self._lock:
            nbytes = self.nbytes
            self._slabs.clear()
            self._needs.clear()
        return nbytes

    def _used(self) -> int:
        for slab in self._slabs:
            slab.collect()
        return self.nbytes - sum(high - low for slab in self._slabs for low, high in slab.free)

    def _shrink(self, limit: int) -> None:
        for slab in [slab for slab in self._slabs if slab.is_idle]:
            if self.nbytes > limit:
                self._slabs.remove(slab)

    def _placed(self, sizes: Sequence[int], allocate: Allocate) -> list[Span | None]:
        """Return a span of what is there for each size, or None; memory that nobody uses and that does not do, goes."""
        idle = [slab for slab in self._slabs if slab.is_idle and slab.allocate == allocate]
        spans = [self._found(size, allocate) for size in sizes]
        if idle and None in spans:
            spans.clear()
            for slab in idle:
                self._slabs.remove(slab)
            self._used()
            spans = [self._found(size, allocate) for size in sizes]
        return spans

    def _found(self, size: int, allocate: Allocate) -> Span | None:
        return next((span for slab in self._slabs if slab.allocate == allocate and (span := slab.take(size))), None)

    def _new(self, sizes: Sequence[int], allocate: Allocate, limit: int) -> list[Span | None]:
        if self.nbytes + sum(sizes) > limit:
            return [_Slab(allocate, size).take(size) for size in sizes]
        slab = _Slab(allocate, sum(sizes))
        self._slabs.append(slab)
        return [slab.take(size) for size in sizes]


def the_pool() -> StagingPool:
    """Return the pool of this process."""
    return _POOL


def aligned(nbytes: int) -> int:
    """Return `nbytes`, rounded up to where the next span may begin.

    Examples
    --------
    >>> aligned(1), aligned(64)
    (64, 64)
    """
    return -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES


def _forget() -> None:
    """In a forked child there is neither the memory of its parent nor anybody who uses it.

    Others may have mapped pages at its address by the time when the child drops what refers to it, and to let go of it
    would unmap theirs.
    """
    global _POOL
    _LEFT_BEHIND.extend(_MAPPED.values())
    _POOL = StagingPool()


#: Memory from `host_memory`, by its address.
_MAPPED: WeakValueDictionary[int, Array] = WeakValueDictionary()
_LEFT_BEHIND: list[Array] = []
_POOL = StagingPool()
os.register_at_fork(after_in_child=_forget)
