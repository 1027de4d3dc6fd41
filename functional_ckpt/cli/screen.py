"""Output to a terminal, whose width matters, or to a pipe, where one row is one line without colours or rules."""

import os
import shutil
import sys
from collections.abc import Iterable, Sequence

import attrs

from functional_ckpt.show.text import cells, clean

__all__ = ["Screen", "columns", "facts", "write"]

_BOLD, _DIM, _END = "\x1b[1m", "\x1b[2m", "\x1b[0m"
#: The least that is left of the first and of the last column on a narrow terminal.
_LEAST_COLUMNS = 20
#: The least that is left of a name in a tree, before the lines of the tree are given up.
_LEAST_NAME = 6


@attrs.frozen
class Screen:
    """What can be shown: `width` in columns, None for a pipe; `colours`; `lines`, characters that draw."""

    width: int | None = None
    colours: bool = False
    lines: bool = False

    @classmethod
    def current(cls) -> "Screen":
        """Return what standard output is; ``NO_COLOR`` turns colours off, and ``TERM=dumb`` drawing too."""
        if not sys.stdout.isatty():
            return cls()
        is_dumb = os.environ.get("TERM", "dumb") in ("", "dumb", "unknown")
        draws = not is_dumb and "utf" in (sys.stdout.encoding or "").lower()
        return cls(shutil.get_terminal_size().columns, not is_dumb and not os.environ.get("NO_COLOR"), draws)

    def bold(self, text: str) -> str:
        """Return a text in bold, if colours are on."""
        return f"{_BOLD}{text}{_END}" if self.colours else text

    def dim(self, text: str) -> str:
        """Return a dimmed text, if colours are on."""
        return f"{_DIM}{text}{_END}" if self.colours else text


def write(lines: Iterable[str]) -> None:
    """Write lines to standard output, whatever its encoding, without the blanks at their ends."""
    encoding = sys.stdout.encoding or "utf-8"
    text = "".join(f"{line.rstrip()}\n" for line in lines)
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))


def columns(screen: Screen, names: Sequence[str], sides: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table. On a terminal the first column has the room that the others leave, and is broken after dots.

    The last column is broken where it must be. `sides` has a ``<`` or a ``>`` for each column.

    Examples
    --------
    >>> columns(Screen(), ("key", "n"), "<>", [("w", "10"), ("long.key", "9")])
    ['key        n', 'w         10', 'long.key   9']
    >>> columns(Screen(24), ("key", "n"), "<>", [("a.key.that.is.longer.than.that", "9")])
    ['key                   n', 'a.key.that.is.longer.  9', '  than.that']
    """
    cleaned = [[clean(cell) for cell in row] for row in rows]
    widths = [max(map(cells, (names[i], *(row[i] for row in cleaned)))) for i in range(len(names))]
    if screen.width is not None:
        rest = sum(min(width, 40) + 2 for width in widths[1:])
        widths[0] = min(widths[0], max(_LEAST_COLUMNS, screen.width - rest))
        taken = sum(width + 2 for width in widths[:-1])
        widths[-1] = min(widths[-1], max(_LEAST_COLUMNS, screen.width - taken))
    head = screen.bold(_line(names, widths, sides).rstrip())
    return [head, *(line for row in cleaned for line in _lines(row, widths, sides))]


def _lines(row: Sequence[str], widths: Sequence[int], sides: str) -> list[str]:
    if all(cells(row[i]) <= widths[i] for i in (0, -1)):
        return [_line(row, widths, sides).rstrip()]
    first, last = _at_dots(row[0], widths[0]), _anywhere(row[-1], widths[-1])
    height = max(len(first), len(last))
    first = [*first, *[_guides(row[0])[1]] * (height - len(first))]
    last = [*last, *[""] * (height - len(last))]
    middle = [list(row[1:-1]), *([""] * (len(row) - 2) for _ in range(height - 1))]
    return [_line([a, *b, c], widths, sides).rstrip() for a, b, c in zip(first, middle, last, strict=True)]


def _line(row: Sequence[str], widths: Sequence[int], sides: str) -> str:
    padded = []
    for text, width, side in zip(row, widths, sides, strict=True):
        blanks = " " * (width - cells(text))
        padded.append(blanks + text if side == ">" else text + blanks)
    return "  ".join(padded)


def _guides(key: str) -> tuple[str, str]:
    """Return the lines of a tree before a name, and what continues them beside its second line."""
    guides = key[: len(key) - len(key.lstrip(" │├└─"))]
    return guides, guides.translate({ord("├"): "│", ord("└"): " ", ord("─"): " "})


def _at_dots(key: str, width: int) -> list[str]:
    guides, others = _guides(key)
    room = width - cells(guides)
    if room < _LEAST_NAME:
        guides, others, room = "", "", width
    lines = [""]
    for part in key[len(guides) :].replace(".", ".\0").split("\0"):
        if lines[-1].strip() and cells(lines[-1]) + cells(part) > room:
            lines.append("" if guides else "  ")
        lines[-1] += part
    pieces = [piece for line in lines for piece in _anywhere(line, room)]
    return [guides + pieces[0], *(others + piece for piece in pieces[1:])]


def _anywhere(text: str, width: int) -> list[str]:
    """Return a text in pieces of at most `width` columns, broken at a blank where there is one late enough."""
    lines: list[str] = []
    while cells(text) > width:
        end = len(text)
        while cells(text[:end]) > width:
            end = min(end - 1, max(1, width)) if end > width else end - 1
        blank = text.rfind(" ", 1, end + 1)
        end = blank if blank > end // 2 else max(end, 1)
        lines.append(text[:end])
        text = text[end:].removeprefix(" ")
    return [*lines, text]


def facts(screen: Screen, pairs: Sequence[tuple[str, str]]) -> list[str]:
    r"""Return names and their texts in two columns. A text may have several lines; empty ones are left out.

    Examples
    --------
    >>> facts(Screen(), [("shape", "[2]"), ("codecs", ""), ("values", "1\n2")])
    ['  shape   [2]', '  values  1', '          2']
    """
    filled = [(name, text) for name, text in pairs if text]
    width = max((len(name) for name, _ in filled), default=0)
    lines: list[str] = []
    for name, text in filled:
        label = name.ljust(width)
        for line in text.split("\n"):
            room = None if screen.width is None else max(_LEAST_COLUMNS, screen.width - width - 4)
            for piece in [clean(line)] if room is None else _anywhere(clean(line), room):
                lines.append(f"  {screen.dim(label)}  {piece}".rstrip())
                label = " " * width
    return lines
