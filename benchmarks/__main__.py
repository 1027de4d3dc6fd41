"""Measure, and print ratios and figures: ``python -m benchmarks [--dir DIR ...] [--quick]``.

Ratios compare runs of one invocation, each the median over rounds of the quotient of two runs of
the same round. A target that is missed is printed and not an error: a busy machine misses some.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import attrs
from rich.console import Console

from benchmarks import fetched, figures, memory, reshard
from benchmarks.competitors import COMPETITORS, DCP, DCP_NO_CRC, OURS, SAFETENSORS
from benchmarks.figures import Results
from benchmarks.measure import Samples, time_loads, time_saves
from benchmarks.place import Place, is_tmpfs
from benchmarks.state import MIB, large_state, small_state
from benchmarks.table import figure_table, ratio_table


@attrs.frozen
class Size:
    """How much is saved, and how often."""

    large_nbytes: int
    small_count: int
    rounds: int

    @property
    def title(self) -> str:
        return (
            f"large: {self.large_nbytes // MIB} MiB float32 in 16 tensors; "
            f"small: {self.small_count} x 4 KiB; {self.rounds} rounds"
        )


FULL = Size(1024 * MIB, 5000, 7)
QUICK = Size(128 * MIB, 500, 5)


def main(arguments: list[str] | None = None) -> None:
    chosen = _parser().parse_args(arguments)
    size = QUICK if chosen.quick else FULL
    if chosen.rounds:
        size = attrs.evolve(size, rounds=chosen.rounds)
    console = Console(width=110)
    console.print(size.title)
    for directory in chosen.dir or _default_directories():
        with tempfile.TemporaryDirectory(prefix="benchmark-", dir=directory) as scratch:
            place = Place(Path(scratch), is_tmpfs(Path(scratch)))
            durable = () if place.on_tmpfs else (attrs.evolve(place, durable=True),)
            for where in (place, *durable):
                results = _measure(where, size, chosen.skip_ours)
                console.print(ratio_table(where.title, results))
                console.print(figure_table(f"figures: {where.title}", results))


def _measure(place: Place, size: Size, skip_ours: bool) -> Results:
    """Everything in one place; with fsync only the saves, since nothing else differs."""
    samples = _one_process(place, size, skip_ours)
    if place.durable:
        return Results(samples)
    _tell(place, figures.RESHARD)
    libraries = (DCP,) if skip_ours else (OURS, DCP)
    samples[figures.RESHARD] = reshard.time_loads(libraries, place, size.large_nbytes, size.rounds)
    _tell(place, "bytes from disk, peak memory")
    names = (DCP, DCP_NO_CRC, SAFETENSORS)
    if not skip_ours:
        names = (memory.OURS_SMALL_BUDGET, OURS, *names)
    return Results(
        samples,
        None if skip_ours else fetched.measure(place, size.large_nbytes),
        memory.measure(names, place, size.large_nbytes),
    )


def _one_process(place: Place, size: Size, skip_ours: bool) -> dict[str, Samples]:
    competitors = [one for one in COMPETITORS if not (skip_ours and one.name == OURS)]
    samples: dict[str, Samples] = {}
    scenarios = (
        (figures.SMALL_SAVE, figures.SMALL_LOAD, small_state(size.small_count)),
        (figures.LARGE_SAVE, figures.LARGE_LOAD, large_state(size.large_nbytes)),
    )
    for save, load, state in scenarios:
        # Loads come first: they prove each competitor, and leave it warm.
        if not place.durable:
            _tell(place, load)
            samples[load] = time_loads(competitors, state, place, size.rounds)
        _tell(place, save)
        samples[save] = time_saves(competitors, state, place, size.rounds)
    return samples


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--dir", action="append", type=Path,
        help="where to write, repeatable; default: /dev/shm, and the directory for temporary files",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    parser.add_argument("--rounds", type=int, help="rounds of each measurement")
    parser.add_argument("--skip-ours", action="store_true", help="only the others")
    return parser


def _default_directories() -> tuple[Path, ...]:
    directories = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return tuple(one for one in directories if one.is_dir())


def _tell(place: Place, step: str) -> None:
    print(f"{place.title}: {step} ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
