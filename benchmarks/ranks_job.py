"""What each rank does for `benchmarks.ranks`: timed saves and loads, and the peak memory of each."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import attrs
import torch
import torch.distributed as dist

from benchmarks.competitors import DCP, OURS
from benchmarks.group import gathered, timed_by_all
from benchmarks.measure import Sample, Samples, rotated
from benchmarks.place import Place, footprint
from benchmarks.rss import peak_extra_nbytes
from benchmarks.sharded import DState, Library, Tensors, all_ranks, library, local_tensors, prove, sharded
from benchmarks.state import MIB, large_tensors, small_tensors

ROWS, COLUMNS = 0, 1


@attrs.frozen
class Work:
    """A state of `small_count` arrays of 4 KiB, or if that is zero of `large_nbytes` in 16 arrays."""

    small_count: int = 0
    large_nbytes: int = 0

    def tensors(self) -> Tensors:
        if self.small_count:
            return small_tensors(self.small_count)
        return large_tensors(self.large_nbytes)


@attrs.frozen
class Times:
    """Samples by library: the first save of the process, later saves, loads."""

    first: Samples
    saves: Samples
    loads: Samples


@attrs.frozen
class Peak:
    """Bytes that a call added at most on the rank where it added most, and the bytes of that rank's own state."""

    extra_nbytes: int
    state_nbytes: int


def measure_times(place: Place, work: Work, rounds: int) -> Times:
    """Save and load by ours and by DCP in turn; every save goes to a fresh directory."""
    state = sharded(all_ranks(), work.tensors(), ROWS)
    into = sharded(all_ranks(), work.tensors(), ROWS)
    libraries = [library(name) for name in (OURS, DCP)]
    loads: dict[str, Callable[[], object]] = {}
    first: dict[str, list[Sample]] = {}
    for one in libraries:
        path, sample = timed_save(one, state, place)
        first[one.name] = [sample]
        loads[one.name] = partial(one.load, into, path)
        prove(loads[one.name], into, work.tensors(), ROWS, one.name)
    times = Times(first, {one.name: [] for one in libraries}, {one.name: [] for one in libraries})
    for number in range(rounds):
        timed_saves(rotated(libraries, number), state, place, times.saves)
        for one in rotated(libraries, number):
            times.loads[one.name].append(timed_by_all(loads[one.name]))
    return times


def measure_peaks(place: Place, name: str, nbytes: int, budget_nbytes: int) -> tuple[Peak, Peak, Peak]:
    """Return the peaks of a save, of an asynchronous save and of a load that reshards rows to columns.

    The processes have done the same with a small state before. What is loaded into is there before the load.
    """
    one = library(name, budget_nbytes)
    warm, state = (sharded(all_ranks(), large_tensors(size), ROWS) for size in (16 * MIB, nbytes))
    peaks = []
    for save in (one.save, one.save_async):
        _run_once(save, warm, place)
        peaks.append(_peak(partial(_run_once, save, state, place), state))
    columns = [sharded(all_ranks(), large_tensors(size), COLUMNS) for size in (16 * MIB, nbytes)]
    for saved, into in zip((warm, state), columns, strict=True):
        path, _ = timed_save(one, saved, place)
        peak = _peak(partial(one.load, into, path), into)
    return peaks[0], peaks[1], peak


def timed_saves(libraries: Sequence[Library], state: DState, place: Place, samples: Samples) -> None:
    """Save by each library to a fresh path that does not stay, and add the samples."""
    for one in libraries:
        path, sample = timed_save(one, state, place)
        samples[one.name].append(sample)
        if sample.left is not None:  # on rank 0
            place.discard(path, sample.left.files)


def timed_save(one: Library, state: DState, place: Place) -> tuple[Path, Sample]:
    """Save to a fresh path; rank 0 also measures what was left there."""
    path = fresh_path(place)
    if dist.get_rank() == 0:
        place.settle()
    sample = timed_by_all(partial(one.save, state, path))
    return path, attrs.evolve(sample, left=footprint(path)) if dist.get_rank() == 0 else sample


def _run_once(save: Callable[[DState, Path], object], state: DState, place: Place) -> None:
    path = fresh_path(place)
    save(state, path)
    dist.barrier()
    if dist.get_rank() == 0:
        place.discard(path, files=0)


def _peak(run: Callable[[], object], state: DState) -> Peak:
    own = sum(_nbytes(tensor) for tensor in local_tensors(state).values())
    peaks = [Peak(*found) for found in gathered((peak_extra_nbytes(run), own))]
    return max(peaks, key=lambda peak: peak.extra_nbytes)


def fresh_path(place: Place) -> Path:
    return Path(gathered(str(place.fresh_path()) if dist.get_rank() == 0 else None)[0])


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
