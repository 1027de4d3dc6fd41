"""`map`: how an array is cut into chunks, and which rank wrote which of them, as far as anybody noted it."""

from collections import Counter
from itertools import product
from typing import Any

from functional_ckpt.cli.drawing import LINE, colour, label, rectangle, svg
from functional_ckpt.cli.facts import key_problem, provenance_of
from functional_ckpt.cli.screen import Screen, facts
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.plan.writers import writers_from
from functional_ckpt.run.checkpoint import Checkpoint
from functional_ckpt.show.text import clean, count, size
from functional_ckpt.spec.box import Box
from functional_ckpt.store.chunk import stored_nbytes
from functional_ckpt.store.encoding import chunk_name, node_name
from functional_ckpt.store.opening import open_store

__all__ = ["chart", "chart_lines", "chart_svg"]

Facts = dict[str, Any]

#: Chunks that are drawn along one axis.
_MOST_ROWS, _MOST_COLUMNS = 40, 60
_MOST_RANKS = 16
_WIDTH, _HEIGHT, _LEAST = 480.0, 360.0, 40.0
#: Bright backgrounds of a terminal, under black.
_SGR = (104, 106, 103, 105, 102, 101)
_HOW = {
    "exclusive": "each chunk was written by the rank that held all of it",
    "owned": "each chunk was written by one rank, and others sent it what they held of it",
    "shared": "several ranks wrote parts of one chunk",
}


def chart(checkpoint: Checkpoint, key: str) -> Facts:
    """Return every chunk of an array: where it is, how large, its digest, and the rank that wrote it, if that is known.

    Raises
    ------
    KeyMismatchError
        If no array has this key.
    """
    if key not in checkpoint:
        raise key_problem(checkpoint.manifest, key)
    entry = checkpoint[key].entry
    store = open_store(checkpoint.url)
    node, grid = node_name(entry.spec.key), entry.grid
    told = provenance_of(store)
    writers = writers_from(told, entry.spec.key, grid.size, entry.layout.ownership == "shared")
    chunks = []
    for position, index in enumerate(grid.touched(entry.spec.box)):
        box, name = grid.box(index), chunk_name(index)
        chunks.append({
            "name": name, "index": list(index), "offset": list(box.start), "shape": list(box.shape),
            "nbytes": box.size * entry.spec.itemsize,
            "stored_nbytes": stored_nbytes(store, f"{node}/{name}", entry.layout),
            "digest": entry.digest(position).hex(), "rank": writers[position] if writers else None,
        })  # fmt: skip
    return {
        "key": key, "stored_as": entry.spec.key, "dtype": entry.spec.dtype, "shape": list(entry.spec.shape),
        "nbytes": entry.spec.nbytes, "chunk": list(entry.layout.chunk), "grid": list(grid.counts),
        "ownership": entry.layout.ownership, "writers_known": writers is not None,
        "ranks": _possible(told, entry), "chunks": chunks,
    }  # fmt: skip


def _possible(told: Any, entry: ArrayEntry) -> list[int]:
    """Return the ranks that wrote chunks of the array, whichever these were; none where that is not known."""
    try:
        return [rank for rank, each in enumerate(told["ranks"]) if entry.spec.key in each["arrays"]]
    except (TypeError, KeyError):
        return []


def chart_lines(screen: Screen, found: Facts) -> list[str]:
    """Return the map as text: a number for each chunk, that of the rank which wrote it."""
    pairs = [
        ("array", f"{found['dtype']} {found['shape']}, {size(found['nbytes'])}"),
        ("cut into", _cut(found)),
        ("ownership", f"{found['ownership']}: {_HOW.get(found['ownership'], 'as a later version means it')}"),
        ("writers", "\n".join(_writers(found))),
    ]
    lines = [screen.bold(clean(found["key"])), *facts(screen, pairs)]
    if not found["chunks"]:
        return [*lines, "", "There is no chunk: the array has no elements."]
    plane = _Plane(found)
    wide = max(len(_name(chunk)) for chunk in found["chunks"]) + 1
    fits = _MOST_COLUMNS if screen.width is None else max(1, min(_MOST_COLUMNS, (screen.width - 3) // wide))
    rows, shown = plane.rows[:_MOST_ROWS], min(fits, len(plane.columns))
    lines += ["", plane.caption(len(rows), shown)]
    for row in rows:
        cells = [plane.at(row, column) for column in plane.columns[:shown]]
        lines.append("   " + "".join(_cell(screen, chunk, wide) for chunk in cells))
    return lines


def _cell(screen: Screen, chunk: Facts, wide: int) -> str:
    text = f"{_name(chunk):>{wide - 1}} "
    if not screen.colours or chunk["rank"] is None:
        return text
    return f"\x1b[30;{_SGR[chunk['rank'] % len(_SGR)]}m{text}\x1b[0m"


def _name(chunk: Facts) -> str:
    return "?" if chunk["rank"] is None else str(chunk["rank"])


def _cut(found: Facts) -> str:
    """Return the grid in words."""
    n = len(found["chunks"])
    if n < 2:
        return f"{count(n, 'chunk')} of {found['chunk']}"
    return f"{' x '.join(map(str, found['grid']))} chunks of {found['chunk']}"


def _writers(found: Facts) -> list[str]:
    """Return what each rank wrote, in words; or what is known of it."""
    if not found["writers_known"]:
        ranks = found["ranks"]
        if len(ranks) < 2:
            return ["not known: provenance.json does not tell"]
        return [f"{count(len(ranks), 'rank')}; which of them wrote which chunk was not noted"]
    chunks: Counter[int] = Counter()
    nbytes: Counter[int] = Counter()
    for chunk in found["chunks"]:
        chunks[chunk["rank"]] += 1
        nbytes[chunk["rank"]] += chunk["nbytes"]
    told = [f"rank {rank}: {count(n, 'chunk')}, {size(nbytes[rank])}" for rank, n in sorted(chunks.items())]
    rest = len(told) - _MOST_RANKS
    return told if rest <= 0 else [*told[:_MOST_RANKS], f"and {count(rest, 'other rank')}"]


class _Plane:
    """The two axes of an array with the most chunks; along all others only the first chunk is in it."""

    def __init__(self, found: Facts) -> None:
        grid: list[int] = found["grid"]
        by_chunks = sorted(range(len(grid)), key=lambda axis: (-grid[axis], axis))[:2]
        self.axes = sorted(by_chunks)
        self.hidden = [axis for axis, n in enumerate(grid) if axis not in self.axes and n > 1]
        self.shape = [found["shape"][axis] for axis in self.axes]
        # An array of one dimension is one row.
        counts = [1] * (2 - len(self.axes)) + [grid[axis] for axis in self.axes]
        self.rows, self.columns = range(counts[0]), range(counts[1])
        self._ndim = len(grid)
        self._chunks: dict[tuple[int, ...], Facts] = {tuple(chunk["index"]): chunk for chunk in found["chunks"]}

    def at(self, row: int, column: int) -> Facts:
        """Return the chunk in a row and column."""
        index = [0] * self._ndim
        for axis, place in zip(self.axes, (row, column)[2 - len(self.axes) :], strict=True):
            index[axis] = place
        chunk: Facts = self._chunks[tuple(index)]
        return chunk

    def box(self, chunk: Facts) -> Box:
        """Return the rows and columns of elements that a chunk holds."""
        start = [0] * (2 - len(self.axes)) + [chunk["offset"][axis] for axis in self.axes]
        extent = [1] * (2 - len(self.axes)) + [chunk["shape"][axis] for axis in self.axes]
        return Box.from_shape(extent, start)

    def caption(self, rows: int, columns: int) -> str:
        """Return what is shown, in words."""
        names = ("down", "across")[2 - len(self.axes) :]
        text = ", ".join(f"axis {axis} {name}" for axis, name in zip(self.axes, names, strict=True)) or "one chunk"
        text += "".join(f", axis {axis} at its first chunk" for axis in self.hidden)
        if (rows, columns) != (len(self.rows), len(self.columns)):
            text += f"; the first {rows} x {columns} chunks"
        return text


def chart_svg(found: Facts) -> str:
    """Return the map as a figure at true proportions, unless an axis would be too thin to be seen."""
    title = f"{found['key']}: {found['dtype']} {found['shape']}"
    plane = _Plane(found) if found["chunks"] else None
    parts = [label(title, 0, 6, anchor="start"), label(_subtitle(found), 0, 24, True, "start")]
    height = 40.0
    if plane is not None:
        drawn, high = _drawn(plane, found)
        parts += drawn
        height += high + 34
        parts.append(label(plane.caption(*_counts(plane)), 0, height - 18, True, "start"))
    for line, text in enumerate(_writers(found)):
        y = height + 16 * line
        if text.startswith("rank "):
            swatch = Box.from_shape((10, 10))
            rank = int(text.split()[1].rstrip(":"))
            parts.append(rectangle(swatch, (0, y - 9), 1, f'fill="{colour(rank)}" fill-opacity="0.55"'))
        parts.append(label(text, 16, y, True, "start"))
    return svg(_WIDTH, height + 16 * len(_writers(found)), title, parts)


def _counts(plane: _Plane) -> tuple[int, int]:
    return min(_MOST_COLUMNS, len(plane.rows)), min(_MOST_COLUMNS, len(plane.columns))


def _subtitle(found: Facts) -> str:
    return f"{size(found['nbytes'])} in {_cut(found)}, {found['ownership']}"


def _drawn(plane: _Plane, found: Facts) -> tuple[list[str], float]:
    """Return the chunks, and the height that they take."""
    rows, columns = _counts(plane)
    chunks = [plane.at(row, column) for row, column in product(range(rows), range(columns))]
    boxes = [plane.box(chunk) for chunk in chunks]
    extent = [max(box.stop[axis] for box in boxes) for axis in (0, 1)]
    scale = min(_WIDTH / extent[1], _HEIGHT / extent[0])
    high, wide = max(_LEAST, extent[0] * scale), max(_LEAST, extent[1] * scale)
    both = (high / extent[0], wide / extent[1])
    parts = []
    for chunk, box in zip(chunks, boxes, strict=True):
        fill = "none" if chunk["rank"] is None else colour(chunk["rank"])
        who = "" if chunk["rank"] is None else f", rank {chunk['rank']}"
        tip = f"{chunk['name']}{who}, {size(chunk['nbytes'])}, {chunk['digest']}"
        parts.append(rectangle(box, (0, 40), both, f'fill="{fill}" fill-opacity="0.55"', tip))
        parts.append(rectangle(box, (0, 40), both, LINE))
    return parts, high
