"""`Joiner`: memory in which the parts of a large object are joined, one object after the other."""

from collections.abc import Sequence
from threading import Lock
from typing import Any

import attrs

__all__ = ["REUSED_NBYTES", "Joiner", "joined"]

#: From this size on an object is joined in memory that is used again. Measured, for 32 MiB: memory that is new each
#: time takes 20 ms, in which no other thread can run Python; this takes 5.
REUSED_NBYTES = 2**20


@attrs.define(eq=False)
class Joiner:
    r"""One object at a time: hold `lock` from `filled` until its memory is copied.

    Examples
    --------
    >>> joiner = Joiner()
    >>> with joiner.lock:
    ...     joiner.filled([memoryview(b"ab"), memoryview(b"c")], 5)
    bytearray(b'abc\x00\x00')
    """

    lock: Any = attrs.field(factory=Lock)
    _memory: bytearray = attrs.field(factory=bytearray, init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Joiner, ()

    def filled(self, parts: Sequence[memoryview], nbytes: int) -> bytearray:
        """Return the parts one after the other, then zeros up to `nbytes`."""
        if len(self._memory) != nbytes:
            self._memory = bytearray(nbytes)
        at, memory = 0, memoryview(self._memory)
        for part in parts:
            memory[at : at + len(part)] = part
            at += len(part)
        memory[at:] = bytes(nbytes - at)
        return self._memory


def joined(parts: Sequence[memoryview], nbytes: int) -> bytes:
    r"""Return the parts one after the other, then zeros up to `nbytes`.

    Examples
    --------
    >>> joined([memoryview(b"ab")], 3)
    b'ab\x00'
    """
    return b"".join(parts).ljust(nbytes, b"\0")
