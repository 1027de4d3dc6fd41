"""Planning without any data: ``python -m benchmarks.planning [--quick]``.

CPU time to plan the save of an irregular world (uneven cuts by rows, other ones for each array): what DCP's
coordinator computes against what each of our ranks computes, from the messages of all ranks to the text that describes
the checkpoint. Worlds grow until the next one would take too long or too much memory; a power law through the
measured sizes gives the exponent, and rows marked with ~ are that law's, not measured.
"""

import argparse
from collections.abc import Callable

import attrs
from rich.console import Console
from rich.table import Table

from benchmarks import planning_local, planning_ours
from benchmarks.competitors import DCP, OURS
from benchmarks.fit import PowerLaw, fit
from benchmarks.options import new_parser, tell
from benchmarks.planning_dcp import plan_dcp
from benchmarks.planning_world import COLUMNS, RowCuts, irregular
from benchmarks.stages import Cost, available_nbytes, cost_of
from benchmarks.table import WIDTH, figure_table, new_table

GIB = 1 << 30
AGAIN = f"{OURS}, again"
PLANNERS: dict[str, Callable[[RowCuts], dict[str, float]]] = {
    DCP: plan_dcp, OURS: planning_ours.plan_all, AGAIN: planning_ours.plan_again,
}  # fmt: skip
STAGES = ("gather", "plan", "scatter", "metadata")


@attrs.frozen
class Size:
    """Numbers of ranks, arrays of each world, seconds that one world may take a planner, arrays of the local plan."""

    ranks: tuple[int, ...]
    arrays: int
    limit_s: float
    local_arrays: int
    local_rounds: int


#: The largest has two million shards.
FULL = Size((64, 128, 256, 512, 1024, 2048, 4096), 500, 900, 3000, 7)
QUICK = Size((16, 32, 64, 128), 200, 15, 500, 3)


def main(arguments: list[str] | None = None) -> None:
    chosen = _parser().parse_args(arguments)
    size = QUICK if chosen.quick else FULL
    size = attrs.evolve(size, ranks=tuple(chosen.ranks or size.ranks), limit_s=chosen.limit_s or size.limit_s)
    console = Console(width=WIDTH)
    costs, remarks = _measure(size)
    console.print(_totals_table(size, costs))
    for name in (DCP, OURS):
        console.print(_stages_table(name, size, costs[name]))
    for name in (DCP, OURS):
        law = _law(costs[name])
        console.print(
            f"{name}: CPU grows as shards ** {law.exponent:.2f}" if law else f"{name}: too few sizes for a fit"
        )
    console.print(*remarks, sep="\n", end="\n" if remarks else "")
    largest = max(costs[AGAIN].keys() & costs[OURS].keys())
    first, again = costs[OURS][largest], costs[AGAIN][largest]
    planned_s = first.cpu_s["gather"] + first.cpu_s["plan"]
    console.print(
        f"{OURS}: a repeated save of {largest} shards plans in {again.total_s / planned_s:.2%} of the first's"
    )
    tell("plan_local_save ...")
    local = planning_local.measure(size.local_arrays, size.local_rounds)
    console.print(planning_local.costs_table(size.local_arrays, local))
    console.print(figure_table("figures: plan_local_save", planning_local.FIGURES, local))


Costs = dict[str, dict[int, Cost]]


def _measure(size: Size) -> tuple[Costs, list[str]]:
    """Cost by planner and number of shards, and why a planner stopped."""
    costs: Costs = {name: {} for name in PLANNERS}
    stopped: dict[str, str] = {}
    for ranks in size.ranks:
        cuts = irregular(ranks, size.arrays)
        for name, compute in PLANNERS.items():
            if name in stopped:
                continue
            reason = _reason_to_stop(costs[name], cuts.shards, size.limit_s)
            if reason is None:
                tell(f"{name}: {ranks} ranks x {size.arrays} arrays ...")
                cost = cost_of(compute, cuts, runs=_runs(costs[name], cuts.shards))
                if cost is not None:
                    costs[name][cuts.shards] = cost
                    continue
                reason = "ran out of memory"
            stopped[name] = f"{name} stopped before {ranks} ranks ({cuts.shards} shards): {reason}"
    return costs, list(stopped.values())


def _reason_to_stop(costs: dict[int, Cost], shards: int, limit_s: float) -> str | None:
    if not costs:
        return None
    last = max(costs)
    wall_s = costs[last].wall_s * shards / last
    nbytes = costs[last].peak_nbytes * shards / last
    if wall_s > limit_s:
        return f"it would take {wall_s:.0f} s, preparation included, and {limit_s:.0f} s are allowed"
    if nbytes > 0.6 * available_nbytes():
        return f"it would take {nbytes / GIB:.1f} GiB of {available_nbytes() / GIB:.1f} GiB that are free"
    return None


def _runs(costs: dict[int, Cost], shards: int) -> int:
    """Three where that takes no more than some seconds."""
    last = max(costs, default=None)
    return 3 if last is None or costs[last].wall_s * shards / last < 5 else 1


def _law(costs: dict[int, Cost]) -> PowerLaw | None:
    return fit((shards, cost.total_s) for shards, cost in costs.items())


def _totals_table(size: Size, costs: Costs) -> Table:
    title = f"{size.arrays} arrays of {COLUMNS} columns, cut by rows; ~ by the fitted law"
    headings = ("ranks", "shards", "DCP, CPU s", "ours, CPU s", "ours again, CPU s", "DCP / ours")
    table = new_table(title, *headings, "DCP, GiB", "ours, GiB")
    laws = {name: _law(found) for name, found in costs.items()}
    for ranks in size.ranks:
        shards = ranks * size.arrays
        totals = {name: _total(costs[name].get(shards), laws[name], shards) for name in PLANNERS}
        known = all(seconds is not None for seconds, _ in totals.values())
        guessed = any(is_guess for _, is_guess in totals.values())
        table.add_row(
            f"{ranks}",
            f"{shards}",
            *(_seconds(*total) for total in totals.values()),
            f"{'~' if guessed else ''}{totals[DCP][0] / totals[OURS][0]:.1f}" if known else "-",
            *(_gib(costs[name].get(shards)) for name in (DCP, OURS)),
        )
    return table


def _total(cost: Cost | None, law: PowerLaw | None, shards: int) -> tuple[float | None, bool]:
    """CPU seconds, and whether the law says so."""
    if cost is not None:
        return cost.total_s, False
    return (law.at(shards) if law else None), True


def _seconds(seconds: float | None, is_guess: bool) -> str:
    return "-" if seconds is None else f"{'~' if is_guess else ''}{seconds:.3g}"


def _gib(cost: Cost | None) -> str:
    return "-" if cost is None else f"{cost.peak_nbytes / GIB:.2f}"


def _stages_table(name: str, size: Size, costs: dict[int, Cost]) -> Table:
    """CPU microseconds per shard: level where the cost is linear."""
    table = new_table(f"{name}: CPU microseconds per shard", "ranks", "shards", *STAGES, "total")
    for shards, cost in costs.items():
        parts = (cost.cpu_s.get(stage) for stage in STAGES)
        cells = ("" if part is None else f"{part / shards * 1e6:.2f}" for part in (*parts, cost.total_s))
        table.add_row(f"{shards // size.arrays}", f"{shards}", *cells)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("benchmarks.planning", __doc__, rounds=False)
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks, growing")
    parser.add_argument("--limit-s", type=float, help="seconds that one world may take one planner, with preparation")
    return parser


if __name__ == "__main__":
    main()
