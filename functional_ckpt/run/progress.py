"""`Progress` of a save or load, and the tracker that threads report to."""

from collections.abc import Callable
from threading import Event, Lock

import attrs

from functional_ckpt.errors import SaveCancelledError

__all__ = ["Progress", "Tracker"]


@attrs.frozen
class Progress:
    """How far a save or load of this rank has come; bytes of elements.

    Examples
    --------
    >>> Progress("write", 3, 12).fraction
    0.25
    """

    phase: str
    done_nbytes: int
    total_nbytes: int

    @property
    def fraction(self) -> float:
        """Share of the bytes that is done, from 0.0 to 1.0."""
        if self.phase == "done":
            return 1.0
        return self.done_nbytes / self.total_nbytes if self.total_nbytes else 0.0


class Tracker:
    """Counts bytes from several threads, tells a callback, and stops the work when cancelled."""

    def __init__(self, report: Callable[[Progress], None] | None = None) -> None:
        self.cancelled = Event()
        self._phase, self._done, self._total = "plan", 0, 0
        self._report = report
        self._lock = Lock()

    @property
    def now(self) -> Progress:
        """How far the work has come."""
        return Progress(self._phase, self._done, self._total)

    def enter(self, phase: str, total_nbytes: int | None = None) -> None:
        """Begin a phase."""
        self._phase = phase
        self._total = self._total if total_nbytes is None else total_nbytes
        if self._report is not None:
            self._report(self.now)

    def add(self, nbytes: int) -> None:
        """Count bytes; raises in the working thread once the save is cancelled."""
        if self.cancelled.is_set():
            raise SaveCancelledError("the save was cancelled")
        with self._lock:
            self._done += nbytes
            if self._report is not None:
                self._report(self.now)
