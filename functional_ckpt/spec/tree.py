"""State trees: dicts and lists nest, everything else is a leaf.

A path names a leaf: text for a text key of a dict, an int for a position in a list, `DictKey` for a dict key
of another type (optimizer states are keyed by ints). Empty dicts and lists are leaves, so that nothing is lost.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import attrs

from functional_ckpt.errors import DuplicateKeyError, SpecError

__all__ = [
    "DictKey",
    "Path",
    "flatten",
    "has_prefix",
    "is_node",
    "key_of",
    "map_leaves",
    "place_of",
    "unflatten",
    "walk",
]


@attrs.frozen
class DictKey:
    """A dict key that is not text, such as the int of an optimizer's parameter number.

    Examples
    --------
    >>> key_of(("state", DictKey(0), "step"))
    'state.0.step'
    """

    # Of one type and one text: True, 1 and 1.0, or 0.0 and -0.0, are equal but have different storage keys.
    value: object = attrs.field(eq=lambda value: (type(value), str(value)))


Path: TypeAlias = tuple[str | int | DictKey, ...]


def is_node(value: object) -> bool:
    """Tell whether `value` nests: a non-empty dict, OrderedDict or list (subclasses of them are leaves).

    ``defaultdict`` counts as a dict: optimizers keep their state in one.

    Examples
    --------
    >>> is_node({"a": 1}), is_node((1, 2)), is_node([])
    (True, False, False)
    """
    if type(value) is list:
        return len(value) > 0
    if not isinstance(value, dict) or not value:
        return False
    return type(value) in (dict, OrderedDict) or hasattr(value, "default_factory")


def key_of(path: Path) -> str:
    """Return the storage key of a path: its components joined by dots.

    Examples
    --------
    >>> key_of(("layers", 0, "weight"))
    'layers.0.weight'
    """
    try:
        return ".".join(path)  # type: ignore[arg-type] # nearly all paths are text
    except TypeError:
        return ".".join(str(item.value) if isinstance(item, DictKey) else str(item) for item in path)


def place_of(path: Path) -> str:
    """Return a path as one writes it in Python, where a key that is an int differs from one that is text.

    Examples
    --------
    >>> print(place_of(("state", DictKey(0), "step")))
    state['state'][0]['step']
    """
    return "state" + "".join(f"[{item.value if isinstance(item, DictKey) else item!r}]" for item in path)


def has_prefix(key: str, prefix: str) -> bool:
    """Tell whether `key` is `prefix` or lies below it; prefixes end at dots, and every key lies below the empty one.

    Examples
    --------
    >>> has_prefix("model.w", "model"), has_prefix("model.w", "model."), has_prefix("models", "model")
    (True, True, False)
    """
    stem = prefix.rstrip(".")
    return not stem or key == stem or key.startswith(f"{stem}.")


def flatten(tree: object) -> tuple[tuple[Path, Any], ...]:
    """Return the leaves with their paths, in the order of the tree.

    Raises
    ------
    SpecError
        If a container contains itself.

    Examples
    --------
    >>> flatten({"a": [1, (2, 3)], "b": {}})
    ((('a', 0), 1), (('a', 1), (2, 3)), (('b',), {}))
    """
    return tuple(walk(tree))


def walk(tree: object, path: Path = (), open_ids: tuple[int, ...] = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what `flatten` returns, one leaf at a time; paths begin with `path`, below the containers `open_ids`.

    Examples
    --------
    >>> list(walk([3]))
    [((0,), 3)]
    """
    if not is_node(tree):
        yield path, tree
        return
    if id(tree) in open_ids:
        raise SpecError("a container contains itself", key_of(path))
    open_ids = (*open_ids, id(tree))
    for item, child in _children(tree):
        if is_node(child):
            yield from walk(child, (*path, item), open_ids)
        else:
            yield (*path, item), child


def _children(node: Any) -> Iterable[tuple[str | int | DictKey, Any]]:
    if isinstance(node, list):
        return enumerate(node)
    return ((_item(k), v) for k, v in node.items())


def _item(key: Any) -> str | DictKey:
    if type(key) is str:
        return key
    return str.__str__(key) if isinstance(key, str) else DictKey(key)  # an enum of text is its text


def unflatten(leaves: Iterable[tuple[Path, Any]]) -> Any:
    """Rebuild a tree of dicts and lists; the inverse of `flatten` up to the type of mapping.

    Raises
    ------
    DuplicateKeyError
        If one path is a leaf and a container, or a list and a dict, or occurs twice.
    SpecError
        If a list lacks a position.

    Examples
    --------
    >>> unflatten(((("a", 1), "y"), (("a", 0), "x")))
    {'a': ['x', 'y']}
    """
    root: dict[Any, Any] = {}
    for path, leaf in leaves:
        node = root
        for item in (None, *path[:-1]) if path else ():
            node = node.setdefault(item, {})
            if not isinstance(node, dict):
                raise DuplicateKeyError("a path is both a leaf and a container", key_of(path))
        last = path[-1] if path else None
        if last in node:
            twice = isinstance(node[last], _Leaf)
            raise DuplicateKeyError(
                "a path occurs twice" if twice else "a path is both a leaf and a container", key_of(path)
            )
        node[last] = _Leaf(leaf)
    return _built(root[None], ()) if root else {}


@attrs.frozen(eq=False)
class _Leaf:
    value: Any


def _built(node: Any, path: Path) -> Any:
    if isinstance(node, _Leaf):
        return node.value
    positions = [item for item in node if isinstance(item, int)]
    if not positions:
        return {
            item.value if isinstance(item, DictKey) else item: _built(child, (*path, item))
            for item, child in node.items()
        }
    if len(positions) != len(node):
        raise DuplicateKeyError("a container is both a list and a dict", key_of(path))
    if sorted(positions) != list(range(len(node))):
        raise SpecError(
            "a list lacks a position", key_of(path), expected=f"0 to {max(positions)}", found=sorted(positions)
        )
    return [_built(node[i], (*path, i)) for i in range(len(node))]


def map_leaves(function: Callable[[Path, Any], Any], tree: Any, path: Path = ()) -> Any:
    """Return a tree of the same containers with ``function(path, leaf)`` in place of each leaf.

    Examples
    --------
    >>> map_leaves(lambda path, leaf: leaf + 1, {"a": [1, 2]})
    {'a': [2, 3]}
    """
    if not is_node(tree):
        return function(path, tree)
    if isinstance(tree, list):
        return [map_leaves(function, child, (*path, i)) for i, child in enumerate(tree)]
    mapped = OrderedDict() if type(tree) is OrderedDict else {}
    for key, child in tree.items():
        below = (*path, _item(key))
        mapped[key] = map_leaves(function, child, below) if is_node(child) else function(below, child)
    return mapped
