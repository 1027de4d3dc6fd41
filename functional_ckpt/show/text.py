"""Keys, sizes and stored values as text for people, none of which can steer a terminal."""

from typing import Any
from unicodedata import combining, east_asian_width

__all__ = ["cells", "clean", "count", "short", "shown", "size"]

_MOST_VALUE_CHARS = 72


def clean(text: str) -> str:
    r"""Return `text` without control characters: keys come from a file, and must not steer the terminal.

    Examples
    --------
    >>> clean("w\x1b[2J")
    'w\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def cells(text: str) -> int:
    """Return how many columns of a terminal a clean text takes.

    Examples
    --------
    >>> cells("w"), cells("\u91cd")
    (1, 2)
    """
    if text.isascii():
        return len(text)
    return sum(2 if east_asian_width(c) in "WF" else 0 if combining(c) else 1 for c in text)


def count(n: int, noun: str) -> str:
    """Return a number of things.

    Examples
    --------
    >>> count(1, "array"), count(2880, "array")
    ('1 array', '2,880 arrays')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def size(nbytes: float) -> str:
    """Return a number of bytes in a unit that suits it.

    Examples
    --------
    >>> size(12), size(3 * 2**30)
    ('12 B', '3.0 GiB')
    """
    if nbytes >= 2**80:  # a lie, and perhaps more than a float holds
        return f"2^{int(nbytes).bit_length() - 1} B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def short(text: str) -> str:
    """Return a text cut to one line of a table."""
    return text if len(text) <= _MOST_VALUE_CHARS else f"{text[: _MOST_VALUE_CHARS - 4]} ..."


def shown(coded: Any) -> str:
    """Return a stored value much as Python would print it, whatever it is: the manifest says only that it is JSON.

    Examples
    --------
    >>> shown({"~tuple": [0.9, {"~float": "inf"}]})
    '(0.9, inf)'
    """
    try:
        return _value(coded)
    except (TypeError, ValueError, RecursionError):
        return "(cannot be read)"


def _value(coded: Any) -> str:
    if isinstance(coded, list):
        return f"[{', '.join(map(_value, coded))}]"
    if not isinstance(coded, dict):
        return repr(coded)
    body: Any
    tag, body = next(iter(coded.items()), ("", []))
    if not tag.startswith("~"):
        return f"{{{', '.join(f'{k!r}: {_value(v)}' for k, v in coded.items())}}}"
    if tag == "~tuple":
        return f"({', '.join(map(_value, body))}{',' if len(body) == 1 else ''})"
    if tag in ("~dict", "~ordered", "~counter"):
        return f"{{{', '.join(f'{_value(k)}: {_value(v)}' for k, v in body)}}}"
    return str(body) if tag in ("~float", "~torch.dtype") else f"{tag[1:]}({_value(body)})"
