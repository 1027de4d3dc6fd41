"""Peak memory of a save, seen from outside: ``python -m benchmarks.memory COMPETITOR DIR NBYTES``.

A process of its own saves a small state first, so that imports and pools are there; then it resets
the kernel's high-water mark of its resident memory, saves, and reads the mark.
"""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.competitors import COMPETITORS, OURS, Competitor, save_ours
from benchmarks.place import Place, is_tmpfs
from benchmarks.state import MIB, State, large_state

BUDGET_NBYTES = 64 * MIB
OURS_SMALL_BUDGET = f"{OURS}, budget 64 MiB"


def measure(names: tuple[str, ...], place: Place, nbytes: int) -> dict[str, int]:
    """Return the bytes that a save by each competitor adds at its peak."""
    return {name: _in_fresh_process(name, place, nbytes) for name in names}


def _in_fresh_process(name: str, place: Place, nbytes: int) -> int:
    command = [sys.executable, "-m", __name__, name, str(place.directory), str(nbytes)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout.splitlines()[-1])


def _save_once(one: Competitor, state: State, place: Place) -> None:
    path = place.fresh_path()
    one.save(state, path, False)
    place.discard(path, files=0)


def _status_nbytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


def _main(name: str, directory: str, nbytes: str) -> None:
    budgeted = partial(save_ours, budget_nbytes=BUDGET_NBYTES)
    known = {one.name: one for one in COMPETITORS}
    known[OURS_SMALL_BUDGET] = Competitor(OURS_SMALL_BUDGET, budgeted, known[OURS].load)
    place = Place(Path(directory), is_tmpfs(Path(directory)))
    _save_once(known[name], large_state(16 * MIB), place)
    state = large_state(int(nbytes))
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_nbytes("VmRSS")
    _save_once(known[name], state, place)
    print(_status_nbytes("VmHWM") - before)


if __name__ == "__main__":
    _main(*sys.argv[1:])
