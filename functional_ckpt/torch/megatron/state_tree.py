"""State dicts as Megatron nests them: dicts and lists, subclasses too; everything else, tuples included, is a leaf.

`functional_ckpt.spec.tree` is stricter: there a subclass of a container is a leaf. Here the containers are the caller's
own, and are changed in place.
"""

from collections.abc import Callable, Iterator
from typing import Any

from functional_ckpt.errors import DuplicateKeyError, SpecError

__all__ = ["NOTHING", "assign_in_place", "joined", "leaves_of", "map_leaves", "picked", "with_lists"]

#: The result of `picked` if no leaf is wanted.
NOTHING: Any = object()


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


def leaves_of(tree: Any) -> Iterator[Any]:
    """Yield the leaves, in the order of the tree.

    Examples
    --------
    >>> list(leaves_of({"a": [1, (2, 3)], "b": {}}))
    [1, (2, 3)]
    """
    if not isinstance(tree, dict | list):
        yield tree
        return
    for child in tree.values() if isinstance(tree, dict) else tree:
        yield from leaves_of(child)


def picked(wanted: Callable[[Any], bool], tree: Any, empty: bool = False) -> Any:
    """Return the part of a tree whose leaves are wanted, or `NOTHING`; with `empty` also empty containers.

    If only a part of a list is wanted, the result has a dict from position to element, so that `joined` can rebuild it.

    Examples
    --------
    >>> picked(lambda leaf: leaf > 1, {"a": [1, 2], "b": [3, 4], "c": 0})
    {'a': {1: 2}, 'b': [3, 4]}
    """
    if not isinstance(tree, dict | list):
        return tree if wanted(tree) else NOTHING
    if not tree:
        return ({} if isinstance(tree, dict) else []) if empty else NOTHING
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    parts = {place: part for place, child in items if (part := picked(wanted, child, empty)) is not NOTHING}
    if not parts:
        return NOTHING
    return list(parts.values()) if isinstance(tree, list) and len(parts) == len(tree) else parts


def joined(one: Any, other: Any, path: tuple[Any, ...] = ()) -> Any:
    """Return two parts of a tree as one; the inverse of `picked`.

    Raises
    ------
    CheckpointingException
        If both have a leaf at one place, or the parts of a list leave a hole; a ``ValueError`` too.

    Examples
    --------
    >>> joined({"a": {1: 2}, "b": 0}, {"a": {0: 1}, "c": [3]})
    {'a': {1: 2, 0: 1}, 'b': 0, 'c': [3]}
    >>> joined({"a": {1: 2}}, {"a": [1, {}]})
    Traceback (most recent call last):
    ...
    functional_ckpt.errors.DuplicateKeyError: two parts of a state dict hold the same place: key 'a.1'
    """
    if isinstance(one, dict | list) and isinstance(other, dict | list) and not (one and other):
        return one or other  # a container that is empty on the rank that saved it may have elements on others
    if isinstance(one, dict) and isinstance(other, dict):
        both = {place: joined(one[place], other[place], (*path, place)) for place in one if place in other}
        return {**one, **other, **both}
    if isinstance(one, list) and isinstance(other, list) and len(one) != len(other):
        raise SpecError("two parts of a list differ in length", _text(path), expected=len(one), found=len(other))
    if isinstance(one, dict | list) and isinstance(other, dict | list):
        parts = [part if isinstance(part, dict) else dict(enumerate(part)) for part in (one, other)]
        whole = joined(parts[0], parts[1], path)
        if sorted(whole, key=str) != sorted(range(len(whole)), key=str):
            raise SpecError("parts of a list leave a hole", _text(path), found=sorted(map(str, whole)))
        return [whole[i] for i in range(len(whole))]
    raise DuplicateKeyError("two parts of a state dict hold the same place", _text(path))


def with_lists(tree: Any, like: Any, holes: bool = False, path: tuple[Any, ...] = ()) -> Any:
    """Return a tree with lists for dicts of positions, where `like` has a list; with `holes` incomplete ones stay.

    A dict with other keys stays, whatever `like` has in its place.

    Raises
    ------
    CheckpointingException
        If positions are missing; a ``ValueError`` too.

    Examples
    --------
    >>> with_lists({"a": {1: 2, 0: 1}}, {"a": [None]})
    {'a': [1, 2]}
    """
    if not isinstance(tree, dict | list) or not isinstance(like, dict | list):
        return tree
    places = dict(enumerate(like)) if isinstance(like, list) else like
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found = {place: with_lists(child, places.get(place), holes, (*path, place)) for place, child in items}
    if isinstance(tree, list):
        return list(found.values())
    if not isinstance(like, list) or not all(type(place) is int for place in found):
        return found
    if {*found} == {*range(len(found))}:
        return [found[i] for i in range(len(found))]
    if not holes:
        raise SpecError("parts of a list leave a hole", _text(path), expected=len(like), found=sorted(map(str, found)))
    return found


def assign_in_place(target: Any, source: Any) -> None:
    """Give the dict or list `target` the content of `source`; containers that both have are kept and changed in place.

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
        old = target[place] if isinstance(target, list) else target.get(place, NOTHING)
        if old is value:
            continue
        if _same_kind(old, value):
            assign_in_place(old, value)
        else:
            target[place] = value


def _same_kind(one: Any, other: Any) -> bool:
    return any(isinstance(one, kind) and isinstance(other, kind) for kind in (dict, list))


def _text(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
