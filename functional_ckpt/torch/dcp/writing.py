"""The writing of one DCP save, on a thread of its own where ranks work together.

DCP reports a failure of one rank after all ranks have returned from `write_data` or failed before it, for example in a
planner or in a subclass of the writer. Blocking in `write_data` for such a rank would deadlock DCP. So `write_data`
returns at once; the thread waits for the other ranks, and `finish` waits for the thread.
"""

import atexit
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread, current_thread

from functional_ckpt.run.progress import Tracker
from functional_ckpt.run.saving import Written, abandon_written

__all__ = ["Writing", "abandon_left"]

#: How long the interpreter waits at exit for these threads: a thread that runs on can abort the process.
_EXIT_S = 5.0


class Writing:
    """The writing of one rank for one save; with `is_wanted` the caller will call `result` or `abandon`.

    The memory that is written must not change until the save has returned.
    """

    def __init__(self, is_wanted: bool, lane: object = None) -> None:
        self._is_wanted, self._lane, self._owner = is_wanted, lane, current_thread()
        self._tracker = Tracker()
        self._thread: Thread | None = None
        self._outcome: Future[Written] = Future()

    @classmethod
    def done(cls, written: Written) -> "Writing":
        """Return an object for a save that was written already."""
        writing = cls(True)
        writing._outcome.set_result(written)
        return writing

    @classmethod
    def begun(cls, work: Callable[[Tracker], Written], is_wanted: bool, lane: object) -> "Writing":
        """Start `work` on a thread, over a `lane` on which no earlier save waits; it stops when it is cancelled."""
        abandon_left(lane)
        writing = cls(is_wanted, lane)
        writing._thread = Thread(target=writing._run, args=(work,), name="functional_ckpt-dcp", daemon=True)
        _LEFT.add(writing)
        try:
            writing._thread.start()
        except BaseException:
            _LEFT.discard(writing)
            raise
        return writing

    def result(self) -> Written:
        """Wait for the writing and return its result.

        Raises
        ------
        CheckpointError
            If it failed on any rank.
        """
        try:
            return self._outcome.result()
        finally:
            _LEFT.discard(self)

    def abandon(self) -> None:
        """Remove the written files; a thread that still waits for other ranks gives up."""
        self._tracker.cancelled.set()
        if self._thread is not None:
            self._thread.join()
        _LEFT.discard(self)
        if self._outcome.done() and self._outcome.exception() is None:
            abandon_written(self._outcome.result())

    def is_left(self, lane: object) -> bool:
        """Tell whether this save has been left behind when another save begins on `lane`.

        Two saves of one lane do not wait for other ranks at the same time: the earlier one must have ended.
        """
        is_over = self._owner is current_thread() or not self._owner.is_alive()
        return is_over or (lane is not None and self._lane is lane and self._tracker.now.phase == "plan")

    def _run(self, work: Callable[[Tracker], Written]) -> None:
        try:
            written = work(self._tracker)
        except BaseException as error:
            if self._is_wanted:
                self._outcome.set_exception(error)
        else:
            if self._is_wanted:
                self._outcome.set_result(written)
        if not self._is_wanted:  # the memory that was written may be released now
            _LEFT.discard(self)


def abandon_left(lane: object = None) -> None:
    """Abandon earlier saves that were left behind: DCP does not report to a writer that its save failed elsewhere."""
    for writing in [each for each in list(_LEFT) if each.is_left(lane)]:
        writing.abandon()


@atexit.register
def _end() -> None:
    """Stop threads that wait for ranks which do not come any more, and wait shortly for the others."""
    ends = time.monotonic() + _EXIT_S
    for share in (0.8, 0.0):
        for writing in list(_LEFT):
            if writing._thread is not None:
                writing._thread.join(max(0.1, ends - share * _EXIT_S - time.monotonic()))
            writing._tracker.cancelled.set()


_LEFT: set[Writing] = set()
os.register_at_fork(after_in_child=_LEFT.clear)
