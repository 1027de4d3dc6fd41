"""Tables of what was measured, and of the figures against their targets."""

from collections.abc import Sequence
from statistics import median

from rich.table import Table

from benchmarks.competitors import DCP, RAW
from benchmarks.figures import FIGURES, RESHARD, Results
from benchmarks.measure import Sample, Samples, ratio
from benchmarks.reshard import same_layout
from benchmarks.state import MIB


def ratio_table(title: str, results: Results) -> Table:
    """One row per scenario and competitor: medians, and ratios to the first row that is a floor."""
    table = Table(title=title, title_justify="left")
    for heading in ("", "wall s", "min - max", "CPU s", "wall ratio", "CPU ratio"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for scenario, samples in results.samples.items():
        _add_scenario(table, scenario, samples)
    if results.peak_nbytes:
        table.add_section()
        table.add_row("[bold]peak extra memory of a large save, MiB")
    for name, nbytes in results.peak_nbytes.items():
        table.add_row(f"  {name}", f"{nbytes / MIB:.0f}")
    return table


def figure_table(title: str, results: Results) -> Table:
    """One row per figure: target, measured, met or MISS; a dash where this place cannot tell."""
    table = Table(title=title, title_justify="left")
    for heading in ("figure", "target", "measured", ""):
        table.add_column(heading, no_wrap=True)
    for figure in FIGURES:
        value = figure.value(results)
        target = f"{figure.relation} {figure.bound:g}"
        if value is None:
            table.add_row(figure.name, target, "-", "not measured here")
            continue
        verdict = "[green]met" if figure.is_met(value) else "[red]MISS"
        table.add_row(figure.name, target, f"{value:.2f}", verdict)
    return table


def _add_scenario(table: Table, scenario: str, samples: Samples) -> None:
    floor = _floor(scenario, samples)
    table.add_section()
    table.add_row(f"[bold]{scenario}", "", "", "", f"to {floor}")
    for name, runs in samples.items():
        table.add_row(
            f"  {name}",
            f"{_median(runs, 'wall'):.3f}",
            f"{min(run.wall for run in runs):.3f} - {max(run.wall for run in runs):.3f}",
            f"{_median(runs, 'cpu'):.3f}",
            f"{ratio(samples, name, floor):.2f}",
            f"{ratio(samples, name, floor, 'cpu'):.2f}",
        )


def _floor(scenario: str, samples: Samples) -> str:
    preferred = same_layout(DCP) if scenario == RESHARD else RAW
    return preferred if preferred in samples else next(iter(samples))


def _median(runs: Sequence[Sample], what: str) -> float:
    return median(getattr(run, what) for run in runs)
