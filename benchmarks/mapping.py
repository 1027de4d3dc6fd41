"""Sharded state dicts as Megatron has them: ``python -m benchmarks.mapping [--dir DIR] [--quick]``.

Four real ranks hold ranges of flattened tensors with arbitrary cuts, as a distributed optimizer leaves them; the same
bytes cut into blocks of rows are what they are measured against. Saves and loads are whole calls of
`functional_ckpt.torch.serialization`. Then the ranks load what each has a copy of, and the bytes are counted that they
read. Last, the CPU time of one rank from a state dict of 20,000 sharded tensors to the plan of their save.
"""

import argparse
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import attrs
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.figures import Figure
from benchmarks.group import run_ranks
from benchmarks.mapping_job import FLAT, ROWS, SHARDS, Fetched, Times, measure_fetched, measure_times
from benchmarks.measure import Sample, Samples, ratio
from benchmarks.options import chosen_size, new_parser, tell
from benchmarks.place import default_directories, scratch_place
from benchmarks.state import MIB
from benchmarks.table import WIDTH, figure_table, new_table, time_cells
from functional_ckpt.run.capture import capture
from functional_ckpt.run.comm import LocalGather
from functional_ckpt.run.planning import PlanMemory, Planner
from functional_ckpt.torch.megatron.mapping import ShardedTensor
from functional_ckpt.torch.megatron.sharded_state import leaves_to_save
from functional_ckpt.torch.megatron.state_parts import Parts
from functional_ckpt.torch.megatron.strategies.zarr import ZarrSaveShardedStrategy
from functional_ckpt.torch.megatron.validation import validate_sharding_integrity

RANKS = 4
STEPS = ("flatten", "validate", "describe", "plan")


@attrs.frozen
class Size:
    """Tensors and bytes of each, bytes of the replicated state, sharded tensors that are planned, rounds."""

    tensors: int
    nbytes: int
    replicated_nbytes: int
    planned: int
    rounds: int


FULL = Size(4, 64 * MIB, 256 * MIB, 20_000, 7)
QUICK = Size(4, 4 * MIB, 16 * MIB, 2_000, 3)


@attrs.frozen
class Results:
    """What was measured; planning is CPU seconds of each step, by round."""

    times: Times
    fetched: Fetched
    planning: list[tuple[float, ...]]

    @property
    def planned_s(self) -> float:
        """Median CPU seconds of all steps."""
        return median(map(sum, self.planning))


FIGURES = (
    Figure("save + load: flat shards / rows", "<=", 1.5, lambda found: ratio(_both(found.times), FLAT, ROWS)),
    Figure(
        "fully parallel load: bytes read / stored", "<=", 1, lambda f: f.fetched.read_nbytes / f.fetched.stored_nbytes
    ),
    Figure("sharded tensors of one rank planned: CPU s", "<=", 1.5, lambda found: found.planned_s),
)


def main(arguments: list[str] | None = None) -> None:
    chosen = _parser().parse_args(arguments)
    size = chosen_size(chosen, FULL, QUICK)
    console = Console(width=WIDTH)
    title = (
        f"{RANKS} ranks, {size.tensors} float32 tensors of {size.nbytes // MIB} MiB, "
        f"{SHARDS} shards of each; {size.rounds} rounds"
    )
    with scratch_place(chosen.dir or default_directories()[0]) as place:
        tell("flat shards and rows ...")
        times = run_ranks(RANKS, measure_times, place, size.tensors, size.nbytes, size.rounds)
        console.print(_times_table(f"{title}, {place.title}", times))
        tell("a fully parallel load ...")
        fetched = run_ranks(RANKS, measure_fetched, place, size.replicated_nbytes)
    tell("planning ...")
    results = Results(times, fetched, measure_planning(size.planned, size.rounds))
    console.print(_planning_table(size.planned, results.planning))
    console.print(figure_table("figures", FIGURES, results))


def measure_planning(count: int, rounds: int) -> list[tuple[float, ...]]:
    """Go from a state dict to the plan of its save, as `save` does on the only rank; CPU seconds of each step.

    Keys differ from round to round: a state that was planned before is remembered.
    """
    _plan(10, "first")
    return [_plan(count, f"round{number}") for number in range(rounds)]


def _plan(count: int, name: str) -> tuple[float, ...]:
    keys = [f"{name}.layer.{i}.weight" for i in range(count)]
    state = {"model": {key: ShardedTensor.from_rank_offsets(key, torch.ones(4)) for key in keys}}
    policy, alone = ZarrSaveShardedStrategy().policy, LocalGather()
    marks = [time.process_time()]
    parts = Parts.of(state)
    marks.append(time.process_time())
    validate_sharding_integrity(parts.sharded, alone)
    marks.append(time.process_time())
    leaves = leaves_to_save(parts.sharded)
    marks.append(time.process_time())
    planner = Planner("memory://mapping", policy, alone, PlanMemory())
    planner.agree(lambda: capture(leaves, alone, policy, False, None))
    marks.append(time.process_time())
    return tuple(after - before for before, after in pairwise(marks))


def _both(times: Times) -> Samples:
    """Saves and loads of each round together."""
    return {
        kind: [Sample(a.wall + b.wall, a.cpu + b.cpu) for a, b in zip(saves, times.loads[kind], strict=True)]
        for kind, saves in times.saves.items()
    }


def _times_table(title: str, times: Times) -> Table:
    table = new_table(title, "", "wall s", "min - max", "CPU s", "flat / rows")
    for what, samples in (("save", times.saves), ("load", times.loads), ("save + load", _both(times))):
        table.add_section()
        for kind, runs in samples.items():
            compared = "" if kind == ROWS else f"{ratio(samples, kind, ROWS):.2f}"
            table.add_row(f"{what}, {kind}", *time_cells(runs), compared)
    return table


def _planning_table(count: int, planning: list[tuple[float, ...]]) -> Table:
    table = new_table(f"{count} sharded tensors on one rank: CPU seconds", "", *STEPS, "together")
    medians = [median(step) for step in zip(*planning, strict=True)]
    table.add_row("median", *(f"{step:.3f}" for step in medians), f"{median(map(sum, planning)):.3f}")
    return table


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("benchmarks.mapping", __doc__)
    parser.add_argument("--dir", type=Path, help="where to write; default: /dev/shm")
    return parser


if __name__ == "__main__":
    main()
