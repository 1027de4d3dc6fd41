"""How much memory a call adds at its peak, as the kernel sees it: the high-water mark of the resident set."""

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path


def peak_extra_nbytes(run: Callable[[], object]) -> int:
    """Return the bytes by which the resident memory of this process grows at most while `run` runs.

    What was freed before is given back first, so that using it again counts.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_nbytes("VmRSS")
    run()
    return _status_nbytes("VmHWM") - before


def _status_nbytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024
