"""Run many small and few large tasks on a few threads, within a byte budget."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from threading import Thread

import attrs

__all__ = ["SMALL_NBYTES", "Work", "run_all", "thread_count"]

#: A smaller task is mostly Python and short system calls, where threads only wait for each other (measured: two threads
#: take 1.4 times as long as one).
SMALL_NBYTES = 256 * 2**10


@attrs.frozen(eq=False)
class Work:
    """A call that handles `nbytes` of elements and needs up to `held_nbytes` of extra memory meanwhile."""

    nbytes: int
    call: Callable[[], object]
    held_nbytes: int


def thread_count() -> int:
    """Return how many threads copy and do input/output: one per usable core, at most 8."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def run_all(work: Iterable[Work], budget_nbytes: int, on_bytes: Callable[[int], None] | None = None) -> list[object]:
    """Run all `work` and return the results in order; after the first failure no other task begins.

    Large tasks run on threads, one at a time each; there are only so many threads that the largest task on each fits
    into `budget_nbytes`. This thread runs the small tasks and then helps.

    Examples
    --------
    >>> run_all([Work(1, lambda: "a", 1), Work(1, lambda: "b", 1)], 10)
    ['a', 'b']
    """
    pieces = list(work)
    results: list[object] = [None] * len(pieces)
    failures: list[BaseException] = []
    small = [i for i, piece in enumerate(pieces) if piece.nbytes < SMALL_NBYTES]
    large = [i for i, piece in enumerate(pieces) if piece.nbytes >= SMALL_NBYTES]
    largest = max((pieces[i].held_nbytes for i in large), default=1) or 1

    def drain(order: Iterable[int]) -> None:
        try:
            for i in order:
                if failures:
                    return
                results[i] = pieces[i].call()
                if on_bytes is not None:
                    on_bytes(pieces[i].nbytes)
        except BaseException as error:
            failures.append(error)

    # All threads share one iterator of the large tasks: taking its next item is atomic.
    todo = iter(large)
    count = min(thread_count(), len(large), max(1, budget_nbytes // largest))
    helpers = [Thread(target=drain, args=(todo,)) for _ in range(count - 1)]
    started: list[Thread] = []
    try:
        with suppress(RuntimeError):  # too many threads, or the interpreter is shutting down: go on with fewer
            for helper in helpers:
                helper.start()
                started.append(helper)
        drain(chain(small, todo))
        for helper in started:
            helper.join()
    except BaseException as error:  # an interrupt: no thread may use the caller's memory after this returns
        failures.append(error)
        for helper in started:
            helper.join()
        raise
    if failures:
        raise failures[0]
    return results
