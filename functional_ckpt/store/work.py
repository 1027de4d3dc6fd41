"""Run many small and few large tasks on a few threads, within a byte budget."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain, islice
from threading import Condition, Thread
from typing import TypeVar

import attrs

__all__ = ["COPIES", "SMALL_NBYTES", "Work", "at_once", "batches", "most_at_once", "run_all", "thread_count"]

T = TypeVar("T")

#: A smaller task is mostly Python and short system calls, where threads only wait for each other (measured: two threads
#: take 1.4 times as long as one).
SMALL_NBYTES = 256 * 2**10
#: Most pieces that are one task.
_BATCH = 64


#: So many times the bytes of a request are in memory while it is on its way.
COPIES = 2


@attrs.frozen(eq=False)
class Work:
    """A call that handles `nbytes` of elements and needs up to `held_nbytes` of extra memory meanwhile."""

    nbytes: int
    call: Callable[[], object]
    held_nbytes: int


def thread_count() -> int:
    """Return how many threads copy and do input/output: one per usable core, at most 8."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


class _Budget:
    """Bytes that pieces hold at a time; a piece that is larger than all of it goes alone."""

    def __init__(self, nbytes: int) -> None:
        self._free = self._all = nbytes
        self._changed = Condition()

    @contextmanager
    def holding(self, nbytes: int) -> Iterator[None]:
        """Wait until there is room."""
        nbytes = min(nbytes, self._all)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= nbytes)
            self._free -= nbytes
        try:
            yield
        finally:
            with self._changed:
                self._free += nbytes
                self._changed.notify_all()


def run_all(
    work: Iterable[Work],
    budget_nbytes: int,
    on_bytes: Callable[[int], None] | None = None,
    concurrency: int = 0,
) -> list[object]:
    """Run all `work` and return the results in order; after the first failure nothing more begins.

    Large tasks run on threads, one at a time each; there are only so many threads that the largest task on each fits
    into `budget_nbytes`. This thread runs the small tasks and then helps. If each task waits for a server,
    `concurrency` of them run at a time, large and small, as long as what they hold fits into the budget: each counts
    twice, since requests are copied on their way.

    Examples
    --------
    >>> run_all([Work(1, lambda: "a", 1), Work(1, lambda: "b", 1)], 10)
    ['a', 'b']
    """
    pieces = list(work)
    results: list[object] = [None] * len(pieces)
    failures: list[BaseException] = []
    small = [i for i, piece in enumerate(pieces) if piece.nbytes < SMALL_NBYTES and not concurrency]
    large = [i for i, piece in enumerate(pieces) if piece.nbytes >= SMALL_NBYTES or concurrency]
    budget = _Budget(budget_nbytes)

    def drain(order: Iterable[int]) -> None:
        try:
            for i in order:
                if failures:
                    return
                piece = pieces[i]
                with budget.holding(COPIES * max(piece.held_nbytes, piece.nbytes)) if concurrency else nullcontext():
                    results[i] = piece.call()
                if on_bytes is not None:
                    on_bytes(piece.nbytes)
        except BaseException as error:
            failures.append(error)

    largest = max((pieces[i].held_nbytes for i in large), default=1) or 1
    count = concurrency or min(thread_count(), max(1, budget_nbytes // largest))
    try:
        _run_on_threads(drain, small, large, count, failures)
        if failures:
            raise failures[0]
    finally:
        failures.clear()  # an error refers to this function, and to what the tasks hold
    return results


def batches(pieces: Iterable[T], nbytes: Iterable[int]) -> Iterator[tuple[list[T], int]]:
    """Yield small pieces, as many at a time as are small together, with their bytes; `nbytes` are those of each.

    Examples
    --------
    >>> list(batches("ab", [3, 4]))
    [(['a', 'b'], 7)]
    """
    batch: list[T] = []
    total = 0
    for piece, each in zip(pieces, nbytes, strict=True):
        if total + each >= SMALL_NBYTES or len(batch) == _BATCH:
            yield batch, total
            batch, total = [], 0
        batch.append(piece)
        total += each
    if batch:
        yield batch, total


def most_at_once(held_nbytes: Iterable[int], budget_nbytes: int, concurrency: int) -> int:
    """Return how many pieces of work `run_all` runs at a time if each waits for a server and holds so much: 1 at least.

    Examples
    --------
    >>> most_at_once([10] * 5, 100, 32), most_at_once([10] * 5, 60, 32), most_at_once([10] * 5, 100, 4)
    (5, 3, 4)
    """
    found = [*islice(held_nbytes, concurrency)]
    return max(1, min(len(found), budget_nbytes // (COPIES * max(found, default=0) or 1)))


def at_once(calls: Sequence[Callable[[], object]], concurrency: int) -> list[object]:
    """Return the results of a few calls: made at the same time if each waits for a server, else one after the other.

    Examples
    --------
    >>> at_once([lambda: 1, lambda: 2], 32)
    [1, 2]
    """
    return run_all([Work(0, call, 0) for call in calls], 1, None, concurrency)


def _run_on_threads(
    drain: Callable[[Iterable[int]], None],
    mine: list[int],
    all_of: list[int],
    count: int,
    failures: list[BaseException],
) -> None:
    """Let this thread do what is `mine`, and up to `count` threads, this one at last, what is for all of them."""
    # All threads share one iterator of these tasks: taking its next item is atomic.
    todo = iter(all_of)
    helpers = _Helpers(lambda: drain(todo))
    try:
        helpers.start(min(count, len(all_of)) - 1)
        drain(chain(mine, todo))
        helpers.end()
    except BaseException as error:  # an interrupt: no thread may use the caller's memory after this returns
        failures.append(error)
        helpers.end()
        raise


class _Helpers:
    """Threads that call a function, each once. After `end` none of them is in it, nor will be.

    That counts who is in it rather than who was started: a start that is interrupted may have begun a thread.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._inside, self._is_over = 0, False
        self._changed = Condition()
        self._started: list[Thread] = []

    def start(self, count: int) -> None:
        """Start threads; fewer if there are too many, or the interpreter is shutting down."""
        with suppress(RuntimeError):
            for _ in range(count):
                helper = Thread(target=self._help)
                helper.start()
                self._started.append(helper)

    def end(self) -> None:
        """Wait until no thread is in the function."""
        with self._changed:
            self._is_over = True
            self._changed.wait_for(lambda: not self._inside)
        for helper in self._started:
            helper.join()

    def _help(self) -> None:
        with self._changed:
            if self._is_over:
                return
            self._inside += 1
        try:
            self._function()
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()
