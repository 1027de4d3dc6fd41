"""Converters and validators of the fields of policies."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, TypeAlias

from functional_ckpt.errors import PolicyError

__all__ = [
    "as_int",
    "as_number",
    "as_tuple",
    "at_least",
    "flag",
    "instance_of",
    "is_function",
    "is_word",
    "one_of",
    "refuse",
    "seconds",
    "short_repr",
]

Validator: TypeAlias = Callable[[Any, Any, Any], None]

#: A refused value is cut to so many characters in a message.
_SHOWN = 80
#: Sums of sizes must fit into 64 bits, and timeouts into what the operating system accepts.
_LARGEST = 2**62
_LONGEST_S = 10**9


def short_repr(value: object) -> str:
    """Return the repr of a value, shortened for a message.

    Examples
    --------
    >>> short_repr("x" * 100)[-4:]
    'x...'
    """
    try:
        text = repr(value)
    except Exception as error:  # a caller's class can raise anything
        text = f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def refuse(owner: object, name: str, expected: str, value: object, remedy: str | None = None) -> PolicyError:
    """Return the error for a wrong `value` of `name`: a field of the policy `owner`, or an argument of a function."""
    what = f"{owner if isinstance(owner, str) else type(owner).__name__} does not accept this {name}"
    return PolicyError(what, expected=expected, found=short_repr(value), remedy=remedy)


def one_of(*words: str) -> Validator:
    """Return a validator that accepts these words only.

    Examples
    --------
    >>> one_of("a", "b")(None, None, "a")
    """

    def check(policy: Any, field: Any, value: Any) -> None:
        if not is_word(value, *words):
            raise refuse(policy, field.name, " or ".join(map(repr, words)), value)

    return check


def is_word(value: object, *words: str) -> bool:
    """Tell whether `value` is one of the words.

    Examples
    --------
    >>> is_word("a", "a", "b"), is_word(1, "a")
    (True, False)
    """
    return isinstance(value, str) and value in words


def instance_of(kind: type) -> Validator:
    """Return a validator that accepts objects of this class only.

    Examples
    --------
    >>> instance_of(int)(None, None, 3)
    """

    def check(policy: Any, field: Any, value: Any) -> None:
        if not isinstance(value, kind):
            raise refuse(policy, field.name, f"a {kind.__name__}", value)

    return check


def flag(policy: Any, field: Any, value: Any) -> None:
    """Check that `value` is a bool: a text such as ``"no"`` would count as true."""
    if not isinstance(value, bool):
        raise refuse(policy, field.name, "True or False", value)


def at_least(low: int) -> Validator:
    """Return a validator that accepts integers from `low` on.

    Examples
    --------
    >>> at_least(1)(None, None, 3)
    """

    def check(policy: Any, field: Any, value: Any) -> None:
        if type(value) is not int or not low <= value <= _LARGEST:
            raise refuse(policy, field.name, f"a whole number from {low} to 2**62", value)

    return check


def seconds(policy: Any, field: Any, value: Any) -> None:
    """Check that `value` is a timeout in seconds."""
    if type(value) is not float or not 0 < value <= _LONGEST_S:  # nan compares false
        raise refuse(policy, field.name, "seconds, above 0 and up to 1e9", value)


def as_int(value: Any) -> Any:
    """Return an integer of any type as an int, and anything else as it is.

    Examples
    --------
    >>> as_int(True), as_int("1")
    (True, '1')
    """
    return int(value) if not isinstance(value, bool) and isinstance(value, Integral) else value


def as_number(value: Any) -> Any:
    """Return a real number of any type as a float, and anything else as it is.

    Examples
    --------
    >>> as_number(3)
    3.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    try:
        return float(value)
    except OverflowError:
        return value


def as_tuple(value: Any) -> Any:
    """Return an iterable as a tuple; strings, mappings and anything else as they are.

    Examples
    --------
    >>> as_tuple(iter([1, 2])), as_tuple("ab")
    ((1, 2), 'ab')
    """
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return value
    try:
        return tuple(value)
    except TypeError:  # a zero-dimensional array
        return value


def is_function(value: object) -> bool:
    """Tell whether `value` is callable and hashable (policies are hashed).

    Examples
    --------
    >>> is_function(len), is_function("len")
    (True, False)
    """
    return callable(value) and isinstance(value, Hashable)
