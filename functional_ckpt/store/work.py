"""Many small and few large pieces of work on a few threads, within a byte budget."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

import attrs

__all__ = ["Work", "run_all", "thread_count"]

T = TypeVar("T")

# One batch is what a thread takes at a time: enough to hide the hand-over, small enough to balance.
_BATCH_NBYTES = 4 * 2**20
_BATCH_ITEMS = 256


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

    At most `budget_nbytes` of work is in flight, or one batch if a single piece is larger.

    Examples
    --------
    >>> run_all([Work(1, lambda: "a"), Work(1, lambda: "b")], 10)
    ['a', 'b']
    """
    batches = list(_batches(work))
    if len(batches) <= 1:
        return [result for batch in batches for result in _run(batch, on_bytes)]
    futures: list[Future[list[object]]] = []
    pending: dict[Future[list[object]], int] = {}
    with ThreadPoolExecutor(thread_count(), thread_name_prefix="functional_ckpt") as pool:
        try:
            for batch in batches:
                nbytes = sum(w.nbytes for w in batch)
                while pending and sum(pending.values()) + nbytes > budget_nbytes:
                    _collect(pending)
                future = pool.submit(_run, batch, on_bytes)
                futures.append(future)
                pending[future] = nbytes
            while pending:
                _collect(pending)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [result for future in futures for result in future.result()]


def _collect(pending: dict[Future[list[object]], int]) -> None:
    done, _ = wait(pending, return_when=FIRST_COMPLETED)
    for future in done:
        del pending[future]
        future.result()


def _run(batch: list[Work], on_bytes: Callable[[int], None] | None) -> list[object]:
    results = []
    for work in batch:
        results.append(work.call())
        if on_bytes is not None:
            on_bytes(work.nbytes)
    return results


def _batches(work: Iterable[Work]) -> Iterator[list[Work]]:
    batch: list[Work] = []
    nbytes = 0
    for item in work:
        batch.append(item)
        nbytes += item.nbytes
        if nbytes >= _BATCH_NBYTES or len(batch) >= _BATCH_ITEMS:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
