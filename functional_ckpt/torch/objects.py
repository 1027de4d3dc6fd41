"""Objects as ``torch.save`` bytes, read back without running code unless the caller says so."""

import io
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from functional_ckpt.errors import ObjectCodecError
from functional_ckpt.store.encoding import Array

__all__ = ["dump", "load"]


def dump(key: str, value: Any) -> Array:
    """Return what ``torch.save`` writes, as a uint8 array."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # pickling calls code of the object, which can raise anything
        raise ObjectCodecError(
            "an object cannot be serialised", key, found=f"{type(error).__name__}: {error}"
        ) from error
    return np.frombuffer(buffer.getvalue(), np.uint8)


def load(key: str, data: bytes, safe_globals: Iterable[Any] | str) -> Any:
    """Return the object; ``weights_only`` unless `safe_globals` is ``"trust"``."""
    trust = isinstance(safe_globals, str) and safe_globals == "trust"
    classes = [] if isinstance(safe_globals, str) else list(safe_globals)
    try:
        with torch.serialization.safe_globals(classes):
            return torch.load(io.BytesIO(data), weights_only=not trust, map_location="cpu")
    except Exception as error:  # so does unpickling
        raise ObjectCodecError(
            "an object cannot be read", key, found=str(error).splitlines()[0] if str(error) else type(error).__name__,
            remedy="Allow its classes with LoadPolicy(safe_globals=[...])",
        ) from error  # fmt: skip
