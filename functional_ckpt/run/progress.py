"""`Progress` of a save or load, and the tracker that threads report to."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock
from time import monotonic

import attrs

from functional_ckpt.errors import SaveCancelledError
from functional_ckpt.plan.timings import Timings
from functional_ckpt.show.bar import Count

__all__ = ["Progress", "Tracker"]


@attrs.frozen
class Progress:
    """How far a save or load of this rank has come; bytes of elements, and seconds per phase so far.

    Examples
    --------
    >>> Progress("write", 3, 12).fraction
    0.25
    """

    phase: str
    done_nbytes: int
    total_nbytes: int
    timings: Timings = attrs.field(default=Timings(), eq=False)

    @property
    def fraction(self) -> float:
        """Share of the bytes that is done, from 0.0 to 1.0."""
        if self.phase == "done":
            return 1.0
        return self.done_nbytes / self.total_nbytes if self.total_nbytes else 0.0


class Tracker:
    """Counts bytes from several threads, calls a callback, times phases, and stops the work when cancelled.

    The thread that conducts the work enters phases. A phase within another, such as waiting for other ranks, takes its
    time from that.
    """

    def __init__(self, report: Callable[[Progress], None] | None = None) -> None:
        self.cancelled = Event()
        self._phase, self._done, self._total = "plan", 0, 0
        self.report = report
        self._lock = Lock()
        self._timed, self._since_s, self._spent_s = "plan", monotonic(), dict[str, float]()

    @property
    def now(self) -> Progress:
        """How far the work has come."""
        return Progress(self._phase, self._done, self._total, self.timings)

    @property
    def timings(self) -> Timings:
        """Seconds per phase until now."""
        spent = self._spent_s.copy()
        if self._phase != "done":
            spent[self._timed] = spent.get(self._timed, 0.0) + monotonic() - self._since_s
        return Timings(tuple(spent.items()))

    def count(self) -> Count:
        """Return what a bar shows."""
        return Count(self._timed, self._done, self._total)

    def time(self, phase: str) -> str:
        """Count time as that of another phase from now on, without a report; return the phase until now."""
        now, before = monotonic(), self._timed
        self._spent_s[before] = self._spent_s.get(before, 0.0) + now - self._since_s
        self._timed, self._since_s = phase, now
        return before

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time in the ``with`` block as that of a phase."""
        before = self.time(phase)
        try:
            yield
        finally:
            self.time(before)

    def enter(self, phase: str, total_nbytes: int | None = None) -> None:
        """Begin a phase."""
        self.time(phase)
        self._phase = phase
        self._total = self._total if total_nbytes is None else total_nbytes
        if self.report is not None:
            self.report(self.now)

    def add(self, nbytes: int) -> None:
        """Count bytes; raises in the working thread once the save is cancelled."""
        if self.cancelled.is_set():
            raise SaveCancelledError("the save was cancelled")
        with self._lock:
            self._done += nbytes
            if self.report is not None:
                self.report(self.now)
