"""What `Checkpoints` adds to `save`, and how long it looks for steps: ``python -m benchmarks.manager [--quick]``.

Saves of one rank into one directory, with and without `Checkpoints`, take turns; the figure is the median difference of
their CPU time in one round. The steps that are listed are real ones, hard links to one checkpoint.
"""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import attrs
import numpy as np
from rich.console import Console

import functional_ckpt as fc
from benchmarks.figures import Figure
from benchmarks.options import chosen_size, new_parser, tell
from benchmarks.place import default_directories, scratch_place
from benchmarks.table import WIDTH, figure_table
from functional_ckpt.store.steps import step_path

POLICY = fc.SavePolicy(durability="none")


@attrs.frozen
class Size:
    """Number of steps that are there, and of rounds."""

    steps: int
    rounds: int


FULL = Size(10_000, 200)
QUICK = Size(500, 20)

FIGURES = (
    Figure("Checkpoints.save above save, few steps, ms", "<=", 5.0, lambda found: found["few"]),
    Figure("Checkpoints.save above save, many steps, ms", "<=", 5.0, lambda found: found["many"]),
    Figure("steps() of many, CPU s", "<=", 0.3, lambda found: found["steps"]),
)


def main(arguments: list[str] | None = None) -> None:
    chosen = new_parser("benchmarks.manager", __doc__).parse_args(arguments)
    size = chosen_size(chosen, FULL, QUICK)
    console = Console(width=WIDTH)
    for directory in default_directories():
        with scratch_place(directory) as place:
            tell(place.title)
            found = measure(place.directory, size)
        console.print(figure_table(f"{place.title}; many: {size.steps:,} steps", FIGURES, found))


def measure(root: Path, size: Size) -> dict[str, float]:
    """Return the figures by name: milliseconds of CPU per save, seconds of CPU to list."""
    found = {"few": _overhead(root / "few", size.rounds, 0)}
    many = root / "many"
    fc.save({"step": 0}, step_path(many, 0), policy=POLICY)
    for step in range(1, size.steps):
        shutil.copytree(step_path(many, 0), step_path(many, step), copy_function=os.link)
    with fc.Checkpoints(many) as checkpoints:
        found["steps"] = min(_timed(checkpoints.steps) for _ in range(5))
    found["many"] = _overhead(many, size.rounds, size.steps)
    return found


def _overhead(root: Path, rounds: int, first: int) -> float:
    state = {"w": np.zeros(1000), "step": 0}
    keep = fc.KeepLast(3 + first) | fc.KeepEvery(1000)
    apart = []
    with fc.Checkpoints(root, keep=keep, policy=POLICY) as checkpoints:
        for step in range(first, first + rounds):
            one = _timed(lambda step=step: fc.save(state, root / f"alone-{step}", policy=POLICY))
            other = _timed(lambda step=step: checkpoints.save(step, state, {"loss": 0.5}))
            apart.append(other - one)
    return 1000 * median(apart[rounds // 10 :])


def _timed(function: Callable[[], object]) -> float:
    began = time.process_time()
    function()
    return time.process_time() - began


if __name__ == "__main__":
    main()
