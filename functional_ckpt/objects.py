"""Arbitrary objects, by opt-in: what ``torch.save`` makes of them, as a uint8 array."""

import importlib
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from functional_ckpt.errors import ObjectCodecError
from functional_ckpt.store.encoding import Array

__all__ = ["object_bytes", "object_from_bytes"]


def object_bytes(key: str, value: Any) -> Array:
    """Return an object as bytes.

    Raises
    ------
    ObjectCodecError
        If torch is not installed or cannot serialise the object.
    """
    return _codec(key).dump(key, value)  # type: ignore[no-any-return]


def object_from_bytes(key: str, data: Array, safe_globals: Iterable[Any] | str) -> Any:
    """Return the object, built from plain types and `safe_globals` only unless those are ``"trust"``.

    Raises
    ------
    ObjectCodecError
        If it needs a class that is not allowed.
    """
    return _codec(key).load(key, np.ascontiguousarray(data).tobytes(), safe_globals)


def _codec(key: str) -> Any:
    try:
        if "torch" not in sys.modules:
            importlib.import_module("torch")
        return importlib.import_module("functional_ckpt.torch.objects")
    except ImportError as error:
        raise ObjectCodecError("objects need torch", key, found=str(error), remedy="pip install torch") from None
