"""Facts as text for people: aligned columns that fit the terminal, or one line per row into a pipe."""

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

__all__ = ["clean", "print_header", "print_leaf", "print_listing", "print_verification", "progress"]

Facts = dict[str, Any]

_PIPE_COLUMNS = 10_000  # into a pipe nothing is wrapped: one row, one line
_MOST_DIGESTS = 8
_MOST_VALUE_CHARS = 72
_MOST_RANKS = 8


def print_listing(found: Facts) -> int:
    """Print what ``ls`` says."""
    arrays, tied, values = found["arrays"], found["tied"], found["values"]
    if arrays:
        _print(_columns(
            ("key", "dtype", "shape", "chunks", "bytes", "ownership"), "<<<>><",
            [(a["key"], a["dtype"], str(a["shape"]), str(a["chunks"]), _size(a["nbytes"]), a["ownership"])
             for a in arrays],
        ), "")  # fmt: skip
    if tied:
        _print(_columns(("tied key", "is stored as"), "<<", [(t["key"], t["target"]) for t in tied]), "")
    if values:
        _print(_columns(("value", "holds"), "<<", [(v["key"], _short(_shown(v["value"]))) for v in values]), "")
    totals = found["totals"]
    line = f"{_count(len(arrays), 'array')} ({_size(totals['nbytes'])} in {_count(totals['chunks'], 'chunk')})"
    line += f", {_count(len(tied), 'tied key')}" if tied else ""
    _print(Text(f"{line}, {_count(len(values), 'value')}"))
    return 0


def print_header(found: Facts) -> int:
    """Print what ``show PATH`` says."""
    saved = found["provenance"] or {}
    version = ".".join(map(str, found["version"]))
    facts = [
        ("format", f"{found['format']} {version}, a Zarr v3 group"),
        ("arrays", f"{found['arrays']} in {_count(found['chunks'], 'chunk')}, {_size(found['nbytes'])}"),
        ("data types", _tally(found["dtypes"])),
        ("chunks", _tally(found["ownerships"])),
        ("codecs", _tally(found["codecs"]) or "none"),
        ("objects", ", ".join(found["objects"])),
        ("values", str(found["values"])),
        ("tied", "\n".join(f"{t['key']} = {t['target']}" for t in found["tied"])),
        ("per rank", "\n".join(f"{p['key']} ({_count(p['world_size'], 'rank')})" for p in found["per_rank"])),
        ("attributes", "\n".join(f"{k}: {json.dumps(v)}" for k, v in found["attributes"].items())),
        ("saved", _when(saved)),
        ("with", ", ".join(f"{k} {v}" for k, v in [("python", saved.get("python")), *_items(saved)] if v)),
        ("written by", _ranks(saved)),
    ]
    _print(Text(clean(found["path"]), style="bold"), _facts(facts))
    return 0


def print_leaf(found: Facts) -> int:
    """Print what ``show PATH KEY`` says."""
    if found["kind"] == "value":
        _print(Text(clean(found["key"]), style="bold"), Text(clean(_shown(found["value"]))))
        return 0
    summary = found["summary"]
    digests = list(found["digests"].items())
    shown = [f"{name}  {digest}" for name, digest in digests[:_MOST_DIGESTS]]
    if len(digests) > _MOST_DIGESTS:
        shown.append(f"and {len(digests) - _MOST_DIGESTS} more (--json prints all)")
    facts = [
        ("stored as", found["stored_as"] if found["stored_as"] != found["key"] else ""),
        ("tied", ", ".join(k for k in found["tied"] if k != found["key"])),
        ("dtype", _dtype(found)),
        ("shape", str(found["shape"])),
        ("bytes", _size(found["nbytes"]) + _ratio(found)),
        ("chunks", f"{found['chunks']} of {found['chunk']}, grid {found['grid']}, {found['ownership']}"),
        ("codecs", ", ".join(found["codecs"]) or "none"),
        ("directory", found["node"]),
        ("digests", "\n".join(shown)),
        ("object", f"bytes of an object ({found['object_codec']})" if found["object_codec"] else ""),
        ("values", _summary(summary) if summary else ""),
        ("corner", _corner(found["corner"] or [])),
    ]
    _print(Text(clean(found["key"]), style="bold"), _facts(facts))
    return 0


def print_verification(found: Facts) -> int:
    """Print what ``verify`` says."""
    read = f"{_count(found['chunks'], 'chunk')} of {_count(found['arrays'], 'array')}, {_size(found['nbytes'])}"
    if found["ok"]:
        _print(Text.assemble(("ok", "bold green"), f": {read}, every one as it was saved"))
        return 0
    rows = [(p["key"] or "", p["chunk"] or "", _what(p)) for p in found["problems"]]
    problems = _count(len(found["problems"]), "problem")
    _print(_columns(("key", "chunk", "problem"), "<<<", rows), "", Text.assemble((problems, "bold red"), f" in {read}"))
    return 1


@contextmanager
def progress(title: str, total_nbytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on the terminal's error stream while bytes are counted; nothing where that is no terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(clean(title), total=min(total_nbytes, 2**63))
        yield lambda nbytes: bar.advance(task, min(nbytes, 2**63))  # it cannot count what a hostile shape says


def _print(*items: Any) -> None:
    """Print without the blanks that tables put at the ends of lines."""
    console = _console()
    with console.capture() as captured:
        for item in items:
            console.print(item, soft_wrap=not console.is_terminal)
    lines = captured.get().splitlines()
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in lines))


def _console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        return console
    return Console(file=io.StringIO(), highlight=False, markup=False, emoji=False, width=_PIPE_COLUMNS)


def _columns(names: Sequence[str], sides: str, rows: Sequence[Sequence[str]]) -> Table:
    """Return a table whose first column takes the room the others leave, wrapped at dots; the last one may wrap."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    widths = [max(len(row[i]) for row in (names, *rows)) for i in range(len(names))]
    room = max(20, _console().width - sum(min(w, 40) + 2 for w in widths[1:]))
    for name, side in zip(names, sides, strict=True):
        last = name == names[-1]
        justify: Any = "left" if side == "<" else "right"
        table.add_column(name, justify=justify, no_wrap=not last, overflow="fold")
    for row in rows:
        table.add_row(Text(_wrapped(clean(row[0]), room)), *(Text(clean(cell)) for cell in row[1:]))
    return table


def clean(text: str) -> str:
    """Return `text` without control characters: keys come from a file, and must not steer the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _wrapped(key: str, width: int) -> str:
    """Break a key after dots, so that no line is wider than `width` where dots allow."""
    lines = [""]
    for part in key.replace(".", ".\n").split("\n"):
        if lines[-1].strip() and len(lines[-1]) + len(part) > width:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


def _facts(facts: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in facts:
        if text:
            table.add_row(Text(f"  {name}"), Text("\n".join(map(clean, text.split("\n")))))
    return table


def _shown(coded: Any) -> str:
    """Return a stored value as text, whatever it is: the manifest says only that it is JSON."""
    try:
        return _value(coded)
    except (TypeError, ValueError, RecursionError):
        return "(cannot be read)"


def _value(coded: Any) -> str:
    """Return a tagged value much as Python would print it."""
    if isinstance(coded, list):
        return f"[{', '.join(map(_value, coded))}]"
    if not isinstance(coded, dict):
        return repr(coded)
    body: Any
    tag, body = next(iter(coded.items()), ("", []))
    if not tag.startswith("~"):
        return f"{{{', '.join(f'{k!r}: {_value(v)}' for k, v in coded.items())}}}"
    if tag == "~tuple":
        return f"({', '.join(map(_value, body))}{',' if len(body) == 1 else ''})"
    if tag in ("~dict", "~ordered", "~counter"):
        return f"{{{', '.join(f'{_value(k)}: {_value(v)}' for k, v in body)}}}"
    return str(body) if tag in ("~float", "~torch.dtype") else f"{tag[1:]}({_value(body)})"


def _short(text: str) -> str:
    return text if len(text) <= _MOST_VALUE_CHARS else f"{text[: _MOST_VALUE_CHARS - 4]} ..."


def _summary(summary: Facts) -> str:
    finite = summary["finite"]
    if not finite and not summary["not_finite"]:
        return "none"
    parts = [f"{name} {_number(summary[name])}" for name in ("min", "max", "mean") if summary[name] is not None]
    if summary["not_finite"]:
        parts.append(f"{summary['not_finite']} not finite")
    return ", ".join(parts)


def _number(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:d}"
    return f"{complex(*value):.6g}" if isinstance(value, list) else f"{value:.6g}"


def _corner(rows: list[list[str]]) -> str:
    width = max((len(cell) for row in rows for cell in row), default=0)
    return "\n".join("  ".join(cell.rjust(width) for cell in row) for row in rows)


def _what(problem: Facts) -> str:
    facts = [f"{name} {problem[name]}" for name in ("expected", "found") if problem[name] is not None]
    return f"{problem['what']}: {', '.join(facts)}" if facts else problem["what"]


def _dtype(found: Facts) -> str:
    stored = found["stored_dtype"]
    return found["dtype"] if stored == found["dtype"] else f"{found['dtype']}, stored as {stored}"


def _ratio(found: Facts) -> str:
    stored, nbytes = found["stored_nbytes"], found["nbytes"]
    return f", {_size(stored)} stored" if stored != nbytes else ""


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
        counts = [_count(len(rank["arrays"]), "array") for rank in ranks or ()]
    except (KeyError, TypeError, ValueError, OverflowError):
        return ""
    if len(sizes) > _MOST_RANKS:
        return f"{len(sizes)} ranks, {_size(min(sizes))} to {_size(max(sizes))} each"
    lines = zip(sizes, counts, strict=True)
    return "\n".join(f"rank {i}: {_size(size)} of {count}" for i, (size, count) in enumerate(lines))


def _tally(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({n})" for name, n in counts.items())


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _size(nbytes: float) -> str:
    if nbytes >= 2**80:  # a lie, and perhaps more than a float holds
        return f"2^{int(nbytes).bit_length() - 1} B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise ValueError(nbytes)
