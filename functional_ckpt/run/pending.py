"""`PendingSave`: a save that goes on in the background and commits by itself."""

import atexit
import logging
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait

import attrs

from functional_ckpt.errors import (
    CheckpointError,
    CheckpointWarning,
    ProblemError,
    SaveCancelledError,
    SaveInFlightError,
    changed,
    forget_locals,
    raise_problems,
)
from functional_ckpt.plan.manifest import Manifest
from functional_ckpt.run.progress import Progress, Tracker

__all__ = ["PendingSave", "raise_dropped", "refuse_while_running", "start", "wait_for_all"]

_LOGGER = logging.getLogger("functional_ckpt")


class PendingSave:
    """A running save. Dropping this object changes nothing: the save publishes by itself, or fails on all ranks.

    If `result` is not called, a failure is logged and raised by the next save; at exit it becomes a warning.

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
        self._was_asked = False

    def __repr__(self) -> str:
        """Return the phase and its share that is done, or how the save has ended."""
        if not self.done():
            now = self.progress()
            return f"PendingSave({now.phase}, {now.fraction:.0%})"
        error = self._future.exception()
        return f"PendingSave({'published' if error is None else f'failed: {type(error).__name__}'})"

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
        try:
            return self._future.result(timeout)
        finally:
            if self._future.done():
                self._was_asked = True
                _FAILED.pop(self._future, None)

    def settle(self) -> Manifest | None:
        """Wait for the save and return its manifest; None if it failed and `result` has raised that already.

        Raises
        ------
        CheckpointError
            If it failed and the failure was not raised before.
        """
        wait([self._future])
        return None if self._was_asked and self._future.exception() is not None else self.result()

    def progress(self) -> Progress:
        """Return how far this rank has come."""
        return self._tracker.now

    def cancel(self) -> None:
        """Ask the save to stop. Unless it is published already, `result` raises on every rank."""
        self._tracker.cancelled.set()


@attrs.frozen(eq=False)
class _Job:
    """A save to run, and its future and `PendingSave`."""

    function: Callable[[], Manifest]
    future: "Future[Manifest]"
    pending: "weakref.ref[PendingSave]"
    #: Keeps the key of the queue, which is its number, from being given to another one.
    lane: object

    def run(self) -> None:
        try:
            manifest = self.function()
        except BaseException as error:
            if not isinstance(error, SaveCancelledError):
                _LOGGER.exception("a save in the background failed")
                _FAILED[self.future] = self.pending
            forget_locals(error)  # among them, the copy of the state
            self.future.set_exception(error)
        else:
            self.future.set_result(manifest)


def start(function: Callable[[], Manifest], tracker: Tracker, lane: object = None) -> PendingSave:
    """Run `function` in the background, after all that were started before it on its `lane`: ranks agree on the order.

    Each lane has its own thread, so that ranks which start saves of two lanes in different orders do not deadlock. A
    thread ends with its last save, so that no thread has to be stopped at exit or is missing in a forked child. If no
    thread can be started, at exit or at the system's limit, the save is done when this returns.
    """
    future: Future[Manifest] = Future()
    pending = PendingSave(future, tracker)
    job, key = _Job(function, future, weakref.ref(pending), lane), id(lane)
    try:
        with _LOCK:
            _QUEUES.setdefault(key, deque()).append(job)
        _work_on(key)
    except BaseException:  # an interrupt: the save ends as a cancelled one does
        tracker.cancelled.set()
        _run_all(key)
        raise
    return pending


def _work_on(key: int) -> None:
    """Let a thread run the saves of a queue, unless one does."""
    if key in _WORKED_ON:
        return
    thread = threading.Thread(target=_run_all, args=(key,), name="functional_ckpt-save")
    try:
        if threading.main_thread().is_alive():
            thread.start()
            return
    except RuntimeError:
        pass
    _run_all(key)  # the interpreter ends, and waits for no more threads, or there are too many


def wait_for_all() -> None:
    """Wait for the saves of this process that are in the background, so that a later one is also published later."""
    wait(_running())


def refuse_while_running() -> None:
    """Raise `SaveInFlightError` while a save of this process is in the background."""
    if _running():
        raise SaveInFlightError(
            "an earlier save of this process is still running",
            remedy="Wait for its result(), or pass SavePolicy(in_flight='wait')",
        )


def _running() -> list["Future[Manifest]"]:
    """Return the saves in the background; empty in a thread of such a save, which would wait for itself."""
    if getattr(_HERE, "is_worker", False):
        return []
    with _LOCK:
        queues = {key: [job.future for job in queue] for key, queue in _QUEUES.items()}
    for key in queues:  # of a queue that an interrupt has left to nobody
        _work_on(key)
    return [future for queue in queues.values() for future in queue if not future.done()]


def raise_dropped() -> None:
    """Raise the failures of earlier saves in the background whose `PendingSave` was dropped without a `result`.

    Raises
    ------
    CheckpointError
        All of these failures, once.
    """
    dropped = [future for future, pending in [*_FAILED.items()] if pending() is None]
    errors = [future.exception() for future in dropped if _FAILED.pop(future, None) is not None]
    for error in errors:
        if not isinstance(error, CheckpointError | None):
            raise error
    raise_problems(_dated(error) for error in errors if isinstance(error, CheckpointError))


def _dated(error: CheckpointError) -> CheckpointError:
    """Return the error with a text that attributes it to an earlier save."""
    if not isinstance(error, ProblemError):
        return error
    return changed(error, what=f"an earlier async_save has failed: {error.what}")


def _run_all(key: int) -> None:
    """Run the saves of a queue until it is empty, unless another thread does.

    A caller that is interrupted while it starts the thread cannot know whether that runs, and calls this too. In the
    main thread an interrupt may come anywhere here: no save is run twice, and what it leaves in the queue is run later.
    """
    worker, job = object(), None
    was_worker = getattr(_HERE, "is_worker", False)
    try:
        with _LOCK:
            if key in _WORKED_ON or key not in _QUEUES:
                return
            _WORKED_ON[key] = worker
        _HERE.is_worker = True
        while (job := _next(key)) is not None:
            job.run()
    except BaseException as error:
        if job is not None and not job.future.done():
            job.future.set_exception(error)
        raise
    finally:
        _HERE.is_worker = was_worker
        if _WORKED_ON.get(key) is worker:
            del _WORKED_ON[key]


def _next(key: int) -> _Job | None:
    """Return the save that is next in a queue; if there is none, the queue goes, and who works on it stops."""
    with _LOCK:
        queue = _QUEUES[key]
        while queue and queue[0].future.done():
            queue.popleft()
        if queue:
            return queue[0]
        del _QUEUES[key], _WORKED_ON[key]
        return None


def _warn() -> None:
    for future in _FAILED:
        warnings.warn(f"a save in the background failed: {future.exception()!r}", CheckpointWarning, stacklevel=2)


def _forget() -> None:
    """In a forked child there are neither the saves nor the threads of its parent."""
    global _LOCK
    _LOCK = threading.Lock()
    _QUEUES.clear()
    _WORKED_ON.clear()
    _FAILED.clear()


_LOCK = threading.Lock()
_HERE = threading.local()
#: Saves that run or wait, by the number of their lane.
_QUEUES: dict[int, deque[_Job]] = {}
#: Who runs the saves of a lane, an object for each.
_WORKED_ON: dict[int, object] = {}
#: Saves that have failed, until their failure is raised.
_FAILED: "dict[Future[Manifest], weakref.ref[PendingSave]]" = {}
os.register_at_fork(after_in_child=_forget)
atexit.register(_warn)
