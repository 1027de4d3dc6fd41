"""The tree of a checkpoint as HTML for a notebook: branches open by a click, keys are escaped, size is bounded."""

from collections.abc import Iterator
from html import escape

from functional_ckpt.plan.outline import Branch, folded
from functional_ckpt.plan.text import clean, short, size

__all__ = ["tree_html"]

#: Rows in all, and rows of one branch: what a browser lays out at once without being noticed.
_MOST_ROWS, _MOST_CHILDREN = 1000, 60
_STYLE = (
    "font-family:var(--jp-code-font-family,monospace);font-size:90%;line-height:1.5",
    "display:inline-block;min-width:7em;text-align:right;opacity:.65",
)


def tree_html(title: str, root: Branch) -> str:
    """Return HTML that shows a tree below a title.

    Examples
    --------
    >>> from functional_ckpt.plan.outline import Leaf, outline
    >>> page = tree_html("Checkpoint", outline([Leaf("<b>", "int8 [2]", 2, 2, 1, True, "int8")]))
    >>> "<b>" in page, "&lt;b&gt;" in page
    (False, True)
    """
    box, _ = _STYLE
    head = f"<div><strong>{_escaped(title)}</strong> &nbsp;{root.summary}</div>"
    return f'<div style="{box}">{head}{"".join(_rows(folded(root), 0, [_MOST_ROWS]))}</div>'


def _rows(branch: Branch, depth: int, left: list[int]) -> Iterator[str]:
    """Yield the rows of the children; `left` is how many may still be made, in the whole page."""
    shown = branch.children[: min(_MOST_CHILDREN, left[0])]
    left[0] -= len(shown)
    for child in shown:
        if child.children:
            is_open = " open" if depth == 0 and len(branch.children) <= 8 else ""
            inner = "".join(_rows(child, depth + 1, left))
            yield f"<details{is_open}><summary>{_row(child)}</summary><div style='margin-left:1.4em'>{inner}</div>"
            yield "</details>"
        else:
            yield f"<div style='margin-left:1em'>{_row(child)}</div>"
    rest = len(branch.children) - len(shown)
    if rest:
        yield f"<div style='margin-left:1em;opacity:.65'>and {rest:,} more</div>"


def _row(branch: Branch) -> str:
    _, number = _STYLE
    nbytes = f'<span style="{number}">{size(branch.nbytes)}</span>' if branch.nbytes else ""
    name = f'<span title="{escape(clean(branch.key))}">{_escaped(branch.name)}</span>'
    return f'{name} {nbytes} &nbsp;<span style="opacity:.65">{_escaped(branch.what)}</span>'


def _escaped(text: str) -> str:
    return escape(clean(short(text)))
