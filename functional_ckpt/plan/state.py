"""What each rank says of its state, and the one state that these make together.

`LocalState` is what travels between ranks before a save; `merge_states` is pure and gives the same answer on every
rank: which tensors are tied, which values are copies of one another, and where each leaf stands in the tree.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from functional_ckpt.errors import DuplicateKeyError, ProblemError, ReplicaError, SpecError
from functional_ckpt.plan.manifest import Alias, ArrayEntry, Manifest, PerRankEntry, ValueEntry
from functional_ckpt.plan.save import SavePlan
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.sharding import ShardSpec, World
from functional_ckpt.spec.tree import unflatten

__all__ = ["ArrayLeaf", "GlobalState", "LocalState", "build_manifest", "merge_states"]

#: What `encode_value` makes of containers that hold nothing.
_EMPTY = ("{}", "[]", '{"~ordered":[]}')


@attrs.frozen
class ArrayLeaf:
    """A leaf that is an array: its key and path; `tied_to` an earlier key of the same memory on this rank.

    `is_copy` says that every rank which has it holds all of it; then `copy_digest`, if known, must be equal on all.
    """

    key: str
    path: tuple[Any, ...]
    codec: str | None = None
    tied_to: str | None = None
    is_copy: bool = False
    copy_digest: bytes | None = None


@attrs.frozen
class LocalState:
    """The state of one rank, without its data; `terms` are the parts of the policy on which all must agree."""

    shards: tuple[ShardSpec, ...] = ()
    arrays: tuple[ArrayLeaf, ...] = ()
    values: tuple[ValueEntry, ...] = ()
    per_rank: tuple[PerRankEntry, ...] = ()
    attributes: str = "{}"
    terms: str = ""


@attrs.frozen
class GlobalState:
    """The state of all ranks: leaves sorted by key, tied tensors once in `world`."""

    world: World
    leaves: tuple[ArrayLeaf, ...]
    aliases: tuple[Alias, ...]
    values: tuple[ValueEntry, ...]
    per_rank: tuple[PerRankEntry, ...]
    attributes: str


def merge_states(
    states: Sequence[LocalState], replicated: str = "check"
) -> tuple[GlobalState, tuple[ProblemError, ...]]:
    """Merge what all ranks hold, and return the problems with it.

    With ``replicated="trust"`` unequal copies are none: the lowest rank's plain value is taken, and any rank's tensor.

    Examples
    --------
    >>> states = [LocalState(values=(ValueEntry("lr", "0.1"),)), LocalState(values=(ValueEntry("lr", "0.2"),))]
    >>> print(merge_states(states)[1][0])  # doctest: +ELLIPSIS
    ranks hold different values under one key: key 'lr', rank (0, 1), expected 0.1, found 0.2. Wrap ...
    """
    problems: list[ProblemError] = []
    leaves = _merged_leaves(states, problems)
    values = _without_placeholders(_merged_values(states, replicated, problems), leaves)
    per_rank = tuple(sorted({p.key: p for state in states for p in state.per_rank}.values(), key=lambda p: p.key))
    if replicated == "check":
        problems += _unequal_copies(states)
    problems += _both_kinds(states)
    problems += _unequal_attributes(states) or _tree_problems(leaves, values)
    tied = _agreed_ties(states)
    by_key = {leaf.key: leaf for leaf in leaves}
    aliases = tuple(Alias(key, target, by_key[key].path) for key, target in sorted(tied.items()))
    world = _world(states, tied)
    stored = tuple(leaf for leaf in leaves if leaf.key not in tied)
    attributes = states[0].attributes
    return GlobalState(world, stored, aliases, values, per_rank, attributes), tuple(problems)


def build_manifest(state: GlobalState, plan: SavePlan, digests: Iterable[tuple[str, int, bytes]]) -> Manifest:
    """Return the manifest of a finished save from ``(key, chunk position, digest)`` of every chunk.

    Raises
    ------
    SpecError
        If a chunk has no digest, or two: then some rank has not done its part of the plan.
    """
    found: dict[str, dict[int, bytes]] = {array.spec.key: {} for array in plan.arrays}
    for key, position, digest in digests:
        if found[key].setdefault(position, digest) is not digest:
            raise SpecError("a chunk was written twice", key, found=f"chunk number {position}")
    leaves = {leaf.key: leaf for leaf in state.leaves}
    entries = []
    for array in plan.arrays:
        key, chunks = array.spec.key, found[array.spec.key]
        if len(chunks) != array.grid.size:
            raise SpecError("a chunk was not written", key, None, array.spec.shape, None, array.grid.size, len(chunks))
        joined = b"".join(chunks[i] for i in range(len(chunks)))
        entries.append(ArrayEntry(array.spec, array.layout, joined, leaves[key].path, leaves[key].codec))
    return Manifest(tuple(entries), state.values, state.aliases, state.per_rank, state.attributes)


def _world(states: Sequence[LocalState], tied: Mapping[str, str]) -> World:
    """Return all shards but those of tied keys; the copy on the lowest rank that has one is the main one."""
    main: dict[str, int] = {}
    for rank, state in enumerate(states):
        for leaf in state.arrays:
            if leaf.is_copy:
                main.setdefault(leaf.key, rank)

    later = {key: first for key, first in main.items() if first}
    if not later and not tied:
        return World(state.shards for state in states)
    return World(
        [_renumbered(s, rank, later) for s in state.shards if s.key not in tied] for rank, state in enumerate(states)
    )


def _renumbered(shard: ShardSpec, rank: int, first: Mapping[str, int]) -> ShardSpec:
    return attrs.evolve(shard, replica_id=rank - first[shard.key]) if shard.key in first else shard


def _merged_leaves(states: Sequence[LocalState], problems: list[ProblemError]) -> tuple[ArrayLeaf, ...]:
    found: dict[str, ArrayLeaf] = {}
    for state in states:
        for leaf in state.arrays:
            first = found.setdefault(leaf.key, leaf)
            if first.path != leaf.path:
                problems.append(_two_paths(leaf.key, first.path, leaf.path))
    return tuple(leaf for _, leaf in sorted(found.items()))


def _merged_values(
    states: Sequence[LocalState], replicated: str, problems: list[ProblemError]
) -> tuple[ValueEntry, ...]:
    found: dict[str, tuple[int, ValueEntry]] = {}
    for rank, state in enumerate(states):
        for value in state.values:
            first_rank, first = found.setdefault(value.key, (rank, value))
            if first.path != value.path:
                problems.append(_two_paths(value.key, first.path, value.path))
            elif first.text != value.text and replicated == "check":
                problems.append(ReplicaError(
                    "ranks hold different values under one key", value.key, (first_rank, rank), None, None,
                    _short(first.text), _short(value.text),
                    "Wrap values that differ by rank in PerRank, or pass replicated='trust'",
                ))  # fmt: skip
    return tuple(value for _, (_, value) in sorted(found.items()))


def _without_placeholders(values: Sequence[ValueEntry], leaves: Sequence[ArrayLeaf]) -> tuple[ValueEntry, ...]:
    """Drop an empty container of one rank where another rank has something in it."""
    entries: list[ArrayLeaf | ValueEntry] = [*leaves, *values]
    inner = {entry.path[:depth] for entry in entries if entry.path for depth in range(len(entry.path))}
    return tuple(v for v in values if v.path not in inner or v.text not in _EMPTY)


def _tree_problems(leaves: Sequence[ArrayLeaf], values: Sequence[ValueEntry]) -> list[ProblemError]:
    """Return a problem if the leaves of all ranks make no tree: a leaf of one rank is a dict of another."""
    entries: list[ArrayLeaf | ValueEntry] = [*leaves, *values]
    paths = {entry.path: None for entry in entries if entry.path is not None}
    try:
        unflatten(paths.items())
    except SpecError as error:
        return [error]
    return []


def _both_kinds(states: Sequence[LocalState]) -> list[ProblemError]:
    """Return a problem for each key that is an array here and a plain value there."""
    arrays = {leaf.key: rank for rank, state in reversed(list(enumerate(states))) for leaf in state.arrays}
    values = {value.key: rank for rank, state in reversed(list(enumerate(states))) for value in state.values}
    return [
        DuplicateKeyError("ranks hold an array and a plain value under one key", key, (arrays[key], values[key]))
        for key in sorted(arrays.keys() & values.keys())
    ]


def _unequal_copies(states: Sequence[LocalState]) -> list[ProblemError]:
    first: dict[str, tuple[int, bytes, ArraySpec]] = {}
    problems: list[ProblemError] = []
    for rank, state in enumerate(states):
        specs = {shard.key: shard.array for shard in state.shards}
        for leaf in state.arrays:
            if leaf.copy_digest is None:
                continue
            spec = specs[leaf.key]
            first_rank, digest, first_spec = first.setdefault(leaf.key, (rank, leaf.copy_digest, spec))
            # Another shape or data type is a problem of its own, which planning names.
            if digest != leaf.copy_digest and spec == first_spec:
                problems.append(ReplicaError(
                    "ranks hold different copies of a plain tensor", leaf.key, (first_rank, rank), None, None,
                    digest.hex(), leaf.copy_digest.hex(),
                    "Shard it (DTensor), wrap it in PerRank, or pass replicated='trust'",
                ))  # fmt: skip
    return problems


def _unequal_attributes(states: Sequence[LocalState]) -> list[ProblemError]:
    problems: list[ProblemError] = []
    for what, texts in (
        ("ranks pass different attributes", [state.attributes for state in states]),
        ("ranks pass different policies", [state.terms for state in states]),
    ):
        ranks = [rank for rank, text in enumerate(texts) if text != texts[0]]
        if ranks:
            expected, found = _difference(texts[0], texts[ranks[0]])
            problems.append(SpecError(what, None, (0, ranks[0]), None, None, expected, found))
    return problems


def _difference(one: str, other: str) -> tuple[str, str]:
    """Return both texts from a little before the place where they part."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = max(0, at - 40)
    return _short(one[start:]), _short(other[start:])


def _agreed_ties(states: Sequence[LocalState]) -> dict[str, str]:
    """Return the ties on which all holders of a key agree; a key tied on one rank only is stored by itself."""
    claims: dict[str, list[str | None]] = {}
    for state in states:
        for leaf in state.arrays:
            claims.setdefault(leaf.key, []).append(leaf.tied_to)
    agreed = {key: ties[0] for key, ties in claims.items() if ties[0] is not None and len(set(ties)) == 1}
    # The key tied to must be held wherever the alias is; a chain cannot arise, ties name the first key.
    return {key: target for key, target in agreed.items() if len(claims[target]) == len(claims[key])}


def _two_paths(key: str, one: object, other: object) -> DuplicateKeyError:
    return DuplicateKeyError(
        "two leaves have one key", key, None, None, None, one, other, "Rename one: a key is the path joined by dots"
    )


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
