"""`PendingSave`: a save that goes on in the background and commits by itself."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

from functional_ckpt.plan.manifest import Manifest
from functional_ckpt.progress import Progress, Tracker

__all__ = ["PendingSave", "start"]


class PendingSave:
    """A running save. Dropping it changes nothing: the save publishes by itself, or fails on all ranks.

    Examples
    --------
    >>> import numpy as np, functional_ckpt
    >>> pending = functional_ckpt.async_save({"w": np.ones(3)}, "memory://pending-example")
    >>> pending.result().nbytes, pending.done()
    (24, True)
    """

    def __init__(self, future: "Future[Manifest]", tracker: Tracker) -> None:
        self._future = future
        self._tracker = tracker

    def done(self) -> bool:
        """Tell whether the save has been published or has failed."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Manifest:
        """Wait for the save, at most `timeout` seconds, and return its manifest.

        Raises
        ------
        TimeoutError
            If it is still running; it goes on.
        CheckpointError
            If it failed, here or on another rank; then nothing was published.
        """
        return self._future.result(timeout)

    def progress(self) -> Progress:
        """Return how far this rank has come."""
        return self._tracker.now

    def cancel(self) -> None:
        """Ask the save to stop. Unless it is published already, `result` raises on every rank."""
        self._tracker.cancelled.set()


def start(function: Callable[[], Manifest], tracker: Tracker) -> PendingSave:
    """Run `function` in the background, after all saves started before it: ranks then agree on the order."""
    return PendingSave(_worker().submit(function), tracker)


@cache
def _worker() -> ThreadPoolExecutor:
    # One thread per process, never a fork: TensorStore aborts in a forked child.
    return ThreadPoolExecutor(1, thread_name_prefix="functional_ckpt-save")
