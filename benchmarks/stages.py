"""CPU seconds by stage, and memory, of one computation in a process of its own."""

import gc
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import attrs

from benchmarks.rss import peak_extra_nbytes

#: Of the memory that is free, what a computation may take: others live here too.
_SHARE = 0.7


class Stages:
    """Adds up the CPU time (all threads) of the blocks that it surrounds, by name."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.cpu_s[name] = self.cpu_s.get(name, 0.0) + time.process_time() - began


@attrs.frozen
class Cost:
    """Medians over the runs: CPU seconds by stage; bytes of memory at the peak, and seconds with all preparation."""

    cpu_s: dict[str, float]
    peak_nbytes: int
    wall_s: float

    @property
    def total_s(self) -> float:
        return sum(self.cpu_s.values())


def cost_of(compute: Callable[..., dict[str, float]], *arguments: object, runs: int = 1) -> Cost | None:
    """Run `compute`, which returns CPU seconds by stage, in a fresh process; None if its memory does not suffice."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        try:
            return pool.submit(_measured, compute, arguments, runs, int(available_nbytes() * _SHARE)).result()
        except (MemoryError, BrokenProcessPool):
            return None


def available_nbytes() -> int:
    """Bytes of memory that the kernel would give away now."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(dict(line.split(":") for line in lines)["MemAvailable"].split()[0]) * 1024


def _measured(
    compute: Callable[..., dict[str, float]], arguments: tuple[object, ...], runs: int, limit_nbytes: int
) -> Cost:
    # The process fails by itself before the kernel looks for one to kill.
    resource.setrlimit(resource.RLIMIT_DATA, (limit_nbytes, resource.RLIM_INFINITY))
    # What imports left behind is in nobody's collections, so that small worlds cost what they cost.
    gc.collect()
    gc.freeze()
    found: list[dict[str, float]] = []
    began = time.perf_counter()
    peaks = [peak_extra_nbytes(lambda: found.append(compute(*arguments))) for _ in range(runs)]
    wall_s = (time.perf_counter() - began) / runs
    return Cost({name: median(one[name] for one in found) for name in found[0]}, max(peaks), wall_s)
