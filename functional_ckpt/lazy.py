"""Names of a package that are imported on first use, so that importing the package costs nothing."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["getattr_of"]


def getattr_of(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package: each name is looked up in its module below the package, once.

    Examples
    --------
    >>> getattr_of("functional_ckpt", {"Box": "spec.box"})("Box").__name__
    'Box'
    """

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
