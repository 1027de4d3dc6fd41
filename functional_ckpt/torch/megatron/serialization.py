"""Save and load state dicts with sharded leaves, by the names of ``megatron.core.dist_checkpointing.serialization``.

A state dict has three kinds of leaves: sharded ones, local ones (`LocalNonpersistentObject`, never stored), and common
ones, which rank 0 stores. The functions do not change the caller's dicts and lists.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from functional_ckpt.api import named
from functional_ckpt.errors import (
    AlreadyExistsError,
    CorruptionError,
    ReplacedError,
    SpecError,
)
from functional_ckpt.run.comm import TIMEOUT_S, Gather, agree, turn_of
from functional_ckpt.store.access import StorePolicy
from functional_ckpt.store.base import Store, storage_errors
from functional_ckpt.store.opening import directory_of, open_store
from functional_ckpt.torch.group.link import torch_gather
from functional_ckpt.torch.megatron.choice import (
    access_of,
    get_default_load_sharded_strategy,
    loaders_of,
    savers_of,
)
from functional_ckpt.torch.megatron.core import CheckpointingConfig, read_config, write_config
from functional_ckpt.torch.megatron.halves import make_way, root_of
from functional_ckpt.torch.megatron.sharded_base import CommonStateDict, ShardedStateDict, StateDict
from functional_ckpt.torch.megatron.state_parts import Parts, assembled, objects_of, tensors_of
from functional_ckpt.torch.megatron.strategies.async_calls import AsyncRequest
from functional_ckpt.torch.megatron.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    get_default_save_common_strategy,
    get_default_save_sharded_strategy,
)
from functional_ckpt.torch.megatron.strategies.fully_parallel import knowing
from functional_ckpt.torch.megatron.validation import (
    StrictHandling,
    check_integrity,
    find_mismatches,
    parse_strict_flag,
    report_mismatches,
    validate_sharding_integrity,
)

__all__ = [
    "CkptShardedMetadata",
    "StrictHandling",
    "get_default_load_sharded_strategy",
    "get_default_save_common_strategy",
    "get_default_save_sharded_strategy",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
]

#: Key or unique key -> `ShardedTensor` or `ShardedObject` without data.
CkptShardedMetadata: TypeAlias = dict[str, Any]
_Named: TypeAlias = tuple[str, int] | None

_CONTENT = "content_metadata"


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: SaveShardedStrategy | _Named = None,
    common_strategy: SaveCommonStrategy | _Named = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict] | None = None,
    content_metadata: dict[str, Any] | None = None,
) -> AsyncRequest | None:
    """Save a state dict; all ranks of the default process group call it.

    The checkpoint exists once its root exists; ``metadata.json``, which Megatron looks for, follows. A checkpoint that
    is in the directory already is replaced: while that happens, the directory holds no complete checkpoint.

    Parameters
    ----------
    sharded_state_dict
        The state of this rank.
    checkpoint_dir
        Directory, created if necessary. It must not hold a checkpoint of another format.
    sharded_strategy, common_strategy
        A strategy, or the ``(backend, version)`` of a registered one; the built-in ones if None.
    validate_access_integrity
        Check before writing that the main copies cover every tensor exactly once, and log where the common half differs
        between ranks.
    async_sharded_save
        Return a request, to be scheduled by the caller; the tensors may be changed at once.
    preprocess_common_before_consistancy_check
        Function that gets a copy of the common half and returns the part to compare.
    content_metadata
        Stored with the common half, for `load_content_metadata`.

    Raises
    ------
    CheckpointingException
        On every rank, with all problems at once.

    Examples
    --------
    >>> import tempfile, torch
    >>> from functional_ckpt.torch.megatron.mapping import ShardedTensor
    >>> path = tempfile.mkdtemp()
    >>> save({"w": ShardedTensor.from_rank_offsets("w", torch.arange(4)), "step": 3}, path)
    >>> tail = ShardedTensor("w", None, torch.int64, (2,), (4,), (2,), None)
    >>> load({"w": tail}, path, validate_access_integrity=False)
    {'step': 3, 'w': tensor([2, 3])}
    """
    sharded_saver, common_saver = savers_of(sharded_strategy, common_strategy, async_sharded_save)
    access = access_of(sharded_saver, common_saver)
    state = {**sharded_state_dict, _CONTENT: content_metadata} if content_metadata is not None else sharded_state_dict
    gather = _gather("save", checkpoint_dir)
    with turn_of(gather):
        parts = agree(gather, lambda: Parts.of(state))
        held = None
        if validate_access_integrity:
            held = check_integrity(parts.sharded, parts.common, gather, preprocess_common_before_consistancy_check)
        # Once: a relative path may mean another place when the save ends.
        store = agree(gather, lambda: _cleared(checkpoint_dir, sharded_saver.backend, access, gather.rank == 0))
        common_saver.save_common(parts.common, checkpoint_dir)
        sharded = parts.sharded
        if not sharded_saver.can_handle_sharded_objects:
            common_saver.save_sharded_objects(objects_of(sharded), checkpoint_dir)
            sharded = tensors_of(sharded)
        config = CheckpointingConfig(
            sharded_saver.backend, sharded_saver.version, common_saver.backend, common_saver.version
        )

        def finish() -> None:
            if gather.rank == 0:
                write_config(config, store)

        if async_sharded_save and isinstance(sharded_saver, AsyncSaveShardedStrategy):
            with knowing(sharded_saver, held):
                request = sharded_saver.async_save(sharded, checkpoint_dir)
            request.add_finalize_fn(finish)
            return request
        with knowing(sharded_saver, held):
            sharded_saver.save(sharded, checkpoint_dir)
        agree(gather, finish)
    return None


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | _Named = None,
    common_strategy: LoadCommonStrategy | _Named = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load a checkpoint; all ranks of the default process group call it.

    Parameters
    ----------
    sharded_state_dict
        The request of this rank: sharded leaves are replaced by the stored values (tensors with data are filled in
        place), local ones by their object. Common leaves are ignored.
    checkpoint_dir
        Directory of the checkpoint.
    sharded_strategy, common_strategy
        A strategy, or the ``(backend, version)`` of a registered one; by default those that the checkpoint names.
    validate_access_integrity
        Check that the main copies of all ranks cover every wanted tensor once.
    strict
        How to handle keys that only the request or only the checkpoint has, see `StrictHandling`.

    Returns
    -------
        The whole common half and the requested leaves; under ``RETURN_UNEXPECTED`` and ``RETURN_ALL`` also the missing
        keys (which no rank requests) and this rank's unexpected keys.

    Raises
    ------
    CheckpointingException
        On every rank, with all problems at once.
    """
    gather = _gather("load", checkpoint_dir)
    with turn_of(gather):
        mode = agree(gather, lambda: parse_strict_flag(strict))
        first, access = gather.rank == 0, access_of(sharded_strategy, common_strategy)
        root, loaders = agree(
            gather,
            lambda: (
                root_of(checkpoint_dir, access) if first else None,
                loaders_of(checkpoint_dir, sharded_strategy, common_strategy, first),
            ),
        )
        sharded_loader, common_loader = loaders
        common = agree(gather, lambda: common_loader.load_common(checkpoint_dir))
        parts = agree(gather, lambda: Parts.of(sharded_state_dict))
        missing: set[str] = set()
        unexpected: set[str] = set()
        if StrictHandling.requires_explicit_ckpt_mismatch_check(mode):
            stored = agree(gather, lambda: _metadata(checkpoint_dir, *loaders))
            missing, unexpected = find_mismatches(parts.sharded, stored, mode, gather)
            report_mismatches(missing, unexpected, mode, gather)
            parts = parts.without(unexpected)
            if mode is StrictHandling.IGNORE_ALL:
                unexpected = set()
        if validate_access_integrity:
            validate_sharding_integrity(parts.sharded, gather)
        sharded = parts.sharded
        found: list[Any] = []
        if not sharded_loader.can_handle_sharded_objects:
            found.append(common_loader.load_sharded_objects(objects_of(sharded), checkpoint_dir))
            sharded = tensors_of(sharded)
        found.append(sharded_loader.load(sharded, checkpoint_dir))

        def finish() -> StateDict:
            if first:
                _require_root(checkpoint_dir, root, access)
            return assembled(common, found, parts)

        result = agree(gather, finish)
        return (result, missing, unexpected) if mode.returns_keys else result


def load_common_state_dict(checkpoint_dir: str | Path) -> StateDict:
    """Return the common half; any rank may call it alone.

    Raises
    ------
    CheckpointingException
        If there is no checkpoint.
    """
    _, common_loader = loaders_of(checkpoint_dir, None, None)
    return common_loader.load_common(checkpoint_dir)


def load_tensors_metadata(
    checkpoint_dir: str | Path, sharded_strategy: LoadShardedStrategy | None = None
) -> CkptShardedMetadata:
    """Return the stored tensors by key, whole and without data: their global shapes and data types.

    Raises
    ------
    CheckpointingException
        If there is no checkpoint.
    """
    sharded_loader, _ = loaders_of(checkpoint_dir, sharded_strategy, None)
    return sharded_loader.load_tensors_metadata(checkpoint_dir)


def load_sharded_metadata(
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | None = None,
    common_strategy: LoadCommonStrategy | None = None,
) -> CkptShardedMetadata:
    """Return the stored tensors and objects without data, by key and unique key. `load` takes it as a state dict.

    Raises
    ------
    CheckpointingException
        If there is no checkpoint.
    """
    return _metadata(checkpoint_dir, *loaders_of(checkpoint_dir, sharded_strategy, common_strategy))


def load_plain_tensors(checkpoint_dir: str | Path) -> StateDict:
    """Return all stored tensors, whole, by key; all ranks call it, and each gets everything.

    Raises
    ------
    CheckpointingException
        If there is no checkpoint.

    Examples
    --------
    >>> import tempfile, torch
    >>> from functional_ckpt.torch.megatron.mapping import ShardedTensor
    >>> path = tempfile.mkdtemp()
    >>> save({"any": ShardedTensor.from_rank_offsets("w", torch.arange(4)), "step": 3}, path)
    >>> load_plain_tensors(path)
    {'w': tensor([0, 1, 2, 3])}
    """
    sharded_loader, _ = agree(_gather("load", checkpoint_dir), lambda: loaders_of(checkpoint_dir, None, None))
    return sharded_loader.load(sharded_loader.load_tensors_metadata(checkpoint_dir), checkpoint_dir)


def load_content_metadata(
    checkpoint_dir: str | Path | None = None, *, preloaded_state_dict: StateDict | None = None
) -> dict[str, Any] | None:
    """Return the `content_metadata` that was passed to `save`, or None.

    Parameters
    ----------
    checkpoint_dir
        Directory of the checkpoint.
    preloaded_state_dict
        The common half, if it is loaded already.

    Raises
    ------
    CheckpointingException
        If neither is given (a ``ValueError`` too), or there is no checkpoint.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise SpecError("neither a checkpoint nor a loaded state dict was passed")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    return preloaded_state_dict.get(_CONTENT)


def remove_sharded_tensors(checkpoint_dir: str | Path, key_prefix: str) -> None:
    """Remove the tensors whose keys begin with `key_prefix`; one rank calls it.

    Raises
    ------
    CheckpointingException
        If there is no checkpoint, or it cannot be changed in one step.

    Examples
    --------
    >>> import tempfile, torch
    >>> from functional_ckpt.torch.megatron.mapping import ShardedTensor
    >>> path = tempfile.mkdtemp()
    >>> save({name: ShardedTensor.from_rank_offsets(name, torch.ones(2)) for name in ("w", "optimizer.w")}, path)
    >>> remove_sharded_tensors(path, "optimizer.")
    >>> list(load_tensors_metadata(path))
    ['w']
    """
    sharded_loader, _ = loaders_of(checkpoint_dir, None, None)
    sharded_loader.remove_sharded_tensors(checkpoint_dir, key_prefix)


def _gather(purpose: str, checkpoint_dir: str | Path) -> Gather:
    # Lanes of their own: the functions called below use other lanes, with calls of their own.
    return torch_gather(None, TIMEOUT_S, f"serialization.{purpose}", f"{purpose} of {named(checkpoint_dir)}")


def _metadata(
    checkpoint_dir: str | Path, sharded_loader: LoadShardedStrategy, common_loader: LoadCommonStrategy
) -> CkptShardedMetadata:
    found = sharded_loader.load_sharded_metadata(checkpoint_dir)
    if not sharded_loader.can_handle_sharded_objects:
        found = {**found, **common_loader.load_sharded_metadata(checkpoint_dir)}
    return found


def _require_root(checkpoint_dir: str | Path, root: bytes | None, access: StorePolicy) -> None:
    if root_of(checkpoint_dir, access) != root:
        raise ReplacedError(
            "the checkpoint was replaced or removed while its halves were loaded",
            path=str(checkpoint_dir),
            remedy="If it was overwritten, load it again",
        )


def _cleared(checkpoint_dir: str | Path, backend: str, access: StorePolicy, coordinates: bool) -> Store:
    """Create the directory, or invalidate the checkpoint in it; raise if that has another format. Return its store."""
    store, directory = open_store(checkpoint_dir, access=access), directory_of(checkpoint_dir)
    if not coordinates:
        return store
    try:
        found = read_config(store)
    except CorruptionError:  # damaged: no valid checkpoint
        found = None
    if found is not None and found.sharded_backend != backend:
        raise AlreadyExistsError(
            "the directory holds a checkpoint of another format",
            path=store.url,
            expected=backend,
            found=found.sharded_backend,
            remedy="Save to another directory",
        )
    if directory is not None:
        with storage_errors("creating the directory to save to", store.url):
            directory.mkdir(parents=True, exist_ok=True)
    make_way(checkpoint_dir, access=access)
    return store
