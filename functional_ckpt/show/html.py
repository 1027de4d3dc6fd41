"""The tree of a checkpoint as HTML for a notebook: branches open by a click, keys are escaped, size is bounded."""

from collections.abc import Iterator
from html import escape

from functional_ckpt.show.outline import Branch, folded
from functional_ckpt.show.text import clean, short, size

__all__ = ["tree_html"]

#: Rows in all, and rows of one branch: what a browser lays out at once without being noticed.
_MOST_ROWS, _MOST_CHILDREN = 1000, 60
_BOX = "font-family:var(--jp-code-font-family,monospace);font-size:90%;line-height:1.5;max-width:72em"
# The marker of a branch that can be opened takes 1.2em, beside which the columns of all rows end at one place.
_ROW = "display:inline-flex;width:{};gap:1em;vertical-align:top"
_NAME = "flex:1;overflow-wrap:anywhere"
_SIZE = "width:7em;text-align:right;opacity:.65"
_WHAT = "width:24em;opacity:.65;overflow-wrap:anywhere"


def tree_html(title: str, root: Branch) -> str:
    """Return HTML that shows a tree below a title.

    Examples
    --------
    >>> from functional_ckpt.show.outline import Leaf, outline
    >>> page = tree_html("Checkpoint", outline([Leaf("<b>", "int8 [2]", 2, 2, 1, True, "int8")]))
    >>> "<b>" in page, "&lt;b&gt;" in page
    (False, True)
    """
    head = f"<div><strong>{_escaped(title)}</strong> &nbsp;{root.summary}</div>"
    return f'<div style="{_BOX}">{head}{"".join(_rows(folded(root), 0, [_MOST_ROWS]))}</div>'


def _rows(branch: Branch, depth: int, left: list[int]) -> Iterator[str]:
    """Yield the rows of the children; `left` is how many may still be made, in the whole page."""
    shown = branch.children[: min(_MOST_CHILDREN, left[0])]
    left[0] -= len(shown)
    for child in shown:
        if child.children:
            is_open = " open" if depth == 0 and len(branch.children) <= 8 else ""
            inner = "".join(_rows(child, depth + 1, left))
            yield f"<details{is_open}><summary>{_row(child, 'calc(100% - 1.2em)')}</summary>"
            yield f'<div style="margin-left:1.2em">{inner}</div></details>'
        else:
            yield f'<div style="margin-left:1.2em">{_row(child, "100%")}</div>'
    rest = len(branch.children) - len(shown)
    if rest:
        yield f'<div style="margin-left:1.2em;opacity:.65">and {rest:,} more</div>'


def _row(branch: Branch, width: str) -> str:
    name = f'<span style="{_NAME}" title="{escape(clean(branch.key))}">{_escaped(branch.name)}</span>'
    nbytes = f'<span style="{_SIZE}">{size(branch.nbytes) if branch.nbytes else ""}</span>'
    return (
        f'<span style="{_ROW.format(width)}">{name}{nbytes}<span style="{_WHAT}">{_escaped(branch.what)}</span></span>'
    )


def _escaped(text: str) -> str:
    return escape(clean(short(text)))
