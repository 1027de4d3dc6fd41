"""From and to a CUDA device: ``python -m benchmarks.device [--dir DIR] [--gib N ...] [--quick]``.

How long `async_save` blocks, against a bare copy of the same tensors into pinned memory that was used before, and
against ``dcp.async_save`` with each of its stagers; then saves and loads that are waited for, against DCP's own files.
Each round measures each of them, in turn; a save in the background is waited for before the next begins. DCP's stager
may copy in the background too: its row ends when that is done, since only then may the state change.
"""

import argparse
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import functional_ckpt
from benchmarks.figures import Figure
from benchmarks.measure import Sample, ratio, rotated, timed
from benchmarks.options import chosen_size, new_parser, tell
from benchmarks.place import Place, default_directories, scratch_place
from benchmarks.state import MIB, State, blank_like, large_state, same_bits, tensors_of
from benchmarks.table import WIDTH, figure_table, new_table, time_cells

COPY = "copy into pinned memory used before"
FIRST, SAVE = "the first async_save, until it returns", "async_save, until it returns"
DCP_FIRST, DCP_DEFAULT = "the first dcp.async_save, by default", "dcp.async_save, by default, until staged"
DCP_PINNED = "dcp.async_save, pinned, until staged"
WAITED, DCP_WAITED = "save, waited for", "dcp.save, waited for"
LOAD, DCP_LOAD = "load into the device", "dcp.load into the device"
BLOCKING = (COPY, SAVE, DCP_DEFAULT, DCP_PINNED)
WHOLE = (WAITED, DCP_WAITED)
LOADS = (LOAD, DCP_LOAD)

FIGURES = (
    Figure(f"{SAVE} / {COPY}", "<=", 1.15, lambda found: ratio(found, SAVE, COPY)),
    Figure(f"{DCP_PINNED} / {SAVE}", ">=", 1, lambda found: ratio(found, DCP_PINNED, SAVE)),
    Figure(f"{DCP_WAITED} / {WAITED}", ">=", 1, lambda found: ratio(found, DCP_WAITED, WAITED)),
    Figure(f"{DCP_LOAD} / {LOAD}", ">=", 1, lambda found: ratio(found, DCP_LOAD, LOAD)),
)
POLICY = functional_ckpt.SavePolicy(durability="none")
# A stager for each save: torch 2.11 closes it after one. Its memory is not shared with other processes.
PINNED = StagingOptions(use_pinned_memory=True, use_shared_memory=False)
Samples = Mapping[str, Sequence[Sample]]


@attrs.frozen
class Size:
    """How much is saved, and how often."""

    mebibytes: tuple[int, ...]
    rounds: int


FULL = Size((1024, 4096), 7)
QUICK = Size((64,), 3)


def main(arguments: list[str] | None = None) -> None:
    chosen = _parser().parse_args(arguments)
    size = chosen_size(chosen, FULL, QUICK)
    size = attrs.evolve(size, mebibytes=tuple(1024 * gib for gib in chosen.gib)) if chosen.gib else size
    console = Console(width=WIDTH)
    warnings.filterwarnings("ignore", module="torch.distributed")
    console.print(torch.cuda.get_device_name(), f"torch {torch.__version__}", highlight=False)
    with scratch_place(chosen.dir or default_directories()[0]) as place, _one_rank():
        for mebibytes in size.mebibytes:
            tell(f"{mebibytes} MiB ...")
            state = _on_device(large_state(mebibytes * MIB))
            found = _Case(state, place).measured(size.rounds)
            title = f"{mebibytes} MiB float32 in 16 tensors, {place.title}, {size.rounds} rounds"
            table = new_table(title, "", "wall s", "min - max", "CPU s", "GiB/s")
            for name, runs in found.items():
                median, *others = time_cells(runs)
                table.add_row(name, median, *others, f"{mebibytes / 1024 / max(float(median), 1e-9):.1f}")
            console.print(table, figure_table(f"figures: {mebibytes} MiB", FIGURES, found))
            functional_ckpt.release_staging()


def _on_device(state: State) -> State:
    return {group: {name: tensor.cuda() for name, tensor in tensors.items()} for group, tensors in state.items()}


@attrs.frozen(eq=False)
class _Case:
    """A state on the device, and where it is saved to."""

    state: State
    place: Place

    def measured(self, rounds: int) -> Samples:
        tensors = [tensor for _, tensor in tensors_of(self.state)]
        pinned = [torch.empty_like(tensor, device="cpu").pin_memory() for tensor in tensors]

        def copy() -> None:
            for tensor, into in zip(tensors, pinned, strict=True):
                into.copy_(tensor, non_blocking=True)
            torch.cuda.synchronize()

        calls: dict[str, Callable[[], Sample]] = {
            COPY: lambda: timed(copy),
            SAVE: self._async_save,
            DCP_DEFAULT: lambda: self._dcp_async_save(None),
            DCP_PINNED: lambda: self._dcp_async_save(DefaultStager(PINNED)),
            WAITED: lambda: self._waited(lambda path: functional_ckpt.save(self.state, path, policy=POLICY)),
            DCP_WAITED: lambda: self._waited(lambda path: _save_with_dcp(self.state, path)),
        }
        copy()
        samples = {FIRST: [self._async_save()], DCP_FIRST: [self._dcp_async_save(None)]}
        calls[DCP_PINNED]()
        for names in (BLOCKING, WHOLE):
            samples |= _in_turn({name: calls[name] for name in names}, rounds)
        return samples | self._loads(rounds)

    def _async_save(self) -> Sample:
        path, begun = self.place.fresh_path(), list[functional_ckpt.PendingSave]()
        torch.cuda.synchronize()
        sample = timed(lambda: begun.append(functional_ckpt.async_save(self.state, path, policy=POLICY)))
        begun[0].result()
        shutil.rmtree(path.parent)
        return sample

    def _dcp_async_save(self, stager: Any) -> Sample:
        path, begun = self.place.fresh_path(), list[Any]()
        options = {} if stager is None else {"async_stager": stager}
        writer = dcp.FileSystemWriter(str(path), sync_files=False)

        def run() -> None:
            begun.append(dcp.async_save(self.state, storage_writer=writer, **options))
            if hasattr(begun[0], "staging_completion"):
                begun[0].staging_completion.result()

        torch.cuda.synchronize()
        sample = timed(run)
        getattr(begun[0], "upload_completion", begun[0]).result()
        shutil.rmtree(path.parent)
        return sample

    def _waited(self, save: Callable[[Path], object]) -> Sample:
        path = self.place.fresh_path()
        torch.cuda.synchronize()
        sample = timed(lambda: save(path))
        shutil.rmtree(path.parent)
        return sample

    def _loads(self, rounds: int) -> dict[str, list[Sample]]:
        path, other = self.place.fresh_path(), self.place.fresh_path()
        functional_ckpt.save(self.state, path, policy=POLICY)
        _save_with_dcp(self.state, other)
        into = blank_like(self.state)

        def ours() -> None:
            functional_ckpt.load(into, path)
            torch.cuda.synchronize()

        def theirs() -> None:
            dcp.load(into, storage_reader=dcp.FileSystemReader(str(other)))
            torch.cuda.synchronize()

        found = _in_turn({LOAD: lambda: timed(ours), DCP_LOAD: lambda: timed(theirs)}, rounds)
        expected = dict(tensors_of(self.state))
        if not all(same_bits(tensor, expected[name]) for name, tensor in tensors_of(into)):
            raise RuntimeError("what was loaded is not what was saved")
        shutil.rmtree(path.parent)
        shutil.rmtree(other.parent)
        return found


def _save_with_dcp(state: State, path: Path) -> object:
    return dcp.save(state, storage_writer=dcp.FileSystemWriter(str(path), sync_files=False))


def _in_turn(calls: Mapping[str, Callable[[], Sample]], rounds: int) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in rotated(list(calls), number):
            samples[name].append(calls[name]())
    return samples


@contextmanager
def _one_rank() -> Iterator[None]:
    """The group that ``dcp.async_save`` asks for."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("benchmarks.device", __doc__)
    parser.add_argument("--dir", type=Path, help="where to write; default: /dev/shm")
    parser.add_argument("--gib", type=int, nargs="+", help="how much is saved; default: 1 4")
    return parser


if __name__ == "__main__":
    main()
