"""Display of the progress of a long call: a bar in a terminal, else two lines in the log.

A failure here never makes the call fail, and a short call is not slowed: a thread waits a second before it starts.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any

import attrs

from functional_ckpt.show.text import clean, size

__all__ = ["Count", "displayed", "progress_text"]

_LOGGER = logging.getLogger("functional_ckpt")
#: A shorter call ends before a display could be read.
_LONG_S = 1.0
_REFRESH_S = 0.1
#: A stopped terminal must not stop the call.
_PATIENCE_S = 1.0
# Two bars on one terminal would overwrite each other.
_BAR = Lock()


@attrs.frozen
class Count:
    """The state that a bar shows: the phase, and bytes done of a total, which is 0 if it is not known."""

    phase: str
    done_nbytes: int
    total_nbytes: int


@contextmanager
def displayed(title: str, now: Callable[[], Count], is_shown: bool = True, bar: bool = True) -> Iterator[None]:
    """Show how far the work in the ``with`` block is if it takes longer than a second; not unless it `is_shown`.

    Without a terminal, or without `bar`, a line is logged at the first second, and one at the end.

    Examples
    --------
    >>> with displayed("loading", lambda: Count("read", 1, 2)):
    ...     pass
    """
    wants_bar = is_shown and bar and _is_terminal()
    if not (wants_bar or (is_shown and _LOGGER.isEnabledFor(logging.INFO))):
        yield
        return
    watcher = _Watcher(title, now, wants_bar)
    watcher.start()
    try:
        yield
    except BaseException as error:
        watcher.stop(error)
        raise
    watcher.stop(None)


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


class _Watcher:
    """Watches a call from a separate thread."""

    def __init__(self, title: str, now: Callable[[], Count], wants_bar: bool) -> None:
        self._title, self._now, self._wants_bar = clean(title), now, wants_bar
        self._over, self._is_logged, self._begun_s = Event(), False, monotonic()
        self._thread = Thread(target=self._watch, name="functional_ckpt-display", daemon=True)

    def start(self) -> None:
        """Begin to wait."""
        with suppress(RuntimeError):  # too many threads, or the interpreter is shutting down: nothing is shown
            self._thread.start()

    def stop(self, error: BaseException | None) -> None:
        """Remove the bar, or log how the call has ended."""
        self._over.set()
        with suppress(RuntimeError):  # it has not been started
            self._thread.join(_PATIENCE_S)
        if self._is_logged:
            now, elapsed_s = self._now(), monotonic() - self._begun_s
            rate = f", {size(now.done_nbytes / elapsed_s)}/s" if now.done_nbytes else ""
            ended = "done" if error is None else f"failed with {type(error).__name__}"
            _LOGGER.info("%s: %s after %.1f s, %s%s", self._title, ended, elapsed_s, size(now.done_nbytes), rate)

    def _watch(self) -> None:
        if self._over.wait(_LONG_S):
            return
        try:
            if self._wants_bar and _BAR.acquire(blocking=False):
                try:
                    self._draw()
                finally:
                    _BAR.release()
            else:
                now = self._now()
                _LOGGER.info("%s: %s, %s to do", self._title, now.phase, size(now.total_nbytes))
                self._is_logged = True
        except Exception:  # of a terminal that went away, or of a handler of the log
            _LOGGER.debug("progress could not be shown", exc_info=True)

    def _draw(self) -> None:
        bar = _bar(self._title)
        begun, done = monotonic(), self._now().done_nbytes
        with bar:
            while not self._over.wait(_REFRESH_S):
                now = self._now()
                rate = (now.done_nbytes - done) / (monotonic() - begun)
                total = max(now.total_nbytes, now.done_nbytes)
                known = {"total": min(total, 2**63) or None, "completed": min(now.done_nbytes, 2**63)}
                bar.update(bar.task_ids[0], progress=progress_text(now, rate), refresh=True, **known)


def _bar(title: str) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    # Standard output and error stay as they are: other threads write there.
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[progress]}", markup=False),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bar.add_task(title, total=None, progress="")
    return bar


def progress_text(now: Count, rate: float) -> str:
    """Return bytes, rate (bytes per second), time left and phase as text, as far as they are known.

    Examples
    --------
    >>> progress_text(Count("write", 3 * 2**20, 12 * 2**20), 2**20)
    '3.0 MiB of 12.0 MiB, 1.0 MiB/s, 0:09 left, write'
    >>> progress_text(Count("plan", 0, 0), 0.0)
    'plan'
    """
    parts = [f"{size(now.done_nbytes)} of {size(now.total_nbytes)}"] if now.total_nbytes else []
    left = now.total_nbytes - now.done_nbytes
    if rate > 0 and left > 0:
        seconds = int(min(left / rate, 359_999))
        hours = f"{seconds // 3600}:{seconds // 60 % 60:02d}" if seconds >= 3600 else f"{seconds // 60}"
        parts += [f"{size(rate)}/s", f"{hours}:{seconds % 60:02d} left"]
    return ", ".join([*parts, now.phase])
