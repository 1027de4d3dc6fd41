"""Durable saves, and loads after a restart: ``python -m benchmarks.disk [--dir DIR] [--ranks 1 2] [--quick]``.

Real processes hold DTensors cut by rows. Every save is synced: ours as it comes, DCP as it comes (with CRC), and raw
files by one thread per rank, each synced when it is written. Before each load the page cache is emptied of what it
reads, as after a restart, and the disk must have delivered that; raw is one thread per rank, that reads its own files.
"""

import argparse
from functools import partial
from pathlib import Path

import attrs
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.competitors import DCP, OURS, RAW
from benchmarks.fetched import disk_read_nbytes, evict
from benchmarks.figures import Figure
from benchmarks.group import gathered, run_ranks, timed_by_all
from benchmarks.measure import Sample, Samples, ratio, rotated
from benchmarks.options import chosen_size, new_parser, tell
from benchmarks.place import Place, default_directories, scratch_place
from benchmarks.ranks_job import COLUMNS, ROWS, fresh_path, timed_save
from benchmarks.sharded import DState, Library, all_ranks, library, prove, sharded
from benchmarks.state import MIB, large_tensors
from benchmarks.table import WIDTH, figure_table, new_table, size_cells, time_cells

RESHARD = f"{OURS}, rows to columns"


@attrs.frozen
class Size:
    """How much is saved, and how often."""

    nbytes: int
    rounds: int


@attrs.frozen
class Results:
    """What was measured with one number of ranks: durable saves, and loads from a cold page cache."""

    saves: Samples
    loads: Samples


FULL = Size(1024 * MIB, 5)
QUICK = Size(64 * MIB, 3)

FIGURES = (
    Figure("durable save: wall / raw", "<=", 0.8, lambda found: ratio(found.saves, OURS, RAW)),
    Figure("durable save: DCP / ours", ">=", 1.4, lambda found: ratio(found.saves, DCP, OURS)),
    Figure("cold load: wall / raw", "<=", 1.05, lambda found: ratio(found.loads, OURS, RAW)),
    Figure("cold load, rows to columns: wall / raw", "<=", 1.3, lambda found: ratio(found.loads, RESHARD, RAW)),
)


def main(arguments: list[str] | None = None) -> None:
    chosen = _parser().parse_args(arguments)
    size = chosen_size(chosen, FULL, QUICK)
    console = Console(width=WIDTH)
    console.print(f"{size.nbytes // MIB} MiB float32 in 16 tensors; Shard(0); {size.rounds} rounds")
    for ranks in chosen.ranks:
        with scratch_place(chosen.dir) as place:
            if place.on_tmpfs:
                raise SystemExit(f"{chosen.dir} is in memory: name a directory on a disk with --dir")
            tell(f"{ranks} ranks: durable saves ...")
            saves = run_ranks(ranks, measure_saves, place, size.nbytes, size.rounds)
            tell(f"{ranks} ranks: cold loads ...")
            results = Results(saves, run_ranks(ranks, measure_loads, place, size.nbytes, size.rounds))
        console.print(_table(f"{ranks} ranks", results))
        console.print(figure_table(f"figures: {ranks} ranks", FIGURES, results))


def measure_saves(place: Place, nbytes: int, rounds: int) -> Samples:
    """Save by each library in turn to fresh paths; one more round before, which connects and plans, does not count."""
    state = sharded(all_ranks(), large_tensors(nbytes), ROWS)
    libraries = [library(name, durable=True) for name in (RAW, OURS, DCP)]
    samples: dict[str, list[Sample]] = {one.name: [] for one in libraries}
    for number in range(-1, rounds):
        for one in rotated(libraries, number):
            path, sample = timed_save(one, state, place)
            samples[one.name] += [sample] if number >= 0 else []
            if dist.get_rank() == 0:
                place.discard(path, files=0)
    return samples


def measure_loads(place: Place, nbytes: int, rounds: int) -> Samples:
    """Load by each library in turn what it saved; by ours also into columns, if there are several ranks."""
    mesh = all_ranks()
    runs: dict[str, tuple[Library, DState, Path]] = {}
    for axis in (ROWS, COLUMNS)[: dist.get_world_size()]:
        into = sharded(mesh, large_tensors(nbytes), axis)
        for one in map(library, (RAW, OURS, DCP) if axis == ROWS else (OURS,)):
            if axis == ROWS:
                path = fresh_path(place)
                one.save(into, path)
            else:
                path = runs[OURS][2]
            runs[one.name if axis == ROWS else RESHARD] = one, into, path
            prove(partial(one.load, into, path), into, large_tensors(nbytes), axis, one.name)
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in rotated(list(runs), number):
            samples[name].append(_cold(*runs[name], nbytes))
    return samples


def _cold(one: Library, into: DState, path: Path, nbytes: int) -> Sample:
    if dist.get_rank() == 0:
        evict(path)
    dist.barrier()
    before = disk_read_nbytes()
    sample = timed_by_all(partial(one.load, into, path))
    if sum(gathered(disk_read_nbytes() - before)) < 0.9 * nbytes:
        raise RuntimeError(f"the page cache still had parts of {path}")
    return sample


def _table(title: str, results: Results) -> Table:
    table = new_table(title, "", "wall s", "min - max", "CPU s", "wall / raw", "files", "MiB")
    for name, samples in (("durable save", results.saves), ("cold load", results.loads)):
        table.add_section()
        table.add_row(f"[bold]{name}")
        for who, runs in samples.items():
            table.add_row(f"  {who}", *time_cells(runs), f"{ratio(samples, who, RAW):.2f}", *size_cells(runs))
    return table


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("benchmarks.disk", __doc__)
    parser.add_argument("--dir", type=Path, default=default_directories()[-1], help="a directory on the disk")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of processes; default: 1 2")
    return parser


if __name__ == "__main__":
    main()
