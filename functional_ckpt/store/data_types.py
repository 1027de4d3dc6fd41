"""Values of the standard library and of numpy as JSON: types that hold only data, no code.

Each is an object with one key, its tag. Decoding creates only these types, in linear time. Exceptions from malformed
text are turned into a `CorruptionError` by `functional_ckpt.store.values`.
"""

import base64
import io
import re
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID

import numpy as np

from functional_ckpt.spec.array import DTYPES
from functional_ckpt.store.encoding import Array, numpy_dtype

__all__ = ["DATA_DECODERS", "encode_data"]

#: numpy's own names for data types without a Zarr name: another byte order, text, bytes, dates and durations.
_DTYPE = re.compile(r"[<>|]([iuf][248]|c8|c16|[US]\d{1,9}|[mM]8(\[\d{0,9}[A-Za-zμ]{1,7}\])?)")
_ZARR_NAMES = {numpy_dtype(name): name for name in DTYPES}


def encode_data(value: Any) -> Any:
    """Return a value as tagged JSON, or None if its type is not one of these.

    Examples
    --------
    >>> encode_data(timedelta(days=1)), encode_data(np.float32(1)), encode_data([1])
    ({'~timedelta': [1, 0, 0]}, {'~numpy.generic': ['float32', 'AACAPw==']}, None)
    """
    if isinstance(value, np.generic):
        return _encode_scalar(value)
    encode = _ENCODERS.get(type(value))
    return None if encode is None else encode(value)


def _base64(data: bytes | memoryview) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


def _dtype_text(dtype: np.dtype[Any]) -> str | None:
    """Return the name of a data type whose elements are fully described by their bytes, else None."""
    return _ZARR_NAMES.get(dtype) or (dtype.str if _DTYPE.fullmatch(dtype.str) and dtype.kind != "V" else None)


def _dtype_of(text: Any) -> np.dtype[Any]:
    if text in DTYPES:
        return numpy_dtype(text)
    if not _DTYPE.fullmatch(text):
        raise ValueError(f"{text!r} is not a data type")
    dtype: np.dtype[Any] = np.dtype(text)
    return dtype


def _encode_scalar(value: Any) -> Any:
    if type(value) is np.str_:
        return {"~numpy.str": str.__str__(value)}
    if type(value) is np.bytes_:
        return {"~numpy.bytes": _base64(bytes(value))}
    name = _dtype_text(value.dtype)
    # Some platforms have two types of one width, such as numpy.longlong: only one of them comes back.
    if name is None or _dtype_of(name).type is not type(value):
        return None
    return {"~numpy.generic": [name, _base64(value.tobytes())]}


def _decode_scalar(body: Any) -> Any:
    name, text = body
    scalar: Any = _decode_array([name, [], text])[()]
    if not isinstance(scalar, np.generic):
        raise TypeError(f"{name!r} has no scalars")
    return scalar


def _encode_array(value: Array) -> Any:
    name = _dtype_text(value.dtype)
    return None if name is None else {"~numpy.ndarray": [name, list(value.shape), _base64(value.tobytes())]}


def _decode_array(body: Any) -> Array:
    name, shape, text = body
    dtype, data = _dtype_of(name), bytearray(_bytes(text))
    if any(type(n) is not int or n < 0 for n in shape) or prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes do not fit shape {shape} and data type {name}")
    return np.ndarray(tuple(shape), dtype, data).copy()


def _encode_clock(value: datetime | time) -> list[Any] | None:
    """Return the text of a time without its zone, the zone, and its `fold`."""
    zone = _encode_zone(value.tzinfo)
    return None if zone is _NO_ZONE else [value.replace(tzinfo=None, fold=0).isoformat(), zone, value.fold]


def _decode_clock(kind: Any, body: Any) -> Any:
    text, zone, fold = body
    return kind.fromisoformat(text).replace(tzinfo=None if zone is None else _decode_zone(zone), fold=fold)


_NO_ZONE: Any = object()


def _encode_zone(zone: tzinfo | None) -> list[Any] | None:
    if type(zone) is not timezone:
        return None if zone is None else _NO_ZONE
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
    return [_encode_delta(offset), *name]


def _decode_zone(body: Any) -> timezone:
    offset, *name = body
    return timezone(timedelta(*offset), *name)


def _encode_delta(value: timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _encode_stream(value: io.BytesIO) -> Any:
    if value.closed or value.__dict__:
        return None
    return {"~io.BytesIO": [_base64(value.getbuffer()), value.tell()]}


def _decode_stream(body: Any) -> io.BytesIO:
    text, position = body
    stream = io.BytesIO(_bytes(text))
    stream.seek(position)
    return stream


def _tagged(tag: str, encode: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def encoded(value: Any) -> Any:
        body = encode(value)
        return None if body is None else {tag: body}

    return encoded


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    np.ndarray: _encode_array,
    bytearray: _tagged("~bytearray", _base64),
    io.BytesIO: _encode_stream,
    date: _tagged("~date", date.isoformat),
    datetime: _tagged("~datetime", _encode_clock),
    time: _tagged("~time", _encode_clock),
    timedelta: _tagged("~timedelta", _encode_delta),
    timezone: _tagged("~timezone", _encode_zone),
    Decimal: _tagged("~decimal", str),
    UUID: _tagged("~uuid", str),
    PurePosixPath: _tagged("~path.posix", str),
    PureWindowsPath: _tagged("~path.windows", str),
    type(Path()): _tagged("~path", str),
}

#: Tag -> function that decodes its body.
DATA_DECODERS: dict[str, Callable[[Any], Any]] = {
    "~numpy.generic": _decode_scalar,
    "~numpy.str": lambda body: np.str_(_text(body)),
    "~numpy.bytes": lambda body: np.bytes_(_bytes(body)),
    "~numpy.ndarray": _decode_array,
    "~bytearray": lambda body: bytearray(_bytes(body)),
    "~io.BytesIO": _decode_stream,
    "~date": date.fromisoformat,
    "~datetime": lambda body: _decode_clock(datetime, body),
    "~time": lambda body: _decode_clock(time, body),
    "~timedelta": lambda body: timedelta(*body),
    "~timezone": _decode_zone,
    "~decimal": lambda body: Decimal(_text(body)),
    "~uuid": lambda body: UUID(_text(body)),
    "~path.posix": lambda body: PurePosixPath(_text(body)),
    "~path.windows": lambda body: PureWindowsPath(_text(body)),
    "~path": lambda body: Path(_text(body)),
}


def _text(body: Any) -> str:
    if type(body) is not str:
        raise TypeError(f"expected text, found {type(body).__name__}")
    return body
