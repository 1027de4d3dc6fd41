"""`fingerprint`: a digest of a value, made from all of its fields, those that a class gets later included.

Values of one class are encoded together, field by field, since states have thousands of them.
"""

import marshal
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from itertools import chain
from operator import attrgetter
from typing import Any

import attrs
import numpy as np

from functional_ckpt.spec.sharding import Sharding

__all__ = ["fingerprint"]

_ATOMS = frozenset({str, int, bool, bytes, float, type(None)})


def fingerprint(*values: Any) -> bytes:
    """Return 16 bytes: the same for equal values in every process, different for different values.

    Values are numbers, text, bytes, None, numpy arrays, and tuples and attrs objects of these.

    Raises
    ------
    TypeError
        For a value of another type: this function does not know when two of them are equal.

    Examples
    --------
    >>> from functional_ckpt.spec.box import Box
    >>> fingerprint(Box((0,), (1,))) == fingerprint(Box((0,), (1,))), fingerprint(1) == fingerprint(True)
    (True, False)
    """
    seen: dict[Any, int] = {}
    told = _column(values, seen)
    once = tuple(_column(tuple([field(value) for field in _class(Sharding)[1]]), {}) for value in seen)
    # Version 2 of marshal encodes equal values equally, whether or not they are one object.
    return blake2b(marshal.dumps((told, once), 2), digest_size=16).digest()


def _column(values: tuple[Any, ...], seen: dict[Any, int]) -> tuple[Any, ...]:
    """Return `values` as atoms, or as a tag, counts and columns of fields; `seen` numbers what is written once."""
    kinds: set[Any] = set(map(type, values))
    if kinds <= _ATOMS:
        return values
    if len(kinds) > 1:
        return _mixed(values, seen)
    kind = kinds.pop()
    if kind is Sharding:  # thousands of leaves share a mesh of thousands of ranks: it is written once
        return "once", tuple([seen.setdefault(value, len(seen)) for value in values])
    if issubclass(kind, tuple):
        return "tuple", tuple(map(len, values)), _column(tuple(chain.from_iterable(values)), seen)
    if issubclass(kind, np.ndarray) and not any(value.dtype.hasobject for value in values):
        return "array", tuple([(value.dtype.str, value.shape, value.tobytes()) for value in values])
    for atom in (str, int, bytes, float):
        if issubclass(kind, atom):
            return tuple(map(atom, values))
    name, fields = _class(kind)
    return name, len(values), tuple([_column(tuple(map(field, values)), seen) for field in fields])


def _mixed(values: tuple[Any, ...], seen: dict[Any, int]) -> tuple[Any, ...]:
    groups: dict[type | None, list[Any]] = {}
    numbers: dict[type | None, int] = {}
    order = []
    for value in values:
        kind = None if type(value) in _ATOMS else type(value)
        groups.setdefault(kind, []).append(value)
        order.append(numbers.setdefault(kind, len(numbers)))
    return "mixed", tuple(order), tuple([_column(tuple(group), seen) for group in groups.values()])


@cache
def _class(kind: Any) -> tuple[str, tuple[Callable[[Any], Any], ...]]:
    """Return the name of an attrs class, and functions that return the values of its fields."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not attrs.has(kind):
        raise TypeError(f"a {name} has no fingerprint")
    return name, tuple([attrgetter(field.name) for field in attrs.fields(kind)])
