"""functional_ckpt: save and load sharded training state; a checkpoint saved under one layout loads under any other.

The names below are imported on first use; ``import functional_ckpt`` imports neither torch nor TensorStore.

Examples
--------
>>> import numpy as np, functional_ckpt
>>> _ = functional_ckpt.save({"w": np.ones(3)}, "memory://package-example")
>>> functional_ckpt.load({"w": np.zeros(3)}, "memory://package-example")
{'w': array([1., 1., 1.])}
"""

import importlib
import threading  # noqa: F401 - if it is first imported at exit, the interpreter does not wait for threads
from typing import TYPE_CHECKING, Any

from functional_ckpt.lazy import getattr_of

if TYPE_CHECKING:
    from functional_ckpt import errors
    from functional_ckpt.api import async_save, diff, load, save
    from functional_ckpt.manager import Checkpoints
    from functional_ckpt.plan.layout import LayoutPolicy
    from functional_ckpt.plan.manifest import Manifest
    from functional_ckpt.plan.retention import KeepBest, KeepEvery, KeepLast, StepInfo
    from functional_ckpt.run.checkpoint import Checkpoint, StoredArray, open_checkpoint
    from functional_ckpt.run.leaves import LocalShards, PerRank
    from functional_ckpt.run.pending import PendingSave
    from functional_ckpt.run.policy import LoadPolicy, SavePolicy, Strict
    from functional_ckpt.run.progress import Progress
    from functional_ckpt.run.staging import release_staging
    from functional_ckpt.spec.array import ArraySpec, ObjectSpec
    from functional_ckpt.spec.box import Box
    from functional_ckpt.spec.shard import Fragment, ShardSpec, World
    from functional_ckpt.store.access import StorePolicy
    from functional_ckpt.store.reading import VerifyReport, read_manifest, verify
    from functional_ckpt.store.sweep import sweep

    __version__: str

_MODULES = {
    "async_save": "api",
    "diff": "api",
    "load": "api",
    "save": "api",
    "Checkpoint": "run.checkpoint",
    "StoredArray": "run.checkpoint",
    "open_checkpoint": "run.checkpoint",
    "LocalShards": "run.leaves",
    "PerRank": "run.leaves",
    "PendingSave": "run.pending",
    "Checkpoints": "manager",
    "LayoutPolicy": "plan.layout",
    "Manifest": "plan.manifest",
    "KeepBest": "plan.retention",
    "KeepEvery": "plan.retention",
    "KeepLast": "plan.retention",
    "StepInfo": "plan.retention",
    "LoadPolicy": "run.policy",
    "SavePolicy": "run.policy",
    "Strict": "run.policy",
    "Progress": "run.progress",
    "release_staging": "run.staging",
    "ArraySpec": "spec.array",
    "ObjectSpec": "spec.array",
    "Box": "spec.box",
    "Fragment": "spec.sharding",
    "ShardSpec": "spec.sharding",
    "World": "spec.sharding",
    "StorePolicy": "store.access",
    "VerifyReport": "store.reading",
    "read_manifest": "store.reading",
    "verify": "store.reading",
    "sweep": "store.sweep",
}

__all__ = [
    "ArraySpec",
    "Box",
    "Checkpoint",
    "Checkpoints",
    "Fragment",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "LayoutPolicy",
    "LoadPolicy",
    "LocalShards",
    "Manifest",
    "ObjectSpec",
    "PendingSave",
    "PerRank",
    "Progress",
    "SavePolicy",
    "ShardSpec",
    "StepInfo",
    "StorePolicy",
    "StoredArray",
    "Strict",
    "VerifyReport",
    "World",
    "async_save",
    "diff",
    "errors",
    "load",
    "open_checkpoint",
    "read_manifest",
    "release_staging",
    "save",
    "sweep",
    "verify",
]

_find = getattr_of(__name__, _MODULES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name == "errors":
        return importlib.import_module("functional_ckpt.errors")
    return _find(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def _version() -> str:
    metadata = importlib.import_module("importlib.metadata")  # here: it is slow to import
    try:
        return str(metadata.version("functional_ckpt"))
    except metadata.PackageNotFoundError:  # the source tree, not installed
        return "0+unknown"
