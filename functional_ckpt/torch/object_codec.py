"""Objects as ``torch.save`` bytes, read back without running code unless the caller trusts the file."""

import argparse
import datetime
import io
import pathlib
import pickle
import re
from collections import deque
from collections.abc import Iterable
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import torch

from functional_ckpt.errors import ObjectCodecError, UnsupportedLeafError
from functional_ckpt.plan.record import canonical
from functional_ckpt.run.leaves import PerRank
from functional_ckpt.store.data_types import encode_data
from functional_ckpt.store.encoding import Array
from functional_ckpt.store.values import decode_text, plain_text

__all__ = ["classes_to_allow", "dump", "load", "refuse_per_rank"]

#: Types of the standard library that hold only data: allowed within objects as among plain values.
_SAFE: tuple[Any, ...] = (
    decode_text,
    frozenset,
    range,
    slice,
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
    Decimal,
    UUID,
    io.BytesIO,
    type(pathlib.Path()),
    pathlib.PurePosixPath,
    pathlib.PureWindowsPath,
    argparse.Namespace,
)
#: The bytes by which the pickle of a set is recognised.
_SETS = (b"__builtin__\nset\n", b"__builtin__\nfrozenset\n")
_PER_RANK = f"{PerRank.__module__}.{PerRank.__qualname__}"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class _Pickler(pickle.Pickler):
    """Writes values of data types as tagged JSON: exact, and read by a function that creates nothing else.

    numpy's own pickles would need classes that a crafted file can make interpret its bytes as pointers.
    """

    def reducer_override(self, value: Any) -> Any:
        """Return how to make a value, or leave it to its class."""
        text = plain_text(value) if isinstance(value, deque) else _text_of(encode_data(value))
        return NotImplemented if text is None else (decode_text, ("", text))


def _text_of(coded: Any) -> str | None:
    return None if coded is None else canonical(coded)


class _SortingPickler(pickle._Pickler):
    """Writes sets of plain values in an order that does not depend on the process; slow, so used only with sets."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to make a value, or leave it to its class."""
        if type(value) not in (set, frozenset):
            return _Pickler.reducer_override(self, value)  # type: ignore[arg-type]
        items = [(plain_text(item), item) for item in value]
        if any(text is None for text, _ in items):
            return NotImplemented
        return type(value), ([item for _, item in sorted(items, key=lambda pair: str(pair[0]))],)


def _bytes_of(value: Any, pickler: type) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=SimpleNamespace(__name__="pickle", Pickler=pickler))
    return buffer.getvalue()


def dump(key: str, value: Any) -> Array:
    """Return the bytes of ``torch.save`` as a uint8 array: equal on all ranks that hold equal objects."""
    try:
        data = _bytes_of(value, _Pickler)
        if any(name in data for name in _SETS):
            data = _bytes_of(value, _SortingPickler)
    except Exception as error:  # pickling calls code of the object, which can raise any exception
        raise ObjectCodecError(
            "an object cannot be pickled",
            key,
            found=f"{type(error).__name__}: {error}",
            remedy="Save what it holds as plain values, or leave it out of the state",
        ) from error
    return np.frombuffer(data, np.uint8)


def classes_to_allow(data: bytes, safe_globals: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of the classes that an object needs and that are not allowed yet; none if that is unknown."""
    with torch.serialization.safe_globals(_allowed(safe_globals)):
        try:
            return tuple(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))))
        except Exception:  # not from torch.save, or with an unknown instruction: loading reports it
            return ()


def load(key: str, data: bytes, safe_globals: Iterable[Any] | str) -> Any:
    """Return the object; ``weights_only`` unless `safe_globals` is ``"trust"``."""
    trust = isinstance(safe_globals, str) and safe_globals == "trust"
    try:
        with torch.serialization.safe_globals(_allowed(() if isinstance(safe_globals, str) else safe_globals)):
            return torch.load(io.BytesIO(data), weights_only=not trust, map_location="cpu")
    except Exception as error:  # unpickling can raise any exception too
        raise ObjectCodecError(
            "an object cannot be read",
            key,
            found=_first_line(error),
            remedy="If you trust the file, pass LoadPolicy(safe_globals='trust')",
        ) from error


def refuse_per_rank(key: str, classes: Iterable[str]) -> None:
    """Raise if an object holds a `PerRank`: only the value of one rank would be saved.

    Raises
    ------
    UnsupportedLeafError
        If it does.
    """
    if _PER_RANK in classes:
        raise UnsupportedLeafError(
            "a PerRank within an object, or saved through DCP, would keep the value of one rank only",
            key,
            remedy="Give each rank's value a key of its own, such as f'rng.{rank}', or save it by functional_ckpt.save",
        )


def _allowed(safe_globals: Iterable[Any]) -> list[Any]:
    """Return the classes that may be created; with ``numpy.dtype`` also its subclasses, which no file names."""
    classes = [*_SAFE, *safe_globals]
    return [*classes, *(type(np.dtype(code)) for code in np.typecodes["All"])] if np.dtype in classes else classes


def _first_line(error: Exception) -> str:
    """Return the first line of the original error, without colours; torch wraps it in another one with advice."""
    inner = error.__context__ if isinstance(error.__context__, type(error)) else error
    lines = (line.strip() for line in _COLOURS.sub("", str(inner)).splitlines())
    return next((line for line in lines if line), type(error).__name__)
