"""Plain values as JSON, with tags for what JSON lacks; nothing is pickled.

JSON's own types stand for themselves. Everything else is an object with one key that starts with ``~``:
``{"~tuple": [...]}``, ``{"~float": "nan"}`` and so on. These are the types that real optimizer, scheduler and
scaler state dicts hold, and data types of the standard library and of numpy.
"""

import base64
import json
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from functional_ckpt.errors import CorruptionError, ObjectCodecError
from functional_ckpt.plan.record import canonical
from functional_ckpt.store.data_types import DATA_DECODERS, encode_data

__all__ = [
    "MAX_INLINE_NBYTES",
    "decode_text",
    "decode_value",
    "encode_value",
    "is_plain",
    "plain_text",
    "refuse_colliding",
]

#: Longest text of a value in the manifest; a longer one is stored as an array of bytes.
MAX_INLINE_NBYTES = 64 * 2**10

_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, struct.error, RuntimeError, ArithmeticError)
_MAX_COLLISIONS = 1000
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}


class _NotPlainError(Exception):
    """A type without an encoding."""


def is_plain(value: object) -> bool:
    """Tell whether `value` can be written as tagged JSON.

    Examples
    --------
    >>> is_plain((1, 2.5, None)), is_plain(object())
    (True, False)
    """
    return plain_text(value) is not None


def plain_text(value: object) -> str | None:
    """Return the canonical JSON of a plain value, None for any other.

    Examples
    --------
    >>> plain_text({"b": 1, "a": (2,)}), plain_text(object())
    ('{"a":{"~tuple":[2]},"b":1}', None)
    """
    try:
        return canonical(encode_value(value))
    except _NotPlainError:
        return None


def encode_value(value: Any) -> Any:
    """Return `value` as JSON values.

    Examples
    --------
    >>> encode_value({"betas": (0.9, float("inf")), 0: b"x"})
    {'~dict': [['betas', {'~tuple': [0.9, {'~float': 'inf'}]}], [0, {'~bytes': 'eA=='}]]}
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    encode = _ENCODERS.get(kind) or _torch_encoder(kind)
    if encode is not None:
        return encode(value)
    coded = encode_data(value)
    if coded is None:
        raise _NotPlainError(kind.__name__)
    return coded


def decode_value(coded: Any) -> Any:
    """Return the value that `encode_value` wrote.

    Raises
    ------
    CorruptionError
        If the text is not a value of the format.
    ObjectCodecError
        If it needs torch and torch is not installed.

    Examples
    --------
    >>> decode_value({"~tuple": [1, {"~float": "-inf"}]})
    (1, -inf)
    """
    if isinstance(coded, list):
        return [decode_value(item) for item in coded]
    if not isinstance(coded, dict):
        return coded
    if len(coded) == 1:
        tag, body = next(iter(coded.items()))
        if tag in _DECODERS:
            try:
                return _DECODERS[tag](body)
            except _UNREADABLE as error:
                raise CorruptionError("a stored value cannot be read", found=f"{tag}: {error}") from None
    if any(key.startswith("~") for key in coded):
        raise CorruptionError("a stored value has an unknown tag", found=sorted(coded))
    return {key: decode_value(item) for key, item in coded.items()}


def decode_text(key: str, text: str) -> Any:
    """Return the value whose canonical JSON a manifest holds under `key`.

    Examples
    --------
    >>> decode_text("betas", '{"~tuple":[0.9,0.95]}')
    (0.9, 0.95)
    """
    try:
        return decode_value(json.loads(text))
    except (ObjectCodecError, CorruptionError) as error:
        raise type(error)(error.what, key, found=error.found, remedy=error.remedy) from None
    except RecursionError:
        raise CorruptionError("a stored value is nested too deeply", key) from None


def _encode_float(value: float) -> Any:
    if math.isfinite(value):
        return value
    if math.isinf(value):
        return {"~float": "inf" if value > 0 else "-inf"}
    bits = struct.pack(">d", value)
    return {"~float": "nan" if bits == struct.pack(">d", math.nan) else bits.hex()}


def _decode_float(text: str) -> float:
    return _FLOATS[text] if text in _FLOATS else float(struct.unpack(">d", bytes.fromhex(text))[0])


def _encode_dict(value: dict[Any, Any]) -> Any:
    if all(type(key) is str and not key.startswith("~") for key in value):
        return {key: encode_value(item) for key, item in value.items()}
    return {"~dict": _pairs(value)}


def _decode_deque(body: list[Any]) -> deque[Any]:
    items, length = body
    return deque(_decoded(items), length)


def _encode_defaultdict(value: defaultdict[Any, Any]) -> Any:
    factory = value.default_factory
    name = None if factory is None else next((name for name, kind in _FACTORIES.items() if kind is factory), None)
    if (factory is None) != (name is None):
        raise _NotPlainError("defaultdict")
    return {"~defaultdict": [name, _pairs(value)]}


def _decode_defaultdict(body: list[Any]) -> defaultdict[Any, Any]:
    name, pairs = body
    return defaultdict(None if name is None else _FACTORIES[name], _from_pairs(pairs))


def _pairs(value: dict[Any, Any]) -> list[Any]:
    return [[encode_value(key), encode_value(item)] for key, item in value.items()]


def _from_pairs(pairs: list[Any]) -> dict[Any, Any]:
    keys = _spread(decode_value(key) for key, _ in pairs)
    return dict(zip(keys, (decode_value(item) for _, item in pairs), strict=True))


def _decoded(body: list[Any]) -> list[Any]:
    return [decode_value(item) for item in body]


def _spread(items: Iterable[Any]) -> list[Any]:
    """Return the items of a set or the keys of a dict."""
    found = list(items)
    refuse_colliding(found)
    return found


def refuse_colliding(items: Iterable[Hashable]) -> None:
    """Raise ValueError if so many items have one hash that building a set of them would take quadratic time.

    Real states have no such values, but a file made to attack a reader can: ints that differ by multiples of 2**61 - 1.

    Examples
    --------
    >>> refuse_colliding([1, 2, 2**61])
    """
    first: dict[int, Hashable] = {}
    others: Counter[int] = Counter()
    for item in items:
        found = hash(item)
        if first.setdefault(found, item) != item:
            others[found] += 1
            if others[found] > _MAX_COLLISIONS:
                raise ValueError(f"more than {_MAX_COLLISIONS} keys or items have one hash")


def _items(value: Any) -> list[Any]:
    return [encode_value(item) for item in value]


def _encode_set(value: Any) -> list[Any]:
    return sorted(_items(value), key=repr)


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    int: lambda value: value if -(2**63) <= value < 2**63 else {"~int": hex(value)},
    float: _encode_float,
    list: _items,
    dict: _encode_dict,
    tuple: lambda value: {"~tuple": _items(value)},
    bytes: lambda value: {"~bytes": base64.b64encode(value).decode()},
    complex: lambda value: {"~complex": [_encode_float(value.real), _encode_float(value.imag)]},
    set: lambda value: {"~set": _encode_set(value)},
    frozenset: lambda value: {"~frozenset": _encode_set(value)},
    range: lambda value: {"~range": _items((value.start, value.stop, value.step))},
    slice: lambda value: {"~slice": _items((value.start, value.stop, value.step))},
    deque: lambda value: {"~deque": [_items(value), value.maxlen]},
    defaultdict: _encode_defaultdict,
    Counter: lambda value: {"~counter": _pairs(value)},
    OrderedDict: lambda value: {"~ordered": _pairs(value)},
}

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "~int": lambda body: int(body, 16),
    "~float": _decode_float,
    "~dict": _from_pairs,
    "~tuple": lambda body: tuple(_decoded(body)),
    "~bytes": lambda body: base64.b64decode(body, validate=True),
    "~complex": lambda body: complex(*map(decode_value, body)),
    "~set": lambda body: set(_spread(_decoded(body))),
    "~frozenset": lambda body: frozenset(_spread(_decoded(body))),
    "~range": lambda body: range(*_decoded(body)),
    "~slice": lambda body: slice(*_decoded(body)),
    "~deque": _decode_deque,
    "~counter": lambda body: Counter(_from_pairs(body)),
    "~ordered": lambda body: OrderedDict(_from_pairs(body)),
    "~defaultdict": _decode_defaultdict,
    "~torch.Size": lambda body: _torch().Size(body),
    "~torch.dtype": lambda body: _torch_dtype(body),
    "~torch.device": lambda body: _torch().device(body),
    **DATA_DECODERS,
}


def _torch_encoder(kind: type) -> Callable[[Any], Any] | None:
    torch = sys.modules.get("torch")  # a torch value exists only where torch has been imported
    if torch is None:
        return None
    encoders: dict[type, Callable[[Any], Any]] = {
        torch.Size: lambda value: {"~torch.Size": list(value)},
        torch.dtype: lambda value: {"~torch.dtype": str(value).removeprefix("torch.")},
        torch.device: lambda value: {"~torch.device": str(value)},
    }
    return encoders.get(kind)


def _torch() -> Any:
    import importlib

    try:
        return importlib.import_module("torch")
    except ImportError:
        raise ObjectCodecError("a stored value needs torch", remedy="pip install torch") from None


def _torch_dtype(name: str) -> Any:
    torch = _torch()
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is not a data type")
    return dtype
