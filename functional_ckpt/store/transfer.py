"""Bytes from an open file to memory and back: `read_fully`, `read_small`, `fill`."""

import os
from collections.abc import Sequence

from functional_ckpt.errors import CorruptionError
from functional_ckpt.store.base import BLOCK_NBYTES, SMALL_CHUNK_NBYTES, OnBlock

__all__ = ["fill", "read_fully", "read_small"]


def read_fully(file: int, name: str, start: int, into: memoryview, each: OnBlock | None = None) -> None:
    """Read from byte `start` of a file until `into` is full; `each` gets the blocks while they are in the cache."""
    done = 0
    while done < len(into):
        block = into[done:] if each is None else into[done : done + BLOCK_NBYTES]
        count = os.preadv(file, [block], start + done)
        if count == 0:
            expected, found = f"{start + len(into)} bytes", f"{start + done} bytes"
            raise CorruptionError("a file is too short", path=name, expected=expected, found=found)
        if each is not None:
            each(block[:count])
        done += count


def read_small(file: int, nbytes: int) -> bytes | None:
    """Return the bytes of a file if it has just so many, at most `SMALL_CHUNK_NBYTES`; else None, for a closer look.

    The system is not asked for size and kind of the file first: what is read is checked against a digest.
    """
    if not 0 < nbytes <= SMALL_CHUNK_NBYTES:
        return None
    try:
        data = os.read(file, nbytes + 1)
    except OSError:
        return None
    return data if len(data) == nbytes else None


def fill(file: int, parts: Sequence[memoryview], nbytes: int, each: OnBlock | None, done: int) -> None:
    """Write `parts`, of the first of which `done` bytes are written already, and zeros up to `nbytes`."""
    written = done
    for part in parts:
        written += _write_all(file, part[done:], each)
        done = 0
    if written < nbytes:
        os.ftruncate(file, nbytes)


def _write_all(file: int, part: memoryview, each: OnBlock | None) -> int:
    for start in range(0, len(part), BLOCK_NBYTES):
        block = part[start : start + BLOCK_NBYTES]
        if each is not None:
            each(block)  # before the write, which then finds the block in the cache
        written = os.write(file, block)
        while written < len(block):
            written += os.write(file, block[written:])
    return len(part)
