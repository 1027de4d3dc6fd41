"""Boxes, labels and colours of ranks as SVG: for the figures of the documentation, and for `map`.

A figure brings its own background: code hosts and sites show it as an image, by day and by night.
"""

from collections.abc import Sequence
from html import escape

from functional_ckpt.show.text import clean
from functional_ckpt.spec.box import Box

__all__ = ["COLOURS", "LINE", "colour", "label", "rectangle", "svg"]

COLOURS = ("#5c6bc0", "#26a69a", "#ffa726", "#ec407a")
LINE = 'fill="none" stroke="currentColor" stroke-opacity="0.55"'

Scale = float | tuple[float, float]
#: Degrees between the hues of one rank and the next: the golden angle, so that neighbours differ.
_TURN = 137.508


def colour(rank: int) -> str:
    """Return the colour of a rank; those of the first four are the ones of the documentation.

    Examples
    --------
    >>> colour(0), colour(5)
    ('#5c6bc0', 'hsl(328 55% 58%)')
    """
    return COLOURS[rank] if rank < len(COLOURS) else f"hsl({rank * _TURN % 360:.0f} 55% 58%)"


def rectangle(box: Box, at: tuple[float, float], scale: Scale, style: str, tip: str = "") -> str:
    """Draw a two-dimensional box; rows go down, columns to the right. `scale` may differ for the two.

    A browser shows the `tip` where the pointer rests.
    """
    down, right = scale if isinstance(scale, tuple) else (scale, scale)
    (top, left), (rows, columns) = box.start, box.shape
    x, y = at[0] + left * right, at[1] + top * down
    drawn = f'<rect x="{x:g}" y="{y:g}" width="{columns * right:g}" height="{rows * down:g}" {style}'
    return f"{drawn}><title>{_text(tip)}</title></rect>" if tip else f"{drawn}/>"


def label(text: str, x: float, y: float, small: bool = False, anchor: str = "middle") -> str:
    """Write a line of text, centred at `x` unless `anchor` says otherwise."""
    kind = ' font-size="10" fill-opacity="0.75"' if small else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{_text(text)}</text>'


def svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """Return a whole figure on a card of its own."""
    margin = 16
    wide, high = width + 2 * margin, height + 2 * margin
    box = f'x="{-margin}" y="{-margin}" width="{wide:g}" height="{high:g}"'
    size = f'viewBox="{-margin} {-margin} {wide:g} {high:g}" width="{wide:g}" height="{high:g}"'
    look = 'color="#1f2328" fill="currentColor" font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {look} role="img">'
    card = f'<rect {box} rx="8" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{_text(title)}</title>", card, *parts, "</svg>"]) + "\n"


def _text(text: str) -> str:
    return escape(clean(text))
