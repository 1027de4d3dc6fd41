"""State dicts as Megatron nests them: dicts and lists, subclasses too; everything else, tuples included, is a leaf.

`functional_ckpt.spec.tree` is stricter: it refuses what a checkpoint could not give back. Here the containers are the
caller's own, and are changed in place.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["assign_in_place", "map_leaves"]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return plain dicts and lists of the shape of `tree` with ``function(leaf)`` in place of each leaf.

    Examples
    --------
    >>> map_leaves(lambda leaf: leaf + 1, {"a": [1, 2], 0: {}})
    {'a': [2, 3], 0: {}}
    """
    if isinstance(tree, dict):
        return {key: map_leaves(function, child) for key, child in tree.items()}
    if isinstance(tree, list):
        return [map_leaves(function, child) for child in tree]
    return function(tree)


def assign_in_place(target: Any, source: Any) -> None:
    """Make the dict or list `target` hold what `source` holds, keeping its own containers where both have one.

    Examples
    --------
    >>> state = {"a": [1, 2], "b": 3, "c": 4}
    >>> inner = state["a"]
    >>> assign_in_place(state, {"a": [1, 5, 6], "b": [7]})
    >>> state, state["a"] is inner
    ({'a': [1, 5, 6], 'b': [7]}, True)
    """
    if isinstance(target, dict):
        for key in [key for key in target if key not in source]:
            del target[key]
        places = source.items()
    else:
        del target[len(source) :]
        target.extend(source[len(target) :])
        places = enumerate(source)
    for place, value in places:
        old = target[place] if isinstance(target, list) else target.get(place, _NOTHING)
        if old is value:
            continue
        if _same_kind(old, value):
            assign_in_place(old, value)
        else:
            target[place] = value


def _same_kind(one: Any, other: Any) -> bool:
    return any(isinstance(one, kind) and isinstance(other, kind) for kind in (dict, list))


_NOTHING = object()
