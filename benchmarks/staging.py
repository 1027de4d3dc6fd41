"""How long `async_save` blocks: ``python -m benchmarks.staging [--dir DIR] [--ranks N ...] [--quick]``.

Against a copy of the same bytes, by one thread, into memory that was used before. Each round measures each of them, in
turn; an async_save is waited for before the next begins. With several ranks: the slowest rank, and rows as FSDP2 has
them.
"""

import argparse
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import functional_ckpt
from benchmarks.figures import Figure
from benchmarks.group import run_ranks, timed_by_all
from benchmarks.measure import Sample, ratio, rotated, timed
from benchmarks.options import chosen_size, new_parser, tell
from benchmarks.place import Place, default_directories, scratch_place
from benchmarks.ranks_job import fresh_path
from benchmarks.sharded import all_ranks, local_tensors, sharded
from benchmarks.state import MIB, large_state, large_tensors, small_state, tensors_of
from benchmarks.table import WIDTH, figure_table, new_table, time_cells

COPY, FRESH = "copy, 1 thread, memory used before", "copy, 1 thread, fresh memory"
FIRST, SAVE = "the first async_save, until it returns", "async_save, until it returns"
NO_COPY, WHOLE = 'the same with staging="none"', "async_save, until it is published"


@attrs.frozen
class Size:
    """How much is saved, and how often."""

    large_nbytes: int
    small_count: int
    rounds: int


FULL = Size(1024 * MIB, 5000, 7)
QUICK = Size(64 * MIB, 500, 3)
Samples = Mapping[str, Sequence[Sample]]

FIGURES = (Figure(f"{SAVE} / {COPY}", "<=", 1.15, lambda found: ratio(found, SAVE, COPY)),)


def main(arguments: list[str] | None = None) -> None:
    chosen = _parser().parse_args(arguments)
    size = chosen_size(chosen, FULL, QUICK)
    console = Console(width=WIDTH)
    with scratch_place(chosen.dir or default_directories()[0]) as place:
        large = f"{size.large_nbytes // MIB} MiB float32 in 16 tensors"
        for ranks in chosen.ranks:
            tell(f"{ranks} ranks, {place.title}: large ...")
            found = _alone(place, size) if ranks == 1 else run_ranks(ranks, _on_rank, place, size)
            console.print(_table(f"{large}, {ranks} ranks, {place.title}, {size.rounds} rounds", found))
            console.print(figure_table(f"figures: {ranks} ranks", FIGURES, found))
        tell(f"1 ranks, {place.title}: small ...")
        found = _small(place, size)
        console.print(_table(f"{size.small_count} x 4 KiB, 1 ranks, {place.title}, {size.rounds} rounds", found))


def _alone(place: Place, size: Size) -> Samples:
    state = large_state(size.large_nbytes)
    arrays = [tensor.numpy() for _, tensor in tensors_of(state)]
    return _Case(state, place.fresh_path, timed, arrays).measured((COPY, FRESH, SAVE, NO_COPY), size.rounds)


def _on_rank(place: Place, size: Size) -> Samples:
    state = sharded(all_ranks(), large_tensors(size.large_nbytes), 0)
    arrays = [tensor.numpy() for tensor in local_tensors(state).values()]
    return _Case(state, partial(fresh_path, place), timed_by_all, arrays).measured((COPY, SAVE), size.rounds)


def _small(place: Place, size: Size) -> Samples:
    return _Case(small_state(size.small_count), place.fresh_path, timed, []).measured((SAVE, WHOLE), size.rounds)


@attrs.frozen
class _Case:
    """A state to save to fresh paths, a clock, and the arrays that it is made of."""

    state: Any
    path: Callable[[], Path]
    clock: Callable[[Callable[[], object]], Sample]
    arrays: Sequence["np.ndarray[Any, Any]"]

    def measured(self, names: Sequence[str], rounds: int) -> Samples:
        used = [np.zeros_like(array) for array in self.arrays]
        samples: dict[str, list[Sample]] = {FIRST: [self._save(FIRST)], **{name: [] for name in names}}
        for number in range(rounds):
            for name in rotated(names, number):
                copied = used if name == COPY else None
                is_copy = name in (COPY, FRESH)
                samples[name].append(self.clock(lambda into=copied: self._copy(into)) if is_copy else self._save(name))
        return samples

    def _copy(self, used: Sequence["np.ndarray[Any, Any]"] | None) -> object:
        if used is None:
            return [np.array(array) for array in self.arrays]
        return [np.copyto(into, array) for into, array in zip(used, self.arrays, strict=True)]

    def _save(self, name: str) -> Sample:
        path, begun = self.path(), list[functional_ckpt.PendingSave]()
        policy = functional_ckpt.SavePolicy(durability="none", staging="none" if name == NO_COPY else "copy")

        def run() -> None:
            begun.append(functional_ckpt.async_save(self.state, path, policy=policy))
            if name == WHOLE:
                begun[0].result()

        sample = self.clock(run)
        begun[0].result()
        if dist.is_initialized():
            dist.barrier()
        shutil.rmtree(path.parent, ignore_errors=True)
        return sample


def _table(title: str, samples: Samples) -> Table:
    table = new_table(title, "", "wall s", "min - max", "CPU s")
    for name, runs in samples.items():
        table.add_row(name, *time_cells(runs))
    return table


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("benchmarks.staging", __doc__)
    parser.add_argument("--dir", type=Path, help="where to write; default: /dev/shm")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of processes; default: 1 2")
    return parser


if __name__ == "__main__":
    main()
