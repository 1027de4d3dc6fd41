"""The exceptions of the library. A call reports all of its problems at once.

A problem says what failed, then key, shape, offset, rank, what was expected and what was found,
and ends with the remedy. Pure code returns problems as values; code with effects raises them.
"""

import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import attrs

__all__ = [
    "AlreadyExistsError",
    "CastError",
    "CheckpointError",
    "CheckpointErrors",
    "CheckpointWarning",
    "CorruptionError",
    "DTypeError",
    "DuplicateKeyError",
    "FormatVersionError",
    "GapError",
    "KeyMismatchError",
    "LayoutError",
    "NotACheckpointError",
    "NotImplementedYet",
    "ObjectCodecError",
    "OutcomeUnknownError",
    "OverlapError",
    "PathNotSharedError",
    "PerRankError",
    "PolicyError",
    "ProblemError",
    "RankFailedError",
    "ReplacedError",
    "ReplicaError",
    "SaveCancelledError",
    "SaveInFlightError",
    "ShapeError",
    "SpecError",
    "StorageError",
    "UnsupportedLeafError",
    "add_notes",
    "changed",
    "forget_locals",
    "raise_problems",
    "report",
]


# Limits of the text of a group of problems; the problems themselves are complete.
_MAX_LINES = 20
_MAX_LINE = 2000


class CheckpointError(Exception):
    """Base of all errors that this library raises.

    Examples
    --------
    >>> issubclass(GapError, CheckpointError) and issubclass(CheckpointErrors, CheckpointError)
    True
    """


class CheckpointWarning(UserWarning):
    """A warning: a difference that a policy allows, or a failure that does not affect the result."""


@attrs.define(slots=False)
class ProblemError(CheckpointError):
    """One problem, with the facts that locate it: `path` of a file or directory, `key`, `chunk` (its file's name)...

    `shape`, `offset`, `expected` and `found` are in elements unless they name another unit; `rank` is one rank or
    several.

    Examples
    --------
    >>> print(GapError("a cell has no writer", "w", shape=(4, 4), offset=(2, 0)))
    a cell has no writer: key 'w', shape (4, 4), offset (2, 0)
    """

    what: str
    key: str | None = None
    rank: int | tuple[int, ...] | None = attrs.field(default=None, kw_only=True)
    shape: tuple[int, ...] | None = attrs.field(default=None, kw_only=True)
    offset: tuple[int, ...] | None = attrs.field(default=None, kw_only=True)
    expected: object = attrs.field(default=None, kw_only=True)
    found: object = attrs.field(default=None, kw_only=True)
    remedy: str | None = attrs.field(default=None, kw_only=True)
    path: str | None = attrs.field(default=None, kw_only=True)
    chunk: str | None = attrs.field(default=None, kw_only=True)

    def __reduce__(self) -> tuple[Any, ...]:
        # Ranks send errors to each other by pickle, which passes positional arguments only.
        return type(self), (self.what,), self.__dict__

    def __str__(self) -> str:
        facts = [
            f"{name} {value!r}" if name == "key" else f"{name} {value}"
            for name in ("path", "key", "chunk", "shape", "offset", "rank", "expected", "found")
            if (value := getattr(self, name)) is not None
        ]
        text = f"{self.what}: {', '.join(facts)}" if facts else self.what
        return f"{text}. {self.remedy}" if self.remedy else text


P = TypeVar("P", bound=ProblemError)


class CheckpointErrors(ExceptionGroup[CheckpointError], CheckpointError):  # noqa: N818 - a plural
    """Several problems at once; ``.exceptions`` holds them, ``except*`` selects among them.

    Examples
    --------
    >>> raise_problems([GapError("a"), OverlapError("b")])
    Traceback (most recent call last):
    ...
    functional_ckpt.errors.CheckpointErrors: 2 problems:
      GapError: a
      OverlapError: b (2 sub-exceptions)
    """

    def derive(self, excs: Sequence[CheckpointError]) -> "CheckpointErrors":  # type: ignore[override]
        """Return a group of `excs` of this type (called by ``split`` and ``except*``)."""
        return CheckpointErrors(self.message, list(excs))


class SpecError(ProblemError, ValueError):
    """The states of the ranks are not consistent."""


class GapError(SpecError):
    """No rank holds some cell of an array."""


class OverlapError(SpecError):
    """Two shards that are not copies of each other hold the same cell of an array."""


class ReplicaError(SpecError):
    """A shard has no main replica, several, or replicas with different content."""


class ShapeError(SpecError):
    """Shapes, offsets or numbers of dimensions disagree or are out of bounds."""


class DTypeError(SpecError):
    """A data type is unknown, unsupported, or differs between ranks."""


class DuplicateKeyError(SpecError):
    """Two leaves have one key, or two keys one node name."""


class UnsupportedLeafError(SpecError, TypeError):
    """A leaf of the state has no representation in the format."""


class PolicyError(ProblemError, ValueError):
    """A policy field, or an argument of a call, has a value that is not allowed."""


class LayoutError(ProblemError):
    """No chunk grid suits the array, the store and the policy."""


class KeyMismatchError(ProblemError, KeyError):
    """A wanted key is not in the checkpoint, or a stored key is not wanted."""

    __str__ = ProblemError.__str__


class CastError(ProblemError, TypeError):
    """Loading would change a data type in a way that the policy forbids."""


class PerRankError(ProblemError):
    """`PerRank` values were saved by another number of ranks, and the policy does not say which rank loads which."""


class ObjectCodecError(ProblemError):
    """An object cannot be pickled, or cannot be read without running code."""


class StorageError(ProblemError):
    """The file system or another store failed (no space, no permission, input/output error)."""


class AlreadyExistsError(StorageError):
    """The target exists and may not be replaced."""


class PathNotSharedError(StorageError):
    """The ranks do not see one directory under the path."""


class NotACheckpointError(StorageError):
    """The path holds no committed checkpoint of this format."""


class FormatVersionError(NotACheckpointError):
    """The checkpoint was written by a newer major version of the format."""


class CorruptionError(StorageError):
    """Stored bytes are missing, have another size, or another digest than was saved."""


class ReplacedError(StorageError):
    """The checkpoint was replaced or removed while it was read; the result is unusable."""


class OutcomeUnknownError(StorageError):
    """The answer to the request that publishes was lost: the path tells whether the checkpoint is there."""


class RankFailedError(ProblemError):
    """Another rank died, does not answer, or failed with an error that is not a `CheckpointError`."""


class SaveCancelledError(ProblemError):
    """The save was cancelled before it was published."""


class SaveInFlightError(ProblemError):
    """An earlier save of this process is still running, and the policy says to refuse another one."""


class NotImplementedYet(ProblemError, NotImplementedError):  # noqa: N818 - reads as a state, not an error
    """An option that is documented, but not implemented in this version."""


def report(text: str) -> None:
    """Issue a `CheckpointWarning` at the line that called this library.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     report("two keys are missing")
    >>> caught[0].category.__name__
    'CheckpointWarning'
    """
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(text, CheckpointWarning, stacklevel=depth)


def add_notes(error: BaseException, notes: Iterable[str]) -> None:
    """Add notes to an error: further failures that it caused.

    Examples
    --------
    >>> error = GapError("a")
    >>> add_notes(error, ["b"])
    >>> error.__notes__
    ['b']
    """
    for note in notes:
        error.add_note(note)


def changed(problem: P, **facts: Any) -> P:
    """Return a copy of a problem with some facts changed; its notes are kept.

    Examples
    --------
    >>> print(changed(GapError("a cell has no writer", "w"), rank=3))
    a cell has no writer: key 'w', rank 3
    """
    other = attrs.evolve(problem, **facts)
    add_notes(other, getattr(problem, "__notes__", ()))
    return other


def forget_locals(error: BaseException, package: str = "") -> None:
    """Clear the local variables of all functions that an error, or one behind it, has left; those of `package` only.

    They refer to what was saved or loaded. Some refer to the error too: such a cycle stays until the collector runs.

    Examples
    --------
    >>> try:
    ...     raise_problems([GapError("a"), GapError("b")])
    ... except CheckpointError as error:
    ...     forget_locals(error, "functional_ckpt")
    ...     print(error.__traceback__.tb_next.tb_frame.f_locals)
    {}
    """
    errors: dict[int, BaseException] = {}
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is None or id(each) in errors:
            continue
        errors[id(each)] = each
        todo += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]
        for frame, _ in traceback.walk_tb(each.__traceback__):
            if str(frame.f_globals.get("__name__")).startswith(package):
                with suppress(RuntimeError):  # it runs
                    frame.clear()


def raise_problems(problems: Iterable[CheckpointError]) -> None:
    """Raise all `problems` at once: one as itself, several as a `CheckpointErrors` group.

    The group holds all problems; its text shows the first few of each kind and counts the others.

    Raises
    ------
    CheckpointError
        If there is any problem.

    Examples
    --------
    >>> raise_problems([])
    """
    found: list[CheckpointError] = []
    for problem in problems:
        inner = problem.exceptions if isinstance(problem, CheckpointErrors) else (problem,)
        found += [error for error in inner if isinstance(error, CheckpointError)]
    if len(found) == 1:
        raise found[0]
    if found:
        raise CheckpointErrors("\n  ".join([f"{len(found)} problems:", *_summary(found)]), found)


def _summary(problems: Sequence[CheckpointError]) -> list[str]:
    """Return a line for each problem if there are few; else for the first problems of each kind and key."""
    kinds: dict[tuple[type, str], dict[str | None, list[CheckpointError]]] = {}
    for problem in problems:
        what, key = (problem.what, problem.key) if isinstance(problem, ProblemError) else (str(problem), None)
        kinds.setdefault((type(problem), what), {}).setdefault(key, []).append(problem)
    # The first key of every kind comes before the second of any, so that no kind displaces another.
    ordered = sorted(
        ((at, key, group) for keys in kinds.values() for at, (key, group) in enumerate(keys.items())),
        key=lambda item: item[0],
    )
    each = 1 if len(ordered) > _MAX_LINES // 3 else 2
    lines: list[str] = []
    remaining = len(problems)
    for _, key, group in ordered:
        shown = group if len(group) <= each + 1 else group[:each]
        if len(lines) + len(shown) + 1 > _MAX_LINES:
            break
        lines += [_shorten(f"{type(problem).__name__}: {problem}") for problem in shown]
        if len(shown) < len(group):
            of_key = "" if key is None else f" of key {key!r}"
            lines.append(_shorten(f"... and {len(group) - len(shown):,} more{of_key}"))
        remaining -= len(group)
    return [*lines, f"... and {remaining:,} more: see .exceptions"] if remaining else lines


def _shorten(line: str) -> str:
    line = line.replace("\n  ", "\n    ")  # a traceback from another rank has lines of its own
    return line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]} ..."
