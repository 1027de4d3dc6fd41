"""Checks before a save or load: the shards of all ranks cover every tensor once; request and checkpoint match."""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from math import prod
from typing import Any

import attrs

from functional_ckpt.errors import (
    CheckpointError,
    GapError,
    KeyMismatchError,
    PolicyError,
    ProblemError,
    ReplicaError,
    raise_problems,
)
from functional_ckpt.plan.check import check_conflicts
from functional_ckpt.plan.fingerprint import fingerprint
from functional_ckpt.plan.save import check_main_replicas
from functional_ckpt.run.comm import Gather, agree, together
from functional_ckpt.spec.table import ShardTable
from functional_ckpt.store.encoding import digest
from functional_ckpt.store.values import plain_text
from functional_ckpt.torch.megatron.exceptions import asserted
from functional_ckpt.torch.megatron.sharded_base import (
    CommonStateDict,
    ShardedStateDict,
    StateDict,
    is_main_replica,
    logger,
)
from functional_ckpt.torch.megatron.sharded_state import as_object, as_tensor, is_object, is_tensor
from functional_ckpt.torch.megatron.state_tree import leaves_of, map_leaves
from functional_ckpt.torch.object_codec import dump

__all__ = [
    "StrictHandling",
    "check_integrity",
    "compare_common_state",
    "find_mismatches",
    "parse_strict_flag",
    "report_mismatches",
    "validate_sharding_integrity",
]


#: What the last check that found no problem was of, by rank: a digest of what all ranks held, and their shards.
_CHECKED: dict[int, tuple[bytes, list[ShardTable]]] = {}


class StrictHandling(Enum):
    """How a load handles keys that only the request has (*unexpected*) or only the checkpoint has (*missing*).

    Unexpected keys are left out of the result, except under `ASSUME_OK_UNEXPECTED`, where the strategy raises. Only the
    modes that end in ``ALL`` search for missing keys.

    Examples
    --------
    >>> StrictHandling("return_all").returns_keys, StrictHandling.RAISE_UNEXPECTED.looks_for_missing
    (True, False)
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: "StrictHandling") -> bool:
        """Tell whether request and checkpoint are compared before the load."""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: "StrictHandling") -> bool:
        """Tell whether the requests of all ranks are needed."""
        return val.value.endswith("_all")

    @staticmethod
    def requires_returning_mismatch_keys(val: "StrictHandling") -> bool:
        """Tell whether `load` returns the keys as well."""
        return val.returns_keys

    @property
    def looks_for_missing(self) -> bool:
        """Whether missing keys are reported."""
        return self.value.endswith("_all") and self is not StrictHandling.IGNORE_ALL

    @property
    def returns_keys(self) -> bool:
        """Whether `load` returns the keys as well."""
        return self.value.startswith("return_")


def parse_strict_flag(strict: "str | StrictHandling") -> StrictHandling:
    """Return the mode of a name.

    Raises
    ------
    CheckpointingException
        If there is no mode of that name; a ``ValueError`` too.

    Examples
    --------
    >>> parse_strict_flag("log_all")
    <StrictHandling.LOG_ALL: 'log_all'>
    """
    try:
        return StrictHandling(strict)
    except ValueError:
        known = ", ".join(mode.value for mode in StrictHandling)
        raise PolicyError("this value of strict is unknown", expected=f"one of {known}", found=repr(strict)) from None


def find_mismatches(
    sharded_part: ShardedStateDict, stored: ShardedStateDict, strict: StrictHandling, gather: Gather
) -> tuple[set[str], set[str]]:
    """Return the missing keys, equal on all ranks, and this rank's unexpected ones.

    `stored` is the result of `load_sharded_metadata`. Missing keys are found only if `strict` asks for them.
    """
    wanted = {leaf.key for leaf in leaves_of(sharded_part)}
    known = {leaf.key for leaf in stored.values()}
    missing: set[str] = set()
    if strict.looks_for_missing:
        missing = known.difference(*together(gather, lambda: wanted))
    return missing, wanted - known


def report_mismatches(missing: set[str], unexpected: set[str], strict: StrictHandling, gather: Gather) -> None:
    """Raise or log, depending on `strict`.

    Raises
    ------
    CheckpointingException
        On every rank, one problem per key.
    """
    # The texts begin as Megatron's do, so that searching logs for these finds them.
    found = {
        "Unexpected keys (for this rank): the checkpoint has no such key": sorted(unexpected),
        "Missing keys (for all ranks): the checkpoint has a key that no rank asks for": sorted(missing),
    }
    if strict.value.startswith("raise_"):
        problems = [KeyMismatchError(what, key) for what, keys in found.items() for key in keys]
        agree(gather, lambda: raise_problems(problems))
    if strict.value.startswith("log_"):
        for what, keys in found.items():
            if keys:
                logger.warning("%s: %s", what, ", ".join(map(repr, keys)))


@attrs.frozen
class _Cell:
    """A sharded object of some rank."""

    key: str
    unique_key: str
    count: int


def validate_sharding_integrity(sharded_part: ShardedStateDict, gather: Gather) -> list[ShardTable]:
    """Check that the main copies of all ranks cover every tensor and every grid of objects exactly once.

    Returns the shards of tensors of each rank. The specs are gathered, unless all ranks hold what they held when they
    last passed this check.

    Raises
    ------
    CheckpointingException
        On every rank, with all problems at once: gaps, overlaps, several main copies of a shard, ranks that disagree
        about a tensor's shape or data type (an ``AssertionError`` too).

    Examples
    --------
    >>> from functional_ckpt.run.comm import LocalGather
    >>> from functional_ckpt.torch.megatron.sharded_tensor import ShardedTensor
    >>> import torch
    >>> validate_sharding_integrity([ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 1, 3))], LocalGather())
    Traceback (most recent call last):
    ...
    functional_ckpt.errors.GapError: no rank holds some cells: key 'w', shape (6,), offset (0,)...
    """
    mine: list[tuple[ShardTable, tuple[_Cell, ...]]] = []
    checked, tables = _CHECKED.get(gather.rank, (b"", []))

    def describe() -> tuple[bytes, bytes]:
        mine.append(_held(sharded_part, gather.rank))
        return fingerprint(*mine), checked

    proposals = together(gather, describe)
    world = fingerprint(tuple(each for each, _ in proposals))
    # If one rank does not remember this world, all gather: otherwise it would wait for specs that no rank sends.
    if all(known == world for _, known in proposals):
        return tables
    held = together(gather, lambda: mine[0])
    # One rank checks, since all would find the same problems; all ranks raise them.
    found = together(gather, lambda: _problems(held) if gather.rank == 0 else [])
    raise_problems(found[0])
    tables = [table for table, _ in held]
    _CHECKED[gather.rank] = world, tables
    return tables


def check_integrity(
    sharded: ShardedStateDict,
    common: CommonStateDict,
    gather: Gather,
    preprocess: Callable[[CommonStateDict], StateDict] | None,
) -> list[ShardTable]:
    """Call `validate_sharding_integrity`, and compare the common half; `preprocess` gets a copy of it.

    Examples
    --------
    >>> from functional_ckpt.run.comm import LocalGather
    >>> len(check_integrity({}, {"step": 3}, LocalGather(), None))
    1
    """
    if preprocess is not None:
        common = agree(gather, lambda: preprocess(map_leaves(lambda leaf: leaf, common)))
    compare_common_state(common, gather)
    return validate_sharding_integrity(sharded, gather)


def _held(sharded_part: ShardedStateDict, rank: int) -> tuple[ShardTable, tuple[_Cell, ...]]:
    """Return this rank's shards of tensors and main copies of objects."""
    leaves = list(leaves_of(sharded_part))
    objects = [as_object(leaf) for leaf in leaves if is_object(leaf)]
    cells = [_Cell(o.key, o.unique_key, prod(o.global_shape)) for o in objects if is_main_replica(o.replica_id)]
    return ShardTable.of(rank, [as_tensor(leaf).spec for leaf in leaves if is_tensor(leaf)]), tuple(cells)


def _problems(held: Sequence[tuple[ShardTable, tuple[_Cell, ...]]]) -> list[ProblemError]:
    table, conflicts = ShardTable.join([table for table, _ in held])
    found = [*map(asserted, check_conflicts(conflicts)), *check_main_replicas(table)]
    grids: dict[str, list[tuple[int, _Cell]]] = {}
    for rank, (_, cells) in enumerate(held):
        for cell in cells:
            grids.setdefault(cell.key, []).append((rank, cell))
    return [*found, *(problem for _, grid in sorted(grids.items()) for problem in _object_problems(grid))]


def _object_problems(grid: Sequence[tuple[int, _Cell]]) -> list[ProblemError]:
    owners: dict[str, int] = {}
    found: list[ProblemError] = []
    for rank, cell in grid:
        if cell.unique_key in owners:
            found.append(
                ReplicaError("an object has several main copies", cell.unique_key, rank=(owners[cell.unique_key], rank))
            )
        owners.setdefault(cell.unique_key, rank)
    first = grid[0][1]
    if len(owners) < first.count:
        found.append(
            GapError(
                "no rank holds some cells of a grid of objects",
                first.key,
                expected=first.count,
                found=sorted(owners),
            )
        )
    return found


def compare_common_state(common_state_dict: StateDict, gather: Gather) -> dict[str, tuple[int, ...]]:
    """Return where the common half of other ranks differs from that of rank 0, which is saved: path -> ranks.

    Each difference is also logged as a warning, on every rank; it is not an error, since many are harmless.

    Examples
    --------
    >>> from functional_ckpt.run.comm import LocalGather
    >>> compare_common_state({"step": 3}, LocalGather())
    {}
    """
    if gather.size == 1:
        return {}
    all_digests = together(gather, lambda: dict(_digests(common_state_dict, ())))
    paths = sorted({path for digests in all_digests for path in digests})
    first = all_digests[0]
    found = {
        path: ranks
        for path in paths
        if (ranks := tuple(r for r, digests in enumerate(all_digests) if digests.get(path) != first.get(path)))
    }
    for path, ranks in found.items():
        logger.warning(
            "the common state differs between ranks at %r: rank 0 is saved, ranks %s have another", path, ranks
        )
    return found


def _digests(tree: Any, path: tuple[Any, ...]) -> Iterable[tuple[str, str]]:
    if isinstance(tree, dict | list) and tree:
        for place, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _digests(child, (*path, place))
        return
    name = ".".join(map(str, path))
    text = plain_text(tree)
    if text is not None:
        yield name, text
        return
    try:
        yield name, digest(dump(name, tree)).hex()
    except CheckpointError as problem:
        yield name, str(problem)
