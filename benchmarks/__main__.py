"""Measure, and print ratios and figures: ``python -m benchmarks [--dir DIR ...] [--quick]``.

Ratios compare runs of one invocation, each the median over rounds of the quotient of two runs of
the same round. A target that is missed is printed and not an error: a busy machine misses some.
Rivals take part where they are installed. Saves by several ranks: ``python -m benchmarks.ranks``; planning
for thousands of them: ``python -m benchmarks.planning``; what a disk takes and gives: ``python -m benchmarks.disk``.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import attrs
from rich.console import Console

from benchmarks import fetched, figures, lineup, memory, reshard
from benchmarks.competitors import DCP, OURS, Competitor
from benchmarks.figures import DURABLE_FIGURES, FIGURES, Results
from benchmarks.measure import Samples, time_loads, time_saves
from benchmarks.options import chosen_size, new_parser, tell
from benchmarks.place import Place, default_directories, scratch_place
from benchmarks.state import MIB, large_state, small_state
from benchmarks.table import WIDTH, figure_table, ratio_table


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
QUICK = Size(64 * MIB, 500, 3)


def main(arguments: list[str] | None = None) -> None:
    chosen = _parser().parse_args(arguments)
    size = chosen_size(chosen, FULL, QUICK)
    found = lineup.assemble()
    competitors = [one for one in found.competitors if not (chosen.skip_ours and one.name == OURS)]
    console = Console(width=WIDTH)
    console.print(*found.remarks, size.title, sep="\n", highlight=False)
    peaks_known = False
    for directory in chosen.dir or default_directories():
        with scratch_place(directory) as place:
            durable = () if place.on_tmpfs else (attrs.evolve(place, durable=True),)
            for where in (place, *durable):
                results = _measure(where, size, competitors, with_memory=not peaks_known)
                peaks_known = True
                console.print(ratio_table(where.title, results))
                targets = DURABLE_FIGURES if where.durable else FIGURES
                console.print(figure_table(f"figures: {where.title}", targets, results))


def _measure(place: Place, size: Size, competitors: Sequence[Competitor], with_memory: bool) -> Results:
    """Everything in one place; with fsync only the saves, since nothing else differs.

    Memory is measured in the first place only: it hardly depends on where the bytes go, and takes a process each.
    """
    names = tuple(one.name for one in competitors)
    samples = _one_process(place, size, competitors)
    if place.durable:
        return Results(samples)
    _tell(place, figures.RESHARD)
    libraries = tuple(name for name in (OURS, DCP) if name in names)
    samples[figures.RESHARD] = reshard.time_loads(libraries, place, size.large_nbytes, size.rounds)
    _tell(place, "bytes from disk, peak memory")
    ours = OURS in names
    peaks = (memory.OURS_SMALL_BUDGET, *names) if ours else names
    return Results(
        samples,
        fetched.measure(place, size.large_nbytes) if ours else None,
        memory.measure(peaks, place, size.large_nbytes) if with_memory else {},
    )


def _one_process(place: Place, size: Size, competitors: Sequence[Competitor]) -> dict[str, Samples]:
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
    parser = new_parser("benchmarks", __doc__)
    parser.add_argument(
        "--dir", action="append", type=Path,
        help="where to write, repeatable; default: /dev/shm, and the directory for temporary files",
    )  # fmt: skip
    parser.add_argument("--skip-ours", action="store_true", help="only the others")
    return parser


def _tell(place: Place, step: str) -> None:
    tell(f"{place.title}: {step} ...")


if __name__ == "__main__":
    main()
