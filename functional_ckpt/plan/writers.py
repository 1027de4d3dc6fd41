"""Who wrote which chunk of an array that several ranks wrote, as `provenance.json` tells it."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from functional_ckpt.plan.layout import ArrayPlan
from functional_ckpt.spec.columns import Ints

__all__ = ["writers_from", "writers_to"]


def writers_to(arrays: Sequence[ArrayPlan], array: Ints, chunk: Ints, rank: Ints) -> dict[str, list[list[int]]]:
    """Return, by key, ``[rank, chunks]`` for each run of chunks that one rank wrote, row-major.

    `array`, `chunk` and `rank` are columns with a row for each chunk. Arrays of one writer are left out, and those of
    which a chunk has no single writer.

    Examples
    --------
    >>> from functional_ckpt.plan.layout import Layout
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> plan = ArrayPlan(ArraySpec("w", (6,), "int8"), Layout("exclusive", (2,), (), "int8"))
    >>> writers_to([plan], np.zeros(3, int), np.array([0, 2, 1]), np.array([0, 1, 0]))
    {'w': [[0, 2], [1, 1]]}
    """
    order = np.lexsort((chunk, array))
    array, rank = array[order], rank[order]
    several = np.unique(array[1:][(array[1:] == array[:-1]) & (rank[1:] != rank[:-1])])
    bounds = zip(*(np.searchsorted(array, several, side).tolist() for side in ("left", "right")), strict=True)
    found: dict[str, list[list[int]]] = {}
    for number, (lo, hi) in zip(several.tolist(), bounds, strict=True):
        if hi - lo == arrays[number].grid.size:
            found[arrays[number].spec.key] = [[r, len(list(run))] for r, run in groupby(rank[lo:hi].tolist())]
    return found


def writers_from(told: Any, key: str, chunks: int, has_parts: bool = False) -> tuple[int, ...] | None:
    """Return the rank of each chunk, from a provenance that may hold anything; None where it does not say so.

    `has_parts` says that several ranks may have written parts of one chunk.

    Examples
    --------
    >>> writers_from({"writers": {"w": [[0, 2], [1, 1]]}}, "w", 3), writers_from({"writers": 7}, "w", 3)
    ((0, 0, 1), None)
    >>> writers_from({"ranks": [{"arrays": []}, {"arrays": ["w"]}]}, "w", 3)
    (1, 1, 1)
    """
    try:
        runs = told["writers"].get(key) if "writers" in told else None
        if runs is None:
            alone = [rank for rank, each in enumerate(told["ranks"]) if key in each["arrays"]]
            return tuple(alone * chunks) if len(alone) == 1 and not has_parts else None
        if not all(type(n) is int and n >= 0 for run in runs for n in run) or sum(n for _, n in runs) != chunks:
            return None
        return tuple(rank for rank, n in runs for _ in range(n))
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
