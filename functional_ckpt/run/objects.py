"""Leaves stored as bytes: arbitrary objects, by opt-in, as ``torch.save`` makes them; plain values that are long."""

import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from functional_ckpt.errors import ObjectCodecError, raise_problems, report
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.store.base import Store
from functional_ckpt.store.chunk import check_chunks, check_digest, read_chunk
from functional_ckpt.store.encoding import Array, digest
from functional_ckpt.store.values import decode_text

__all__ = ["ObjectReader", "object_bytes", "object_from_bytes", "trust_needed", "warn_of_trust"]

#: Keys that are named for one class.
_NAMED = 5


def object_bytes(key: str, value: Any) -> Array:
    """Return an object as bytes.

    Raises
    ------
    ObjectCodecError
        If torch is not installed or cannot pickle the object.
    """
    return _codec(key).dump(key, value)  # type: ignore[no-any-return]


def trust_needed(key: str, data: Array) -> tuple[str, ...]:
    """Return the names of classes and functions that a caller must allow to load this object.

    Raises
    ------
    UnsupportedLeafError
        If the object holds a `PerRank`: only the value of one rank would be saved.
    """
    needed = _refused_classes(key, data, ())
    _codec(key).refuse_per_rank(key, needed)
    return needed


def object_from_bytes(key: str, data: Array, safe_globals: Iterable[Any] | str) -> Any:
    """Return the object, built from plain types and `safe_globals` only unless those are ``"trust"``.

    Raises
    ------
    ObjectCodecError
        If it needs a class that is not allowed.
    """
    needed = _refused_classes(key, data, safe_globals)
    if needed:
        raise _untrusted({key: needed})
    return _codec(key).load(key, np.ascontiguousarray(data).tobytes(), safe_globals)


class ObjectReader:
    """Reads stored objects. Those that need classes which are not allowed are skipped; `problem` names all of them."""

    def __init__(self, store: Store, safe_globals: Iterable[Any] | str) -> None:
        self.store, self.safe_globals = store, safe_globals
        self._refused: dict[str, tuple[str, ...]] = {}

    def read(self, entry: ArrayEntry) -> Any:
        """Return the object or value that an array of bytes holds; None if it is refused, which `problem` tells."""
        key, data = entry.spec.key, self._bytes(entry)
        if entry.codec == "json":
            return decode_text(key, data.tobytes().decode("ascii", "replace"))
        needed = _refused_classes(key, data, self.safe_globals)
        if needed:
            self._refused[key] = needed
            return None
        return object_from_bytes(key, data, self.safe_globals)

    @property
    def problem(self) -> ObjectCodecError | None:
        """What was refused so far."""
        return _untrusted(self._refused) if self._refused else None

    def _bytes(self, entry: ArrayEntry) -> Array:
        indices = list(entry.grid.touched(entry.spec.box))
        raise_problems(check_chunks(self.store, ((entry, index) for index in indices)))
        chunks = [read_chunk(self.store, entry.spec, entry.layout, index) for index in indices]
        for position, chunk in enumerate(chunks):
            check_digest(entry, position, digest(chunk))
        return np.concatenate(chunks)


def warn_of_trust(needed: Mapping[str, tuple[str, ...]]) -> None:
    """Warn of saved objects that load only if the caller allows their classes; `needed` has the classes by key.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn_of_trust({"a": (), "b": ("m.C",)})
    >>> print(caught[0].message)
    objects that are not plain values: m.C in 'b'. To load them, trust the file and pass LoadPolicy(safe_globals=[m.C])
    """
    untrusted = {key: names for key, names in needed.items() if names}
    if untrusted:
        report(f"objects that are not plain values: {_where(untrusted)}. To load them, {_remedy(untrusted)}")


def _refused_classes(key: str, data: Array, safe_globals: Iterable[Any] | str) -> tuple[str, ...]:
    if isinstance(safe_globals, str):
        return ()
    found: tuple[str, ...] = _codec(key).classes_to_allow(np.ascontiguousarray(data).tobytes(), safe_globals)
    return found


def _untrusted(refused: Mapping[str, tuple[str, ...]]) -> ObjectCodecError:
    keys = list(refused)
    who = "an object needs" if len(keys) == 1 else f"{len(keys)} objects need"
    remedy = _remedy(refused)
    return ObjectCodecError(
        f"{who} classes that are not allowed", keys[0], found=_where(refused), remedy=remedy[0].upper() + remedy[1:]
    )


def _where(needed: Mapping[str, tuple[str, ...]]) -> str:
    """Return the classes and the keys of the objects that need them."""
    keys: dict[str, list[str]] = {}
    for key, names in sorted(needed.items()):
        for name in names:
            keys.setdefault(name, []).append(repr(key))
    return "; ".join(f"{name} in {', '.join(found[:_NAMED])}{_more(found)}" for name, found in sorted(keys.items()))


def _more(found: list[str]) -> str:
    return f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""


def _remedy(needed: Mapping[str, tuple[str, ...]]) -> str:
    names = sorted({name for each in needed.values() for name in each})
    return f"trust the file and pass LoadPolicy(safe_globals=[{', '.join(names)}])"


def _codec(key: str) -> Any:
    try:
        if "torch" not in sys.modules:
            importlib.import_module("torch")
        return importlib.import_module("functional_ckpt.torch.object_codec")
    except ImportError as error:
        raise ObjectCodecError("objects need torch", key, found=str(error), remedy="pip install torch") from None
