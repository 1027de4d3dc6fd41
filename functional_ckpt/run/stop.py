"""`StopSignals`: records signals that ask a run to stop, so that its loop can save before it ends."""

import signal
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, TypeAlias

from functional_ckpt.errors import PolicyError
from functional_ckpt.plan.field import short_repr

__all__ = ["StopSignals"]

Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | None


class StopSignals:
    """Records `signals` from now until `restore`; earlier Python handlers are still called.

    Examples
    --------
    >>> stop = StopSignals((signal.SIGUSR1,))
    >>> signal.raise_signal(signal.SIGUSR1)
    >>> stop.seen, stop.restore()
    (True, None)
    """

    def __init__(self, signals: Iterable[int]) -> None:
        self.seen = False
        self._before: dict[int, Handler] = {}
        self._is_over = False
        try:
            for number in _numbers(signals):
                self._before[number] = signal.signal(number, self._note)
        except (TypeError, ValueError, OSError) as error:
            self.restore()
            raise PolicyError(
                "signals cannot be handled",
                expected="signals such as signal.SIGTERM, in the main thread",
                found=str(error),
                remedy="Make Checkpoints in the main thread, or leave on_signal out",
            ) from error

    def restore(self) -> None:
        """Restore the earlier handlers; if another handler was installed meanwhile, only pass signals on."""
        self._is_over = True
        for number, before in self._before.items():
            if before is not None and signal.getsignal(number) == self._note:
                signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if not self._is_over:
            self.seen = True
            # Python's own handler of Ctrl-C would raise, which the caller does not want here.
            if callable(before) and before is not signal.default_int_handler:
                before(number, frame)
        elif callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _numbers(signals: object) -> tuple[int, ...]:
    if isinstance(signals, str | bytes) or not isinstance(signals, Iterable):
        raise TypeError(f"not several signals: {short_repr(signals)}")
    return tuple(dict.fromkeys(signals))
