"""Checks of a whole world and of its keys. They return all problems as values."""

from collections import Counter
from collections.abc import Iterable, Sequence

from functional_ckpt.errors import (
    DTypeError,
    DuplicateKeyError,
    GapError,
    OverlapError,
    ProblemError,
    ShapeError,
)
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.table import Conflict
from functional_ckpt.spec.tiling import check_tiling

__all__ = ["check_conflicts", "check_cover", "check_unique_keys"]


def check_conflicts(conflicts: Iterable[Conflict]) -> list[ProblemError]:
    """Return a problem for each array that two ranks describe differently; it names both ranks.

    Examples
    --------
    >>> a, b = ArraySpec("w", (2,), "int8"), ArraySpec("w", (3,), "int8")
    >>> print(check_conflicts([Conflict(0, a, 3, b)])[0])  # doctest: +ELLIPSIS
    ranks disagree about the shape of an array: key 'w', rank (0, 3), expected (2,), found (3,). Parts of one array ...
    """
    problems: list[ProblemError] = []
    for conflict in conflicts:
        first, other, ranks = conflict.spec, conflict.other, (conflict.rank, conflict.other_rank)
        if other.shape != first.shape:
            problems.append(
                ShapeError(
                    "ranks disagree about the shape of an array",
                    first.key,
                    rank=ranks,
                    expected=first.shape,
                    found=other.shape,
                    remedy="Parts of one array need its global shape (DTensor, LocalShards); "
                    "arrays that differ by rank need a key for each rank",
                )
            )
        else:
            problems.append(
                DTypeError(
                    "ranks disagree about the data type of an array",
                    first.key,
                    rank=ranks,
                    shape=first.shape,
                    expected=first.dtype,
                    found=other.dtype,
                    remedy="Convert it to one data type on all ranks",
                )
            )
    return problems


def check_cover(array: ArraySpec, writes: Sequence[tuple[int, Box]]) -> list[ProblemError]:
    """Return a problem for an overlap and one for a gap between ``(rank, box)`` pieces of `array`.

    Examples
    --------
    >>> w = ArraySpec("w", (4,), "int8")
    >>> [type(p).__name__ for p in check_cover(w, [(0, Box((0,), (3,))), (1, Box((2,), (3,)))])]
    ['OverlapError', 'GapError']
    """
    if len(writes) == 1 and writes[0][1].shape == array.shape:
        return []
    boxes = [box for _, box in writes]
    overlap, gap = check_tiling(array.box, boxes)
    problems: list[ProblemError] = []
    if overlap is not None:
        one, other = overlap
        common = boxes[one].intersect(boxes[other])
        problems.append(
            OverlapError(
                "two shards that are not copies of each other hold the same cells",
                array.key,
                rank=(writes[one][0], writes[other][0]),
                shape=array.shape,
                offset=common.start if common else None,
                found=f"{boxes[one].start} to {boxes[one].stop} and {boxes[other].start} to {boxes[other].stop}",
            )
        )
    if gap is not None:
        problems.append(
            GapError(
                "no rank holds some cells",
                array.key,
                shape=array.shape,
                offset=gap.start,
                expected="shards that cover the whole array",
                found=f"nothing from {gap.start} to {gap.stop}",
            )
        )
    return problems


def check_unique_keys(keys: Iterable[str], what: str = "a key is used twice") -> list[ProblemError]:
    """Return a problem for each key that occurs more than once, in order of the keys.

    Examples
    --------
    >>> [p.key for p in check_unique_keys(["a", "b", "a"])]
    ['a']
    """
    doubled = ((key, n) for key, n in Counter(keys).items() if n > 1)
    return [
        DuplicateKeyError(what, key, found=f"{n} leaves", remedy="Rename one: a key is the path joined by dots")
        for key, n in sorted(doubled)
    ]
