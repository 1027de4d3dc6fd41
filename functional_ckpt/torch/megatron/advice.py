"""Remedies for callers of the Megatron-shaped functions, in place of those for `functional_ckpt.save` and `load`.

These functions choose the policies themselves, so that a caller cannot pass one: the remedy must name the strategy that
takes the policy, the argument of the function, or the field of the leaf.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from functional_ckpt.errors import CheckpointError, CheckpointErrors, ProblemError, changed, raise_problems

__all__ = ["COMMON_HALF", "SHARDED_HALF", "advised", "advising"]

#: Policy in a remedy -> the argument that takes it: for the sharded half, and for the common half.
SHARDED_HALF = {
    "LoadPolicy": "sharded_strategy=ZarrLoadShardedStrategy(policy={call}) to load",
    "SavePolicy": "sharded_strategy=ZarrSaveShardedStrategy(policy={call}) to save",
    "LayoutPolicy": "sharded_strategy=ZarrSaveShardedStrategy(policy=SavePolicy(layout={call})) to save",
}
COMMON_HALF = {
    "LoadPolicy": "common_strategy=ZarrLoadCommonStrategy({arguments}) to load",
    "SavePolicy": "common_strategy=ZarrSaveCommonStrategy(policy={call}) to save",
    "LayoutPolicy": "common_strategy=ZarrSaveCommonStrategy(policy=SavePolicy(layout={call})) to save",
}
#: Pattern in a remedy -> the remedy that replaces it.
_OTHERS = (
    (r"LoadPolicy\(strict=", "Pass strict='log_unexpected' to load, which leaves out what the checkpoint lacks"),
    (
        r"LoadPolicy\(allow_shape_mismatch=",
        "Make its ShardedTensor with allow_shape_mismatch=True, to align them at the origin and fill with zeros",
    ),
    (r"Put any plain value there", "Ask for it by a ShardedObject"),
    (r"PerRank", "Load it with functional_ckpt.load"),
)


def advised(problem: ProblemError, places: Mapping[str, str] = SHARDED_HALF) -> ProblemError:
    """Return a problem with a remedy for callers of the Megatron-shaped functions.

    Examples
    --------
    >>> from functional_ckpt.errors import CastError
    >>> print(advised(CastError("another data type", remedy="Pass LoadPolicy(cast='any')")))
    another data type. Pass sharded_strategy=ZarrLoadShardedStrategy(policy=LoadPolicy(cast='any')) to load
    """
    what = problem.what.replace("`like`", "the state dict")
    remedy = problem.remedy
    if remedy is not None:
        remedy = next((text for mark, text in _OTHERS if re.search(mark, remedy)), _placed(remedy, places))
        remedy = remedy.replace("`like`", "the state dict")
    return problem if (what, remedy) == (problem.what, problem.remedy) else changed(problem, what=what, remedy=remedy)


@contextmanager
def advising(places: Mapping[str, str] = SHARDED_HALF) -> Iterator[None]:
    """Raise problems with the remedies of `advised`.

    Examples
    --------
    >>> from functional_ckpt.errors import ObjectCodecError
    >>> with advising(COMMON_HALF):
    ...     raise ObjectCodecError("a class", remedy="Trust and pass LoadPolicy(safe_globals=[C])")
    Traceback (most recent call last):
    ...
    functional_ckpt.errors.ObjectCodecError: a class. Trust...=ZarrLoadCommonStrategy(safe_globals=[C]) to load
    """
    try:
        yield
    except CheckpointError as error:
        found = error.exceptions if isinstance(error, CheckpointErrors) else (error,)
        told = [advised(each, places) if isinstance(each, ProblemError) else each for each in found]
        if all(one is other for one, other in zip(told, found, strict=True)):
            raise
        try:
            raise_problems(each for each in told if isinstance(each, CheckpointError))
        except CheckpointError as other:
            raise other.with_traceback(error.__traceback__) from error.__cause__


def _placed(remedy: str, places: Mapping[str, str]) -> str:
    """Return a remedy with the policy that it names inside the argument that takes it."""
    found = re.search(rf"\b({'|'.join(places)})\(", remedy)
    if found is None:
        return remedy
    start, end = found.start(), _end_of_call(remedy, found.start())
    place = places[found[1]].format(call=remedy[start:end], arguments=remedy[found.end() : end - 1])
    return remedy[:start] + place + remedy[end:]


def _end_of_call(text: str, start: int) -> int:
    """Return the end of the call whose parenthesis opens first after `start`."""
    depth = 0
    for at in range(text.index("(", start), len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0 and text[at] == ")":
            return at + 1
    return len(text)
