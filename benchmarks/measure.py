"""Time competitors in turn, so that a slow moment of the machine falls on all of them."""

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import attrs

from benchmarks.competitors import Competitor
from benchmarks.place import Footprint, Place, footprint
from benchmarks.state import State, blank_like, require_equal, tensors_of

_Item = TypeVar("_Item")


@attrs.frozen
class Sample:
    """One run: seconds of wall clock, of CPU over all threads and ended child processes, and what a save left."""

    wall: float
    cpu: float
    left: Footprint | None = None


Samples = Mapping[str, Sequence[Sample]]


def timed(run: Callable[[], object]) -> Sample:
    wall, cpu = time.perf_counter(), _cpu_s()
    run()
    return Sample(time.perf_counter() - wall, _cpu_s() - cpu)


def ratio(samples: Samples, above: str, below: str, what: str = "wall") -> float:
    """Median over the rounds of one competitor's time divided by another's in the same round."""
    pairs = zip(samples[above], samples[below], strict=True)
    return median(getattr(a, what) / getattr(b, what) for a, b in pairs)


def rotated(items: Sequence[_Item], number: int) -> list[_Item]:
    """The items in another order each round, so that nobody always runs after the same one.

    Examples
    --------
    >>> rotated("abc", 4)
    ['b', 'c', 'a']
    """
    start = number % len(items)
    return [*items[start:], *items[:start]]


def time_saves(competitors: Sequence[Competitor], state: State, place: Place, rounds: int) -> Samples:
    """Time `rounds` saves of each competitor, each to a path that never existed."""
    samples: dict[str, list[Sample]] = {one.name: [] for one in competitors}
    for number in range(rounds):
        for one in rotated(competitors, number):
            path = place.fresh_path()
            place.settle()
            sample = _save(one, state, path, place.durable)
            left = footprint(path)
            samples[one.name].append(attrs.evolve(sample, left=left))
            place.discard(path, left.files)
    return samples


def time_loads(competitors: Sequence[Competitor], state: State, place: Place, rounds: int) -> Samples:
    """Time `rounds` loads of each competitor into allocated tensors, from a warm page cache.

    Many small files are saved once. Of a few large ones only one checkpoint exists at a time: ten would
    fill the memory.
    """
    keep = sum(1 for _ in tensors_of(state)) > 100
    into = blank_like(state)
    kept = {one.name: _proved(one, state, into, place, keep) for one in competitors}
    samples: dict[str, list[Sample]] = {one.name: [] for one in competitors}
    for number in range(rounds):
        for one in rotated(competitors, number):
            path = kept[one.name] or _saved(one, state, place)
            samples[one.name].append(_load(one, into, path))
            if not keep:
                place.discard(path, files=0)
    for path in filter(None, kept.values()):
        place.discard(path, sum(1 for _ in tensors_of(state)))
    return samples


def _proved(one: Competitor, state: State, into: State, place: Place, keep: bool) -> Path | None:
    """Show that what is loaded is what was saved; return the checkpoint if it is kept."""
    path = _saved(one, state, place)
    for _, tensor in tensors_of(into):
        tensor.fill_(float("nan"))
    _load(one, into, path)
    require_equal(into, state, one.name)
    if keep:
        return path
    place.discard(path, files=0)
    return None


def _saved(one: Competitor, state: State, place: Place) -> Path:
    path = place.fresh_path()
    _save(one, state, path, place.durable)
    place.settle()
    return path


def _save(one: Competitor, state: State, path: Path, durable: bool) -> Sample:
    with one.session():
        return timed(partial(one.save, one.view(state), path, durable))


def _load(one: Competitor, into: State, path: Path) -> Sample:
    with one.session():
        return timed(partial(one.load, one.view(into), path))


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
