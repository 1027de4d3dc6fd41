"""Interfaces of strategies, and the registry of default ones.

A strategy saves or loads one half of a state dict: the sharded leaves, or the common ones.
"""

import importlib
from abc import ABC, abstractmethod
from collections import defaultdict
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from functional_ckpt.errors import NotImplementedYet, PolicyError
from functional_ckpt.torch.megatron.halves import BACKEND, VERSION
from functional_ckpt.torch.megatron.sharded_base import CheckpointingException, ShardedStateDict, StateDict
from functional_ckpt.torch.megatron.strategies.async_calls import AsyncCallsQueue, AsyncRequest

__all__ = [
    "AsyncSaveShardedStrategy",
    "CheckpointingException",
    "LoadCommonStrategy",
    "LoadShardedStrategy",
    "LoadStrategyBase",
    "ReadsOneFormat",
    "SaveCommonStrategy",
    "SaveShardedStrategy",
    "SaveStrategyBase",
    "StrategyAction",
    "async_calls",
    "default_strategies",
    "get_default_save_common_strategy",
    "get_default_save_sharded_strategy",
    "get_default_strategy",
    "register_built_in_strategy",
    "register_default_strategy",
]


class StrategyAction(Enum):
    """The action of a strategy: save or load, and which half of a state dict.

    Examples
    --------
    >>> StrategyAction("save_sharded")
    <StrategyAction.SAVE_SHARDED: 'save_sharded'>
    """

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


class LoadStrategyBase(ABC):
    """Base of strategies that load. The checks raise for formats that the strategy does not read."""

    @abstractmethod
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise unless this strategy reads checkpoints of the backend."""

    @abstractmethod
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise unless this strategy reads this version of the format."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether the strategy also loads `ShardedObject` leaves."""
        return False


class SaveStrategyBase(ABC):  # noqa: B024 - its two subclasses have different abstract methods
    """Base of strategies that save, in the format `backend`, `version`.

    Examples
    --------
    >>> class Nowhere(SaveStrategyBase): ...
    >>> str(Nowhere("null", 1))
    'Nowhere(null, 1)'
    """

    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether the strategy also saves `ShardedObject` leaves."""
        return False

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.backend}, {self.version})"


class ReadsOneFormat(LoadStrategyBase):
    """The checks of strategies that read one version of one format, by default that of functional_ckpt."""

    reads = (BACKEND, VERSION)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise `CheckpointingException` unless this strategy reads the format."""
        if loaded_backend != self.reads[0]:
            raise PolicyError("this strategy reads another format", expected=self.reads[0], found=loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise `CheckpointingException` unless this strategy reads the version."""
        if loaded_version != self.reads[1]:
            raise PolicyError("this strategy reads another version", expected=self.reads[1], found=loaded_version)


class LoadCommonStrategy(LoadStrategyBase):
    """Loads the common half."""

    @abstractmethod
    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """Return the common half."""

    @abstractmethod
    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> StateDict:
        """Return the state dict with each `ShardedObject` replaced by the stored object."""

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return the stored objects without data, by their unique keys.

        Raises
        ------
        NotImplementedError
            If the strategy handles objects and does not define this.
        """
        if not self.can_handle_sharded_objects:
            return {}
        raise _undefined(self, "load_sharded_metadata")


class LoadShardedStrategy(LoadStrategyBase):
    """Loads the sharded half."""

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Return the state dict with each sharded leaf replaced by the stored value."""

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return the stored tensors by key, whole and without data: their global shapes and data types."""

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return the stored tensors and objects without data, by key and unique key.

        Raises
        ------
        NotImplementedError
            If the strategy handles objects and does not define this.
        """
        if not self.can_handle_sharded_objects:
            return self.load_tensors_metadata(checkpoint_dir)
        raise _undefined(self, "load_sharded_metadata")

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove the tensors whose keys begin with `key_prefix`.

        Raises
        ------
        NotImplementedError
            If the strategy does not define this.
        """
        raise _undefined(self, "remove_sharded_tensors")


class SaveCommonStrategy(SaveStrategyBase):
    """Saves the common half."""

    @abstractmethod
    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Save the common half."""

    def save_sharded_objects(self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Save `ShardedObject` leaves.

        Raises
        ------
        NotImplementedError
            If the strategy does not define this.
        """
        raise _undefined(self, "save_sharded_objects")


class SaveShardedStrategy(SaveStrategyBase):
    """Saves the sharded half."""

    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Save the sharded half."""


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """Saves the sharded half in two steps: preparation, and work that can be done in the background."""

    @abstractmethod
    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> AsyncRequest:
        """Prepare a save and return the request, which the caller schedules."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Save now."""
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()


_Strategy: TypeAlias = SaveStrategyBase | LoadStrategyBase

#: Value of the action -> (backend, version) -> strategy. The whole process shares the instances.
default_strategies: defaultdict[str, dict[tuple[str, int], Any]] = defaultdict(dict)

#: The queue of saves in the background.
async_calls = AsyncCallsQueue()

_BUILT_IN = ("functional_ckpt.torch.megatron.strategies.zarr", "functional_ckpt.torch.megatron.strategies.common_file")
_METHODS = {
    StrategyAction.LOAD_COMMON: "load_common",
    StrategyAction.LOAD_SHARDED: "load",
    StrategyAction.SAVE_COMMON: "save_common",
    StrategyAction.SAVE_SHARDED: "save",
}


def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Any:
    """Return the strategy that is registered for an action and a format.

    Raises
    ------
    CheckpointingException
        If there is none.

    Examples
    --------
    >>> get_default_strategy(StrategyAction.LOAD_COMMON, "papyrus", 1)
    Traceback (most recent call last):
    ...
    functional_ckpt.errors.PolicyError: no strategy is registered for ('load_common', 'papyrus', 1)...
    """
    known = default_strategies[_checked(action).value]
    if (backend, version) not in known:
        for name in _BUILT_IN:
            importlib.import_module(name)  # registers the strategies of this library
    if (backend, version) not in known:
        raise PolicyError(
            f"no strategy is registered for {(action.value, backend, version)}",
            found=sorted(known),
            remedy="Register one with register_default_strategy",
        )
    return known[backend, version]


def get_default_save_sharded_strategy(backend: str = BACKEND, version: int = VERSION) -> SaveShardedStrategy:
    """Return the strategy that `save` uses by default for the sharded half.

    Examples
    --------
    >>> str(get_default_save_sharded_strategy())
    'ZarrSaveShardedStrategy(functional_ckpt, 1)'
    """
    return get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)  # type: ignore[no-any-return]


def get_default_save_common_strategy(backend: str = BACKEND, version: int = VERSION) -> SaveCommonStrategy:
    """Return the strategy that `save` uses by default for the common half.

    Examples
    --------
    >>> str(get_default_save_common_strategy())
    'ZarrSaveCommonStrategy(functional_ckpt, 1)'
    """
    return get_default_strategy(StrategyAction.SAVE_COMMON, backend, version)  # type: ignore[no-any-return]


def register_default_strategy(action: StrategyAction, backend: str, version: int, strategy: _Strategy) -> None:
    """Make `strategy` the default for an action and a format; it replaces the one registered before.

    Raises
    ------
    CheckpointingException
        If it lacks the method that the action calls.
    """
    default_strategies[_checked(action, strategy).value][backend, version] = strategy


def register_built_in_strategy(action: StrategyAction, backend: str, version: int, strategy: _Strategy) -> None:
    """Make `strategy` the default unless one is registered: a user's strategy stays, whatever the order of imports.

    Raises
    ------
    CheckpointingException
        If it lacks the method that the action calls.
    """
    default_strategies[_checked(action, strategy).value].setdefault((backend, version), strategy)


_ANY = object()


def _checked(action: StrategyAction, strategy: object = _ANY) -> StrategyAction:
    if not isinstance(action, StrategyAction):
        raise PolicyError(
            "this is not an action of a strategy", expected=[str(a) for a in StrategyAction], found=action
        )
    if strategy is not _ANY and (isinstance(strategy, type) or not callable(getattr(strategy, _METHODS[action], None))):
        raise PolicyError(
            f"a strategy for {action.value} needs a method {_METHODS[action]}",
            found=repr(strategy),
            remedy="Pass an instance",
        )
    return action


def _undefined(strategy: object, method: str) -> NotImplementedYet:
    return NotImplementedYet(f"{type(strategy).__name__} does not define {method}")
