"""The base class of sharded leaves, and the type aliases of state dicts."""

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Self, TypeAlias

import torch.distributed as dist

from functional_ckpt.errors import CheckpointError, ProblemError, SpecError

__all__ = [
    "CheckpointingException",
    "CommonStateDict",
    "ReplicaId",
    "ShardedBase",
    "ShardedStateDict",
    "StateDict",
    "about",
    "is_main_replica",
    "logger",
    "of_megatron",
    "warn_once",
]

logger = logging.getLogger("functional_ckpt.torch.megatron.mapping")

#: A state dict without sharded leaves.
StateDict: TypeAlias = dict[str, Any]
#: The part of a state dict that is equal on all ranks.
CommonStateDict: TypeAlias = dict[str, Any]
#: A state dict with sharded leaves.
ShardedStateDict: TypeAlias = dict[str, Any]
#: Distinguishes the copies of one shard; 0, or all zeros, is the main copy.
ReplicaId: TypeAlias = int | tuple[int, ...]

#: Megatron's name for the base of its errors.
CheckpointingException = CheckpointError

# The warnings that this process has logged.
_logged_deprecations: dict[str, bool] = {}
# The classes of leaves that are registered with Megatron's.
_introduced: set[type] = set()


class ShardedBase(ABC):
    """A leaf of a state dict that is a part of something global.

    Examples
    --------
    >>> ShardedBase()
    Traceback (most recent call last):
    ...
    TypeError: Can't instantiate abstract class ShardedBase with abstract methods ...
    """

    key: str
    data: object
    replica_id: ReplicaId

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Register the class with Megatron's, if imported: otherwise Megatron would pickle rank 0's data as common."""
        if cls not in _introduced:
            _introduce(cls)
        return super().__new__(cls)

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raise `CheckpointingException` if the fields contradict each other."""

    @abstractmethod
    def without_data(self) -> "ShardedBase":
        """Return a copy whose `data` is None."""


def of_megatron(name: str) -> Any:
    """Return a class of Megatron by its name, or None if the process has not imported it.

    Examples
    --------
    >>> of_megatron("NoSuchLeaf") is None
    True
    """
    return getattr(sys.modules.get("megatron.core.dist_checkpointing.mapping"), name, None)


def _introduce(cls: type) -> None:
    """Register a class of leaves as a virtual subclass of Megatron's, whose leaves are abstract base classes."""
    known = [(base, of_megatron(base.__name__)) for base in cls.__mro__ if base.__module__.startswith(__package__)]
    for ours, theirs in known:
        if theirs is not None:
            theirs.register(ours)
            _introduced.add(cls)


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Tell whether a replica id is that of the main copy: 0, or an iterable of zeros.

    Examples
    --------
    >>> is_main_replica(0), is_main_replica((0, 0)), is_main_replica((0, 1))
    (True, True, False)
    """
    parts = replica_id if isinstance(replica_id, Iterable) else (replica_id,)
    return all(part == 0 for part in parts)


def warn_once(text: str) -> None:
    """Log a warning once per process."""
    if text not in _logged_deprecations:
        _logged_deprecations[text] = True
        logger.warning(text)


class about:  # noqa: N801 - used like a function; a generator-based context manager costs more than the code within it
    """Add `key` and this rank to problems without a key, and turn type errors into a `SpecError`.

    Examples
    --------
    >>> with about("w"):
    ...     raise SpecError("too long")
    Traceback (most recent call last):
    ...
    functional_ckpt.errors.SpecError: too long: key 'w'
    """

    def __init__(self, key: object) -> None:
        self.key = key

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ProblemError):
            error.key = str(self.key) if error.key is None else error.key
            error.rank = _own_rank() if error.rank is None else error.rank
        elif isinstance(error, TypeError | ValueError):
            raise SpecError(
                "a field has a value of the wrong type", str(self.key), rank=_own_rank(), found=str(error)
            ) from error


def _own_rank() -> int | None:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None
