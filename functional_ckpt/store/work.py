"""Many small and few large pieces of work on a few threads, within a byte budget."""

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from threading import Thread

import attrs

__all__ = ["Work", "run_all", "thread_count"]

# Below this a piece is mostly system calls and Python; threads then begin at opposite ends of the pile.
_SMALL_NBYTES = 256 * 2**10
# Fewer small pieces than this are done before a thread has started.
_FEW = 128


@attrs.frozen(eq=False)
class Work:
    """A call that needs up to `nbytes` of extra memory while it runs."""

    nbytes: int
    call: Callable[[], object]


def thread_count() -> int:
    """Return how many threads copy and do input/output: one per usable core, at most 8."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def run_all(work: Iterable[Work], budget_nbytes: int, on_bytes: Callable[[int], None] | None = None) -> list[object]:
    """Run all `work` and return the results in order; after the first failure nothing more begins.

    Every thread does one piece at a time, and there are only as many threads as `budget_nbytes` allows of the largest
    piece (at least one).

    Examples
    --------
    >>> run_all([Work(1, lambda: "a"), Work(1, lambda: "b")], 10)
    ['a', 'b']
    """
    pieces = list(work)
    results: list[object] = [None] * len(pieces)
    failures: list[BaseException] = []
    small = [i for i, piece in enumerate(pieces) if piece.nbytes < _SMALL_NBYTES]
    large = [i for i, piece in enumerate(pieces) if piece.nbytes >= _SMALL_NBYTES]
    largest = max((pieces[i].nbytes for i in large), default=1)

    def drain(order: Iterator[int]) -> None:
        try:
            for i in order:
                if failures:
                    return
                results[i] = pieces[i].call()
                if on_bytes is not None:
                    on_bytes(pieces[i].nbytes)
        except BaseException as error:
            failures.append(error)

    # Each list has one iterator for all threads: taking the next item of it is atomic.
    todo_small, todo_large = iter(small), iter(large)
    useful = len(large) + len(small) // _FEW
    count = min(thread_count(), useful, max(1, budget_nbytes // largest))
    helpers = [Thread(target=drain, args=(chain(todo_large, todo_small),)) for _ in range(count - 1)]
    for helper in helpers:
        helper.start()
    drain(chain(todo_small, todo_large))
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]
    return results
