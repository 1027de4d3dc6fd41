"""Torch's side: tensors and DTensors as leaves, process groups as `Gather`, storage and planners for DCP.

Imported only where torch is used; the names below are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functional_ckpt.torch.default_storage import INSTALLED_SAVE_POLICY, install
    from functional_ckpt.torch.planner import StrictLoadPlanner, StrictSavePlanner
    from functional_ckpt.torch.storage import ZarrStorageReader, ZarrStorageWriter

_MODULES = {
    "INSTALLED_SAVE_POLICY": "default_storage",
    "install": "default_storage",
    "StrictLoadPlanner": "planner",
    "StrictSavePlanner": "planner",
    "ZarrStorageReader": "storage",
    "ZarrStorageWriter": "storage",
}

__all__ = [
    "INSTALLED_SAVE_POLICY",
    "StrictLoadPlanner",
    "StrictSavePlanner",
    "ZarrStorageReader",
    "ZarrStorageWriter",
    "install",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'functional_ckpt.torch' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"functional_ckpt.torch.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
