"""`Board`: short notes that ranks leave for one another in the store of their process group.

The host of the store may die, hang or become unreachable, and torch's clients then wait forever. So a separate thread
makes the calls; if it hangs, it is abandoned.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from torch.distributed.distributed_c10d import PrefixStore

__all__ = ["Board"]

T = TypeVar("T")
_Queue: TypeAlias = "SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]"


class Board:
    """Notes by name; each call raises `ConnectionError` if the store is gone or does not answer within `timeout_s`.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> board = Board(dist.HashStore(), "example")
    >>> board.put("step", "3", 10.0), board.read("step", 10.0), board.read("none", 10.0)
    (None, '3', None)
    >>> board.count("saves", 1, 10.0), board.count("saves", 0, 10.0)
    (1, 1)
    """

    def __init__(self, store: Any, prefix: str) -> None:
        #: The calls in which this rank has published that it waits, by lane.
        self.said: dict[str, str] = {}
        #: Ranks of this process that have published an address; see `presence`.
        self.present: set[int] = set()
        self._parent, self._prefix = store, prefix
        self._store: Any = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stuck: Future[Any] | None = None
        self._work: _Queue = SimpleQueue()
        weakref.finalize(self, self._work.put, None).atexit = False

    def put(self, name: str, text: str, timeout_s: float) -> None:
        """Write a note; it replaces an earlier one of this name."""
        self._call(lambda: self._client().set(name, text), timeout_s)

    def read(self, name: str, timeout_s: float) -> str | None:
        """Return a note, or None."""

        def read() -> str | None:
            return bytes(self._client().get(name)).decode() if self._client().check([name]) else None

        return self._call(read, timeout_s)

    def count(self, name: str, more: int, timeout_s: float) -> int:
        """Add to a counter, which begins at 0, and return its new value."""
        return self._call(lambda: int(self._client().add(name, more)), timeout_s)

    def remove(self, name: str, timeout_s: float) -> None:
        """Delete a note."""
        self._call(lambda: self._client().delete_key(name), timeout_s)

    def _client(self) -> Any:
        if self._store is None:
            # A separate client: the one of the process group blocks while another thread waits for a key in it.
            store = self._parent.clone() if hasattr(self._parent, "clone") else self._parent
            self._store = PrefixStore(self._prefix, store)
        return self._store

    def _call(self, function: Callable[[], T], timeout_s: float) -> T:
        answer: Future[T] = Future()
        with self._lock:
            if self._stuck is not None and not self._stuck.done():
                raise ConnectionError("the store of the process group does not answer")
            is_running = self._runs()
        self._work.put((function, answer))
        if not is_running:
            self._work.put(None)
            _serve(self._work)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            self._stuck = answer
            raise ConnectionError(f"the store of the process group has not answered for {timeout_s} s") from None
        except RuntimeError as error:  # of torch; a stack of C++ follows the first line
            first = str(error).partition("\n")[0]
            raise ConnectionError(f"the store of the process group is gone: {first}") from error

    def _runs(self) -> bool:
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=_serve, args=(self._work,), name="functional_ckpt-board", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # too many threads, or the interpreter is shutting down
                return False
            self._thread = thread
        return True


def _serve(work: _Queue) -> None:
    """Make the calls in the queue, until it yields None."""
    while (item := work.get()) is not None:
        function, answer = item
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)
        del item, function, answer
