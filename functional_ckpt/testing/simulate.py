"""Several ranks in one process: each is a thread, and the values that they exchange are pickled as between processes.

This suffices for saves and loads of many ranks without collectives of torch, hundreds of times a second.
"""

import pickle
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import numpy as np

from functional_ckpt.store.encoding import Array

__all__ = ["SimulatedGather", "run_ranks", "try_ranks"]

T = TypeVar("T")


class _Mail:
    """All messages that each rank has sent so far, in order, and the ranks that have ended."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.sent: list[list[bytes]] = [[] for _ in range(size)]
        self.letters: dict[tuple[int, int], list[bytes]] = {}
        self.ended = [False] * size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()

    def end(self, rank: int) -> None:
        with self.changed:
            self.ended[rank] = True
            self.changed.notify_all()


@attrs.frozen(eq=False)
class SimulatedGather:
    """A `functional_ckpt.run.comm.Gather` and `Exchange` of one simulated rank; made by `run_ranks`.

    Raises
    ------
    RuntimeError
        From `all_gather`, if a peer has ended without taking part, or does not take part within the timeout.

    Examples
    --------
    >>> run_ranks(2, lambda gather: gather.all_gather(gather.rank * 10))
    [[0, 10], [0, 10]]
    """

    rank: int
    size: int
    _mail: _Mail = attrs.field(repr=False)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the `value` of each rank."""
        mail = self._mail
        with mail.changed:
            turn = len(mail.sent[self.rank])
            mail.sent[self.rank].append(pickle.dumps(value))
            mail.changed.notify_all()
            in_time = mail.changed.wait_for(lambda: not self._waits_for(turn) or self._lost(turn), mail.timeout_s)
            waited_for = self._waits_for(turn)
            if waited_for:
                raise RuntimeError(f"ranks {waited_for} did not take part in exchange {turn}{self._late(in_time)}")
            return [pickle.loads(sent[turn]) for sent in mail.sent]  # noqa: S301 - our own bytes

    def swap(self, target: int, outgoing: Array, source: int, nbytes: int) -> Array:
        """Send bytes to `target` and return the `nbytes` that come from `source`."""
        mail = self._mail
        with mail.changed:
            if len(outgoing):
                mail.letters.setdefault((self.rank, target), []).append(outgoing.tobytes())
                mail.changed.notify_all()
            if not nbytes:
                return np.empty(0, np.uint8)
            in_time = mail.changed.wait_for(lambda: self._has_letter(source) or mail.ended[source], mail.timeout_s)
            if not self._has_letter(source):
                raise RuntimeError(f"rank {source} did not send its piece{self._late(in_time)}")
            letter = mail.letters[source, self.rank].pop(0)
        if len(letter) != nbytes:
            raise RuntimeError(f"rank {source} sent {len(letter)} bytes, {nbytes} were expected")
        return np.frombuffer(letter, np.uint8)

    def _late(self, in_time: bool) -> str:
        """Return a text about the timeout, unless the rank is known to have ended."""
        return "" if in_time else f" within {self._mail.timeout_s} s"

    def _has_letter(self, source: int) -> bool:
        return bool(self._mail.letters.get((source, self.rank)))

    def _waits_for(self, turn: int) -> list[int]:
        return [rank for rank, sent in enumerate(self._mail.sent) if len(sent) <= turn]

    def _lost(self, turn: int) -> bool:
        return any(self._mail.ended[rank] for rank in self._waits_for(turn))


def run_ranks(size: int, function: Callable[[SimulatedGather], T], timeout_s: float = 30.0) -> list[T]:
    """Call `function` once per rank, all at the same time, and return the results in rank order.

    Raises
    ------
    BaseException
        The exception of the lowest rank that failed.
    TimeoutError
        If a rank has not ended after `timeout_s` seconds.

    Examples
    --------
    >>> import numpy as np, functional_ckpt, tempfile
    >>> path = tempfile.mkdtemp() + "/a"
    >>> state = {"w": np.arange(3)}
    >>> [m.nbytes for m in run_ranks(2, lambda gather: functional_ckpt.save(state, path, process_group=gather))]
    [24, 24]
    """
    outcomes = try_ranks(size, function, timeout_s)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def try_ranks(size: int, function: Callable[[SimulatedGather], T], timeout_s: float = 30.0) -> list[T | BaseException]:
    """Call `function` as `run_ranks` does, and return for each rank its result or its exception.

    Examples
    --------
    >>> try_ranks(2, lambda gather: 1 // gather.rank)
    [ZeroDivisionError('integer division or modulo by zero'), 1]
    """
    mail = _Mail(size, timeout_s)
    outcomes: list[T | BaseException] = [TimeoutError(f"rank {rank} did not end") for rank in range(size)]

    def run(rank: int) -> None:
        try:
            outcomes[rank] = function(SimulatedGather(rank, size, mail))
        except BaseException as error:  # of any kind: it is the outcome of the rank
            outcomes[rank] = error
        finally:
            mail.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    return list(outcomes)
