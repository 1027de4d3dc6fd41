"""One hierarchy for everything that can go wrong, with every problem reported at once.

A problem names what failed, then the key, shape, offset, rank, what was expected and what was
found, and ends with the remedy. Problems are values first (planning returns them) and exceptions
second (the edge raises them).
"""

import sys
import warnings
from collections.abc import Iterable, Sequence
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
    "raise_problems",
    "report",
]


# What a group of problems says in its text; all of it is in the problems themselves.
_MAX_LINES = 20
_MAX_LINE = 2000


class CheckpointError(Exception):
    """Base of every error this library raises on purpose.

    Examples
    --------
    >>> issubclass(GapError, CheckpointError) and issubclass(CheckpointErrors, CheckpointError)
    True
    """


class CheckpointWarning(UserWarning):
    """Something that a policy says to report rather than raise."""


@attrs.define(slots=False)
class ProblemError(CheckpointError):
    """One problem, with the facts that locate it: `path` of a file or directory, `key`, `chunk` (its file's name)...

    `shape`, `offset` and what is `expected` or `found` are in elements unless they say otherwise; `rank` is one rank or
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
        # Errors travel between ranks by pickle, which knows positional arguments only.
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
    """What the ranks say they hold is not one consistent state."""


class GapError(SpecError):
    """A cell of an array is held by nobody."""


class OverlapError(SpecError):
    """A cell of an array is written by two different shards."""


class ReplicaError(SpecError):
    """A shard has no main replica, several, or replicas with different content."""


class ShapeError(SpecError):
    """Shapes, offsets or ranks (numbers of dimensions) disagree or are out of bounds."""


class DTypeError(SpecError):
    """A data type is unknown, unsupported, or differs between ranks."""


class DuplicateKeyError(SpecError):
    """Two leaves claim one key, or two keys claim one node name."""


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
    """Values that differ by rank cannot be dealt to another number of ranks by themselves."""


class ObjectCodecError(ProblemError):
    """An object cannot be written, or not read safely, with the codec at hand."""


class StorageError(ProblemError):
    """The storage below failed (no space, no permission, input/output error)."""


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
    """The checkpoint was replaced or removed while it was read; what was read of it is nothing."""


class OutcomeUnknownError(StorageError):
    """The answer to the request that publishes was lost: the path tells whether the checkpoint is there."""


class RankFailedError(ProblemError):
    """Another rank failed with an error that is not ours, or died."""


class SaveCancelledError(ProblemError):
    """The save was cancelled before it was published."""


class SaveInFlightError(ProblemError):
    """An earlier save of this process is still running, and the policy says to refuse another one."""


class NotImplementedYet(ProblemError, NotImplementedError):  # noqa: N818 - reads as a state, not an error
    """A documented option that this version does not build yet."""


def report(text: str) -> None:
    """Warn of something at the line that called this library.

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
    """Say with an error what else has failed because of it.

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
    """Return a problem with other facts, and the notes that were added to it.

    Examples
    --------
    >>> print(changed(GapError("a cell has no writer", "w"), rank=3))
    a cell has no writer: key 'w', rank 3
    """
    other = attrs.evolve(problem, **facts)
    add_notes(other, getattr(problem, "__notes__", ()))
    return other


def raise_problems(problems: Iterable[CheckpointError]) -> None:
    """Raise all `problems` at once: one as itself, several as a `CheckpointErrors` group.

    The group holds all of them; its text tells the first few of each kind, and counts the others.

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
        raise CheckpointErrors("\n  ".join([f"{len(found)} problems:", *_told(found)]), found)


def _told(problems: Sequence[CheckpointError]) -> list[str]:
    """Return a line for each problem, if they are few; else for the first of each kind and, of a kind, of each key."""
    kinds: dict[tuple[type, str], dict[str | None, list[CheckpointError]]] = {}
    for problem in problems:
        what, key = (problem.what, problem.key) if isinstance(problem, ProblemError) else (str(problem), None)
        kinds.setdefault((type(problem), what), {}).setdefault(key, []).append(problem)
    # One key of each kind after the other, so that many of one kind hide none of another.
    ordered = sorted(
        ((at, key, group) for keys in kinds.values() for at, (key, group) in enumerate(keys.items())),
        key=lambda item: item[0],
    )
    each = 1 if len(ordered) > _MAX_LINES // 3 else 2
    lines: list[str] = []
    untold = len(problems)
    for _, key, group in ordered:
        shown = group if len(group) <= each + 1 else group[:each]
        if len(lines) + len(shown) + 1 > _MAX_LINES:
            break
        lines += [_short(f"{type(problem).__name__}: {problem}") for problem in shown]
        if len(shown) < len(group):
            of_key = "" if key is None else f" of key {key!r}"
            lines.append(_short(f"... and {len(group) - len(shown):,} more{of_key}"))
        untold -= len(group)
    return [*lines, f"... and {untold:,} more: see .exceptions"] if untold else lines


def _short(line: str) -> str:
    line = line.replace("\n  ", "\n    ")  # a traceback from another rank has lines of its own
    return line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]} ..."
