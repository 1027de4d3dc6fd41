"""The names of ``megatron.core.dist_checkpointing``, and (`plugin`) strategies for Megatron itself.

The modules have the names of Megatron's modules; only `plugin` needs Megatron. The names below, which Megatron has in
its package, are imported on first use.
"""

from typing import TYPE_CHECKING

from functional_ckpt.lazy import getattr_of

if TYPE_CHECKING:
    from functional_ckpt.torch.megatron.core import check_is_distributed_checkpoint
    from functional_ckpt.torch.megatron.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
    from functional_ckpt.torch.megatron.plugin import ZarrLoadStrategy, ZarrSaveStrategy
    from functional_ckpt.torch.megatron.serialization import (
        load,
        load_common_state_dict,
        load_content_metadata,
        load_plain_tensors,
        load_tensors_metadata,
        remove_sharded_tensors,
        save,
    )

_MODULES = {
    "LocalNonpersistentObject": "mapping",
    "ShardedObject": "mapping",
    "ShardedTensor": "mapping",
    "ZarrLoadStrategy": "plugin",
    "ZarrSaveStrategy": "plugin",
    "check_is_distributed_checkpoint": "core",
    "load": "serialization",
    "load_common_state_dict": "serialization",
    "load_content_metadata": "serialization",
    "load_plain_tensors": "serialization",
    "load_tensors_metadata": "serialization",
    "remove_sharded_tensors": "serialization",
    "save": "serialization",
}

__all__ = [
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedTensor",
    "ZarrLoadStrategy",
    "ZarrSaveStrategy",
    "check_is_distributed_checkpoint",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
]

__getattr__ = getattr_of(__name__, _MODULES)
