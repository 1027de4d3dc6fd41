"""R: of the copies of a shard exactly one is written, the same one whoever asks."""

from collections import Counter

import attrs
from hypothesis import event, example, given
from hypothesis import strategies as st

from functional_ckpt.errors import CheckpointErrors, ReplicaError
from functional_ckpt.plan.layout import LayoutPolicy
from functional_ckpt.plan.replica import choose_writers
from functional_ckpt.plan.save import plan_save
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.sharding import ShardSpec, World
from functional_ckpt.spec.table import ShardTable
from functional_ckpt.testing import laws
from functional_ckpt.testing import strategies as fst

WORLDS = fst.array_specs("w").flatmap(fst.shardings)
RULES = st.sampled_from(["declared", "elect"])
SCALAR = ArraySpec("w", (), "int8")
EMPTY = ArraySpec("w", (0,), "int8")


@given(WORLDS, RULES)
def test_r1_each_shard_has_one_writer_that_holds_it(world, rule):
    (holders,) = world.by_key().values()
    writers, problems = written(world, rule)
    assert problems == []
    assert writers or not any(shard.size for _, _, shard in holders)
    laws.check_writers(holders, writers)


def written(world, rule):
    """Return the holders that write, and the problems."""
    table, _ = ShardTable.of_world(world)
    rows, problems = choose_writers(table, rule)
    picked = [(int(table.rows.rank[row]), int(table.rows.shard[row])) for row in rows]
    return [(rank, at, world.ranks[rank][at]) for rank, at in picked], problems


@given(WORLDS)
def test_r1_declared_writers_are_main_replicas(world):
    writers, _ = written(world, "declared")
    assert all(shard.is_main for _, _, shard in writers)


@st.composite
def relabelled(draw):
    """Valid worlds whose replica ids are drawn anew: maybe no main replica, maybe several."""
    world = draw(WORLDS)
    new = st.sampled_from([(0,), (1,), (0, 0), (0, 1)])
    return World([[attrs.evolve(s, replica_id=draw(new)) for s in shards] for shards in world.ranks])


@given(relabelled())
@example(World([[ShardSpec(SCALAR, SCALAR.box, 0, (0, 1)), ShardSpec(SCALAR, SCALAR.box, 1, (0, 0))]]))
@example(World([[ShardSpec(EMPTY, EMPTY.box, 1)]]))
@example(World([[ShardSpec(EMPTY, EMPTY.box, 1)], [ShardSpec(EMPTY, EMPTY.box)]]))
def test_r2_declared_accepts_exactly_one_main_replica_per_cell(world):
    (holders,) = world.by_key().values()
    mains = Counter(shard.identity for _, _, shard in holders if shard.is_main)
    main_ranks = {rank for rank, _, shard in holders if shard.is_main}
    full = {shard.identity for _, _, shard in holders if shard.size}
    # An array without cells only needs somebody who writes its metadata.
    valid = all(mains[identity] == 1 for identity in full) and (full or mains)
    event(f"valid: {bool(valid)}")
    plan, problems = planned(world)
    assert bool(valid) == (not problems)
    # Where a shard has no main replica, that is not told as a gap besides.
    assert all((type(problem), problem.key) == (ReplicaError, "w") for problem in problems)
    several = [problem for problem in problems if "two main" in problem.what]
    assert bool(several) == any(mains[identity] > 1 for identity in full)
    assert (len(several) < len(problems)) == (not all(mains[i] for i in full) or not (full or mains))
    assert all(len(problem.rank) > 1 and main_ranks.issuperset(problem.rank) for problem in several)
    assert all({*problem.rank} <= {rank for rank, _, _ in holders} for problem in problems)
    if plan is not None:
        assert {header.rank for header in plan.headers} <= main_ranks


def planned(world):
    """Return the plan, or None and the problems."""
    try:
        return plan_save(world, LayoutPolicy(), "declared"), []
    except ReplicaError as error:
        return None, [error]
    except CheckpointErrors as group:
        return None, list(group.exceptions)


@given(WORLDS, RULES, st.randoms(use_true_random=False))
def test_r3_the_order_of_shards_does_not_matter(world, rule, random):
    shuffled = World([random.sample(shards, len(shards)) for shards in world.ranks])
    one, other = written(world, rule), written(shuffled, rule)
    assert [(rank, shard) for rank, _, shard in one[0]] == [(rank, shard) for rank, _, shard in other[0]]
    assert one[1] == other[1] == []


@given(fst.worlds(), fst.layout_policies(), st.data())
def test_r3_renaming_ranks_moves_writers_but_not_the_checkpoint(world, policy, data):
    order = data.draw(st.permutations(range(world.size)))
    renamed = World([world.ranks[rank] for rank in order])
    for rule in ("declared", "elect"):
        one, other = plan_save(world, policy, rule), plan_save(renamed, policy, rule)
        assert one.arrays == other.arrays
        assert sorted((w.key, w.box) for w in one.writes) == sorted((w.key, w.box) for w in other.writes)
        moved = [sorted((m.key, m.index, m.box) for m in plan.moves) for plan in (one, other)]
        assert moved[0] == moved[1]
        assert [d.index for d in one.digests] == [d.index for d in other.digests]


@given(st.integers(2, 5), st.sampled_from(["w", "model.layers.0.weight"]))
def test_r3_elected_writers_spread_over_the_ranks(ranks, key):
    array = ArraySpec(key, (200,), "int8")
    boxes = [Box((i,), (i + 1,)) for i in range(200)]
    world = World([[ShardSpec(array, b, r) for b in boxes] for r in range(ranks)])
    plan = plan_save(world, LayoutPolicy(min_chunk_nbytes=0))
    loads = Counter(write.rank for write in plan.writes)
    assert max(loads.values()) <= 2 * 200 / ranks
