"""Which of several copies of a shard is written: total, deterministic rules that never iterate a set.

`declared`: exactly one copy has an all-zero replica id. `elect`: a hash of key and region picks among the copies
sorted by (replica id, rank), so that writing spreads over the ranks and every rank knows the answer.
"""

from collections.abc import Sequence
from zlib import crc32

from functional_ckpt.errors import ReplicaError
from functional_ckpt.spec.sharding import ShardSpec

__all__ = ["Holder", "choose_writers", "elect"]

#: (rank, position among the rank's shards, shard)
Holder = tuple[int, int, ShardSpec]


def elect(shard: ShardSpec, holders: Sequence[Holder]) -> Holder:
    """Return the holder that writes, the same whatever the order of `holders`.

    Examples
    --------
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> a = ArraySpec("w", (2,), "int8")
    >>> copies = [(r, 0, ShardSpec(a, a.box, r)) for r in range(4)]
    >>> elect(copies[0][2], copies) == elect(copies[0][2], copies[::-1])
    True
    """
    box, flat = shard.identity
    order = sorted(holders, key=lambda h: (h[2].replica_id, h[0], h[1]))
    return order[crc32(f"{shard.key} {box.start} {flat}".encode()) % len(order)]


def choose_writers(holders: Sequence[Holder], rule: str) -> tuple[list[Holder], list[ReplicaError]]:
    """Return one writer per distinct shard of one array, sorted by region, and the problems found.

    `rule` is ``"declared"`` or ``"elect"``. Empty shards need no writer, but an array without any cells
    keeps one holder, who writes its metadata.

    Examples
    --------
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> a = ArraySpec("w", (2,), "int8")
    >>> _, problems = choose_writers([(0, 0, ShardSpec(a, a.box, 1))], "declared")
    >>> print(problems[0])  # doctest: +ELLIPSIS
    a shard has no main replica: key 'w', shape (2,), offset (0,), rank (0,), found replica ids [(1,)]...
    """
    if len(holders) == 1 and (rule == "elect" or holders[0][2].is_main):
        return list(holders), []
    groups: dict[tuple[object, object], list[Holder]] = {}
    for holder in holders:
        groups.setdefault(holder[2].identity, []).append(holder)
    writers: list[Holder] = []
    problems: list[ReplicaError] = []
    for _, group in sorted(groups.items(), key=lambda item: item[0]):
        shard = group[0][2]
        if rule == "elect":
            writers.append(elect(shard, group))
            continue
        mains = [h for h in group if h[2].is_main]
        if len(mains) == 1 or (mains and not shard.size):
            writers.append(min(mains, key=lambda h: h[:2]))
        elif shard.size:
            problems.append(_problem(shard, group, mains))
    return writers, problems


def _problem(shard: ShardSpec, group: Sequence[Holder], mains: Sequence[Holder]) -> ReplicaError:
    what = "a shard has two main replicas" if mains else "a shard has no main replica"
    ranks = tuple(sorted(h[0] for h in (mains or group)))
    ids = sorted(h[2].replica_id for h in group)
    return ReplicaError(
        what, shard.key, ranks, shard.array.shape, shard.box.start, None, f"replica ids {ids}",
        "Give exactly one copy the replica id 0, or pass replicas='elect'",
    )  # fmt: skip
