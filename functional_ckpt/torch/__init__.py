"""Torch's side: tensors and DTensors as leaves, process groups as `Gather`, storage and planners for DCP.

Imported only where torch is used; the names below are imported on first use. Those that ``megatron.core``'s
``dist_checkpointing`` has in its package are here too: `save` and `load` take state dicts with sharded leaves.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functional_ckpt.torch.core import check_is_distributed_checkpoint
    from functional_ckpt.torch.default_storage import INSTALLED_SAVE_POLICY, install
    from functional_ckpt.torch.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
    from functional_ckpt.torch.planner import StrictLoadPlanner, StrictSavePlanner
    from functional_ckpt.torch.serialization import (
        load,
        load_common_state_dict,
        load_content_metadata,
        load_plain_tensors,
        load_tensors_metadata,
        remove_sharded_tensors,
        save,
    )
    from functional_ckpt.torch.storage import ZarrStorageReader, ZarrStorageWriter

_MODULES = {
    "INSTALLED_SAVE_POLICY": "default_storage",
    "install": "default_storage",
    "StrictLoadPlanner": "planner",
    "StrictSavePlanner": "planner",
    "ZarrStorageReader": "storage",
    "ZarrStorageWriter": "storage",
    "check_is_distributed_checkpoint": "core",
    "LocalNonpersistentObject": "mapping",
    "ShardedObject": "mapping",
    "ShardedTensor": "mapping",
    "load": "serialization",
    "load_common_state_dict": "serialization",
    "load_content_metadata": "serialization",
    "load_plain_tensors": "serialization",
    "load_tensors_metadata": "serialization",
    "remove_sharded_tensors": "serialization",
    "save": "serialization",
}

__all__ = [
    "INSTALLED_SAVE_POLICY",
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedTensor",
    "StrictLoadPlanner",
    "StrictSavePlanner",
    "ZarrStorageReader",
    "ZarrStorageWriter",
    "check_is_distributed_checkpoint",
    "install",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'functional_ckpt.torch' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"functional_ckpt.torch.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
