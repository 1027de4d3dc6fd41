"""How many files a checkpoint has, by plan alone: ``python -m benchmarks.files [--quick]``.

For models of several sizes, held by FSDP2, by tensor parallelism with FSDP2, and as flat ranges (ZeRO), on few ranks
and on many: files with a chunk for each shard that reaches the minimum, files as planned by default, their bound (two
for each target of bytes and two for each array), what a rank sends to others (the mean over a few drawn ranks, for flat
ranges over all), and the CPU time in which one rank plans. Without any data.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from statistics import median

import attrs
import numpy as np
from rich.console import Console

from benchmarks.figures import Figure
from benchmarks.files_states import (
    KEPT,
    MODELS,
    PLACED,
    POLICY,
    RANKS,
    Model,
    bound_of,
    file_count,
    specs,
    zero,
)
from benchmarks.options import new_parser, tell
from benchmarks.table import WIDTH, figure_table, new_table
from functional_ckpt.plan.local import local_array_plans, plan_local_save
from functional_ckpt.plan.save import SavePlan, plan_save
from functional_ckpt.spec.sharding import PlacedArray

MIB = 1 << 20
#: Ranks whose plans are made, for the mean of what a rank sends: one of each stretch of ranks, since some hold nothing.
_SAMPLES = 16
FLAT = "ZeRO, flat"


@attrs.frozen
class Point:
    """One state in one world; `kept` are the files with a chunk for each shard."""

    model: str
    layout: str
    ranks: int
    nbytes: int
    kept: int
    files: int
    bound: int
    moved_nbytes: float
    plan_s: float


FIGURES = (
    Figure("files / bound, at most", "<=", 1, lambda points: max(p.files / p.bound for p in points)),
    Figure("CPU seconds to plan on one rank, at most", "<=", 10, lambda points: max(p.plan_s for p in points)),
)  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    chosen = new_parser("benchmarks.files", __doc__, rounds=False).parse_args(arguments)
    models, ranks = (MODELS[:1], RANKS[:2]) if chosen.quick else (MODELS, RANKS)
    points = []
    for point in _points(models, ranks):
        tell(f"{point.model}, {point.layout}, {point.ranks} ranks ...")
        points.append(point)
    console = Console(width=WIDTH)
    console.print(_table(points))
    console.print(figure_table("figures", FIGURES, points))
    print(*_markdown(points, ranks), sep="\n")


def _points(models: Sequence[Model], worlds: Sequence[int]) -> Iterator[Point]:
    for model in models:
        nbytes, bound = sum(spec.nbytes for spec, _ in specs(model)), bound_of(model)
        for layout in (*PLACED, FLAT):
            for ranks in worlds:
                found = _flat(model, ranks) if layout == FLAT else _placed(PLACED[layout](model, ranks), ranks)
                yield Point(model.name, layout, ranks, nbytes, found[0], found[1], bound, *found[2:])


def _placed(items: list[PlacedArray], ranks: int) -> tuple[int, int, float, float]:
    samples = min(_SAMPLES, ranks)
    chosen = (np.arange(samples) + np.random.default_rng(0).random(samples)) * ranks // samples
    sent, times = [], []
    gc.collect()
    for rank in chosen.astype(int).tolist():
        began = time.process_time()
        plan = plan_local_save(rank, items, POLICY)
        times.append(time.process_time() - began)
        sent.append(_sent_nbytes(plan, rank))
    kept, arrays = (local_array_plans(items, policy) for policy in (KEPT, POLICY))
    return file_count(kept), file_count(arrays), float(np.mean(sent)), median(times)


def _flat(model: Model, ranks: int) -> tuple[int, int, float, float]:
    table = zero(model, ranks)
    kept = plan_save(table, KEPT)
    gc.collect()
    began = time.process_time()
    plan = plan_save(table, POLICY)
    plan_s = time.process_time() - began
    return file_count(kept.arrays), file_count(plan.arrays), _sent_nbytes(plan) / ranks, plan_s


def _sent_nbytes(plan: SavePlan, rank: int | None = None) -> int:
    """Bytes that one rank, or all ranks, send to others."""
    itemsizes = np.array([array.spec.itemsize for array in plan.arrays], np.int64)
    pieces = plan.pieces
    leaves = (pieces.source != pieces.target) & ((pieces.source == rank) if rank is not None else True)
    return int((pieces.sizes * itemsizes[pieces.array])[leaves].sum())


def _table(points: Sequence[Point]) -> object:
    table = new_table(
        "files by plan", "state", "layout", "ranks", "shards kept", "files", "bound", "sent MiB", "of own", "CPU s"
    )
    for point in points:
        own = point.nbytes / point.ranks
        table.add_row(
            point.model, point.layout, f"{point.ranks}", f"{point.kept}", f"{point.files}", f"{point.bound}",
            f"{point.moved_nbytes / MIB:.0f}", f"{point.moved_nbytes / own:.0%}", f"{point.plan_s:.2f}",
        )  # fmt: skip
    return table


def _markdown(points: Sequence[Point], worlds: Sequence[int]) -> Iterator[str]:
    """The table of the documentation: for each world the files, and the MiB that a rank sends."""
    yield f"| state | held by | bound | {' | '.join(f'{ranks:,} ranks' for ranks in worlds)} |"
    yield "|---|---|---:" + "|---:" * len(worlds) + "|"
    rows = {(point.model, point.layout): point for point in points}
    for (model, layout), first in rows.items():
        mine = [point for point in points if (point.model, point.layout) == (model, layout)]
        cells = (f"{point.files:,}; {point.moved_nbytes / MIB:,.0f}" for point in mine)
        yield f"| {model} | {layout} | {first.bound:,} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
