"""torch_checkpointing: its `CheckpointManager` with synchronous saves, as it comes and with a resharder.

What makes it fair:

* As it comes, a checkpoint is one ``torch.save`` file per rank that only the same layout can load. What all others
  write can be resharded; for that an item needs a resharder, hence the second row.
* A manager writes the metadata that resharding needs with its first save only (0.1.1), and refuses a state of other
  shapes later. So each call gets a new manager, made outside of the timing.
* ``use_direct_io`` is off: on ext4 the default fails with EINVAL (0.1.1), and nobody else leaves out the page cache.
* It never syncs. Where everybody does, its files are synced after the save, within the timing.
"""

import logging
from pathlib import Path
from typing import Any

import attrs
import torch_checkpointing
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from benchmarks.competitors import Competitor
from benchmarks.place import fsync_all
from benchmarks.state import State

TORCH_CHECKPOINTING = "torch_checkpointing"
RESHARDABLE = f"{TORCH_CHECKPOINTING}, resharder"

# It warns of each plain tensor, and those are meant.
logging.getLogger("torch_checkpointing").setLevel(logging.ERROR)


@attrs.frozen(eq=False)
class _Managed:
    manager: Any
    state: State


def _managed(state: State) -> _Managed:
    return _Managed(_manager(None), state)


def _managed_with_resharder(state: State) -> _Managed:
    return _Managed(_manager(DefaultResharder()), state)


def _manager(resharder: Any) -> Any:
    config = torch_checkpointing.CheckpointManager.Config(
        default=torch_checkpointing.ItemSpec(resharder=resharder),
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )
    return config.build()


def _save(given: _Managed, path: Path, durable: bool) -> None:
    given.manager.save(str(path), given.state)
    if durable:
        fsync_all(path)


def _load(given: _Managed, path: Path) -> None:
    given.manager.load(str(path), into=given.state)


COMPETITORS = (
    Competitor(TORCH_CHECKPOINTING, _save, _load, _managed),
    Competitor(RESHARDABLE, _save, _load, _managed_with_resharder),
)
