"""Draw the figures from real plans: ``python docs/figures/make.py`` writes the SVG files beside this one.

Colours stand for ranks. A test says when the code plans otherwise than the files show. Each figure brings its own
background: code hosts and sites show it as an image, by day and by night.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from functional_ckpt import ArraySpec, Box, LayoutPolicy, ShardSpec, World
from functional_ckpt.cli.drawing import COLOURS, LINE, label, rectangle, svg
from functional_ckpt.plan.layout import ChunkGrid
from functional_ckpt.plan.load import plan_load
from functional_ckpt.plan.manifest import DIGEST_NBYTES, ArrayEntry
from functional_ckpt.plan.save import SavePlan, plan_save


def held(boxes: Sequence[Box], at: tuple[float, float], scale: float) -> Iterator[str]:
    """Draw what each rank holds."""
    for rank, box in enumerate(boxes):
        yield rectangle(box, at, scale, f'fill="{COLOURS[rank % len(COLOURS)]}" fill-opacity="0.55"')


def chunks(grid: ChunkGrid, at: tuple[float, float], scale: float) -> Iterator[str]:
    """Draw the lines between chunks."""
    for index in grid.touched(Box.from_shape(grid.shape)):
        yield rectangle(grid.box(index), at, scale, LINE)


def rows(extent: int, width: int, ranks: int) -> list[Box]:
    """Cut rows into equal blocks."""
    step = extent // ranks
    return [Box((r * step, 0), ((r + 1) * step, width)) for r in range(ranks)]


def columns(extent: int, width: int, ranks: int) -> list[Box]:
    """Cut columns into equal blocks."""
    step = width // ranks
    return [Box((0, r * step), (extent, (r + 1) * step)) for r in range(ranks)]


def arrow(x: float, y: float, length: float) -> str:
    """Draw an arrow to the right."""
    return f'<path d="M{x:g} {y:g} h{length:g} m-8 -5 l8 5 l-8 5" {LINE}/>'


def planned(saved: Sequence[Box]) -> SavePlan:
    """Plan a 16 x 16 array of which each rank saves a box, with a chunk for each."""
    array = ArraySpec("w", (16, 16), "float32")
    return plan_save(World([[ShardSpec(array, box)] for box in saved]), LayoutPolicy(min_chunk_nbytes=0))


def read_by(plan: SavePlan, wanted: Box) -> list[Box]:
    """Return what of each chunk a rank reads that wants this box."""
    (planned_array,) = plan.arrays
    digests = bytes(DIGEST_NBYTES * planned_array.grid.size)
    array = ArraySpec("w", (16, 16), "float32")
    entry = ArrayEntry(array, planned_array.layout, digests)
    return [read.box for read in plan_load({"w": entry}, [ShardSpec(array, wanted)]).reads]


def life() -> str:
    """Four row blocks become chunks, and chunks two column blocks."""
    saved, wanted = rows(16, 16, 4), columns(16, 16, 2)
    plan = planned(saved)
    scale, top = 9, 34
    parts = [label("4 ranks hold rows", 72, 20), *held(saved, (0, top), scale)]
    parts += [label("chunks on disk, what rank 1 reads", 372, 20), *chunks(plan.arrays[0].grid, (300, top), scale)]
    fill = f'fill="{COLOURS[1]}" fill-opacity="0.55"'
    parts += [rectangle(box, (300, top), scale, fill) for box in read_by(plan, wanted[1])]
    parts += [label("2 ranks want columns", 672, 20), *held(wanted, (600, top), scale)]
    for x, verb in ((222, "save"), (522, "load")):
        parts += [label(verb, x, top + 62), arrow(x - 44, top + 72, 80)]
    return svg(744, 178, "A tensor saved by rows and loaded by columns", parts)


def overview() -> str:
    """One tensor, saved by four ranks, and three ways to have it back."""
    saved, wanted = rows(16, 16, 4), columns(16, 16, 2)
    plan = planned(saved)
    grid = plan.arrays[0].grid
    scale, small, top = 9, 4.5, 44
    parts = [label("trained on 4 ranks", 72, 12), label("FSDP: rows of model.w", 72, 30, True)]
    parts += held(saved, (0, top), scale)
    parts += [label("a plain Zarr v3 array", 352, 12), label("checkpoint/model.w/", 352, 30, True)]
    parts += chunks(grid, (280, top), scale)
    for index in grid.touched(Box.from_shape(grid.shape)):
        parts.append(label("c." + ".".join(map(str, index)), 352, top + 22 + 36 * index[0], True))
    ways = (
        (held(wanted, (600, 0), small), "2 ranks", "tensor parallel: columns"),
        (held([Box.from_shape((16, 16))], (600, 84), small), "1 process", "the whole array"),
        (chunks(grid, (600, 168), small), "stock tools", "zarr, xarray, TensorStore"),
    )
    for number, (drawn, who, what) in enumerate(ways):
        y = 84 * number + 32
        parts += [*drawn, label(who, 684, y, anchor="start"), label(what, 684, y + 16, True, anchor="start")]
        tip = ((-2, 2), (-5, 5), (-8, 8))[number]
        line = f"M440 {top + 72} L584 {y + 4} m-9 {tip[0]} l9 {tip[1]}"
        parts.append(f'<path d="{line}" {LINE}/>')
    parts += [label("save", 212, top + 62), arrow(168, top + 72, 88), label("load", 512, top + 62)]
    return svg(810, 240, "A tensor saved by 4 ranks becomes a Zarr array that other ranks and stock tools read", parts)


def writers(plan: SavePlan) -> Iterator[tuple[int, Box]]:
    """Yield which rank puts which box into storage."""
    for write in plan.writes:
        yield write.rank, write.box
    grid = plan.arrays[0].grid
    for target, index in dict.fromkeys((move.target, move.index) for move in plan.moves):
        yield target, grid.box(index)


def layout() -> str:
    """The three kinds of ownership, at true proportions of a 4096 x 4096 float32 array; bars show who writes."""
    array = ArraySpec("w", (4096, 4096), "float32")
    scale, top = 140 / 4096, 34
    parts: list[str] = []
    for column, (ranks, owned_ok) in enumerate(((1, True), (4, True), (128, True), (128, False))):
        boxes = rows(4096, 4096, ranks)
        world = World([[ShardSpec(array, box)] for box in boxes])
        plan = plan_save(world, LayoutPolicy(), owned_ok=owned_ok)
        chosen, grid = plan.arrays[0].layout, plan.arrays[0].grid
        at = (column * 186 + 10, top)
        middle = at[0] + 70
        title = f"{ranks} rank{'s' * (ranks > 1)}{'' if owned_ok else ', no exchange'}"
        parts += [label(title, middle, 20), *held(boxes, at, scale), *chunks(grid, at, scale)]
        for rank, box in writers(plan):
            bar = Box((box.start[0], 0), (box.stop[0], 256))
            parts.append(rectangle(bar, (at[0] + 144, top), scale, f'fill="{COLOURS[rank % len(COLOURS)]}"'))
        mib = chosen.chunk[0] * chosen.chunk[1] * array.itemsize / 2**20
        parts += [
            label(chosen.ownership, middle, top + 160),
            label(f"{grid.size} chunks of {mib:g} MiB", middle, top + 175, True),
        ]
    title = "Chunks chosen for 64 MiB held by 1, 4 and 128 ranks; the bar beside each shows who writes"
    return svg(744, 212, title, parts)


def moves() -> str:
    """Four row blocks, three chunks: pieces go to the owners, and owners write whole chunks."""
    array = ArraySpec("w", (16, 16), "float32")
    boxes = rows(16, 16, 4)
    world = World([[ShardSpec(array, box)] for box in boxes])
    plan = plan_save(world, LayoutPolicy(target_chunk_nbytes=384))
    grid = plan.arrays[0].grid
    scale, top, gap = 9, 34, 12
    left, right = (110, top + gap), (450, top)
    parts = [label("4 ranks hold rows", left[0] + 72, 20), *held(boxes, left, scale)]
    parts += [label("owners write whole chunks", right[0] + 72, 20)]
    parts += [label(f"rank {rank}", left[0] - 30, left[1] + 22 + rank * 36, True) for rank in range(4)]
    for move in plan.moves:
        at = (right[0], right[1] + move.index[0] * gap)
        parts.append(rectangle(move.box, at, scale, f'fill="{COLOURS[move.source]}" fill-opacity="0.55"'))
        middle = (move.box.start[0] + move.box.stop[0]) / 2 * scale
        begin, end = left[1] + middle, at[1] + middle
        travels = move.source != move.target
        style = f'stroke="{COLOURS[move.source]}" stroke-width="2.5"' if travels else 'stroke="currentColor"'
        opacity = 1 if travels else 0.3
        line = f"M{left[0] + 150} {begin:g} L{right[0] - 8} {end:g} m-8 -5 l8 5 l-8 5"
        parts.append(f'<path d="{line}" fill="none" {style} stroke-opacity="{opacity}"/>')
    for index, owner in sorted({(move.index, move.target) for move in plan.moves}):
        at, box = (right[0], right[1] + index[0] * gap), grid.box(index)
        border = f'fill="none" stroke="{COLOURS[owner]}" stroke-width="2.5"'
        middle = at[1] + (box.start[0] + box.stop[0]) / 2 * scale + 4
        parts += [rectangle(box, at, scale, border), label(f"rank {owner} writes", right[0] + 204, middle, True)]
    return svg(744, 200, "Pieces move to the owners of chunks", parts)


FIGURES = {"overview.svg": overview, "life.svg": life, "layout.svg": layout, "moves.svg": moves}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        Path(__file__).with_name(name).write_text(draw())
