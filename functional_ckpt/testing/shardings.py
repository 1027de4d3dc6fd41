"""Strategies for array specs, device meshes, placements, replica ids, shards and worlds."""

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import TypeVar

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from functional_ckpt.spec.array import DTYPES, ArraySpec, ObjectSpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.mesh import Mesh
from functional_ckpt.spec.placement import (
    Placement,
    Replicate,
    Shard,
    StridedShard,
    from_placements,
)
from functional_ckpt.spec.shard import Fragment, ShardSpec, World, fragments
from functional_ckpt.spec.sharding import PlacedArray, Sharding
from functional_ckpt.spec.tiling import chunked_sizes
from functional_ckpt.testing.regions import (
    balanced_sizes,
    boxes,
    flat_splits,
    grid_boxes,
    grid_tilings,
    guillotine_tilings,
    shapes,
    uneven_tilings,
)

__all__ = [
    "any_fragments",
    "any_shards",
    "array_specs",
    "dtypes",
    "keys",
    "meshes",
    "object_specs",
    "placed_arrays",
    "placed_worlds",
    "placements",
    "replica_ids",
    "scattered",
    "shardings",
    "shards",
    "worlds",
]

T = TypeVar("T")
_TILINGS: dict[str, Callable[[Sequence[int]], SearchStrategy[tuple[Box, ...]]]] = {
    "guillotine": guillotine_tilings,
    "grid": lambda shape: grid_tilings(shape, 3),
    "uneven": lambda shape: uneven_tilings(shape, 3),
}


def dtypes() -> SearchStrategy[str]:
    """Generate the data types of the format.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(dtypes(), lambda name: name.startswith("float8"))
    'float8_e4m3fn'
    """
    return st.sampled_from([*DTYPES])


def keys() -> SearchStrategy[str]:
    """Generate keys: mostly dotted names, some of arbitrary Unicode text.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(keys(), lambda key: "." in key).count(".")
    1
    """
    part = st.text("abwxyz019_", min_size=1, max_size=4)
    names = st.lists(part, min_size=1, max_size=3).map(".".join)
    # Surrogates are not valid Unicode text: a key with one is refused.
    return names | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@st.composite
def array_specs(
    draw: DrawFn, key: str | None = None, sizes: SearchStrategy[tuple[int, ...]] | None = None
) -> ArraySpec:
    """Generate array specs, of the given key if any, with shapes from `sizes` (default: `shapes`).

    Examples
    --------
    >>> from hypothesis import find
    >>> find(array_specs(key="w"), lambda spec: spec.shape == (2, 1))
    ArraySpec(key='w', shape=(2, 1), dtype='bool')
    """
    size = draw(shapes() if sizes is None else sizes)
    return ArraySpec(key if key is not None else draw(keys()), size, draw(dtypes()))


def object_specs() -> SearchStrategy[ObjectSpec]:
    """Generate specs of leaves that are not arrays.

    Examples
    --------
    >>> from hypothesis import find
    >>> len(find(object_specs(), lambda spec: True).key)
    1
    """
    return keys().map(ObjectSpec)


def meshes(max_axes: int = 3, max_side: int = 3) -> SearchStrategy[tuple[int, ...]]:
    """Generate shapes of device meshes: at least one axis, at least one rank.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(meshes(), lambda mesh: len(mesh) == 2 and mesh[0] > 1)
    (2, 1)
    """
    return st.lists(st.integers(1, max_side), min_size=1, max_size=max_axes).map(tuple)


def placements(mesh: Sequence[int], ndim: int) -> SearchStrategy[tuple[Placement, ...]]:
    """Generate one placement per mesh axis for an array of `ndim` dimensions, strided ones included.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(placements((2, 2), 1), lambda p: p[0] != p[1])
    (Replicate(), Shard(dim=0))
    """
    one: SearchStrategy[Placement] = st.just(Replicate())
    if ndim:
        dims = st.integers(0, ndim - 1)
        one |= st.builds(Shard, dims) | st.builds(StridedShard, dims, st.integers(2, 4))
    return st.tuples(*(one for _ in mesh))


def replica_ids(copies: int) -> SearchStrategy[tuple[tuple[int, ...], ...]]:
    """Generate `copies` different replica ids, the first of which is the main one.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(replica_ids(3), lambda ids: True)
    ((0,), (1,), (2,))
    """
    flat = tuple((i,) for i in range(copies))
    pairs = tuple(divmod(i, 2) for i in range(copies))
    return st.sampled_from([flat, pairs])


@st.composite
def shards(draw: DrawFn, array: ArraySpec) -> ShardSpec:
    """Generate single shards of `array`, flat ones included.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(shards(ArraySpec("w", (3, 3), "int8")), lambda shard: shard.flat is not None).flat
    (0, 1)
    """
    box = draw(boxes(array.shape))
    ranges = flat_splits(box.size, 3).flatmap(st.sampled_from)
    return ShardSpec(array, box, draw(st.integers(0, 2)), draw(st.none() | ranges))


def any_shards() -> SearchStrategy[ShardSpec]:
    """Generate shards of any array.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(any_shards(), lambda shard: shard.size == 3).size
    3
    """
    return array_specs().flatmap(shards)


def any_fragments() -> SearchStrategy[Fragment]:
    """Generate fragments of non-empty shards.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(any_fragments(), lambda fragment: fragment.box.ndim == 0)
    Fragment(box=Box(start=(), stop=()), run=0)
    """
    full = shapes(min_side=1).flatmap(
        lambda shape: st.tuples(st.just(shape), boxes(shape, empty=False), flat_splits(prod(shape), 2))
    )
    return full.flatmap(_one_fragment)


def _one_fragment(parts: tuple[tuple[int, ...], Box, tuple[tuple[int, int], ...]]) -> SearchStrategy[Fragment]:
    shape, box, ranges = parts
    array = ArraySpec("w", shape, "int8")
    found = [f for flat in ranges for f in fragments(ShardSpec(array, array.box, 0, flat))]
    return st.sampled_from([Fragment(box, 0), *found])


@st.composite
def placed_worlds(draw: DrawFn, array: ArraySpec, max_axes: int = 3, outside: int = 1) -> World:
    """Generate worlds of DTensor placements on a mesh; up to `outside` ranks are not in the mesh.

    Examples
    --------
    >>> from hypothesis import find
    >>> w = ArraySpec("w", (4,), "int8")
    >>> find(placed_worlds(w), lambda world: sum(s.is_main for rank in world.ranks for s in rank) == 2).size
    2
    """
    mesh = draw(meshes(max_axes))
    how = draw(placements(mesh, len(array.shape)))
    held = [
        tuple(placed.shard for placed in from_placements(array, mesh, coordinate, how))
        for coordinate in product(*map(range, mesh))
    ]
    held += [()] * draw(st.integers(0, outside))
    return World(draw(_reordered(held)))


@st.composite
def placed_arrays(draw: DrawFn, max_arrays: int = 3, spare: int = 1) -> list[PlacedArray]:
    """Generate arrays placed on one or two meshes, whose ranks come in any order; up to `spare` ranks are on neither.

    Arrays of few axes may be long, so that a small chunk size cuts them into many chunks.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(placed_arrays(), lambda placed: placed[0].sharding.copies > 1)[0].sharding.placements
    (Replicate(),)
    """
    sides = st.lists(st.sampled_from([2, 3, 1]), min_size=1, max_size=2).map(tuple)
    shapes_of = draw(st.lists(sides, min_size=1, max_size=2))
    ranks = range(max(map(prod, shapes_of)) + draw(st.integers(0, spare)))
    known = [Mesh(shape, draw(st.permutations(ranks))[: prod(shape)]) for shape in shapes_of]
    long = shapes(1, 24, 4, 1) | shapes(2, 16, 2, 2) | shapes(3, 6, 2, 2)
    placed: list[PlacedArray] = []
    for key in draw(st.lists(keys(), min_size=1, max_size=max_arrays, unique=True)):
        array, mesh = draw(array_specs(key, long | shapes())), draw(st.sampled_from(known))
        how = draw(placements(mesh.shape, len(array.shape)))
        is_cut = draw(st.booleans())
        if array.shape and is_cut:
            how = (Shard(0), *how[1:])  # otherwise most arrays would not be cut at all
        placed.append(PlacedArray(array, Sharding(mesh, how)))
    return placed


@st.composite
def shardings(draw: DrawFn, array: ArraySpec, max_ranks: int = 4) -> World:
    """Generate valid worlds that hold `array`: any tiling, some parts flattened or replicated, spread over ranks.

    Every part has exactly one main replica, so that both writer rules accept the world. Some ranks hold nothing.

    Examples
    --------
    >>> from hypothesis import find
    >>> two_parts = lambda world: sum(shard.size > 0 for shard in world.ranks[0]) == 2
    >>> world = find(shardings(ArraySpec("w", (4,), "int8")), two_parts)
    >>> {shard.key for shard in world.ranks[0]}
    {'w'}
    """
    kind = draw(st.sampled_from([*_TILINGS, "placements"]))
    event(f"sharding: {kind}")
    if kind == "placements":
        return draw(placed_worlds(array))
    ranks = draw(st.integers(1, max_ranks))
    held: list[list[ShardSpec]] = [[] for _ in range(ranks)]
    for shard in draw(_reordered(draw(_parts(array, draw(_TILINGS[kind](array.shape)))))):
        held[draw(st.integers(0, ranks - 1))].append(shard)
    return World(held)


@st.composite
def scattered(draw: DrawFn, array: ArraySpec, max_ranks: int = 4) -> World:
    """Generate valid worlds of two ranks or more over which `array` is scattered in small parts, some with copies.

    Parts are ranges of the flat array, or cells of a grid; unlike in most `shardings`, hardly a chunk has one holder.

    Examples
    --------
    >>> from hypothesis import find
    >>> world = find(scattered(ArraySpec("w", (4,), "int8")), lambda world: all(world.ranks))
    >>> len(world.ranks), len(world.by_key()["w"]) >= 2
    (2, True)
    """
    ranks = draw(st.integers(2, max_ranks))
    if draw(st.booleans()):
        size = prod(array.shape)
        cuts = draw(_several(st.integers(0, size), ranks, 3 * ranks).map(sorted))
        ranges = zip((0, *cuts), (*cuts, size), strict=True)
        parts = [ShardSpec(array, array.box, 0, flat) for flat in dict.fromkeys(ranges)]
    else:
        sizes = [
            draw(st.sampled_from([chunked_sizes, balanced_sizes]))(n, draw(st.integers(2, 4))) for n in array.shape
        ]
        parts = [ShardSpec(array, box) for box in dict.fromkeys(grid_boxes(sizes))]
    turns = draw(st.permutations(range(len(parts))))
    held: list[list[ShardSpec]] = [[] for _ in range(ranks)]
    for turn, part in zip(turns, parts, strict=True):
        held[turn % ranks].append(part)
        if turn % 5 == 4:
            held[(turn + 1) % ranks].append(ShardSpec(array, part.box, 1, part.flat))
    held += [[]] * draw(st.integers(0, 1))
    return World(draw(_reordered(held)))


def _several(values: SearchStrategy[int], least: int, most: int) -> SearchStrategy[list[int]]:
    # The length is drawn first: otherwise Hypothesis prefers short lists.
    return st.integers(least, most).flatmap(lambda n: st.lists(values, min_size=n, max_size=n))


@st.composite
def _parts(draw: DrawFn, array: ArraySpec, tiling: Sequence[Box]) -> list[ShardSpec]:
    """Flatten some boxes of a tiling into ranges and make copies of some parts."""
    flatten, copy = draw(st.tuples(st.booleans(), st.booleans()))
    if flatten:
        event("sharding: some flat")
    parts: list[ShardSpec] = []
    for box in tiling:
        split = flatten and draw(st.booleans())
        ranges = draw(flat_splits(box.size, 3)) if split else (None,)
        for flat in dict.fromkeys(ranges):
            copies = draw(st.integers(1, 3)) if copy else 1
            ids = draw(replica_ids(copies)) if copies > 1 else ((0,),)
            parts += [ShardSpec(array, box, replica, flat) for replica in ids]
    return parts


def _reordered(items: Sequence[T]) -> SearchStrategy[Sequence[T]]:
    # A permutation shrinks to the identity, but costs one drawn number per item.
    return st.permutations(items) if len(items) > 1 else st.just(items)


@st.composite
def worlds(draw: DrawFn, max_arrays: int = 3, max_ranks: int = 4) -> World:
    """Generate valid worlds of several arrays with different keys, each sharded in its own way.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(worlds(), lambda world: len(world.by_key()) == 2).size
    1
    """
    names = draw(st.lists(keys(), max_size=max_arrays, unique=True))
    several = [draw(shardings(draw(array_specs(name)), max_ranks)) for name in names]
    ranks = max((world.size for world in several), default=1)
    held: list[list[ShardSpec]] = [[] for _ in range(ranks)]
    for world in several:
        for rank, part in enumerate(world.ranks):
            held[rank] += part
    return World(held)
