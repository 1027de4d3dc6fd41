"""`Joiner`: hands large objects over from one thread, joined in memory that is used again; `copy_bytes`."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import cache, partial
from queue import SimpleQueue
from threading import Lock, Semaphore, Thread
from typing import Any, TypeAlias

import attrs
import numpy as np

__all__ = ["REUSED_NBYTES", "Joiner", "copy_bytes", "joined"]

#: From this size on an object is joined in memory that is used again. Measured, for 32 MiB: memory that is new each
#: time takes 20 ms, in which no other thread can run Python; this takes 5.
REUSED_NBYTES = 2**20
#: One is joined while another is handed over.
_MEMORIES = 2

_STARTING = Lock()
_Calls: TypeAlias = "SimpleQueue[tuple[Future[Any], Callable[[], Any]]]"


@attrs.define(eq=False)
class Joiner:
    r"""The memory of one store.

    TensorStore copies an object in many small pieces, which the allocator keeps for the thread that asked for them
    (measured: a save with a budget of 256 MiB grew by 740). So one thread of this process asks for all. No Python runs
    while it does: who comes next joins an object meanwhile, in other memory.

    Examples
    --------
    >>> Joiner().passed([memoryview(b"ab"), memoryview(b"c")], 5, bytes)
    b'abc\x00\x00'
    """

    _memories: list[bytearray] = attrs.field(factory=list, init=False)
    _turns: Semaphore = attrs.field(factory=lambda: Semaphore(_MEMORIES), init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Joiner, ()

    def passed(self, parts: Sequence[memoryview], nbytes: int, write: Callable[[bytearray], Any]) -> Any:
        """Return what `write` returns for the parts one after the other, then zeros up to `nbytes`.

        It must have copied them by then.
        """
        with self._turns:
            memory = self._memories.pop() if self._memories else bytearray()
            if len(memory) != nbytes:
                memory = bytearray(nbytes)
            _join(parts, memory)
            done: Future[Any] = Future()
            _calls().put((done, partial(write, memory)))
            try:
                return done.result()
            finally:
                wait([done])  # also after an interrupt: nothing reads this memory any more
                self._memories.append(memory)


def copy_bytes(source: bytes | memoryview, target: memoryview) -> None:
    """Copy; other threads run Python meanwhile, as they do not while one assigns to a slice of a memory view.

    Examples
    --------
    >>> copy_bytes(b"ab", memoryview(target := bytearray(2)))
    >>> target
    bytearray(b'ab')
    """
    np.copyto(np.asarray(target), np.asarray(memoryview(source)))


def _join(parts: Sequence[memoryview], memory: bytearray) -> None:
    """Fill memory with the parts one after the other, then zeros."""
    at, view = 0, memoryview(memory)
    for part in parts:
        copy_bytes(part, view[at : at + len(part)])
        at += len(part)
    view[at:] = bytes(len(view) - at)


def _calls() -> _Calls:
    """Return the queue of the one thread."""
    with _STARTING:
        return _started()


@cache
def _started() -> _Calls:
    calls: _Calls = SimpleQueue()
    Thread(target=_serve, args=(calls,), name="functional_ckpt-joiner", daemon=True).start()
    return calls


def _serve(calls: _Calls) -> None:
    while True:
        done, call = calls.get()
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)
        del done, call  # nothing is kept while it waits for the next


def joined(parts: Sequence[memoryview], nbytes: int) -> bytes:
    r"""Return the parts one after the other, then zeros up to `nbytes`.

    Examples
    --------
    >>> joined([memoryview(b"ab")], 3)
    b'ab\x00'
    """
    return b"".join(parts).ljust(nbytes, b"\0")
