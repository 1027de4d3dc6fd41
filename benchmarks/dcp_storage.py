"""DCP over its own files and over our storage: ``python -m benchmarks.dcp_storage [--part PART ...] [--quick]``.

Ranks joined by gloo on 127.0.0.1 hold DTensors cut by rows. Five ways take turns: DCP's files as they come, the same
with CRC switched off, DCP over our storage, our own save and load, and DCP over a storage that stores nothing: what it
takes is DCP's own. Loads are by rows, and of the large state by columns too. ``plan``: the time to plan a load from
checkpoints written as by 4 and as by 1,024 ranks. ``--part small --ranks 2 --rounds 3`` takes a minute or two.
"""

import argparse
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, ClassVar

import attrs
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.serialization import get_crc32_options, set_crc32_options

import functional_ckpt
from benchmarks.competitors import DCP, OURS
from benchmarks.figures import Figure
from benchmarks.group import run_ranks, timed_by_all
from benchmarks.measure import Samples, ratio, rotated
from benchmarks.options import new_parser, tell
from benchmarks.place import Place, default_directories, scratch_place
from benchmarks.ranks_job import Work, timed_save, timed_saves
from benchmarks.sharded import DState, Library, all_ranks, library, prove, sharded
from benchmarks.state import MIB
from benchmarks.table import WIDTH, figure_table, new_table, time_cells
from functional_ckpt import ArraySpec, Box, LayoutPolicy, LocalShards, SavePolicy, ShardSpec
from functional_ckpt.torch.dcp.bridge import LoadPlan, Metadata, SavePlan, WriteResult, done
from functional_ckpt.torch.dcp.packed import pack_metadata, planned_items
from functional_ckpt.torch.dcp.results import results_of
from functional_ckpt.torch.dcp.storage_writer import ZarrStorageReader, ZarrStorageWriter

NO_CRC, ZARR, NOTHING = "DCP, no CRC", "DCP over ours", "DCP over nothing"
ROWS, COLUMNS = 0, 1
FULL = {"large": Work(large_nbytes=1024 * MIB), "small": Work(small_count=5000)}
QUICK = {"large": Work(large_nbytes=64 * MIB), "small": Work(small_count=500)}
PARTS = ("large", "small", "plan")


@attrs.frozen
class Times:
    """Samples by way: of saves, of loads by rows, of loads by columns."""

    saves: Samples
    loads: Samples
    columns: Samples


FIGURES = (
    Figure("small save: DCP / DCP over ours", ">=", 3, lambda found: ratio(found.saves, DCP, ZARR)),
    Figure("small load: DCP / DCP over ours", ">=", 3, lambda found: ratio(found.loads, DCP, ZARR)),
)


def main(arguments: list[str] | None = None) -> None:
    chosen = _parser().parse_args(arguments)
    console = Console(width=WIDTH)
    for directory in chosen.dir or default_directories()[:1]:
        with scratch_place(directory) as place:
            for ranks in chosen.ranks:
                for work in (work for part, work in (QUICK if chosen.quick else FULL).items() if part in chosen.part):
                    tell(f"{ranks} ranks, {place.title}, {work} ...")
                    times = run_ranks(ranks, measure, place, work, chosen.rounds)
                    console.print(_table(ranks, work, times))
                    if work.small_count:
                        console.print(figure_table(f"figures: {ranks} ranks, {work}", FIGURES, times))
            if "plan" not in chosen.part:
                continue
            few, many = (planning_s(place.fresh_path(), parts) for parts in (4, 1024))
        console.print(
            f"planning a load: of 4 ranks {few * 1e3:.1f} ms, of 1,024 {many * 1e3:.1f} ms, {many / few:.2f}x"
        )


def ways() -> list[Library]:
    """Return everything that is compared; nobody syncs."""
    files = library(DCP)
    policy = SavePolicy(durability="none", object_codec="torch")
    return [
        files,
        Library(NO_CRC, _without_crc(files.save), _without_crc(files.save_async), _without_crc(files.load)),
        Library(
            ZARR,
            lambda state, path: dcp.save(state, storage_writer=ZarrStorageWriter(path, policy=policy)),
            lambda state, path: dcp.async_save(state, storage_writer=ZarrStorageWriter(path, policy=policy)).result(),
            lambda into, path: dcp.load(into, storage_reader=ZarrStorageReader(path)),
        ),
        library(OURS),
        Library(
            NOTHING,
            lambda state, path: dcp.save(state, storage_writer=NothingWriter(path)),
            lambda state, path: dcp.async_save(state, storage_writer=NothingWriter(path)).result(),
            lambda into, path: dcp.load(into, storage_reader=NothingReader(path)),
        ),
    ]


class NothingWriter(ZarrStorageWriter):
    """Exchanges what `ZarrStorageWriter` does; writes no tensor."""

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        """Write nothing."""
        items = planned_items(plan)
        return done(results_of(items, [0] * len(items.names)))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keep the metadata, which a load needs."""
        Path(self.path).mkdir()
        Path(self.path, "metadata").write_bytes(pickle.dumps(metadata))
        pack_metadata(metadata)


class NothingReader(ZarrStorageReader):
    """Exchanges what `ZarrStorageReader` does; reads no tensor."""

    _known: ClassVar[dict[Path, Metadata]] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what was kept: after the first time from memory."""
        path = Path(self.path)
        if path not in self._known:
            self._known[path] = pickle.loads(Path(path, "metadata").read_bytes())
        return self._known[path]

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Open nothing."""

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        """Read nothing."""
        return done(None)


def measure(place: Place, work: Work, rounds: int) -> Times:
    """Save and load in every way in turn; every save goes to a fresh directory, the first of each is not counted."""
    mesh, everyone = all_ranks(), ways()
    state, rows = (sharded(mesh, work.tensors(), ROWS) for _ in range(2))
    columns = sharded(mesh, work.tensors(), COLUMNS) if work.large_nbytes else None
    paths: dict[str, Path] = {}
    for one in everyone:
        paths[one.name], _ = timed_save(one, state, place)
        if one.name == NOTHING:
            continue
        prove(lambda one=one: one.load(rows, paths[one.name]), rows, work.tensors(), ROWS, one.name)
    times = Times(*({one.name: [] for one in everyone} for _ in range(3)))
    for number in range(rounds):
        timed_saves(rotated(everyone, number), state, place, times.saves)
        for one in rotated(everyone, number):
            path = paths[one.name]
            times.loads[one.name].append(timed_by_all(lambda one=one, path=path: one.load(rows, path)))
            if columns is not None:
                run = lambda one=one, path=path: one.load(columns, path)  # noqa: E731 - as above
                times.columns[one.name].append(timed_by_all(run))
    return times


def planning_s(path: Path, parts: int) -> float:
    """Return the seconds to read the metadata of a checkpoint whose arrays `parts` ranks wrote, and plan a load."""
    extent = 4096
    arrays = {f"w{number}": ArraySpec(f"w{number}", (extent, 8), "float32") for number in range(64)}
    step = extent // parts
    shards = {
        key: LocalShards(
            tuple(ShardSpec(spec, Box((row, 0), (row + step, 8))) for row in range(0, extent, step)),
            tuple(np.zeros((step, 8), "f4") for _ in range(parts)),
        )
        for key, spec in arrays.items()
    }
    functional_ckpt.save(shards, path, policy=SavePolicy(durability="none", layout=LayoutPolicy()))
    into = {key: torch.empty(extent, 8) for key in arrays}
    seconds = []
    for _ in range(5):
        began = perf_counter()
        metadata = ZarrStorageReader(path).read_metadata()
        planner = DefaultLoadPlanner()
        planner.set_up_planner(into, metadata, True)
        planner.create_global_plan([planner.create_local_plan()])
        seconds.append(perf_counter() - began)
    return median(seconds)


def _without_crc(call: Callable[[DState, Path], object]) -> Callable[[DState, Path], object]:
    def run(state: DState, path: Path) -> object:
        with _crc_off():
            return call(state, path)

    return run


@contextmanager
def _crc_off() -> Iterator[None]:
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _table(ranks: int, work: Work, times: Times) -> Table:
    table = new_table(f"{ranks} ranks, {work}", "", "wall s", "min - max", "CPU s", "times faster than DCP")
    for what, samples in (("save", times.saves), ("load", times.loads), ("rows -> columns", times.columns)):
        table.add_section()
        table.add_row(f"[bold]{what}")
        for name, runs in samples.items():
            if runs:
                table.add_row(f"  {name}", *time_cells(runs), f"{ratio(samples, DCP, name):.2f}")
    return table


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("benchmarks.dcp_storage", __doc__)
    parser.add_argument("--dir", type=Path, action="append", help="where to write (default: the first known place)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS, help="what to run (default: all)")
    parser.set_defaults(rounds=5)
    return parser


if __name__ == "__main__":
    main()
