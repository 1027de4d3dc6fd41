"""Many small and few large pieces of work on a few threads, within a byte budget."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import attrs

__all__ = ["Work", "run_all", "thread_count"]

# Smaller pieces spend their time in Python, where threads would only wait for one another.
_SMALL_NBYTES = 256 * 2**10


@attrs.frozen(eq=False)
class Work:
    """A call that needs up to `nbytes` of extra memory while it runs."""

    nbytes: int
    call: Callable[[], object]


def thread_count() -> int:
    """Return how many threads copy and do input/output: one per usable core, at most 8."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def run_all(work: Iterable[Work], budget_nbytes: int, on_bytes: Callable[[int], None] | None = None) -> list[object]:
    """Run all `work` and return the results in order; the first failure cancels what has not begun.

    Large pieces run on a few threads, at most `budget_nbytes` of them at a time (one, if it is larger than that);
    small ones run on this thread meanwhile.

    Examples
    --------
    >>> run_all([Work(1, lambda: "a"), Work(1, lambda: "b")], 10)
    ['a', 'b']
    """
    pieces = list(work)
    large = [i for i, piece in enumerate(pieces) if piece.nbytes >= _SMALL_NBYTES]
    results: list[object] = [None] * len(pieces)

    def run(i: int) -> None:
        results[i] = pieces[i].call()
        if on_bytes is not None:
            on_bytes(pieces[i].nbytes)

    if len(large) <= 1:
        for i in range(len(pieces)):
            run(i)
        return results
    with ThreadPoolExecutor(thread_count(), thread_name_prefix="functional_ckpt") as pool:
        try:
            waiting = _submit(pool, run, large, pieces, budget_nbytes)
            for i, piece in enumerate(pieces):
                if piece.nbytes < _SMALL_NBYTES:
                    run(i)
            for future in waiting:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return results


def _submit(
    pool: ThreadPoolExecutor, run: Callable[[int], None], large: list[int], pieces: list[Work], budget_nbytes: int
) -> list[Future[None]]:
    """Submit the large pieces, as many at a time as the budget allows."""
    running: dict[Future[None], int] = {}
    for i in large:
        while running and sum(running.values()) + pieces[i].nbytes > budget_nbytes:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
                del running[future]
        running[pool.submit(run, i)] = pieces[i].nbytes
    return list(running)
