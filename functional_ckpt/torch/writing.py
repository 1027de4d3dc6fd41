"""The writing of one DCP save, on a thread of its own where ranks work together.

DCP tells the ranks of a failure when all of them have returned from `write_data` or failed before it: a planner may
fail there, or what a subclass adds to the writer. Who waited inside `write_data` for such a rank would keep DCP from
telling. So `write_data` returns at once; the thread waits for the other ranks to come, and `finish` for the thread.
"""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event, Thread, current_thread

from functional_ckpt.saving import Written, abandon_written

__all__ = ["Writing", "abandon_left"]


class Writing:
    """What a rank writes for one save; with `is_wanted` somebody will ask for the `result`, or `abandon` it.

    The memory that is written must stay as it is until the save has returned.
    """

    def __init__(self, is_wanted: bool) -> None:
        self._is_wanted, self._owner = is_wanted, current_thread()
        self._is_over = Event()
        self._thread: Thread | None = None
        self._outcome: Future[Written] = Future()

    @classmethod
    def done(cls, written: Written) -> "Writing":
        """Return what has been written already."""
        writing = cls(True)
        writing._outcome.set_result(written)
        return writing

    @classmethod
    def begun(cls, work: Callable[[Callable[[], bool]], Written], is_wanted: bool) -> "Writing":
        """Begin with `work`; it is given a function which tells whether the save is over already."""
        writing = cls(is_wanted)
        writing._thread = Thread(target=writing._run, args=(work,), name="functional_ckpt-dcp", daemon=True)
        _LEFT.add(writing)
        writing._thread.start()
        return writing

    def result(self) -> Written:
        """Wait for the writing and return what was written.

        Raises
        ------
        CheckpointError
            If it failed, on whatever rank.
        """
        try:
            return self._outcome.result()
        finally:
            _LEFT.discard(self)

    def abandon(self) -> None:
        """Remove what was written; who still waits for other ranks gives up."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        _LEFT.discard(self)
        if self._outcome.done() and self._outcome.exception() is None:
            abandon_written(self._outcome.result())

    def is_left(self) -> bool:
        """Tell whether the save that this belongs to has ended, as seen from a thread that begins another one."""
        return self._owner is current_thread() or not self._owner.is_alive()

    def _run(self, work: Callable[[Callable[[], bool]], Written]) -> None:
        try:
            written = work(self._is_over.is_set)
        except BaseException as error:
            if self._is_wanted:
                self._outcome.set_exception(error)
        else:
            if self._is_wanted:
                self._outcome.set_result(written)
        if not self._is_wanted:  # nothing keeps the memory that was written
            _LEFT.discard(self)


def abandon_left() -> None:
    """Abandon what earlier saves have left: DCP does not tell a writer that its save has failed elsewhere."""
    for writing in [writing for writing in _LEFT if writing.is_left()]:
        writing.abandon()


_LEFT: set[Writing] = set()
