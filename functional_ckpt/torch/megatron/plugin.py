"""Strategies for ``megatron.core.dist_checkpointing`` itself, with its own sharded leaves: needs megatron-core.

Importing this module registers them under ``("functional_ckpt", 1)``, so that Megatron 0.16 finds the one for loading
by itself; later versions have no registry, and callers pass both (docs/megatron.md). A thread of the training process
runs a save in the background; a process that Megatron forks or spawns for it only waits, since TensorStore must not be
used in a forked process.
"""

import io
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

try:
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
except ImportError as error:
    raise ImportError(f"functional_ckpt.torch.megatron.plugin needs megatron-core 0.16 or later: {error}") from error
try:
    from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy, LoadShardedStrategy
except ImportError:  # 0.19 has no such classes and needs only the methods
    AsyncSaveShardedStrategy = LoadShardedStrategy = object
    _HANDS_COMMON_OVER = True
else:
    _HANDS_COMMON_OVER = False

from functional_ckpt.api import named
from functional_ckpt.errors import CheckpointError
from functional_ckpt.run.comm import agree
from functional_ckpt.run.pending import PendingSave
from functional_ckpt.run.policy import LoadPolicy, SavePolicy
from functional_ckpt.torch.megatron import sharded_object
from functional_ckpt.torch.megatron.advice import advising
from functional_ckpt.torch.megatron.arrival import has_been_checked, wait_for_rank_0
from functional_ckpt.torch.megatron.core import write_whole
from functional_ckpt.torch.megatron.halves import COMMON_FILE, check_halves
from functional_ckpt.torch.megatron.sharded_base import is_main_replica
from functional_ckpt.torch.megatron.state_tree import leaves_of
from functional_ckpt.torch.megatron.strategies.zarr import (
    BACKEND,
    LOAD_POLICY,
    SAVE_POLICY,
    VERSION,
    ZarrLoadCommonStrategy,
    ZarrLoadShardedStrategy,
    ZarrSaveShardedStrategy,
)

__all__ = ["ZarrLoadStrategy", "ZarrSaveStrategy"]

_POLL_S = 0.05
_ENTRANCES = (serialization.save.__code__, serialization.load.__code__)
#: Key of the object in which 0.19 and later pass the common half; all versions read that from its file.
_COMMON_KEY = "common_state"


class ZarrSaveStrategy(AsyncSaveShardedStrategy):
    """Saves Megatron's sharded leaves into a Zarr group, beside its ``common.pt`` and ``metadata.json``.

    Parameters
    ----------
    backend, version
        Name and version of the format in ``metadata.json``.
    policy
        How to save, see `ZarrSaveShardedStrategy`.
    process_group
        Ranks that save together; None for the default group.

    Examples
    --------
    >>> str(ZarrSaveStrategy())
    'ZarrSaveStrategy(functional_ckpt, 1)'
    """

    def __init__(
        self,
        backend: str = BACKEND,
        version: int = VERSION,
        *,
        policy: SavePolicy = SAVE_POLICY,
        process_group: Any = None,
    ) -> None:
        self.backend, self.version = backend, version  # not by the base class, which warns in 0.17 and 0.18
        self._saver = ZarrSaveShardedStrategy(
            backend, version, policy=policy, process_group=process_group, common_file=COMMON_FILE
        )

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.backend}, {self.version})"

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Yes."""
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Save now; all ranks call it.

        Raises
        ------
        megatron.core.dist_checkpointing.core.CheckpointingException
            On every rank, with the text of all problems; they are its ``__cause__``.
        """
        with _theirs():
            self._await(sharded_state_dict, checkpoint_dir)
            self._saver.save(self._sharded(sharded_state_dict, checkpoint_dir), checkpoint_dir)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path, *_newer: Any) -> AsyncRequest:
        """Copy the state to the host, start the save in a thread, and return a request that waits for it.

        Later versions of Megatron pass more arguments, which are ignored. The request's finalize function raises a
        failure of the thread on every rank, before Megatron writes ``metadata.json``.

        Raises
        ------
        megatron.core.dist_checkpointing.core.CheckpointingException
            On every rank, for problems found before the copy.
        """
        with _theirs():
            self._await(sharded_state_dict, checkpoint_dir)
            pending = self._saver.start(self._sharded(sharded_state_dict, checkpoint_dir), checkpoint_dir)
        place = Path(tempfile.mkdtemp(prefix="functional_ckpt-"))
        done = place / "done"
        threading.Thread(target=_announce, args=(pending, done), daemon=True).start()

        def finish() -> None:
            shutil.rmtree(place, ignore_errors=True)
            with _theirs():
                pending.result()

        return AsyncRequest(wait_for, (str(done), os.getpid()), [finish])

    def _await(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        if has_been_checked(_ENTRANCES):
            what, count = f"save to {named(checkpoint_dir)}", sum(1 for _ in leaves_of(sharded_state_dict))
            sign = Path(checkpoint_dir, COMMON_FILE)
            wait_for_rank_0(self._saver.process_group, self._saver.policy.timeout_s, what, count, sign)

    def _sharded(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        if not _HANDS_COMMON_OVER or _COMMON_KEY not in sharded_state_dict:
            return sharded_state_dict
        return agree(self._saver.gather(checkpoint_dir), lambda: _without_common(sharded_state_dict, checkpoint_dir))


class ZarrLoadStrategy(LoadShardedStrategy):
    """Loads Megatron's sharded leaves, under any sharding of the tensors.

    Parameters
    ----------
    policy
        How to load, see `ZarrLoadShardedStrategy`; `safe_globals` are the classes that objects may have.
    process_group
        Ranks that load together; None for the default group.

    Examples
    --------
    >>> ZarrLoadStrategy().can_handle_sharded_objects
    True
    """

    def __init__(self, *, policy: LoadPolicy = LOAD_POLICY, process_group: Any = None) -> None:
        self._loader = ZarrLoadShardedStrategy(policy=policy, process_group=process_group)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Yes."""
        return True

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path, *_newer: Any) -> Any:
        """Return the state dict with each leaf loaded; further arguments of later versions of Megatron are ignored.

        Raises
        ------
        megatron.core.dist_checkpointing.core.CheckpointingException
            On every rank, with the text of all problems; they are its ``__cause__``.
        """
        with _theirs():
            if has_been_checked(_ENTRANCES):
                what, count = f"load of {named(checkpoint_dir)}", sum(1 for _ in leaves_of(sharded_state_dict))
                wait_for_rank_0(self._loader.process_group, self._loader.policy.timeout_s, what, count)
            return self._loader.load(sharded_state_dict, checkpoint_dir)

    def load_tensors_metadata(self, checkpoint_dir: str | Path, *_newer: Any) -> Any:
        """Return the stored tensors by key, whole and without data."""
        found = self.load_sharded_metadata(checkpoint_dir)
        return {key: leaf for key, leaf in found.items() if isinstance(leaf, ShardedTensor)}

    def load_sharded_metadata(self, checkpoint_dir: str | Path, *_newer: Any) -> Any:
        """Return the stored tensors and objects without data, by key and unique key."""
        with _theirs():
            found = self._loader.load_sharded_metadata(checkpoint_dir)
        return {key: _as_theirs(leaf) for key, leaf in found.items()}

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove the tensors whose keys begin with `key_prefix`; one rank calls it."""
        with _theirs():
            self._loader.remove_sharded_tensors(checkpoint_dir, key_prefix)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise unless the format is that of functional_ckpt."""
        with _theirs():
            self._loader.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise unless the version is one that this library reads."""
        with _theirs():
            self._loader.check_version_compatibility(loaded_version)


class _LoadCommon(ZarrLoadCommonStrategy):
    """Loads the common half of a checkpoint of `functional_ckpt.torch.megatron.serialization.save`."""

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        with _theirs():
            check_halves(checkpoint_dir)
            return super().load_common(checkpoint_dir)


def wait_for(done: str, writer: int) -> None:
    """Wait until the file `done` exists, or the process `writer`, a thread of which creates it, has ended.

    A process that Megatron starts for a save in the background does only this.

    Examples
    --------
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     wait_for(file.name, os.getpid())
    """
    while not Path(done).exists() and writer in (os.getpid(), os.getppid()):
        time.sleep(_POLL_S)


def _announce(pending: PendingSave, done: Path) -> None:
    try:
        pending.result()
    except BaseException:
        pass
    finally:
        done.touch()


@contextmanager
def _theirs() -> Iterator[None]:
    """Raise errors as Megatron's exceptions, which its callers catch; they name the strategies of this module."""
    try:
        with advising():
            yield
    except CheckpointError as error:
        text = str(error)
        for verb in ("Load", "Save"):
            text = text.replace(f"Zarr{verb}ShardedStrategy", f"Zarr{verb}Strategy")
        raise CheckpointingException(text) from error


def _without_common(sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
    """Write the common half to the file from which Megatron itself reads it, and return the rest."""
    common = sharded_state_dict[_COMMON_KEY]
    if is_main_replica(common.replica_id):
        data = io.BytesIO()
        torch.save(common.data, data)
        write_whole(Path(checkpoint_dir, COMMON_FILE), data.getvalue())
    return {key: part for key, part in sharded_state_dict.items() if key != _COMMON_KEY}


def _as_theirs(leaf: Any) -> Any:
    if isinstance(leaf, sharded_object.ShardedObject):
        return ShardedObject(leaf.key, None, leaf.global_shape, leaf.global_offset, leaf.replica_id)
    whole = torch.empty(leaf.global_shape, dtype=leaf.dtype, device="meta")
    return ShardedTensor.from_rank_offsets(leaf.key, whole).without_data()


def _register() -> None:
    try:
        from megatron.core.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
    except ImportError:  # 0.17 and later have no registry
        return
    register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION, ZarrSaveStrategy())
    register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, ZarrLoadStrategy())
    register_default_strategy(StrategyAction.LOAD_COMMON, BACKEND, VERSION, _LoadCommon())


_register()
