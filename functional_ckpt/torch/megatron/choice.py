"""The choice of strategies: those that are passed, those registered under a name, or those that a checkpoint names."""

from pathlib import Path
from typing import Any

from functional_ckpt.errors import NotACheckpointError, PolicyError
from functional_ckpt.store.access import StorePolicy
from functional_ckpt.store.foreign import why_not
from functional_ckpt.store.opening import directory_of, open_store
from functional_ckpt.torch.megatron.halves import BACKEND, VERSION, check_halves, format_of
from functional_ckpt.torch.megatron.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
)

__all__ = ["access_of", "get_default_load_sharded_strategy", "loaders_of", "savers_of", "strategy_for"]


def access_of(*strategies: Any) -> StorePolicy:
    """Return how to reach an object store, of the first strategy that says so.

    Examples
    --------
    >>> from functional_ckpt import LoadPolicy
    >>> from functional_ckpt.torch.megatron.strategies.zarr import ZarrLoadShardedStrategy
    >>> policy = LoadPolicy(store=StorePolicy(concurrency=8))
    >>> access_of(None, ZarrLoadShardedStrategy(policy=policy)).concurrency
    8
    """
    silent = StorePolicy()
    for strategy in strategies:
        inner = getattr(strategy, "base_strategy", strategy)
        found = getattr(getattr(inner, "policy", inner), "store", silent)
        if isinstance(found, StorePolicy) and found != silent:
            return found
    return silent


def strategy_for(action: StrategyAction, wanted: Any, kind: type[Any]) -> Any:
    """Return the strategy `wanted`, or the one that is registered under this name and version.

    Raises
    ------
    CheckpointingException
        If it is not a strategy of that kind.
    """
    found = get_default_strategy(action, *wanted) if isinstance(wanted, tuple) else wanted
    if not isinstance(found, kind):
        raise PolicyError(f"this is not a strategy for {action.value}", expected=kind.__name__, found=repr(found))
    return found


def savers_of(
    sharded_strategy: Any, common_strategy: Any, in_background: bool
) -> tuple[SaveShardedStrategy, SaveCommonStrategy]:
    """Return the strategies that save the two halves of a state dict: the built-in ones for None.

    Raises
    ------
    PolicyError
        If the strategy of the sharded half cannot save in the background, and is to.
    """
    built_in = (BACKEND, VERSION)
    sharded_saver = strategy_for(StrategyAction.SAVE_SHARDED, sharded_strategy or built_in, SaveShardedStrategy)
    common_saver = strategy_for(StrategyAction.SAVE_COMMON, common_strategy or built_in, SaveCommonStrategy)
    if in_background and not isinstance(sharded_saver, AsyncSaveShardedStrategy):
        raise PolicyError(
            "this strategy cannot save in the background",
            found=str(sharded_saver),
            remedy="Pass a strategy with async_save, or async_sharded_save=False",
        )
    return sharded_saver, common_saver


def loaders_of(
    checkpoint_dir: str | Path, sharded_strategy: Any, common_strategy: Any, checks: bool = True
) -> tuple[LoadShardedStrategy, LoadCommonStrategy]:
    """Return the strategies that load the two halves of the checkpoint in a directory.

    Raises
    ------
    CheckpointingException
        If there is no checkpoint, the halves are of different saves, or the strategies do not read its format.
    """
    access = access_of(sharded_strategy, common_strategy)
    config = format_of(checkpoint_dir, access)
    if config is None:
        directory = directory_of(checkpoint_dir)
        there = directory is None or directory.is_dir()
        reason = why_not(open_store(checkpoint_dir, access=access), None)
        raise NotACheckpointError(
            "this is not a distributed checkpoint" if there else "the checkpoint directory does not exist",
            path=str(checkpoint_dir),
            found=f"no metadata.json; {reason.found}" if there else None,
            remedy=reason.remedy,
        )
    kept = (config.sharded_backend, config.sharded_backend_version)
    common = (config.common_backend, config.common_backend_version)
    sharded_loader = strategy_for(StrategyAction.LOAD_SHARDED, sharded_strategy or kept, LoadShardedStrategy)
    common_loader = strategy_for(StrategyAction.LOAD_COMMON, common_strategy or common, LoadCommonStrategy)
    for loader, (backend, version) in ((sharded_loader, kept), (common_loader, common)):
        loader.check_backend_compatibility(backend)
        loader.check_version_compatibility(version)
    if config.sharded_backend == BACKEND and checks:
        check_halves(checkpoint_dir, access)
    return sharded_loader, common_loader


def get_default_load_sharded_strategy(checkpoint_dir: str | Path) -> LoadShardedStrategy:
    """Return the strategy that `load` uses by default for the sharded half of a checkpoint.

    Raises
    ------
    CheckpointingException
        If there is no checkpoint.
    """
    return loaders_of(checkpoint_dir, None, None)[0]
