"""The strategies of this library: sharded and common leaves as Zarr v3.

The sharded half is a checkpoint in the directory itself, committed by its root, so that the directory may hold other
files; the common half is a separate checkpoint in ``.common``. The root holds digests of the common half (`halves`).
"""

from pathlib import Path
from typing import Any

import attrs
import numpy as np

from functional_ckpt.api import async_save, load, named, save
from functional_ckpt.plan.layout import LayoutPolicy
from functional_ckpt.plan.manifest import Manifest
from functional_ckpt.run.arguments import check_policy
from functional_ckpt.run.checkpoint import StoredArray, open_checkpoint
from functional_ckpt.run.comm import Gather, LocalGather, agree, together
from functional_ckpt.run.pending import PendingSave
from functional_ckpt.run.policy import Commit, LoadPolicy, SavePolicy, Strict
from functional_ckpt.store.access import StorePolicy
from functional_ckpt.store.commit import manifest_digest
from functional_ckpt.store.reading import read_manifest
from functional_ckpt.torch.group.link import torch_gather
from functional_ckpt.torch.local import OpaqueObject
from functional_ckpt.torch.megatron.advice import COMMON_HALF, SHARDED_HALF, advising
from functional_ckpt.torch.megatron.halves import (
    BACKEND,
    COMMON,
    COMMON_FILE,
    OBJECTS,
    VERSION,
    attributes_for,
    below,
    check_halves,
    commit_over,
    is_without_halves,
    make_way,
    note_common,
)
from functional_ckpt.torch.megatron.sharded_base import ShardedStateDict, StateDict
from functional_ckpt.torch.megatron.sharded_state import (
    Request,
    is_object,
    is_tensor,
    leaves_to_save,
    stored_leaves,
)
from functional_ckpt.torch.megatron.state_tree import leaves_of, map_leaves, picked
from functional_ckpt.torch.megatron.strategies.async_calls import AsyncRequest
from functional_ckpt.torch.megatron.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    ReadsOneFormat,
    SaveCommonStrategy,
    StrategyAction,
    register_built_in_strategy,
)
from functional_ckpt.torch.megatron.strategies.removal import remove_arrays

__all__ = [
    "BACKEND",
    "LOAD_POLICY",
    "SAVE_POLICY",
    "VERSION",
    "ZarrLoadCommonStrategy",
    "ZarrLoadShardedStrategy",
    "ZarrSaveCommonStrategy",
    "ZarrSaveShardedStrategy",
]

#: The default policy for sharded leaves: flat shards may end anywhere, and with smaller chunks fewer bytes move.
SAVE_POLICY = SavePolicy(layout=LayoutPolicy(target_chunk_nbytes=1 << 24))

#: The default policy of both load strategies.
LOAD_POLICY = LoadPolicy()


class ZarrSaveShardedStrategy(AsyncSaveShardedStrategy):
    """Saves `ShardedTensor` and `ShardedObject` leaves: the main copies, into one Zarr group.

    Parameters
    ----------
    backend, version
        Name and version of the format.
    policy
        How to save. Whatever it says, replica ids declare who writes, an existing checkpoint is replaced, and foreign
        files are kept.
    process_group
        Ranks that save together; None for the default group.
    common_file
        Name of the file, such as ``common.pt``, to which the caller has written the common half before; then a common
        half in this library's own format is removed. The root gets a digest of the file.

    Examples
    --------
    >>> ZarrSaveShardedStrategy().can_handle_sharded_objects
    True
    """

    def __init__(
        self,
        backend: str = BACKEND,
        version: int = VERSION,
        *,
        policy: SavePolicy = SAVE_POLICY,
        process_group: Any = None,
        common_file: str | None = None,
    ) -> None:
        super().__init__(backend, version)
        check_policy(self, policy, SavePolicy)
        self.policy = attrs.evolve(policy, replicas="declared", replicated="trust", foreign="keep")
        self.process_group = process_group
        self.common_file = common_file

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Yes."""
        return True

    @advising(SHARDED_HALF)
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Save now; all ranks call it.

        Raises
        ------
        CheckpointingException
            On every rank, with all problems at once: cells that no or several main copies hold, names that other files
            have, and so on. Nothing is published then.
        """
        leaves, attributes, policy = self._described(sharded_state_dict, checkpoint_dir)
        group = self.process_group
        save(leaves, checkpoint_dir, policy=policy, process_group=group, overwrite=True, attributes=attributes)

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> AsyncRequest:
        """Copy the state to the host, start the save in a thread of this process, and return a request that waits.

        The save publishes by itself; tensors may be changed when this returns. The request raises a failure.

        Raises
        ------
        CheckpointingException
            On every rank, for problems found before the copy.
        """
        return AsyncRequest(self.start(sharded_state_dict, checkpoint_dir).result, (), [])

    @advising(SHARDED_HALF)
    def start(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> PendingSave:
        """Start a save like `async_save`, and return the running save itself.

        Raises
        ------
        CheckpointingException
            On every rank, for problems found before the copy.
        """
        leaves, attributes, policy = self._described(sharded_state_dict, checkpoint_dir)
        group = self.process_group
        return async_save(
            leaves, checkpoint_dir, policy=policy, process_group=group, overwrite=True, attributes=attributes
        )

    def gather(self, checkpoint_dir: str | Path) -> Gather:
        """Return the `Gather` of the ranks that save together."""
        what = f"save of sharded leaves to {named(checkpoint_dir)}"
        return torch_gather(self.process_group, self.policy.timeout_s, "leaves", what)

    def _described(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> tuple[Any, dict[str, Any] | None, SavePolicy]:
        """Return this rank's leaves, the attributes with digests of the common half, and the policy with the commit.

        Rank 0 inspects the directory.
        """
        gather = self.gather(checkpoint_dir)
        leaves: list[Any] = []

        def describe() -> tuple[dict[str, Any] | None, Commit] | None:
            leaves.append(leaves_to_save(sharded_state_dict))
            if gather.rank:
                return None
            if self.common_file is not None:
                make_way(checkpoint_dir, COMMON, OBJECTS, access=self.policy.store)
            return attributes_for(checkpoint_dir, self.policy.store), commit_over(checkpoint_dir, self.policy.store)

        attributes, commit = together(gather, describe)[0] or (None, "marker")
        return leaves[0], attributes, attrs.evolve(self.policy, commit=commit)


class ZarrLoadShardedStrategy(ReadsOneFormat, LoadShardedStrategy):
    """Loads `ShardedTensor` and `ShardedObject` leaves, under any sharding of the tensors.

    Parameters
    ----------
    policy
        How to load. Whatever it says, stored keys that the state dict lacks are ignored, and keys that the checkpoint
        lacks are an error; by default a change of data type is an error too.
    process_group
        Ranks that load together; None for the default group.

    Examples
    --------
    >>> ZarrLoadShardedStrategy().can_handle_sharded_objects
    True
    """

    def __init__(self, *, policy: LoadPolicy = LOAD_POLICY, process_group: Any = None) -> None:
        check_policy(self, policy, LoadPolicy)
        self.policy = attrs.evolve(policy, strict=Strict("raise", "ignore"))
        self.process_group = process_group

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Yes."""
        return True

    def reading_once(self, process_group: Any) -> "ZarrLoadShardedStrategy":
        """Return a strategy by which the ranks of a group read each stored chunk once and exchange the pieces."""
        policy = attrs.evolve(self.policy, read_once=True)
        return type(self)(policy=policy, process_group=process_group)

    @advising(SHARDED_HALF)
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Return the state dict with each leaf replaced; tensors that hold data are filled in place.

        Raises
        ------
        CheckpointingException
            On every rank, with all problems at once, before any tensor is changed; corrupt bytes are found later.
        """
        what = f"load of sharded leaves from {named(checkpoint_dir)}"
        gather = torch_gather(self.process_group, self.policy.timeout_s, "load", what)

        def ask() -> Request:
            if gather.rank == 0:
                check_halves(checkpoint_dir, self.policy.store)
            reshaped = any(is_tensor(x) and x.allow_shape_mismatch for x in leaves_of(sharded_state_dict))
            entries = self._manifest(checkpoint_dir).by_key if reshaped else {}
            return Request(sharded_state_dict, {key: entry.spec.shape for key, entry in entries.items()})

        request = agree(gather, ask)
        loaded = load(request.like, checkpoint_dir, policy=self.policy, process_group=self.process_group)
        return request.result(loaded)  # type: ignore[no-any-return]

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return the stored tensors by key, whole and without data."""
        return {key: leaf for key, leaf in self.load_sharded_metadata(checkpoint_dir).items() if is_tensor(leaf)}

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return the stored tensors and objects without data, by key and unique key."""
        return dict(stored_leaves(self._manifest(checkpoint_dir)))

    def _manifest(self, checkpoint_dir: str | Path) -> Manifest:
        return read_manifest(checkpoint_dir, store=self.policy.store)

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove the tensors whose keys begin with `key_prefix`, atomically: a reader sees all of them or none.

        One rank calls it, while no other process saves there.

        Raises
        ------
        CheckpointingException
            If there is no checkpoint, the file system cannot exchange directories, or it lies in an object store.
        """
        stored = self._manifest(checkpoint_dir).by_key
        remove_arrays(checkpoint_dir, [k for k, e in stored.items() if k.startswith(key_prefix) and e.codec is None])


class ZarrSaveCommonStrategy(SaveCommonStrategy):
    """Saves the common half of rank 0: tensors as arrays, plain values as JSON, other objects by ``torch.save``.

    Parameters
    ----------
    backend, version
        Name and version of the format.
    policy
        How to save.

    Examples
    --------
    >>> import tempfile
    >>> path = tempfile.mkdtemp()
    >>> ZarrSaveCommonStrategy().save_common({"step": 3, "betas": (0.9, 0.95)}, path)
    >>> ZarrLoadCommonStrategy().load_common(path)
    {'betas': (0.9, 0.95), 'step': 3}
    """

    def __init__(self, backend: str = BACKEND, version: int = VERSION, *, policy: SavePolicy = SavePolicy()) -> None:
        super().__init__(backend, version)
        check_policy(self, policy, SavePolicy)
        self.policy = attrs.evolve(policy, object_codec="torch", commit="marker")

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Yes."""
        return True

    @advising(COMMON_HALF)
    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Save the common half; all ranks call it.

        Raises
        ------
        CheckpointingException
            On every rank, if it cannot be saved.
        """
        what = f"save of the common half to {named(checkpoint_dir)}"
        gather = torch_gather(None, self.policy.timeout_s, "common", what)

        def write() -> None:
            if gather.rank == 0:
                make_way(checkpoint_dir, COMMON, COMMON_FILE, OBJECTS, access=self.policy.store)
                place = below(checkpoint_dir, COMMON)
                saved = save(_sealed(common_state_dict), place, policy=self.policy, process_group=LocalGather())
                note_common(checkpoint_dir, manifest_digest(saved.to_json()))

        agree(gather, write)

    def save_sharded_objects(self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Save `ShardedObject` leaves, if the sharded strategy does not; all ranks call it."""
        ZarrSaveShardedStrategy(policy=self.policy).save(sharded_objects_state_dict, below(checkpoint_dir, OBJECTS))


class ZarrLoadCommonStrategy(ReadsOneFormat, LoadCommonStrategy):
    """Loads the common half, on every rank.

    Parameters
    ----------
    safe_globals
        Classes that are allowed for objects in it, see `LoadPolicy`.
    store
        How to reach an object store, see `StorePolicy`.
    """

    def __init__(self, *, safe_globals: Any = (), store: StorePolicy = StorePolicy()) -> None:
        self.policy = attrs.evolve(LOAD_POLICY, safe_globals=safe_globals, store=store)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Yes."""
        return True

    @advising(COMMON_HALF)
    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """Return the common half, tensors on the CPU; of a checkpoint of DCP or `save` the plain values.

        Raises
        ------
        CheckpointingException
            If it is missing or corrupt, or holds an object of a class that is not allowed.
        """
        access = self.policy.store
        if is_without_halves(checkpoint_dir, access):
            whole = open_checkpoint(checkpoint_dir, store=access).tree()
            plain = picked(lambda leaf: not isinstance(leaf, StoredArray), whole)
            return plain if isinstance(plain, dict) else {}
        found = open_checkpoint(below(checkpoint_dir, COMMON), store=access)
        state: StateDict = found.state("torch", self.policy.safe_globals)
        return state

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> StateDict:
        """Return the state dict with each `ShardedObject` replaced by the stored object; all ranks call it."""
        strategy = ZarrLoadShardedStrategy(policy=self.policy)
        return strategy.load(sharded_objects_state_dict, below(checkpoint_dir, OBJECTS))

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return the objects that `save_sharded_objects` stored, by their unique keys."""
        stored = read_manifest(below(checkpoint_dir, OBJECTS), store=self.policy.store)
        return {key: leaf for key, leaf in stored_leaves(stored).items() if is_object(leaf)}


def _sealed(common_state_dict: StateDict) -> Any:
    # As a leaf, a numpy array would be loaded as a tensor.
    return map_leaves(lambda x: OpaqueObject(x) if isinstance(x, np.ndarray | np.generic) else x, common_state_dict)


for _action, _strategy in (
    (StrategyAction.SAVE_SHARDED, ZarrSaveShardedStrategy()),
    (StrategyAction.LOAD_SHARDED, ZarrLoadShardedStrategy()),
    (StrategyAction.SAVE_COMMON, ZarrSaveCommonStrategy()),
    (StrategyAction.LOAD_COMMON, ZarrLoadCommonStrategy()),
):
    register_built_in_strategy(_action, BACKEND, VERSION, _strategy)
