"""Strategies for policies, manifests, and worlds of regular grids, in which ranks can plan alone."""

from itertools import product
from operator import mul
from typing import Any

import attrs
import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from functional_ckpt.plan.layout import ChunkGrid, Layout, LayoutPolicy
from functional_ckpt.plan.manifest import (
    DIGEST_NBYTES,
    Alias,
    ArrayEntry,
    Manifest,
    PerRankEntry,
    RankItem,
    ValueEntry,
)
from functional_ckpt.plan.record import canonical
from functional_ckpt.run.policy import SavePolicy
from functional_ckpt.spec.array import BITS, ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.shard import ShardSpec, World, from_rank_offsets
from functional_ckpt.spec.tree import DictKey
from functional_ckpt.testing.regions import shapes
from functional_ckpt.testing.shardings import array_specs, dtypes, keys

__all__ = [
    "joining_policies",
    "json_values",
    "layout_policies",
    "manifests",
    "moving_policies",
    "policies",
    "regular_shards",
    "regular_worlds",
]

_CODECS = ("crc32c", "zstd", "zstd:3", "gzip:1", "blosc")


@st.composite
def layout_policies(draw: DrawFn, codecs: bool = True) -> LayoutPolicy:
    """Generate layout policies with sizes so small that small arrays get every kind of ownership.

    In half of them a few files are too many already, so that chunks are joined.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(layout_policies(), lambda policy: policy.min_chunk_nbytes > 1).min_chunk_nbytes
    2
    """
    names = st.lists(st.sampled_from(_CODECS), max_size=2, unique=True).map(tuple)
    pairs = st.lists(st.tuples(st.text("ab.", max_size=2), names), max_size=2).map(tuple)
    return LayoutPolicy(
        target_chunk_nbytes=draw(st.integers(1, 256)),
        min_chunk_nbytes=draw(st.integers(0, 64)),
        shared_chunk_nbytes=draw(st.integers(1, 64)),
        few_files=draw(st.sampled_from([4096, 0])),
        codecs=draw(pairs) if codecs else (),
        extended_dtypes=draw(st.sampled_from(["native", "bits"])),
    )


def joining_policies() -> SearchStrategy[LayoutPolicy]:
    """Generate layout policies under which shards of a few bytes are joined with their neighbours.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(joining_policies(), lambda policy: True).target_chunk_nbytes
    8
    """
    sizes = st.integers(8, 64)
    return st.builds(
        LayoutPolicy, target_chunk_nbytes=sizes, min_chunk_nbytes=st.integers(0, 4), few_files=st.integers(0, 4)
    )


@st.composite
def moving_policies(draw: DrawFn) -> SavePolicy:
    """Generate save policies under which every shard is smaller than a chunk, so that pieces move.

    The byte budget holds one or two of the largest possible chunks, so that pieces move in several waves.

    Examples
    --------
    >>> from hypothesis import find
    >>> policy = find(moving_policies(), lambda policy: True)
    >>> policy.layout.target_chunk_nbytes, policy.budget_nbytes
    (16, 48)
    """
    largest = draw(st.integers(16, 96))  # no element is larger
    layout = LayoutPolicy(
        target_chunk_nbytes=largest,
        min_chunk_nbytes=2**20,
        shared_chunk_nbytes=largest,
        codecs=draw(st.sampled_from([(), (), (("", ("zstd", "crc32c")),)])),
        extended_dtypes=draw(st.sampled_from(["native", "bits"])),
    )
    return SavePolicy(
        layout=layout,
        replicas=draw(st.sampled_from(["elect", "declared"])),
        consolidate=draw(st.booleans()),
        durability="none",
        budget_nbytes=3 * largest + draw(st.integers(0, 3 * largest)),
    )


@st.composite
def policies(draw: DrawFn) -> SavePolicy:
    """Generate save policies that do not wait for disks.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(policies(), lambda policy: policy.replicas == "declared").commit
    'auto'
    """
    codecs = draw(st.lists(st.sampled_from(_CODECS), max_size=2, unique=True).map(tuple))
    return SavePolicy(
        # A save refuses a prefix that matches no key; the empty one matches all.
        layout=attrs.evolve(draw(layout_policies(codecs=False)), codecs={"": codecs}),
        replicas=draw(st.sampled_from(["elect", "declared"])),
        replicated=draw(st.sampled_from(["check", "trust"])),
        commit=draw(st.sampled_from(["auto", "rename", "marker"])),
        consolidate=draw(st.booleans()),
        durability="none",
        budget_nbytes=draw(st.sampled_from([2**30, 2**10])),  # the least that any chunk needs is 3 * 256
    )


def json_values() -> SearchStrategy[Any]:
    """Generate JSON values.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(json_values(), lambda value: isinstance(value, list) and value)
    [None]
    """
    number = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    return st.recursive(
        st.none() | st.booleans() | number | st.text(max_size=4),
        lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
        max_leaves=4,
    )


@st.composite
def manifests(draw: DrawFn) -> Manifest:
    """Generate consistent manifests, sorted by key as a save makes them.

    Examples
    --------
    >>> from hypothesis import find
    >>> manifest = find(manifests(), lambda manifest: len(manifest.aliases) == 1)
    >>> manifest.aliases[0].target == manifest.arrays[0].spec.key
    True
    """
    names = draw(st.lists(keys(), max_size=4, unique=True))
    kinds = [draw(st.sampled_from(["array", "value", "alias"])) for _ in names]
    specs = [draw(array_specs(name)) for name, kind in zip(names, kinds, strict=True) if kind == "array"]
    values = [name for name, kind in zip(names, kinds, strict=True) if kind == "value" or not specs]
    aliases = [name for name, kind in zip(names, kinds, strict=True) if kind == "alias" and specs]
    targets = sorted(spec.key for spec in specs)
    return Manifest(
        tuple(draw(_entries(spec)) for spec in sorted(specs, key=lambda spec: spec.key)),
        tuple(ValueEntry(name, canonical(draw(json_values())), draw(_paths(name))) for name in sorted(values)),
        tuple(Alias(name, draw(st.sampled_from(targets)), draw(_paths(name))) for name in sorted(aliases)),
        tuple(
            PerRankEntry(name, draw(st.integers(1, 9)), draw(_paths(name)))
            for name in sorted(draw(st.lists(keys(), max_size=2, unique=True)))
        ),
        canonical(draw(st.dictionaries(st.text(max_size=3), json_values(), max_size=2))),
    )


@st.composite
def regular_shards(draw: DrawFn, key: str = "w", max_rank: int = 3) -> tuple[ShardSpec, ...]:
    """Generate all cells of a regular grid, row-major, each made by `from_rank_offsets` and none empty.

    Examples
    --------
    >>> from hypothesis import find
    >>> [shard.box.start for shard in find(regular_shards(), lambda grid: len(grid) == 2)]
    [(0,), (1,)]
    """
    local = draw(shapes(max_rank, 4, min_side=1))
    parts = [draw(st.integers(1, 3)) for _ in local]
    dtype = draw(dtypes())
    prepended = draw(st.integers(0, next((i for i, n in enumerate(local) if n > 1), len(local))))
    cells = product(*map(range, parts))
    return tuple(
        from_rank_offsets(
            key,
            dtype,
            local[prepended:],
            *((axis, i, n) for axis, (i, n) in enumerate(zip(cell, parts, strict=True)) if n > 1),
            prepend_axes=prepended,
        )
        for cell in cells
    )


@st.composite
def regular_worlds(draw: DrawFn, max_arrays: int = 2, max_ranks: int = 4) -> World:
    """Generate worlds in which each rank holds a block of cells of every grid, so that ranks can plan by themselves.

    All cells have equally many copies, one of them main.

    Examples
    --------
    >>> from hypothesis import find
    >>> [len(shards) for shards in find(regular_worlds(), lambda world: len(world.ranks[0]) == 2).ranks]
    [2]
    """
    ranks = draw(st.integers(1, max_ranks))
    held: list[list[ShardSpec]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(1, max_arrays))):
        local = draw(shapes(3, 4, min_side=1))
        copies, ways = ranks, []
        for _ in local:
            ways.append(draw(st.sampled_from([n for n in range(1, copies + 1) if copies % n == 0])))
            copies //= ways[-1]
        each = [draw(st.integers(1, 2)) for _ in local]
        grid = tuple(map(mul, ways, each))
        array = ArraySpec(f"w{number}", tuple(map(mul, grid, local)), draw(dtypes()))
        holders = iter(draw(st.permutations([*range(ranks)])))
        ids = draw(st.permutations([*range(copies)]))
        for index in product(*map(range, ways)):
            for replica in ids:
                rank = next(holders)
                cells = product(*(range(i * n, (i + 1) * n) for i, n in zip(index, each, strict=True)))
                boxes = (Box.from_shape(local, tuple(map(mul, cell, local))) for cell in cells)
                held[rank] += [ShardSpec(array, box, replica, None, grid) for box in boxes]
    return World(held)


@st.composite
def _entries(draw: DrawFn, spec: ArraySpec) -> ArrayEntry:
    counts = [draw(st.integers(1, 3)) for _ in spec.shape]
    chunk = tuple(max(1, -(-n // count)) for n, count in zip(spec.shape, counts, strict=True))
    layout = Layout(
        draw(st.sampled_from(["exclusive", "shared"])),
        chunk,
        tuple(draw(st.lists(st.sampled_from(_CODECS), max_size=2))),
        draw(st.sampled_from([spec.dtype, BITS.get(spec.dtype, spec.dtype)])),
    )
    random = np.random.default_rng(draw(st.integers(0, 99)))
    digests = random.bytes(ChunkGrid(spec.shape, chunk).size * DIGEST_NBYTES)
    holds_object = spec.dtype == "uint8" and len(spec.shape) == 1 and bool(digests) and draw(st.booleans())
    return ArrayEntry(spec, layout, digests, draw(_paths(spec.key)), "torch" if holds_object else None)


def _paths(key: str) -> SearchStrategy[tuple[Any, ...] | None]:
    dict_keys = st.none() | st.booleans() | st.integers()  # a text key is written as it is
    item = st.text(max_size=3) | st.integers(0, 9) | dict_keys.map(DictKey) | st.integers(0, 9).map(RankItem)
    return st.just(tuple(key.split("."))) | st.none() | st.lists(item, max_size=3).map(tuple)
