"""Tables of what was measured, and of the figures against their targets."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.competitors import DCP, RAW
from benchmarks.figures import RESHARD, Figure, Results
from benchmarks.measure import Sample, Samples, ratio
from benchmarks.reshard import same_layout
from benchmarks.state import MIB

WIDTH = 110


def new_table(title: str, *headings: str) -> Table:
    """An empty table; the first column is text, all others are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


def ratio_table(title: str, results: Results) -> Table:
    """One row per scenario and competitor: medians, and ratios to the first row that is a floor."""
    table = new_table(title, "", "wall s", "min - max", "CPU s", "wall x", "CPU x", "files", "MiB")
    for scenario, samples in results.samples.items():
        _add_scenario(table, scenario, samples)
    if results.peak_nbytes:
        table.add_section()
        table.add_row("[bold]large save: peak extra memory, MiB")
    for name, nbytes in results.peak_nbytes.items():
        table.add_row(f"  {name}", f"{nbytes / MIB:.0f}")
    return table


def figure_table(title: str, figures: Sequence[Figure], results: Any) -> Table:
    """One row per figure: target, measured, met or MISS; a dash where this place cannot tell."""
    table = new_table(title, "figure", "target", "measured", "")
    for figure in figures:
        value = figure.value(results)
        target = f"{figure.relation} {figure.bound:g}"
        if value is None:
            table.add_row(figure.name, target, "-", "not measured here")
            continue
        verdict = "[green]met" if figure.is_met(value) else "[red]MISS"
        table.add_row(figure.name, target, f"{value:.2f}" if value < 1000 else f"{value:.0f}", verdict)
    return table


def time_cells(runs: Sequence[Sample]) -> tuple[str, str, str]:
    """Median wall time, its range, and median CPU time, in seconds."""
    walls = [run.wall for run in runs]
    return (
        f"{median(walls):.3f}",
        f"{min(walls):.3f} - {max(walls):.3f}",
        f"{median(run.cpu for run in runs):.3f}",
    )


def size_cells(runs: Sequence[Sample]) -> tuple[str, str]:
    """Files and MiB of what the last save left; nothing for a load."""
    left = runs[-1].left
    return (f"{left.files}", f"{left.nbytes / MIB:.1f}") if left else ("", "")


def _add_scenario(table: Table, scenario: str, samples: Samples) -> None:
    floor = _floor(scenario, samples)
    table.add_section()
    table.add_row(f"[bold]{scenario}[/bold] (x: to {floor})")
    for name, runs in samples.items():
        ratios = (f"{ratio(samples, name, floor, what):.2f}" for what in ("wall", "cpu"))
        table.add_row(f"  {name}", *time_cells(runs), *ratios, *size_cells(runs))


def _floor(scenario: str, samples: Samples) -> str:
    preferred = same_layout(DCP) if scenario == RESHARD else RAW
    return preferred if preferred in samples else next(iter(samples))
