"""Saved by row blocks, loaded by row blocks and by column blocks: two gloo ranks with DTensors."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.group import run_ranks, timed_by_all
from benchmarks.measure import Sample, Samples, rotated
from benchmarks.place import Place
from benchmarks.sharded import all_ranks, library, prove, sharded
from benchmarks.state import large_tensors

RANKS = 2
ROWS, COLUMNS = 0, 1


def same_layout(library: str) -> str:
    """Name of the samples of loads by row blocks."""
    return f"{library}, rows to rows"


def other_layout(library: str) -> str:
    """Name of the samples of loads by column blocks."""
    return f"{library}, rows to columns"


def time_loads(libraries: tuple[str, ...], place: Place, nbytes: int, rounds: int) -> Samples:
    """Return the samples of `same_layout` and `other_layout` of each library.

    A sample's wall time is that of the slower rank, its CPU time that of all ranks.
    """
    scratch = place.fresh_path()
    scratch.mkdir()
    samples: Samples = run_ranks(RANKS, _measure, scratch, libraries, nbytes, rounds)
    place.discard(scratch, files=0)
    return samples


def _measure(scratch: Path, libraries: tuple[str, ...], nbytes: int, rounds: int) -> Samples:
    mesh = all_ranks()
    states = {axis: sharded(mesh, large_tensors(nbytes), axis) for axis in (ROWS, COLUMNS)}
    runs: dict[str, Callable[[], object]] = {}
    for one in map(library, libraries):
        path = scratch / one.name
        one.save(states[ROWS], path)
        for name, axis in ((same_layout(one.name), ROWS), (other_layout(one.name), COLUMNS)):
            runs[name] = partial(one.load, states[axis], path)
            prove(runs[name], states[axis], large_tensors(nbytes), axis, name)
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in rotated(list(runs), number):
            samples[name].append(timed_by_all(runs[name]))
    return samples
