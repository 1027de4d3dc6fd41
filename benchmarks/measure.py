"""Time competitors in turn, so that a slow moment of the machine falls on all of them."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import attrs

from benchmarks.competitors import Competitor
from benchmarks.place import Place
from benchmarks.state import State, blank_like, require_equal, tensors_of

_Item = TypeVar("_Item")


@attrs.frozen
class Sample:
    """One run: seconds of wall clock, and of CPU over all threads of the process."""

    wall: float
    cpu: float


Samples = Mapping[str, Sequence[Sample]]


def timed(run: Callable[[], object]) -> Sample:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Sample(time.perf_counter() - wall, time.process_time() - cpu)


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
    files = sum(1 for _ in tensors_of(state))
    samples: dict[str, list[Sample]] = {one.name: [] for one in competitors}
    for number in range(rounds):
        for one in rotated(competitors, number):
            path = place.fresh_path()
            place.settle()
            samples[one.name].append(timed(partial(one.save, state, path, place.durable)))
            place.discard(path, files)
    return samples


def time_loads(competitors: Sequence[Competitor], state: State, place: Place, rounds: int) -> Samples:
    """Time `rounds` loads of each competitor into allocated tensors, from a warm page cache."""
    into = blank_like(state)
    paths = {one.name: _saved_and_proved(one, state, into, place) for one in competitors}
    samples: dict[str, list[Sample]] = {one.name: [] for one in competitors}
    for number in range(rounds):
        for one in rotated(competitors, number):
            samples[one.name].append(timed(partial(one.load, into, paths[one.name])))
    for path in paths.values():
        place.discard(path, sum(1 for _ in tensors_of(state)))
    return samples


def _saved_and_proved(one: Competitor, state: State, into: State, place: Place) -> Path:
    path = place.fresh_path()
    one.save(state, path, place.durable)
    for _, tensor in tensors_of(into):
        tensor.fill_(float("nan"))
    one.load(into, path)
    require_equal(into, state, one.name)
    return path
