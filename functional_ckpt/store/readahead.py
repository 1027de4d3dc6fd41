"""What the system is told before files are read, so that a disk delivers as fast as it can."""

import os
from collections.abc import Sequence

__all__ = ["advise_ranges"]


def advise_ranges(file: int, starts: Sequence[int], nbytes: int, readers: int) -> None:
    """Tell the system which pages will be read, so that it fetches them at once, and none between them by read-ahead.

    Where so many `readers` on this machine, each with as much as this one, want all that lies between, it is told to
    read ahead instead, for all of them.

    Measured on a cold disk: one process that reads half the columns of chunks fetches 2.0 times its bytes without this,
    1.0 with it. Two processes, each with its half, take twice as long with it: the disk gets many small requests.
    """
    span = starts[-1] + nbytes - starts[0]
    if not hasattr(os, "posix_fadvise") or _is_cached(file, (starts[0], starts[0] + span - 1)):
        return
    if len(starts) > 1 and len(starts) * nbytes * readers >= span:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # doubles read-ahead
        return
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    for start in starts:
        os.posix_fadvise(file, start, nbytes, os.POSIX_FADV_WILLNEED)


def _is_cached(file: int, ends: Sequence[int]) -> bool:
    """Tell whether the bytes at `ends` are in the page cache: then advice to the system about ranges gains nothing.

    Measured: advice costs 0.6 us a range, which doubles the time to read half the columns of cached chunks.
    """
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    byte = bytearray(1)
    try:
        return all(os.preadv(file, [byte], at, os.RWF_NOWAIT) == 1 for at in ends)
    except BlockingIOError:
        return False
    except OSError:  # a file system that cannot tell, such as one in memory; or a bad block, which the read reports
        return True
