"""Groups and stores that report to a tracker how long a rank waits for other ranks and for disks."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from functional_ckpt.run.comm import Gather, lane_of, turn_of
from functional_ckpt.run.progress import Tracker
from functional_ckpt.store.base import Store
from functional_ckpt.store.encoding import Array
from functional_ckpt.store.exchange import Exchange

__all__ = ["TimedGather", "TimedStore", "timed"]


class TimedGather:
    """A group whose agreements, waiting included, count as the phase ``"agree"``."""

    def __init__(self, gather: Gather, tracker: Tracker) -> None:
        self._gather, self._tracker = gather, tracker

    @property
    def rank(self) -> int:
        """Position of this process in the group."""
        return self._gather.rank

    @property
    def size(self) -> int:
        """Number of processes in the group."""
        return self._gather.size

    @property
    def members(self) -> tuple[int, ...] | None:
        """Numbers that meshes use for the ranks."""
        return getattr(self._gather, "members", None)

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """The lock that a thread holds during a call of several steps."""
        return turn_of(self._gather)

    @property
    def lane(self) -> object:
        """What calls that must follow one another have in common."""
        return lane_of(self._gather)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the `value` of each rank."""
        with self._tracker.timed("agree"):
            return self._gather.all_gather(value)


class _TimedExchange(TimedGather):
    """A timed group that exchanges data, which counts as the phase ``"exchange"``."""

    def __init__(self, gather: Gather, exchange: Exchange, tracker: Tracker) -> None:
        super().__init__(gather, tracker)
        self._exchange = exchange

    def swap(self, target: int, outgoing: Array, source: int, nbytes: int) -> Array:
        """Send bytes to `target` and return the `nbytes` that `source` sends."""
        with self._tracker.timed("exchange"):
            return self._exchange.swap(target, outgoing, source, nbytes)


def timed(gather: Gather, tracker: Tracker) -> TimedGather:
    """Return a group that does what `gather` does, and reports to `tracker` how long it takes.

    Examples
    --------
    >>> from functional_ckpt.run.comm import LocalGather
    >>> tracker = Tracker()
    >>> timed(LocalGather(), tracker).all_gather("x"), list(tracker.timings)
    (['x'], ['plan', 'agree'])
    """
    return _TimedExchange(gather, gather, tracker) if isinstance(gather, Exchange) else TimedGather(gather, tracker)


class TimedStore:
    """A store whose `flush` and end of a `batch` count as the phase ``"sync"``; everything else passes through."""

    def __init__(self, store: Store, tracker: Tracker) -> None:
        self._store, self._tracker = store, tracker
        # Looked up once, not for each of thousands of files.
        self.create, self.nbytes_of = store.create, store.nbytes_of

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the store."""
        return getattr(self._store, name)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Make durable at the end of the ``with`` block what was created in it."""
        with ExitStack() as ends:
            ends.enter_context(self._store.batch())
            yield
            with self._tracker.timed("sync"):
                ends.close()

    def flush(self) -> None:
        """Make durable what was created."""
        with self._tracker.timed("sync"):
            self._store.flush()
