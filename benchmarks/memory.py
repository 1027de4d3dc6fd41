"""Peak memory of a save, seen from outside: ``python -m benchmarks.memory COMPETITOR DIR NBYTES``.

A process of its own saves a small state first, so that imports and pools are there, and then the one that counts.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

import attrs

from benchmarks import lineup
from benchmarks.competitors import OURS, Competitor, save_ours
from benchmarks.place import Place, is_tmpfs
from benchmarks.rss import peak_extra_nbytes
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
    with one.session():
        one.save(one.view(state), path, False)
    place.discard(path, files=0)


def _competitor(name: str) -> Competitor:
    if name == OURS_SMALL_BUDGET:
        return attrs.evolve(lineup.find(OURS), save=partial(save_ours, budget_nbytes=BUDGET_NBYTES))
    return lineup.find(name)


def _main(name: str, directory: str, nbytes: str) -> None:
    one = _competitor(name)
    place = Place(Path(directory), is_tmpfs(Path(directory)))
    _save_once(one, large_state(16 * MIB), place)
    state = large_state(int(nbytes))
    print(peak_extra_nbytes(partial(_save_once, one, state, place)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
