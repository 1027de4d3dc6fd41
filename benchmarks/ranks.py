"""Saves and loads by several ranks: ``python -m benchmarks.ranks [--dir DIR ...] [--quick]``.

Real processes joined by gloo on 127.0.0.1 hold DTensors cut by rows, as FSDP2 leaves them. Ours and DCP (as it
comes, with CRC) take turns; wall time is that of the slowest rank between two barriers, CPU time that of all ranks.
The first save of a process is shown by itself: it connects and plans, and later saves may find that done.
More ranks than cores take turns on the cores, for ours and for DCP alike.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
from rich.console import Console
from rich.table import Table

from benchmarks.competitors import DCP, OURS
from benchmarks.figures import Figure
from benchmarks.group import run_ranks
from benchmarks.measure import Sample, ratio
from benchmarks.options import chosen_size, new_parser, tell
from benchmarks.place import Place, default_directories, scratch_place
from benchmarks.ranks_job import Peak, Times, Work, measure_peaks, measure_times
from benchmarks.state import MIB
from benchmarks.table import WIDTH, figure_table, new_table, size_cells, time_cells

BUDGET_NBYTES = 64 * MIB
SYNC, ASYNC, RESHARD = "save", "async_save", "load, rows to columns"


@attrs.frozen
class Size:
    """How much is saved, and how often."""

    small_count: int
    large_nbytes: int
    rounds: int


FULL = Size(5000, 256 * MIB, 7)
QUICK = Size(500, 64 * MIB, 3)


@attrs.frozen
class Results:
    """What was measured with one number of ranks in one place; peaks by (library, kind of call)."""

    small: Times
    large: Times
    peaks: Mapping[tuple[str, str], Peak]


def main(arguments: list[str] | None = None) -> None:
    chosen = _parser().parse_args(arguments)
    size = chosen_size(chosen, FULL, QUICK)
    console = Console(width=WIDTH)
    console.print(
        f"small: {size.small_count} x 4 KiB; large: {size.large_nbytes // MIB} MiB float32 in 16 tensors; "
        f"Shard(0); {size.rounds} rounds"
    )
    for directory in chosen.dir or default_directories()[:1]:
        for ranks in chosen.ranks:
            with scratch_place(directory) as place:
                results = _measure(place, ranks, size)
            title = f"{ranks} ranks, {place.title}"
            console.print(_times_table(title, results))
            console.print(_peaks_table(f"peak extra memory of a rank, {title}", results))
            console.print(figure_table(f"figures: {title}", _figures(size), results))


def _measure(place: Place, ranks: int, size: Size) -> Results:
    times = []
    for work in (Work(small_count=size.small_count), Work(large_nbytes=size.large_nbytes)):
        tell(f"{ranks} ranks, {place.title}: {'small' if work.small_count else 'large'} ...")
        times.append(run_ranks(ranks, measure_times, place, work, size.rounds))
    peaks = {}
    for name in (OURS, DCP):
        tell(f"{ranks} ranks, {place.title}: memory of {name} ...")
        found = run_ranks(ranks, measure_peaks, place, name, size.large_nbytes, BUDGET_NBYTES)
        peaks.update(zip(((name, kind) for kind in (SYNC, ASYNC, RESHARD)), found, strict=True))
    return Results(*times, peaks)


def _figures(size: Size) -> tuple[Figure, ...]:
    return (
        Figure("small save: DCP / ours", ">=", 8, lambda found: ratio(found.small.saves, DCP, OURS)),
        Figure("small load: DCP / ours", ">=", 8, lambda found: ratio(found.small.loads, DCP, OURS)),
        Figure("small save: files of ours", "<=", 2 * size.small_count + 10, _files),
        Figure(
            f"async_save: peak extra / (own state + budget of {BUDGET_NBYTES // MIB} MiB)",
            "<=", 1, _async_peak,
        ),
        Figure(f"load, rows to columns: peak extra / budget of {BUDGET_NBYTES // MIB} MiB", "<=", 1, _load_peak),
    )  # fmt: skip


def _files(results: Results) -> float:
    left = results.small.first[OURS][0].left
    if left is None:
        raise KeyError("files")
    return left.files


def _async_peak(results: Results) -> float:
    peak = results.peaks[OURS, ASYNC]
    return peak.extra_nbytes / (peak.state_nbytes + BUDGET_NBYTES)


def _load_peak(results: Results) -> float:
    return results.peaks[OURS, RESHARD].extra_nbytes / BUDGET_NBYTES


def _times_table(title: str, results: Results) -> Table:
    table = new_table(title, "", "wall s", "min - max", "CPU s", "DCP / ours", "files", "MiB")
    for name, times in (("small", results.small), ("large", results.large)):
        table.add_section()
        table.add_row(f"[bold]{name}")
        for kind, samples in (("first save", times.first), ("save", times.saves), ("load", times.loads)):
            _add_row(table, f"  {kind}, {OURS}", samples[OURS], f"{ratio(samples, DCP, OURS):.1f}")
            _add_row(table, f"  {kind}, {DCP}", samples[DCP], "")
    return table


def _add_row(table: Table, name: str, runs: Sequence[Sample], compared: str) -> None:
    table.add_row(name, *time_cells(runs), compared, *size_cells(runs))


def _peaks_table(title: str, results: Results) -> Table:
    table = new_table(title, "large state", "MiB", "own state, MiB", "MiB / own state")
    for (name, kind), peak in results.peaks.items():
        budget = f", budget {BUDGET_NBYTES // MIB} MiB" if name == OURS else ""
        table.add_row(
            f"{kind}, {name}{budget}",
            f"{peak.extra_nbytes / MIB:.1f}",
            f"{peak.state_nbytes / MIB:.0f}",
            f"{peak.extra_nbytes / peak.state_nbytes:.2f}",
        )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("benchmarks.ranks", __doc__)
    parser.add_argument("--dir", action="append", type=Path, help="where to write, repeatable; default: /dev/shm")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of processes; default: 2 4")
    return parser


if __name__ == "__main__":
    main()
