"""The content of a checkpoint as a tree: keys split at dots, sums per branch, equal branches folded into one."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import attrs

from functional_ckpt.show.text import count, short, shown, size
from functional_ckpt.spec.tree import has_prefix

__all__ = ["Branch", "Leaf", "depth_for", "folded", "is_selected", "natural", "outline", "outline_of"]

#: Deeper levels are shown as one name: real states do not nest so deep, but a crafted file may.
_DEEPEST = 60
_NUMBER = re.compile(r"([0-9]+)")


@attrs.frozen
class Leaf:
    """One key: `what` describes its stored value. An object, a plain value and a tied key have no parameters."""

    key: str
    what: str
    parameters: int = 0
    nbytes: int = 0
    chunks: int = 0
    is_array: bool = False
    dtype: str | None = None


@attrs.frozen
class Branch:
    """All keys with one prefix: `name` is its last component, `key` the whole prefix; the numbers are sums over them.

    `leaf` is the value stored under the prefix itself. `times` branches were folded into this one, and
    `kind` is the same number for all branches of one tree that differ only in their own names.
    """

    name: str
    key: str
    leaf: Leaf | None
    children: tuple["Branch", ...]
    arrays: int
    parameters: int
    nbytes: int
    chunks: int
    values: int
    dtypes: tuple[str, ...]
    kind: int
    times: int = 1

    @property
    def summary(self) -> str:
        """A text with the numbers of arrays, parameters, bytes, chunks and values."""
        stored = f"{size(self.nbytes)} in {count(self.chunks, 'chunk')}"
        facts = [count(self.arrays, "array"), count(self.parameters, "parameter"), stored]
        return ", ".join([*facts, count(self.values, "value")] if self.values else facts)

    @property
    def what(self) -> str:
        """A text that describes the content."""
        if self.leaf is not None and not self.children:
            return f"{self.times} x {self.leaf.what}" if self.times > 1 else self.leaf.what
        arrays = f"{count(self.arrays, 'array')}: {', '.join(self.dtypes)}" if self.dtypes else ""
        if self.arrays and not self.dtypes:
            arrays = count(self.arrays, "object")
        return ", ".join(part for part in (arrays, count(self.values, "value") if self.values else "") if part)

    def rows(self, depth: int | None = None) -> Iterator[tuple[tuple[bool, ...], "Branch"]]:
        """Yield all branches below, parents first, each with whether it and each of its parents is a last child.

        Examples
        --------
        >>> tree = outline([Leaf("a.b", ""), Leaf("a.c", ""), Leaf("d", "")])
        >>> [(branch.name, lasts) for lasts, branch in tree.rows()]
        [('a', (False,)), ('b', (False, False)), ('c', (False, True)), ('d', (True,))]
        """
        yield from self._rows((), depth)

    def _rows(self, lasts: tuple[bool, ...], depth: int | None) -> Iterator[tuple[tuple[bool, ...], "Branch"]]:
        if depth is not None and len(lasts) >= depth:
            return
        for child in self.children:
            mine = (*lasts, child is self.children[-1])
            yield mine, child
            yield from child._rows(mine, depth)


class _Node:
    """A branch while its keys are collected."""

    __slots__ = ("below", "leaf")

    def __init__(self) -> None:
        self.leaf: Leaf | None = None
        self.below: dict[str, _Node] = {}


def outline_of(manifest: Any, prefixes: Sequence[str] = ()) -> Branch:
    """Return the tree of a `Manifest`; with `prefixes`, of what is under one of them."""
    return outline(_leaves(manifest, prefixes))


def is_selected(key: str, prefixes: Sequence[str]) -> bool:
    """Tell whether `key` has one of `prefixes`; all keys do if there are none.

    Examples
    --------
    >>> is_selected("model.w", ["optim", "model"]), is_selected("model.w", []), is_selected("model.w", ["mod"])
    (True, True, False)
    """
    return not prefixes or any(has_prefix(key, prefix) for prefix in prefixes)


def _leaves(manifest: Any, prefixes: Sequence[str]) -> Iterator[Leaf]:
    for entry in manifest.arrays:
        spec = entry.spec
        if not is_selected(spec.key, prefixes):
            continue
        if entry.codec is not None:
            yield Leaf(spec.key, f"object ({entry.codec})", 0, spec.nbytes, entry.grid.size, True)
        else:
            what = f"{spec.dtype} {list(spec.shape)}"
            yield Leaf(spec.key, what, prod(spec.shape), spec.nbytes, entry.grid.size, True, spec.dtype)
    for value in manifest.values:
        if is_selected(value.key, prefixes):
            yield Leaf(value.key, short(shown(json.loads(value.text))))
    for alias in manifest.aliases:
        if is_selected(alias.key, prefixes):
            yield Leaf(alias.key, f"= {alias.target}")


def outline(leaves: Iterable[Leaf]) -> Branch:
    """Return the tree of `leaves`, natural numbers in their order; a branch with one branch in it is joined with it.

    Examples
    --------
    >>> tree = outline([Leaf("m.w", "", 6, 24), Leaf("m.b", "", 2, 8), Leaf("opt.adam.lr", "0.1")])
    >>> tree.nbytes, [(branch.name, branch.parameters) for branch in tree.children]
    (32, [('m', 8), ('opt.adam.lr', 0)])
    """
    root = _Node()
    for leaf in leaves:
        node = root
        for part in leaf.key.split(".", _DEEPEST):
            node = node.below.setdefault(part, _Node())
        node.leaf = leaf
    return _branch("", None, root, {})


def _branch(name: str, key: str | None, node: _Node, kinds: dict[object, int]) -> Branch:
    while key is not None and node.leaf is None and len(node.below) == 1:
        part, node = next(iter(node.below.items()))
        name, key = f"{name}.{part}", f"{key}.{part}"
    start = "" if key is None else f"{key}."
    parts = sorted(node.below.items(), key=lambda item: natural(item[0]))
    children = tuple(_branch(part, start + part, below, kinds) for part, below in parts)
    leaf = node.leaf
    own = leaf or Leaf("", "")
    alike = (leaf and (leaf.what, leaf.nbytes, leaf.chunks), tuple((c.name, c.kind) for c in children))
    return Branch(
        name,
        key or "",
        leaf,
        children,
        sum(c.arrays for c in children) + own.is_array,
        sum(c.parameters for c in children) + own.parameters,
        sum(c.nbytes for c in children) + own.nbytes,
        sum(c.chunks for c in children) + own.chunks,
        sum(c.values for c in children) + (leaf is not None and not own.is_array),
        tuple(sorted({d for c in children for d in c.dtypes} | ({own.dtype} if own.dtype else set()))),
        kinds.setdefault(alike, len(kinds)),
    )


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders ``2`` before ``10``, for numbers of any length.

    Examples
    --------
    >>> sorted(["step-10", "step-9"], key=natural)
    ['step-9', 'step-10']
    """
    parts = _NUMBER.split(name)
    return [(len(part.lstrip("0")) if i % 2 else 0, part) for i, part in enumerate(parts)]


def folded(branch: Branch) -> Branch:
    """Return the tree with equal numbered branches, such as the layers of a model, folded into one; sums cover all.

    Examples
    --------
    >>> tree = folded(outline([Leaf(f"layers.{i}.w", "int8 [2]", 2, 2) for i in range(12)]))
    >>> [(row.name, row.parameters, row.what) for _, row in tree.rows()]
    [('layers.{0..11}.w', 24, '12 x int8 [2]')]
    """
    groups: dict[object, list[Branch]] = {}
    for child in branch.children:
        first, dot, rest = child.name.partition(".")
        numbered = first.isascii() and first.isdigit()
        groups.setdefault((child.kind, rest, dot) if numbered else child.name, []).append(child)
    children = tuple(_folded(group) for group in groups.values())
    if len(children) == 1 and branch.leaf is None and branch.name:
        only = children[0]
        return attrs.evolve(only, name=f"{branch.name}.{only.name}")
    return attrs.evolve(branch, children=children)


def _folded(group: Sequence[Branch]) -> Branch:
    if len(group) == 1:
        return folded(group[0])
    first = _times(group[0], len(group))
    numbers, rest = [b.name.partition(".")[0] for b in group], group[0].name.partition(".")[1:]
    return folded(attrs.evolve(first, name=f"{{{_range(numbers)}}}{''.join(rest)}"))


def _times(branch: Branch, n: int) -> Branch:
    """Return a branch that stands for `n` equal ones."""
    return attrs.evolve(
        branch,
        children=tuple(_times(child, n) for child in branch.children),
        arrays=branch.arrays * n,
        parameters=branch.parameters * n,
        nbytes=branch.nbytes * n,
        chunks=branch.chunks * n,
        values=branch.values * n,
        times=branch.times * n,
    )


def _range(numbers: Sequence[str]) -> str:
    first, second, last = numbers[0], numbers[1], numbers[-1]
    is_row = list(numbers) == [str(n) for n in range(int(first[:9]), int(first[:9]) + len(numbers))]
    if is_row:
        return f"{first}..{last}"
    return f"{first},{second}" if len(numbers) == 2 else f"{first},{second},..,{last}"


def depth_for(branch: Branch, rows: int) -> int:
    """Return the greatest depth at which the tree has at most `rows` rows, at least 1.

    Examples
    --------
    >>> depth_for(outline([Leaf("a.b", ""), Leaf("a.c", ""), Leaf("d", "")]), 3)
    1
    """
    depths: dict[int, int] = {}
    for lasts, _ in branch.rows():
        depths[len(lasts)] = depths.get(len(lasts), 0) + 1
    total = 0
    for depth in sorted(depths):
        total += depths[depth]
        if total > rows:
            return max(1, depth - 1)
    return max(depths, default=1)
