"""Figures with targets: each a ratio with a bound, computed from what was measured in one place."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from benchmarks import competitors as who
from benchmarks.fetched import Fetched
from benchmarks.measure import Samples, ratio
from benchmarks.memory import BUDGET_NBYTES, OURS_SMALL_BUDGET
from benchmarks.reshard import other_layout, same_layout
from benchmarks.state import MIB

LARGE_SAVE, LARGE_LOAD = "large save", "large load"
SMALL_SAVE, SMALL_LOAD = "small save", "small load"
RESHARD = "reshard"


@attrs.frozen
class Results:
    """What was measured in one place: samples by scenario, and what is no time."""

    samples: Mapping[str, Samples] = attrs.field(factory=dict)
    fetched: Fetched | None = None
    peak_nbytes: Mapping[str, int] = attrs.field(factory=dict)


@attrs.frozen
class Figure:
    """A ratio that must not pass a bound; `measured` raises KeyError for what was not run."""

    name: str
    relation: str
    bound: float
    measured: Callable[[Any], float]

    def value(self, results: Any) -> float | None:
        try:
            return self.measured(results)
        except KeyError:
            return None

    def is_met(self, value: float) -> bool:
        return value <= self.bound if self.relation == "<=" else value >= self.bound


def _times(scenario: str, above: str, below: str, what: str = "wall") -> Callable[[Results], float]:
    return lambda results: ratio(results.samples[scenario], above, below, what)


def _fetched(results: Results) -> float:
    if results.fetched is None:
        raise KeyError("fetched")
    return results.fetched.read_nbytes / results.fetched.wanted_nbytes


def _peak(results: Results) -> float:
    return results.peak_nbytes[OURS_SMALL_BUDGET] / (64 * MIB + BUDGET_NBYTES)


FIGURES = (
    Figure("large save: wall / raw", "<=", 0.75, _times(LARGE_SAVE, who.OURS, who.RAW)),
    Figure("large save: CPU / raw", "<=", 1.5, _times(LARGE_SAVE, who.OURS, who.RAW, "cpu")),
    Figure(
        "large save: DCP without CRC / ours",
        ">=", 1.3, _times(LARGE_SAVE, who.DCP_NO_CRC, who.OURS),
    ),
    Figure("large save: DCP / ours", ">=", 4, _times(LARGE_SAVE, who.DCP, who.OURS)),
    Figure("large load: wall / raw", "<=", 0.7, _times(LARGE_LOAD, who.OURS, who.RAW)),
    Figure("large load: DCP / ours", ">=", 3, _times(LARGE_LOAD, who.DCP, who.OURS)),
    Figure(
        "rows to columns / rows to rows",
        "<=", 1.5, _times(RESHARD, other_layout(who.OURS), same_layout(who.OURS)),
    ),
    Figure("rows to columns: bytes from disk / wanted", "<=", 1.05, _fetched),
    Figure("small save: DCP / ours", ">=", 4, _times(SMALL_SAVE, who.DCP, who.OURS)),
    Figure("small load: DCP / ours", ">=", 4, _times(SMALL_LOAD, who.DCP, who.OURS)),
    Figure(
        "small save: CPU ours / torch_checkpointing",
        "<=", 0.9, _times(SMALL_SAVE, who.OURS, "torch_checkpointing", "cpu"),
    ),
    Figure(
        "small load: CPU ours / torch_checkpointing",
        "<=", 0.9, _times(SMALL_LOAD, who.OURS, "torch_checkpointing", "cpu"),
    ),
    Figure("peak extra memory / (64 MiB + budget of 64 MiB)", "<=", 1, _peak),
)  # fmt: skip

#: Where every save is synced, by raw files and DCP too.
DURABLE_FIGURES = (
    Figure("large save: wall / raw", "<=", 0.8, _times(LARGE_SAVE, who.OURS, who.RAW)),
    Figure("large save: DCP / ours", ">=", 1.4, _times(LARGE_SAVE, who.DCP, who.OURS)),
    Figure("small save: DCP / ours", ">=", 4, _times(SMALL_SAVE, who.DCP, who.OURS)),
)
