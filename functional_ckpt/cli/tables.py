"""Facts as text for people: aligned columns that fit the terminal, or one line per row into a pipe."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from functional_ckpt.cli.screen import Screen, columns, facts
from functional_ckpt.show.outline import Branch, depth_for, folded
from functional_ckpt.show.text import clean, count, short, shown, size

__all__ = ["header", "leaf", "listing", "moment", "tree", "verification"]

Facts = dict[str, Any]
Lines = list[str]

_MOST_DIGESTS = 8
_MOST_RANKS = 8
#: Rows of a tree that nobody has asked for more of: what two pages hold.
_MOST_ROWS = 100
_BAR_CELLS = 30
#: What stands beside a bar on its line, besides the name and the count: "  histogram  " and two gaps.
_BESIDE_BARS = 17


def listing(screen: Screen, found: Facts) -> Lines:
    """Return what ``ls`` prints for a checkpoint."""
    arrays, tied, values = found["arrays"], found["tied"], found["values"]
    lines: Lines = []
    if arrays:
        names = ("key", "dtype", "shape", "chunks", "bytes", "ownership")
        rows = [
            (a["key"], a["dtype"], str(a["shape"]), str(a["chunks"]), size(a["nbytes"]), a["ownership"]) for a in arrays
        ]
        lines += [*columns(screen, names, "<<<>><", rows), ""]
    if tied:
        lines += [*columns(screen, ("tied key", "is stored as"), "<<", [(t["key"], t["target"]) for t in tied]), ""]
    if values:
        held = [(v["key"], short(shown(v["value"]))) for v in values]
        lines += [*columns(screen, ("value", "holds"), "<<", held), ""]
    totals = found["totals"]
    line = f"{count(len(arrays), 'array')} ({size(totals['nbytes'])} in {count(totals['chunks'], 'chunk')})"
    line += f", {count(len(tied), 'tied key')}" if tied else ""
    return [*lines, f"{line}, {count(len(values), 'value')}"]


def tree(screen: Screen, root: Branch, depth: int | None, is_whole: bool) -> Lines:
    """Return what ``tree`` prints: equal branches folded, and no deeper than fits, unless `is_whole`."""
    shortened = root if is_whole else folded(root)
    if depth is None and not is_whole:
        depth = depth_for(shortened, _MOST_ROWS)
    rows = [
        (f"{_guides(screen, lasts)}{branch.name}", f"{branch.parameters:,}" if branch.parameters else "",
         size(branch.nbytes) if branch.nbytes else "", branch.what)
        for lasts, branch in shortened.rows(depth)
    ]  # fmt: skip
    lines = columns(screen, ("key", "parameters", "bytes", "holds"), "<>><", rows) if rows else []
    total = f"{count(root.arrays, 'array')}, {count(root.values, 'value')}: "
    return [*lines, *([""] if rows else []), f"{total}{count(root.parameters, 'parameter')}, {size(root.nbytes)}"]


def _guides(screen: Screen, lasts: tuple[bool, ...]) -> str:
    if not screen.lines:
        return "  " * (len(lasts) - 1)
    if len(lasts) == 1:
        return ""
    return "".join("   " if last else "│  " for last in lasts[1:-1]) + ("└─ " if lasts[-1] else "├─ ")


def header(screen: Screen, found: Facts) -> Lines:
    """Return what ``show PATH`` prints."""
    saved = found["provenance"] or {}
    version = ".".join(map(str, found["version"]))
    pairs = [
        ("format", f"{found['format']} {version}, a Zarr v3 group"),
        ("arrays", f"{found['arrays']} in {count(found['chunks'], 'chunk')}, {size(found['nbytes'])}"),
        ("data types", _tally(found["dtypes"])),
        ("chunks", _tally(found["ownerships"])),
        ("codecs", _tally(found["codecs"]) or "none"),
        ("objects", ", ".join(found["objects"])),
        ("values", str(found["values"])),
        ("tied", "\n".join(f"{t['key']} = {t['target']}" for t in found["tied"])),
        ("per rank", "\n".join(f"{p['key']} ({count(p['world_size'], 'rank')})" for p in found["per_rank"])),
        ("attributes", "\n".join(f"{k}: {json.dumps(v)}" for k, v in found["attributes"].items())),
        ("saved", _when(saved)),
        ("with", ", ".join(f"{k} {v}" for k, v in [("python", saved.get("python")), *_items(saved)] if v)),
        ("written by", _ranks(saved)),
    ]
    return [screen.bold(clean(found["path"])), *facts(screen, pairs)]


def leaf(screen: Screen, found: Facts) -> Lines:
    """Return what ``show PATH KEY`` prints."""
    title = screen.bold(clean(found["key"]))
    if found["kind"] == "value":
        return [title, clean(shown(found["value"]))]
    summary = found["summary"]
    digests = list(found["digests"].items())
    shown_digests = [f"{name}  {digest}" for name, digest in digests[:_MOST_DIGESTS]]
    if len(digests) > _MOST_DIGESTS:
        shown_digests.append(f"and {len(digests) - _MOST_DIGESTS} more (--json prints all)")
    pairs = [
        ("stored as", found["stored_as"] if found["stored_as"] != found["key"] else ""),
        ("tied", ", ".join(k for k in found["tied"] if k != found["key"])),
        ("dtype", _dtype(found)),
        ("shape", str(found["shape"])),
        ("bytes", size(found["nbytes"]) + _ratio(found)),
        ("chunks", f"{found['chunks']} of {found['chunk']}, grid {found['grid']}, {found['ownership']}"),
        ("codecs", ", ".join(found["codecs"]) or "none"),
        ("directory", found["node"]),
        ("digests", "\n".join(shown_digests)),
        ("object", f"bytes of an object ({found['object_codec']})" if found["object_codec"] else ""),
        ("holds", shown(found["value"]) if found.get("value") is not None else ""),
        ("values", _summary(summary) if summary else ""),
        ("histogram", _histogram(screen, found.get("histogram"))),
        ("corner", _table(found.get("corner") or [])),
        ("slice", _slice(found.get("slice"))),
    ]
    return [title, *facts(screen, pairs)]


def verification(screen: Screen, found: Facts) -> Lines:
    """Return what ``verify`` prints."""
    read = f"{count(found['chunks'], 'chunk')} of {count(found['arrays'], 'array')}, {size(found['nbytes'])}"
    if found["ok"]:
        return [f"{screen.bold('ok')}: {read}, every one as it was saved"]
    rows = [(p["key"] or "", p["chunk"] or "", _what(p)) for p in found["problems"]]
    problems = screen.bold(count(len(found["problems"]), "problem"))
    return [*columns(screen, ("key", "chunk", "problem"), "<<<", rows), "", f"{problems} in {read}"]


def _summary(summary: Facts) -> str:
    finite = summary["finite"]
    if not finite and not summary["not_finite"]:
        return "none"
    parts = [f"{name} {moment(summary[name])}" for name in ("min", "max", "mean", "std") if summary[name] is not None]
    parts += [count(summary["zeros"], "zero")] if summary["zeros"] else []
    if summary["not_finite"]:
        kinds = [f"{summary[name]:,} {word}" for name, word in (("nan", "NaN"), ("inf", "infinite")) if summary[name]]
        parts.append(f"{summary['not_finite']:,} not finite ({', '.join(kinds)})")
    return ", ".join(parts)


def moment(value: Any) -> str:
    """Return a number of a summary: whole, of six digits, or complex."""
    if isinstance(value, int):
        return f"{value:d}"
    return f"{complex(*value):.6g}" if isinstance(value, list) else f"{value:.6g}"


def _histogram(screen: Screen, found: Facts | None) -> str:
    if found is None:
        return ""
    edges, counts = found["edges"], [f"{n:,}" for n in found["counts"]]
    names = [str(e) for e in edges] if found["whole"] else [f"{a:.3g} to {b:.3g}" for a, b in pairwise(edges)]
    width, wide, most = max(map(len, names)), max(map(len, counts)), max(found["counts"])
    bar = "█" if screen.lines else "#"
    room = _BAR_CELLS if screen.width is None else screen.width - width - wide - _BESIDE_BARS
    bars = [bar * -(-n * max(1, min(_BAR_CELLS, room)) // most) for n in found["counts"]]
    return "\n".join(f"{a:>{width}}  {n:>{wide}}  {b}" for a, n, b in zip(names, counts, bars, strict=True))


def _slice(found: Facts | None) -> str:
    if found is None:
        return ""
    blocks = [part for at, rows in found["rows"] for part in (at, _table(rows)) if part]
    return "\n".join([f"shape {found['shape']}", *blocks])


def _table(rows: list[list[str]]) -> str:
    width = max((len(cell) for row in rows for cell in row), default=0)
    return "\n".join("  ".join(cell.rjust(width) for cell in row) for row in rows)


def _what(problem: Facts) -> str:
    parts = [f"{name} {problem[name]}" for name in ("expected", "found") if problem[name] is not None]
    return f"{problem['what']}: {', '.join(parts)}" if parts else problem["what"]


def _dtype(found: Facts) -> str:
    stored = found["stored_dtype"]
    return found["dtype"] if stored == found["dtype"] else f"{found['dtype']}, stored as {stored}"


def _ratio(found: Facts) -> str:
    stored, nbytes = found["stored_nbytes"], found["nbytes"]
    return f", {size(stored)} stored" if stored != nbytes else ""


def _when(saved: Facts) -> str:
    try:
        started, finished = float(saved["started"]), float(saved["finished"])
        day = datetime.fromtimestamp(finished, UTC)
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return ""
    return f"{day:%Y-%m-%d %H:%M:%S} UTC, in {finished - started:.2f} s"


def _items(saved: Facts) -> list[tuple[str, Any]]:
    versions = saved.get("versions")
    return list(versions.items()) if isinstance(versions, dict) else []


def _ranks(saved: Facts) -> str:
    ranks = saved.get("ranks")
    try:
        sizes = [int(rank["nbytes"]) for rank in ranks or ()]
        counts = [count(len(rank["arrays"]), "array") for rank in ranks or ()]
    except (KeyError, TypeError, ValueError, OverflowError):
        return ""
    if len(sizes) > _MOST_RANKS:
        return f"{len(sizes)} ranks, {size(min(sizes))} to {size(max(sizes))} each"
    return "\n".join(_rank_lines(sizes, counts))


def _rank_lines(sizes: Sequence[int], counts: Sequence[str]) -> Lines:
    pairs = zip(sizes, counts, strict=True)
    return [f"rank {i}: {size(nbytes)} of {arrays}" for i, (nbytes, arrays) in enumerate(pairs)]


def _tally(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({n})" for name, n in counts.items())
