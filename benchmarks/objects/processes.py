"""CPU seconds of other processes, as the kernel counts them."""

import os
from pathlib import Path


def cpu_s(pid):
    """Return the CPU seconds that a process has taken so far; 0 if it is gone."""
    found = _fields(Path(f"/proc/{pid}/stat"))
    return (int(found[11]) + int(found[12])) / os.sysconf("SC_CLK_TCK") if found else 0.0


def descendants(pid):
    """Return the processes that a process has started, and those that these have started."""
    parents = {
        int(path.parent.name): int(found[1]) for path in Path("/proc").glob("[0-9]*/stat") if (found := _fields(path))
    }
    known, found = {pid}, []
    while more := [child for child, parent in parents.items() if parent in known and child not in known]:
        known.update(more)
        found += more
    return found


def _fields(path):
    """Return the fields of a process after its name, the state first; none if it is gone."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []
