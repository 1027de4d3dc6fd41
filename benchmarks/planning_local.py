"""Planning without the other ranks: CPU time of one rank's `plan_local_save`, on few ranks and on many."""

import gc
import time
from collections.abc import Mapping, Sequence
from statistics import median

import attrs
from rich.table import Table

from benchmarks.figures import Figure
from benchmarks.measure import rotated
from benchmarks.planning_ours import local_arrays, plan_local
from benchmarks.table import new_table

RANKS = (8, 64, 1024, 16384)
#: Whether no two arrays have one shape.
KINDS = {"4 shapes": False, "all shapes differ": True}


@attrs.frozen
class LocalCosts:
    """Median CPU seconds by kind of state and number of ranks."""

    cpu_s: Mapping[tuple[str, int], float]

    def growth(self, kind: str) -> float:
        """The most ranks to the fewest."""
        return self.cpu_s[kind, max(RANKS)] / self.cpu_s[kind, min(RANKS)]


FIGURES = (
    *(
        Figure(
            f"plan_local_save, {kind}: CPU on {max(RANKS)} ranks / on {min(RANKS)}",
            "<=", 1.2, lambda found, kind=kind: found.growth(kind),
        )
        for kind in KINDS
    ),
    Figure("plan_local_save: CPU seconds at most", "<=", 0.5, lambda found: max(found.cpu_s.values())),
)  # fmt: skip


def measure(arrays: int, rounds: int) -> LocalCosts:
    """Plan for each number of ranks in turn, `rounds` times."""
    cpu_s = {}
    for kind, distinct in KINDS.items():
        locals_ = {ranks: local_arrays(ranks, arrays, distinct) for ranks in RANKS}
        found: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
        plan_local(min(RANKS), locals_[min(RANKS)])
        for number in range(rounds):
            for ranks in rotated(RANKS, number):
                found[ranks].append(_cpu_s(ranks, locals_[ranks]))
        cpu_s.update({(kind, ranks): median(times) for ranks, times in found.items()})
    return LocalCosts(cpu_s)


def costs_table(arrays: int, costs: LocalCosts) -> Table:
    title = f"plan_local_save: {arrays} arrays of a transformer, cut by rows; CPU seconds of one rank"
    table = new_table(title, "state", *(f"{ranks} ranks" for ranks in RANKS), "last / first")
    for kind in KINDS:
        cells = (f"{costs.cpu_s[kind, ranks]:.3f}" for ranks in RANKS)
        table.add_row(kind, *cells, f"{costs.growth(kind):.2f}")
    return table


def _cpu_s(ranks: int, local: Sequence[object]) -> float:
    gc.collect()
    began = time.process_time()
    plan_local(ranks, local)
    return time.process_time() - began
