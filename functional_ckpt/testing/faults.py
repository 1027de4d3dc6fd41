"""Strategies for faults: worlds with one fault, and damaged manifests."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from hypothesis import event, reject
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from functional_ckpt.errors import (
    DTypeError,
    GapError,
    OverlapError,
    ReplicaError,
    ShapeError,
    SpecError,
)
from functional_ckpt.spec.array import DTYPES
from functional_ckpt.spec.shard import ShardSpec, World
from functional_ckpt.testing.plans import json_values, manifests

__all__ = ["Fault", "corruptions", "mangled_manifests"]


@attrs.frozen
class Fault:
    """A world with one fault, and a problem that a check of it (with declared replicas) must report.

    `error` is the class of the problem; it names `key`, and `rank` unless that is None (for a missing shard there is
    no rank to name).
    """

    world: World
    error: type[SpecError]
    key: str
    rank: int | None
    kind: str


@attrs.frozen
class _Target:
    """A shard to corrupt: its place, the number of shards of its key, and of its copies (itself included)."""

    rank: int
    position: int
    shard: ShardSpec
    holders: int
    copies: int


@st.composite
def corruptions(draw: DrawFn, world: World) -> Fault:
    """Generate worlds that differ from the valid `world` in one shard and are invalid.

    Kinds: another shape, another data type, a wrong offset, a dropped shard, a doubled or a missing main replica.

    Examples
    --------
    >>> from hypothesis import find
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> w = ArraySpec("w", (4,), "int8")
    >>> valid = World(((ShardSpec(w, w.box),), ()))
    >>> fault = find(corruptions(valid), lambda fault: fault.kind == "doubled main")
    >>> fault.error.__name__, sum(map(len, fault.world.ranks))
    ('ReplicaError', 2)
    """
    targets = _targets(world)
    options = [(kind, target) for kind, fits in _KINDS.items() for target in targets if fits(target)]
    if not options:
        reject()
    # The kind first: a world of many shards offers some kinds far more often than others.
    kind = draw(st.sampled_from(list(dict.fromkeys(kind for kind, _ in options))))
    event(f"fault: {kind}")
    target = draw(st.sampled_from([target for name, target in options if name == kind]))
    return _SPOIL[kind](draw, world, target)


def _targets(world: World) -> list[_Target]:
    found = []
    for shards in world.by_key().values():
        for rank, position, shard in shards:
            copies = sum(other.identity == shard.identity for _, _, other in shards)
            found.append(_Target(rank, position, shard, len(shards), copies))
    return found


def _is_sole_part(target: _Target) -> bool:
    return target.copies == 1 and target.shard.size > 0


def _free_axes(shard: ShardSpec) -> list[int]:
    return [a for a, (n, m) in enumerate(zip(shard.array.shape, shard.box.shape, strict=True)) if m < n]


_KINDS: dict[str, Callable[[_Target], bool]] = {
    "shape": lambda t: t.holders > 1 and len(t.shard.array.shape) > 0,
    "dtype": lambda t: t.holders > 1,
    "offset": lambda t: _is_sole_part(t) and len(_free_axes(t.shard)) > 0,
    "dropped": lambda t: _is_sole_part(t) and t.holders > 1,
    "dropped main": lambda t: t.copies > 1 and t.shard.size > 0 and t.shard.is_main,
    "doubled main": lambda t: t.shard.size > 0 and t.shard.is_main,
    "no main": lambda t: t.shard.size > 0 and t.shard.is_main,
}


def _shape(draw: DrawFn, world: World, t: _Target) -> Fault:
    shape = list(t.shard.array.shape)
    shape[draw(st.integers(0, len(shape) - 1))] += 1
    shard = attrs.evolve(t.shard, array=attrs.evolve(t.shard.array, shape=shape), grid=None)
    return Fault(_with(world, t, [shard]), ShapeError, t.shard.key, t.rank, "shape")


def _dtype(draw: DrawFn, world: World, t: _Target) -> Fault:
    other = draw(st.sampled_from([name for name in DTYPES if name != t.shard.array.dtype]))
    shard = attrs.evolve(t.shard, array=attrs.evolve(t.shard.array, dtype=other))
    return Fault(_with(world, t, [shard]), DTypeError, t.shard.key, t.rank, "dtype")


def _offset(draw: DrawFn, world: World, t: _Target) -> Fault:
    axis = draw(st.sampled_from(_free_axes(t.shard)))
    forward = t.shard.box.stop[axis] < t.shard.array.shape[axis]
    offset = [0] * t.shard.box.ndim
    offset[axis] = 1 if forward else -1
    shard = attrs.evolve(t.shard, box=t.shard.box.shift(offset), grid=None)
    # A shard that lands exactly on another one looks like a second main replica of it.
    lands = any(s.identity == shard.identity for _, _, s in world.by_key()[t.shard.key])
    return Fault(_with(world, t, [shard]), ReplicaError if lands else OverlapError, t.shard.key, t.rank, "offset")


def _dropped(_draw: DrawFn, world: World, t: _Target) -> Fault:
    return Fault(_with(world, t, []), GapError, t.shard.key, None, "dropped")


def _dropped_main(_draw: DrawFn, world: World, t: _Target) -> Fault:
    return Fault(_with(world, t, []), ReplicaError, t.shard.key, None, "dropped main")


def _doubled_main(draw: DrawFn, world: World, t: _Target) -> Fault:
    rank = draw(st.integers(0, world.size - 1))
    ranks = [[*shards, t.shard] if r == rank else shards for r, shards in enumerate(world.ranks)]
    return Fault(World(ranks), ReplicaError, t.shard.key, rank, "doubled main")


def _no_main(draw: DrawFn, world: World, t: _Target) -> Fault:
    shard = attrs.evolve(t.shard, replica_id=(draw(st.integers(1, 3)),))
    return Fault(_with(world, t, [shard]), ReplicaError, t.shard.key, t.rank, "no main")


_SPOIL: dict[str, Callable[[DrawFn, World, _Target], Fault]] = {
    "shape": _shape,
    "dtype": _dtype,
    "offset": _offset,
    "dropped": _dropped,
    "dropped main": _dropped_main,
    "doubled main": _doubled_main,
    "no main": _no_main,
}


def _with(world: World, t: _Target, shards: Sequence[ShardSpec]) -> World:
    ranks = list(world.ranks)
    held = ranks[t.rank]
    ranks[t.rank] = (*held[: t.position], *shards, *held[t.position + 1 :])
    return World(ranks)


@st.composite
def mangled_manifests(draw: DrawFn) -> bytes:
    """Generate content of a damaged manifest file: any bytes, damaged text, and well-formed JSON with wrong values.

    Some of it is still a valid manifest.

    Examples
    --------
    >>> from hypothesis import Phase, find, settings
    >>> find(mangled_manifests(), lambda text: True, settings=settings(phases=[Phase.generate]))
    b''
    """
    kind = draw(st.sampled_from(["bytes", "damage", "lie"]))
    event(f"manifest: {kind}")
    if kind == "bytes":
        return draw(st.binary(max_size=64))
    text: bytes = draw(manifests()).to_json()
    if kind == "damage":
        start = draw(st.integers(0, len(text)))
        stop = draw(st.integers(start, min(start + 8, len(text))))
        return text[:start] + draw(st.binary(max_size=8)) + text[stop:]
    document = json.loads(text)
    for _ in range(draw(st.integers(1, 2))):
        _lie(draw, document)
    return json.dumps(document).encode()


def _lie(draw: DrawFn, document: dict[str, Any]) -> None:
    """Replace, drop or repeat one node of the document."""
    place, item = draw(st.sampled_from(_places(document) or [(document, "x")]))
    act = draw(st.sampled_from(["replace", "drop", "repeat"]))
    if act == "drop":
        del place[item]
    elif act == "repeat" and isinstance(place, list):
        place.append(place[item])
    else:
        place[item] = draw(json_values() | st.sampled_from([2**61, -1, 2**70, "int8", "00", "\ud800", [[]], {}]))


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Return all (container, index or key) pairs of a JSON document."""
    children = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
    found = [(node, item) for item, _ in children]
    for _, child in children:
        if isinstance(child, dict | list):
            found += _places(child)
    return found
