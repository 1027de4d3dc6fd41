"""The torch adapter: tensors and DTensors as leaves, process groups as `Gather`, and the rooms for DCP and Megatron.

It is imported only if torch is used; the names below are imported on first use.
"""

from typing import TYPE_CHECKING

from functional_ckpt.lazy import getattr_of

if TYPE_CHECKING:
    from functional_ckpt.torch.dcp.default_storage import INSTALLED_SAVE_POLICY, install
    from functional_ckpt.torch.dcp.planner import StrictLoadPlanner, StrictSavePlanner
    from functional_ckpt.torch.dcp.storage_reader import ZarrStorageReader
    from functional_ckpt.torch.dcp.storage_writer import ZarrStorageWriter

_MODULES = {
    "INSTALLED_SAVE_POLICY": "dcp.default_storage",
    "StrictLoadPlanner": "dcp.planner",
    "StrictSavePlanner": "dcp.planner",
    "ZarrStorageReader": "dcp.storage_reader",
    "ZarrStorageWriter": "dcp.storage_writer",
    "install": "dcp.default_storage",
}

__all__ = [
    "INSTALLED_SAVE_POLICY",
    "StrictLoadPlanner",
    "StrictSavePlanner",
    "ZarrStorageReader",
    "ZarrStorageWriter",
    "install",
]

__getattr__ = getattr_of(__name__, _MODULES)
