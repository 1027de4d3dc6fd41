"""The structure and values of one rank's state, and of all ranks merged: the input of planning and of the manifest."""

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from functional_ckpt.errors import DuplicateKeyError, ProblemError, ReplicaError, SpecError, raise_problems
from functional_ckpt.plan.layout import ArrayPlan
from functional_ckpt.plan.manifest import DIGEST_NBYTES, Alias, ArrayEntry, Manifest, PerRankEntry, RankItem, ValueEntry
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.columns import Columns, Ints, to_column
from functional_ckpt.spec.shard import ShardSpec
from functional_ckpt.spec.sharding import Sharding
from functional_ckpt.spec.table import ShardTable
from functional_ckpt.spec.tree import Path, place_of, unflatten

__all__ = [
    "EMPTY_TEXTS",
    "NO_ATTRIBUTES",
    "ArrayLeaf",
    "ChunkRows",
    "CopyDigest",
    "GlobalState",
    "LocalState",
    "Part",
    "build_manifest",
    "content_problems",
    "is_per_rank",
    "leaves_of",
    "merge_structures",
    "with_values",
]

NO_ATTRIBUTES = "{}"
_PER_RANK = (
    "Wrap what differs by rank in PerRank (through torch.distributed.checkpoint: give each rank a key of its own)"
)
_TRUST = "pass SavePolicy(replicated='trust'), which keeps one"
#: The texts of `encode_value` for empty containers.
EMPTY_TEXTS = ("{}", "[]", '{"~ordered":[]}')


@attrs.frozen
class ArrayLeaf:
    """A leaf that is an array: its spec and path; `tied_to` is an earlier key with the same memory on this rank.

    `sharding` tells how all ranks hold it, if that is known. `is_copy`: every rank that has the leaf holds the whole
    array.
    """

    spec: ArraySpec
    path: Path
    codec: str | None = None
    tied_to: str | None = None
    is_copy: bool = False
    sharding: Sharding | None = None

    @property
    def key(self) -> str:
        """Key of the array."""
        return self.spec.key


@attrs.frozen
class CopyDigest:
    """The digest of a rank's copy of an array, which must be equal on all ranks."""

    spec: ArraySpec
    digest: bytes


@attrs.frozen
class LocalState:
    """The state of one rank, without its data; `policy_text` is the part of the policy that must be equal on all ranks.

    Its contents are `values`, `attributes` and `copies` (digests of the copies to compare); the rest, and the keys and
    paths of the values, is its structure. `shards` are the shards of leaves that are neither copies nor placed on a
    mesh, in order of the leaves. A state that is sent to the other ranks has all of its shards in `table` instead.
    """

    arrays: tuple[ArrayLeaf, ...] = ()
    shards: tuple[ShardSpec, ...] = ()
    values: tuple[ValueEntry, ...] = ()
    per_rank: tuple[PerRankEntry, ...] = ()
    attributes: str = NO_ATTRIBUTES
    policy_text: str = ""
    table: ShardTable | None = None
    copies: tuple[CopyDigest, ...] = ()

    def with_table(self, rank: int, first_shard: int = 0) -> "LocalState":
        """Return the state with the table of all its shards, to be sent to the other ranks."""
        shards = list(self.all_shards(rank))
        table = ShardTable.of(rank, shards)
        rows = attrs.evolve(table.rows, shard=table.rows.shard + first_shard)
        return attrs.evolve(self, shards=(), table=attrs.evolve(table, rows=rows))

    def all_shards(self, rank: int) -> Iterator[ShardSpec]:
        """Yield the shards of all leaves, in order."""
        explicit: dict[str, list[ShardSpec]] = {}
        for shard in self.shards:
            explicit.setdefault(shard.key, []).append(shard)
        for leaf in self.arrays:
            if leaf.is_copy:
                yield ShardSpec(leaf.spec, leaf.spec.box, rank)
            elif leaf.sharding is None:
                yield from explicit.get(leaf.key, ())
            else:
                yield from (part.shard for part in leaf.sharding.parts(leaf.spec, rank))

    def structure(self) -> "LocalState":
        """Return the input of planning: everything but `contents`; of values only which ones are empty containers."""
        values = tuple(v if v.text in EMPTY_TEXTS else attrs.evolve(v, text="") for v in self.values)
        return attrs.evolve(self, values=values, attributes=NO_ATTRIBUTES, copies=())

    def contents(self) -> "LocalState":
        """Return what may differ from save to save: values, attributes, and the digests of copies."""
        return LocalState(values=self.values, attributes=self.attributes, copies=self.copies)

    def split_common(self) -> "tuple[LocalState, LocalState]":
        """Return the part that may be equal on all ranks, and the part of this rank: everything below a `PerRank`."""
        own_arrays = tuple(leaf for leaf in self.arrays if is_per_rank(leaf.path)) if self.per_rank else ()
        own_values = tuple(value for value in self.values if is_per_rank(value.path or ())) if self.per_rank else ()
        if not own_arrays and not own_values:
            return self, LocalState(attributes=self.attributes, policy_text=self.policy_text)
        keys = {leaf.key for leaf in own_arrays}
        common = attrs.evolve(
            self,
            arrays=tuple(leaf for leaf in self.arrays if leaf.key not in keys),
            shards=tuple(shard for shard in self.shards if shard.key not in keys),
            values=tuple(value for value in self.values if not is_per_rank(value.path or ())),
        )
        shards = tuple(shard for shard in self.shards if shard.key in keys)
        return common, attrs.evolve(self, arrays=own_arrays, shards=shards, values=own_values, per_rank=())


def is_per_rank(path: Path) -> bool:
    """Tell whether a leaf lies below a `PerRank`.

    Examples
    --------
    >>> is_per_rank(("rng", RankItem(0)))
    True
    """
    return any(isinstance(item, RankItem) for item in path)


@attrs.frozen
class GlobalState:
    """The state of all ranks, merged: leaves sorted by key, each tied tensor once."""

    leaves: tuple[ArrayLeaf, ...]
    aliases: tuple[Alias, ...]
    values: tuple[ValueEntry, ...]
    per_rank: tuple[PerRankEntry, ...]
    attributes: str


#: A rank, and all or part of its state.
Part = tuple[int, LocalState]


def merge_structures(parts: Sequence[Part]) -> tuple[GlobalState, tuple[ProblemError, ...]]:
    """Merge the structures of all ranks, and return the problems found; a rank may have several parts.

    `with_values` adds the values.
    """
    problems: list[ProblemError] = []
    leaves = _merged_leaves(parts, problems)
    values = _without_placeholders(_merged_places(parts, problems), leaves)
    per_rank = tuple(sorted({p.key: p for _, state in parts for p in state.per_rank}.values(), key=lambda p: p.key))
    problems += _both_kinds(parts)
    problems += _unequal(parts, "policy_text", "ranks pass different policies") or _tree_problems(leaves, values)
    tied = _agreed_ties([state for _, state in parts])
    by_key = {leaf.key: leaf for leaf in leaves}
    aliases = tuple(Alias(key, target, by_key[key].path) for key, target in sorted(tied.items()))
    stored = tuple(leaf for leaf in leaves if leaf.key not in tied)
    return GlobalState(stored, aliases, values, per_rank, NO_ATTRIBUTES), tuple(problems)


def content_problems(parts: Sequence[Part], replicated: str = "check") -> tuple[ProblemError, ...]:
    """Return a problem for each plain value, copy and attribute that must be equal on all ranks and is not.

    With ``replicated="trust"`` unequal values and copies are allowed.

    Examples
    --------
    >>> parts = [(r, LocalState(values=(ValueEntry("lr", text),))) for r, text in enumerate(("0.1", "0.2"))]
    >>> print(content_problems(parts)[0])  # doctest: +ELLIPSIS
    ranks hold different values under one key: key 'lr', rank (0, 1), expected 0.1, found 0.2. Wrap ...
    """
    problems = [*_unequal_values(parts), *_unequal_copies(parts)] if replicated == "check" else []
    return (*problems, *_unequal(parts, "attributes", "ranks pass different attributes"))


def with_values(structure: GlobalState, parts: Sequence[Part]) -> GlobalState:
    """Return a merged structure with the current values: each from the lowest rank that has sent it.

    Raises
    ------
    SpecError
        If no rank has sent a value.
    """
    texts: dict[str, str] = {}
    for _, state in parts:
        for value in state.values:
            texts.setdefault(value.key, value.text)
    unknown = [value.key for value in structure.values if value.key not in texts]
    raise_problems(SpecError("no rank has sent the value of a key", key) for key in unknown)
    values = tuple(attrs.evolve(value, text=texts[value.key]) for value in structure.values)
    return attrs.evolve(structure, values=values, attributes=parts[0][1].attributes)


@attrs.frozen(eq=False)
class ChunkRows(Columns):
    """Chunk number `chunk` of array number `array` has the digest in `words`: 16 bytes as two int64."""

    array: Ints = attrs.field(converter=to_column)
    chunk: Ints = attrs.field(converter=to_column)
    words: Ints = attrs.field(converter=to_column)


def build_manifest(state: GlobalState, arrays: Sequence[ArrayPlan], chunks: ChunkRows) -> Manifest:
    """Return the manifest of a finished save from the digest of every chunk of `arrays`.

    Raises
    ------
    SpecError
        If a chunk has no digest, or two: then some rank did not follow the plan.
    """
    first = np.cumsum([0, *(plan.grid.size for plan in arrays)])
    at = first[chunks.array] + chunks.chunk
    order = np.argsort(at, kind="stable")
    written = np.bincount(at, minlength=first[-1])
    if (written != 1).any():
        what = "a chunk was not written" if not written.all() else "a chunk was written twice"
        wrong = int(np.argmin(written)) if not written.all() else int(np.argmax(written))
        number = int(np.searchsorted(first, wrong, "right")) - 1
        spec, found = arrays[number].spec, f"chunk number {wrong - int(first[number])}"
        raise SpecError(what, spec.key, shape=spec.shape, found=found)
    digests = np.ascontiguousarray(chunks.words[order]).tobytes()
    leaves = leaves_of(state, arrays)
    ends = (first * DIGEST_NBYTES).tolist()
    entries = tuple(
        [
            ArrayEntry(plan.spec, plan.layout, digests[low:high], leaf.path, leaf.codec)
            for plan, leaf, low, high in zip(arrays, leaves, ends[:-1], ends[1:], strict=True)
        ]
    )
    return Manifest(entries, state.values, state.aliases, state.per_rank, state.attributes)


def leaves_of(state: GlobalState, arrays: Sequence[ArrayPlan]) -> list[ArrayLeaf]:
    """Return the leaf of each array."""
    by_key = {leaf.spec.key: leaf for leaf in state.leaves}
    return [by_key[plan.spec.key] for plan in arrays]


def _merged_leaves(parts: Sequence[Part], problems: list[ProblemError]) -> tuple[ArrayLeaf, ...]:
    found: dict[str, ArrayLeaf] = {}
    # Parts that were sent as the same bytes share one tuple of leaves.
    for leaves in {id(state.arrays): state.arrays for _, state in parts}.values():
        for leaf in leaves:
            first = found.setdefault(leaf.key, leaf)
            if first.path != leaf.path:
                problems.append(_two_paths(leaf.key, first.path, leaf.path))
    return tuple(leaf for _, leaf in sorted(found.items()))


def _merged_places(parts: Sequence[Part], problems: list[ProblemError]) -> tuple[ValueEntry, ...]:
    found: dict[str, ValueEntry] = {}
    for _, state in parts:
        for value in state.values:
            first = found.setdefault(value.key, value)
            if first.path != value.path:
                problems.append(_two_paths(value.key, first.path, value.path))
    return tuple(value for _, value in sorted(found.items()))


def _unequal_values(parts: Sequence[Part]) -> list[ProblemError]:
    first: dict[str, tuple[int, str]] = {}
    problems: list[ProblemError] = []
    for rank, state in parts:
        for value in state.values:
            first_rank, text = first.setdefault(value.key, (rank, value.text))
            if text != value.text:
                problems.append(
                    ReplicaError(
                        "ranks hold different values under one key",
                        value.key,
                        rank=(first_rank, rank),
                        expected=_shorten(text),
                        found=_shorten(value.text),
                        remedy=f"{_PER_RANK}, or {_TRUST}",
                    )
                )
    return problems


def _without_placeholders(values: Sequence[ValueEntry], leaves: Sequence[ArrayLeaf]) -> tuple[ValueEntry, ...]:
    """Drop an empty container of one rank where another rank has something in it."""
    if not any(value.text in EMPTY_TEXTS for value in values):
        return tuple(values)
    entries: list[ArrayLeaf | ValueEntry] = [*leaves, *values]
    inner = {entry.path[:depth] for entry in entries if entry.path for depth in range(len(entry.path))}
    return tuple(v for v in values if v.path not in inner or v.text not in EMPTY_TEXTS)


def _tree_problems(leaves: Sequence[ArrayLeaf], values: Sequence[ValueEntry]) -> list[ProblemError]:
    """Return a problem if the leaves of all ranks do not form a tree: a leaf of one rank is a dict of another."""
    entries: list[ArrayLeaf | ValueEntry] = [*leaves, *values]
    paths = {entry.path: None for entry in entries if entry.path is not None}
    try:
        unflatten(paths.items())
    except SpecError as error:
        return [error]
    return []


def _both_kinds(parts: Sequence[Part]) -> list[ProblemError]:
    """Return a problem for each key that is an array on one rank and a plain value on another."""
    arrays = {leaf.key: rank for rank, state in reversed(parts) for leaf in state.arrays}
    values = {value.key: rank for rank, state in reversed(parts) for value in state.values}
    return [
        DuplicateKeyError("ranks hold an array and a plain value under one key", key, rank=(arrays[key], values[key]))
        for key in sorted(arrays.keys() & values.keys())
    ]


def _unequal_copies(parts: Sequence[Part]) -> list[ProblemError]:
    first: dict[str, tuple[int, CopyDigest]] = {}
    problems: list[ProblemError] = []
    for rank, state in parts:
        for copy in state.copies:
            first_rank, known = first.setdefault(copy.spec.key, (rank, copy))
            # Planning reports a different shape or data type.
            if copy.digest != known.digest and copy.spec == known.spec:
                problems.append(
                    ReplicaError(
                        "ranks hold different copies of a plain tensor",
                        copy.spec.key,
                        rank=(first_rank, rank),
                        expected=known.digest.hex(),
                        found=copy.digest.hex(),
                        remedy=f"Shard it (DTensor). {_PER_RANK}, or {_TRUST}",
                    )
                )
    return problems


def _unequal(parts: Sequence[Part], name: str, what: str) -> list[ProblemError]:
    """Return a problem if field `name` of some rank differs from that of the first."""
    first, state = parts[0]
    text = getattr(state, name)
    other = next((part for part in parts if getattr(part[1], name) != text), None)
    if other is None:
        return []
    expected, found = _difference(text, getattr(other[1], name))
    return [SpecError(what, rank=(first, other[0]), expected=expected, found=found)]


def _difference(one: str, other: str) -> tuple[str, str]:
    """Return both texts from shortly before their first difference."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = max(0, at - 40)
    return _shorten(one[start:]), _shorten(other[start:])


def _agreed_ties(states: Sequence[LocalState]) -> dict[str, str]:
    """Return the ties on which all holders of a key agree; a key tied on one rank only is stored by itself."""
    claims: dict[str, list[str | None]] = {}
    for state in states:
        for leaf in state.arrays:
            claims.setdefault(leaf.key, []).append(leaf.tied_to)
    agreed = {key: ties[0] for key, ties in claims.items() if ties[0] is not None and len(set(ties)) == 1}
    # Every rank that has the alias must have its target too. There are no chains: ties name the first key.
    return {key: target for key, target in agreed.items() if len(claims[target]) == len(claims[key])}


def _two_paths(key: str, one: Path | None, other: Path | None) -> DuplicateKeyError:
    remedy = "Rename one: a key is the path joined by dots"
    places = [None if path is None else place_of(path) for path in (one, other)]
    return DuplicateKeyError("two leaves have one key", key, expected=places[0], found=places[1], remedy=remedy)


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
