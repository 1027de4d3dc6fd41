"""Communication is an argument: `Gather`, and the one way in which ranks fail together."""

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Protocol, TypeVar, runtime_checkable

import attrs

from functional_ckpt.errors import (
    CheckpointError,
    CheckpointErrors,
    ProblemError,
    RankFailedError,
    StorageError,
    changed,
    forget_locals,
    raise_problems,
)
from functional_ckpt.store.exchange import LocalExchange

__all__ = ["TIMEOUT_S", "Gather", "GatherOnly", "LocalGather", "agree", "lane_of", "together", "turn_of"]

T = TypeVar("T")

#: How long a rank waits for the others, in seconds, unless a policy says otherwise.
TIMEOUT_S = 600.0


@runtime_checkable
class Gather(Protocol):
    """A group of processes: the rank of this process, their number, and an exchange of values.

    `all_gather` is called by all ranks in the same order and returns the values of all ranks in rank order. It
    raises when a peer has died or does not answer in time.
    """

    @property
    def rank(self) -> int:
        """Position of this process in the group."""

    @property
    def size(self) -> int:
        """Number of processes in the group."""

    def all_gather(self, value: Any) -> list[Any]:
        """Return the `value` of each rank."""


@attrs.frozen
class LocalGather(LocalExchange):
    """A group of one process, as a `Gather` and as an `Exchange`; `members` are the numbers that meshes use for it.

    Examples
    --------
    >>> LocalGather().all_gather("x")
    ['x']
    """

    members: tuple[int, ...] | None = None

    def all_gather(self, value: Any) -> list[Any]:
        """Return ``[value]``."""
        return [value]


@attrs.frozen
class GatherOnly:
    """A group that agrees, but exchanges no data: pieces of a chunk then go to storage one by one.

    Examples
    --------
    >>> from functional_ckpt.store.exchange import Exchange
    >>> isinstance(GatherOnly(LocalGather()), Exchange)
    False
    """

    gather: Gather

    @property
    def rank(self) -> int:
        """Position of this process in the group."""
        return self.gather.rank

    @property
    def size(self) -> int:
        """Number of processes in the group."""
        return self.gather.size

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """The lock that a thread holds during a call of several steps."""
        return turn_of(self.gather)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the `value` of each rank."""
        return self.gather.all_gather(value)


def turn_of(gather: Gather) -> AbstractContextManager[Any]:
    """Return the lock that a thread holds during a call of several steps, if threads of this rank must take turns.

    Examples
    --------
    >>> with turn_of(LocalGather()):
    ...     LocalGather().all_gather(1)
    [1]
    """
    turn: AbstractContextManager[Any] = getattr(gather, "turn", nullcontext())
    return turn


def lane_of(gather: Gather) -> object:
    """Return an object that is the same for calls which must follow one another; None for a process alone.

    Examples
    --------
    >>> lane_of(LocalGather()) is None
    True
    """
    return getattr(gather, "lane", gather if gather.size > 1 else None)


def agree(gather: Gather, function: Callable[[], T]) -> T:
    """Run `function` on every rank and return this rank's result; if any rank fails, every rank raises.

    Ranks exchange only problems; `together` also exchanges the results.

    Examples
    --------
    >>> agree(LocalGather(), lambda: 3)
    3
    """
    mine: list[T] = []
    together(gather, lambda: mine.append(function()))
    return mine[0]


@attrs.frozen
class _Outcome:
    value: Any
    problems: tuple[CheckpointError, ...]


def together(gather: Gather, function: Callable[[], T]) -> list[T]:
    """Run `function` on every rank and return the results of all; if any rank fails, every rank raises.

    An error that all ranks report alike is raised once; one that only some report names them.

    Raises
    ------
    CheckpointError
        The problems of all ranks, on all ranks.

    Examples
    --------
    >>> together(LocalGather(), lambda: 3)
    [3]
    """
    cause: BaseException | None = None
    try:
        mine = _Outcome(function(), ())
    except BaseException as error:
        forget_locals(error, "functional_ckpt")
        cause, mine = error, _Outcome(None, _portable(error))
    try:
        return _outcomes(gather, mine, cause)
    except BaseException as error:
        forget_locals(error, "functional_ckpt")
        raise
    finally:
        del cause, mine  # the error refers to this function


def _outcomes(gather: Gather, mine: _Outcome, cause: BaseException | None) -> list[Any]:
    """Return the results of all ranks, or raise; `cause` is why this rank has failed."""
    try:
        outcomes: list[_Outcome] = gather.all_gather(mine)
    except CheckpointError as error:
        if cause is None:
            raise
        raise error from cause
    except Exception as error:
        raise RankFailedError(
            "the group of ranks broke while they agreed or exchanged data",
            rank=gather.rank,
            found=str(error),
            remedy="A rank died or did not answer within the policy's timeout_s",
        ) from (cause or error)
    if cause is not None and (gather.size == 1 or not isinstance(cause, Exception)):
        _raise_own(cause)
    _raise_merged([o.problems for o in outcomes], cause)
    return [o.value for o in outcomes]


def _raise_own(cause: BaseException) -> NoReturn:
    """Raise the error of a process alone; only errors of the operating system are wrapped."""
    if isinstance(cause, OSError):
        raise _portable(cause)[0] from cause
    raise cause


def _raise_merged(problems: Sequence[tuple[CheckpointError, ...]], cause: BaseException | None) -> None:
    reporters: dict[tuple[str, str], list[int]] = {}
    first: dict[tuple[str, str], CheckpointError] = {}
    for rank, found in enumerate(problems):
        for problem in found:
            name = (type(problem).__name__, str(problem))
            first.setdefault(name, problem)
            reporters.setdefault(name, []).append(rank)
    everyone = len(problems)
    merged = [
        problem if len(set(reporters[name])) == everyone else _named(problem, tuple(sorted(set(reporters[name]))))
        for name, problem in first.items()
    ]
    if merged and cause is not None and not isinstance(cause, CheckpointError):
        try:
            raise_problems(merged)
        except CheckpointError as error:
            raise error from cause
    raise_problems(merged)


def _named(problem: CheckpointError, ranks: tuple[int, ...]) -> CheckpointError:
    """Return `problem` with the ranks that reported it, unless it names ranks already."""
    if isinstance(problem, ProblemError) and problem.rank is None:
        return changed(problem, rank=ranks[0] if len(ranks) == 1 else ranks)
    return problem


def _portable(error: BaseException) -> tuple[CheckpointError, ...]:
    if isinstance(error, CheckpointErrors):
        return tuple(e for e in error.exceptions if isinstance(e, CheckpointError))
    if isinstance(error, CheckpointError):
        return (error,)
    if isinstance(error, OSError):
        return (StorageError("storage failed", found=f"{type(error).__name__}: {error}"),)
    text = "".join(traceback.format_exception(error)).strip()
    return (RankFailedError(f"a rank failed with {type(error).__name__}", found=str(error), remedy=text),)
