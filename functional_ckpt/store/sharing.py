"""Memory to load into that cannot hold what is stored for it, or not beside the rest."""

from collections.abc import Hashable, Mapping, Sequence

from functional_ckpt.errors import SpecError
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.spec.sharding import ShardSpec
from functional_ckpt.spec.strided import View, overlapping
from functional_ckpt.store.buffer import Buffer

__all__ = ["memory_problems"]


def memory_problems(
    shards: Sequence[ShardSpec], buffers: Sequence[Buffer], stored: Mapping[str, ArrayEntry]
) -> list[SpecError]:
    """Return a problem for each buffer that cannot hold what is stored for its shard, or not beside the others.

    An element that a view holds twice, or that two views share, would get whatever is read last. Two shards may have
    one view of one memory if the same elements are stored for them.
    """
    problems: list[SpecError] = []
    spaces: dict[Hashable, dict[View, int]] = {}
    for position, (shard, buffer) in enumerate(zip(shards, buffers, strict=True)):
        space, view = buffer.memory()
        if view.overlaps_itself:
            problems.append(_unfit("memory to load into holds an element twice", shard, "a contiguous copy"))
            continue
        first = spaces.setdefault(space, {}).setdefault(view, position)
        if first != position and 0 not in view.shape and not _is_alike(shards[first], shard, stored):
            problems.append(_sharing(shards[first], shard))
    for views in spaces.values():
        positions = list(views.values())
        pairs = overlapping(list(views))
        problems += [_sharing(shards[positions[early]], shards[positions[late]]) for late, early in pairs]
    return problems


def _is_alike(one: ShardSpec, other: ShardSpec, stored: Mapping[str, ArrayEntry]) -> bool:
    """Tell whether the same elements are stored for two shards."""
    a, b = stored.get(one.key), stored.get(other.key)
    if a is None or b is None or (one.array.dtype, one.box, one.flat) != (other.array.dtype, other.box, other.flat):
        return False
    return (a.spec.shape, a.spec.dtype, a.layout, a.digests) == (b.spec.shape, b.spec.dtype, b.layout, b.digests)


def _sharing(early: ShardSpec, late: ShardSpec) -> SpecError:
    what = f"memory to load into is shared with that of {early.key!r} at {early.box.start}"
    return _unfit(what, late, "a copy; tied leaves must be one view of their memory")


def _unfit(what: str, shard: ShardSpec, remedy: str) -> SpecError:
    return SpecError(what, shard.key, None, shard.array.shape, shard.box.start, remedy=f"Pass {remedy}")
