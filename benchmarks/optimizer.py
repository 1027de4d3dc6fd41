"""Formats of Megatron's distributed optimizer: ``python -m benchmarks.optimizer [--dir DIR] [--quick]``.

Four real ranks joined by gloo hold a GPT of megatron-core at TP2/DP2 with its DistributedOptimizer, whose state is
saved and loaded in Megatron's two formats (strategy ``torch_dist``, fully parallel saves, as its training has it) and
as our flat shards. Wall time is that of the slowest rank; peaks are of the rank that added most. Then each format is
loaded under other layouts, and every element compared. Needs megatron-core 0.16; where there is no GPU its tensors
only say that they are on one.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from benchmarks.group import run_ranks
from benchmarks.measure import ratio
from benchmarks.optimizer_job import (
    FORMATS,
    LAYOUTS,
    OURS_FLAT,
    SAVED,
    Size,
    keep_one_save,
    measure_peaks,
    measure_times,
    try_load,
)
from benchmarks.options import chosen_size, new_parser, tell
from benchmarks.place import Place, default_directories, scratch_place
from benchmarks.ranks_job import Peak, Times
from benchmarks.state import MIB
from benchmarks.table import WIDTH, new_table, size_cells, time_cells

RANKS = 4
FULL = Size(hidden=512, vocabulary=8192, rounds=5)
QUICK = Size(hidden=64, vocabulary=512, rounds=2)


def main(arguments: list[str] | None = None) -> None:
    chosen = _parser().parse_args(arguments)
    size = chosen_size(chosen, FULL, QUICK)
    console = Console(width=WIDTH)
    console.print(f"GPT of 4 layers, hidden size {size.hidden}, {size.rounds} rounds; saved at {SAVED}, {RANKS} ranks")
    with scratch_place(chosen.dir or default_directories()[0]) as place:
        if "costs" in chosen.what:
            tell("times ...")
            times = run_ranks(RANKS, measure_times, place, size)
            peaks = {name: _peaks(place, name, size) for name in FORMATS}
            console.print(_costs_table(f"optimizer state, {place.title}", times, peaks))
        if "layouts" in chosen.what:
            found = {name: _layouts(place, name, size) for name in FORMATS}
            console.print(_layouts_table("loads under other layouts", found))
            for name, answers in found.items():
                for layout, answer in answers.items():
                    if answer != "yes":
                        console.print(f"{name} at {layout}: {answer}", highlight=False)


def _peaks(place: Place, name: str, size: Size) -> tuple[Peak, Peak]:
    tell(f"memory of {name} ...")
    return run_ranks(RANKS, measure_peaks, place, name, size)


def _layouts(place: Place, name: str, size: Size) -> dict[str, str]:
    """Return for each layout "yes", or why not; ranks that fail take the others with them."""
    path = place.fresh_path()
    run_ranks(RANKS, keep_one_save, path, name, size)
    answers = {}
    for layout in LAYOUTS:
        tell(f"{name} at {layout} ...")
        try:
            wrong = run_ranks(RANKS, try_load, path, name, layout, size)
        except (ProcessRaisedException, ProcessExitedException) as error:
            answers[layout] = "no: " + str(error).strip().splitlines()[-1]
        else:
            answers[layout] = f"no: {wrong} elements differ" if wrong else "yes"
    place.discard(path, files=0)
    return answers


def _costs_table(title: str, times: Times, peaks: Mapping[str, tuple[Peak, Peak]]) -> Table:
    table = new_table(title, "", "wall s", "min - max", "CPU s", "/ ours", "peak / own", "files", "MiB")
    for number, (kind, samples) in enumerate((("save", times.saves), ("load", times.loads))):
        table.add_section()
        table.add_row(f"[bold]{kind}")
        for name, runs in samples.items():
            peak = peaks[name][number]
            table.add_row(
                f"  {name}", *time_cells(runs), f"{ratio(samples, name, OURS_FLAT):.1f}",
                f"{peak.extra_nbytes / peak.state_nbytes:.2f}", *(size_cells(runs) if kind == "save" else ("", "")),
            )  # fmt: skip
    own = peaks[OURS_FLAT][0].state_nbytes
    table.caption = f"peak / own: memory added, to the rank's own state of {own / MIB:.0f} MiB"
    return table


def _layouts_table(title: str, found: Mapping[str, Mapping[str, str]]) -> Table:
    table = new_table(title, f"saved at {SAVED}", *LAYOUTS)
    for name, answers in found.items():
        table.add_row(name, *(answers[layout].partition(":")[0] for layout in LAYOUTS))
    return table


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("benchmarks.optimizer", __doc__)
    parser.add_argument("--dir", type=Path, help="where to write; default: /dev/shm")
    parser.add_argument(
        "--what", nargs="+", choices=("costs", "layouts"), default=("costs", "layouts"), help="default: both"
    )
    return parser


if __name__ == "__main__":
    main()
