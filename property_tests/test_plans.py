"""P: plans are deterministic values that move every cell once."""

import hashlib
import pickle
import subprocess
import sys
from functools import cache
from math import prod
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from functional_ckpt import errors
from functional_ckpt.errors import CheckpointError, CheckpointErrors, PolicyError
from functional_ckpt.plan.layout import Layout, LayoutPolicy
from functional_ckpt.plan.load import plan_load
from functional_ckpt.plan.local import plan_local_save
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.plan.save import plan_save, restrict
from functional_ckpt.spec.array import BITS, DTYPES, ArraySpec, can_cast
from functional_ckpt.spec.columns import Columns
from functional_ckpt.spec.mesh import Mesh
from functional_ckpt.spec.placement import Replicate, Shard, from_placements
from functional_ckpt.spec.sharding import PlacedArray, Sharding, ShardSpec, World
from functional_ckpt.testing import laws
from functional_ckpt.testing import strategies as fst

RULES = st.sampled_from(["declared", "elect"])
ALL = Sharding(Mesh.line(2), [Replicate()])
ROWS = Sharding(Mesh.line(3), [Shard(0)])
#: Chunks of three rows of three bytes, of which `ROWS` cuts two.
SHARED_ROWS = LayoutPolicy(min_chunk_nbytes=2**20, shared_chunk_nbytes=9)
#: Most policies find all shards too small for chunks of their own, and cut arrays into many chunks.
MOVING = fst.moving_policies().map(lambda policy: policy.layout)
POLICIES = MOVING | MOVING | MOVING | fst.layout_policies() | fst.joining_policies()
# Each example pickles everything.
FEWER = settings(max_examples=settings.default.max_examples // 3)


@given(fst.worlds(), fst.layout_policies(), RULES, st.booleans())
def test_plans_write_every_cell_once(world, policy, rule, owned_ok):
    plan = plan_save(world, policy, rule, owned_ok=owned_ok)
    for array in plan.arrays:
        event(f"ownership: {array.layout.ownership}")
    laws.check_plan(plan, world)


CHILD = """
import hashlib, pickle, sys
from functional_ckpt.plan.save import plan_save
for world, policy in pickle.load(sys.stdin.buffer):
    print(hashlib.sha256(repr(plan_save(world, policy)).encode()).hexdigest())
"""


@settings(max_examples=3)
@given(st.lists(st.tuples(fst.worlds(), fst.layout_policies()), min_size=8, max_size=8), st.integers(1, 99))
def test_p1_plans_do_not_depend_on_the_hash_seed(cases, seed):
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=pickle.dumps(cases), capture_output=True, check=True,
        cwd=Path(__file__).parents[1], env={"PYTHONHASHSEED": str(seed)},
    )  # fmt: skip
    plans = [plan_save(world, policy) for world, policy in cases]
    expected = [hashlib.sha256(repr(plan).encode()).hexdigest() for plan in plans]
    assert child.stdout.decode().split() == expected


@given(fst.worlds(), fst.layout_policies(), RULES, st.randoms(use_true_random=False))
def test_p2_the_order_of_shards_and_keys_does_not_matter(world, policy, rule, random):
    ranks = [random.sample(shards, len(shards)) for shards in world.ranks]
    assert named_writes(World(ranks), policy, rule) == named_writes(world, policy, rule)


def named_writes(world, policy, rule):
    """Return the plan with shards instead of their positions."""
    plan = plan_save(world, policy, rule)
    writes = [(w.key, w.box, w.rank, w.run, world.ranks[w.rank][w.shard]) for w in plan.writes]
    moves = [(attrs.evolve(m, shard=None), world.ranks[m.source][m.shard]) for m in plan.moves]
    return plan.arrays, writes, moves, plan.headers, plan.digests


@given(fst.worlds(), fst.layout_policies(), RULES, st.booleans())
def test_p3_restrictions_partition_the_plan(world, policy, rule, owned_ok):
    plan = plan_save(world, policy, rule, owned_ok=owned_ok)
    parts = [restrict(plan, rank) for rank in range(world.size)]
    for field in ("writes", "headers", "digests"):
        together = [item for part in parts for item in getattr(part, field)]
        assert sorted(together) == sorted(getattr(plan, field))
        assert len(together) == len({*together})
    for rank, part in enumerate(parts):
        assert {item.rank for item in (*part.writes, *part.headers, *part.digests)} <= {rank}
        assert all(rank in (move.source, move.target) for move in part.moves)
        assert all((move.shard is None) == (move.source != rank) for move in part.moves)
        needed = {item.key for item in (*part.writes, *part.moves, *part.headers, *part.digests)}
        assert {array.spec.key for array in part.arrays} == needed
    leaving = [move for rank, part in enumerate(parts) for move in part.moves if move.source == rank]
    assert sorted(leaving) == sorted(plan.moves)
    coming = {(m.key, m.box, rank) for rank, part in enumerate(parts) for m in part.moves if m.target == rank}
    assert coming == {(m.key, m.box, m.target) for m in plan.moves}


@st.composite
def cut_arrays(draw):
    """Arrays cut along their first axis, mostly in the middle of a chunk: those of `placed_arrays` seldom are."""
    sides = draw(st.sampled_from([(2,), (3,), (2, 2), (3, 2)]))
    mesh = Mesh(sides, draw(st.permutations(range(prod(sides)))))
    second = st.sampled_from([Shard(0), Shard(1), Replicate()])
    sharding = Sharding(mesh, [Shard(0), *(draw(second) for _ in sides[1:])])
    shapes = st.tuples(st.integers(5, 24), st.integers(2, 6))
    return [PlacedArray(draw(fst.array_specs(key, shapes)), sharding) for key in "ab"[: draw(st.integers(1, 2))]]


@given(
    fst.placed_arrays() | cut_arrays(),
    POLICIES,
    RULES,
    st.booleans(),
    st.sampled_from([3 * 96, 3 * 96, 3 * 256, 2**30]),
)
@example([PlacedArray(ArraySpec("w", (10, 3), "int8"), ROWS)], SHARED_ROWS, "elect", False, 2**30)
@example([PlacedArray(ArraySpec("a" * n, (0,) * n, "int8"), ALL) for n in (1, 2)], LayoutPolicy(), "elect", True, 2**30)
@example([], LayoutPolicy(), "elect", True, 2**30)
def test_p4_planning_on_a_mesh_alone_is_planning_together(placed, policy, rule, owned_ok, budget):
    ranks = max((max(item.sharding.mesh.ranks) for item in placed), default=0) + 1
    world = World([[shard for item in placed for shard in shards_of(item, rank)] for rank in range(ranks)])
    rules = (policy, rule, True, owned_ok, budget)
    try:
        plan = plan_save(world, *rules)
    except PolicyError:
        event("budget too small")
        assert all(isinstance(e, PolicyError) for e in errors_of(lambda: plan_local_save(0, placed, *rules)))
        return
    event(f"digests: {min(len(plan.digest_rows), 1)}")
    waves = plan.pieces.wave.max(initial=0) + 1
    event(f"ownerships: {sorted({a.layout.ownership for a in plan.arrays})}, waves: {min(3, waves)}")
    laws.check_plan(plan, world)
    for rank in range(ranks):
        assert plan_local_save(rank, placed, *rules) == restrict(plan, rank)


def shards_of(item, rank):
    mesh = item.sharding.mesh
    parts = from_placements(item.array, mesh.shape, mesh.coordinate(rank), item.sharding.placements)
    return [part.shard for part in parts]


def errors_of(call):
    try:
        call()
    except CheckpointErrors as group:
        return list(group.exceptions)
    except CheckpointError as error:
        return [error]
    return []


@st.composite
def loads(draw):
    """Shards wanted of arrays that are stored with a shape of their own."""
    stored, wanted = {}, []
    for key in ("a", "b"):
        array = draw(fst.array_specs(key))
        shape = tuple(draw(st.integers(0, n + 1)) for n in array.shape) if draw(st.booleans()) else array.shape
        spec = ArraySpec(key, shape, array.dtype)
        chunk = tuple(max(n, 1) for n in shape)
        stored[key] = ArrayEntry(spec, Layout("exclusive", chunk, (), spec.dtype), bytes(16))
        wanted += draw(st.lists(fst.shards(array), min_size=1, max_size=2))
    return stored, wanted


@given(loads())
def test_p6_reads_and_fills_cover_what_is_wanted_once(case):
    stored, wanted = case
    plan = plan_load(stored, wanted, allow_shape_mismatch=True)
    event(f"reads: {min(len(plan.reads), 2)}, fills: {min(len(plan.fills), 2)}")
    laws.check_load_plan(plan, stored, wanted)


@given(loads())
def test_p6_another_shape_is_refused_unless_allowed(case):
    stored, wanted = case
    differ = [shard.key for shard in wanted if shard.array.shape != stored[shard.key].spec.shape]
    found = errors_of(lambda: plan_load(stored, wanted))
    assert [(type(e), e.key) for e in found] == [(errors.ShapeError, key) for key in differ]
    if not differ:
        assert plan_load(stored, wanted).fills == ()


@given(loads(), st.data())
def test_p6_all_problems_of_a_load_are_told_at_once(case, data):
    stored, wanted = case
    gone = data.draw(st.sampled_from([(), ("a",), ("a", "b")]))
    rest = {key: entry for key, entry in stored.items() if key not in gone}
    found = errors_of(lambda: plan_load(rest, wanted, allow_shape_mismatch=True))
    assert [e.key for e in found] == [shard.key for shard in wanted if shard.key in gone]
    assert all(isinstance(e, errors.KeyMismatchError) for e in found)


@given(loads(), fst.dtypes(), st.sampled_from(["error", "same_kind", "any"]))
def test_p6_casts_follow_their_rule(case, dtype, rule):
    stored, wanted = case
    wanted = [attrs.evolve(s, array=attrs.evolve(s.array, dtype=dtype)) for s in wanted]
    refused = [s.key for s in wanted if not can_cast(stored[s.key].spec.dtype, dtype, rule)]
    found = errors_of(lambda: plan_load(stored, wanted, rule, allow_shape_mismatch=True))
    assert [(type(e), e.key) for e in found] == [(errors.CastError, key) for key in refused]
    alike = [s for s in wanted if s.array.shape == stored[s.key].spec.shape]
    found = errors_of(lambda: plan_load(stored, alike, rule))
    assert [(type(e), e.key) for e in found] == [(errors.CastError, s.key) for s in alike if s.key in refused]
    for error in found:  # it names the narrowest rule that would do
        rules = [rule for rule in ("same_kind", "any") if can_cast(error.found, error.expected, rule)]
        assert error.remedy == f"Pass LoadPolicy(cast={rules[0]!r})"


@pytest.mark.parametrize("stored", DTYPES)
def test_p6_same_kind_is_numpys(stored):
    for wanted in DTYPES:
        assert can_cast(stored, wanted, "any")
        assert can_cast(stored, wanted, "error") == (stored == wanted)
        if stored not in BITS and wanted not in BITS:
            expected = np.can_cast(stored, wanted, "same_kind")
            assert can_cast(stored, wanted, "same_kind") == expected
        elif stored in BITS and wanted in BITS:
            assert can_cast(stored, wanted, "same_kind")


@cache
def is_frozen(kind):
    """Tell whether fields of an attrs class refuse to be set."""
    blank = object.__new__(kind)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(blank, attrs.fields(kind)[0].name, None)
    return True


def check_value(value):
    """Check that a value is immutable all the way down."""
    if isinstance(value, Columns):
        assert not any(getattr(value, field.name).flags.writeable for field in attrs.fields(type(value)))
    elif attrs.has(type(value)):
        assert is_frozen(type(value))
        for field in attrs.fields(type(value)):
            if field.eq:  # what a value only keeps (`Deriving`) is no part of it
                check_value(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            check_value(item)
    else:
        assert value is None or isinstance(value, int | str | bytes | float | bool)


@FEWER
@given(fst.worlds(), fst.policies(), fst.manifests(), loads())
def test_p7_values_are_hashable_picklable_and_immutable(world, policy, manifest, case):
    plan = plan_save(world, policy.layout, policy.replicas)
    load = plan_load(*case, allow_shape_mismatch=True)
    for value in (world, policy, manifest, plan, load, restrict(plan, 0)):
        assert hash(value) == hash(attrs.evolve(value))
        other = pickle.loads(pickle.dumps(value))
        assert other == value
        assert hash(other) == hash(value)
        check_value(value)


@st.composite
def reshards(draw):
    specs = [draw(fst.array_specs(key)) for key in draw(st.lists(st.sampled_from("ab"), min_size=1, unique=True))]
    worlds = [[draw(fst.shardings(spec)) for spec in specs] for _ in range(2)]
    return joined(worlds[0]), joined(worlds[1]), {spec.key: draw(fst.arrays(spec)) for spec in specs}


def joined(worlds):
    ranks = max(world.size for world in worlds)
    return World([[s for w in worlds if r < w.size for s in w.ranks[r]] for r in range(ranks)])


@given(reshards(), fst.layout_policies(), st.booleans())
def test_resharding_is_the_identity(case, policy, owned_ok):
    """W1 and W2 for the pure layers alone: no store, only numpy."""
    source, target, arrays = case
    laws.check_reshard(source, target, arrays, policy, owned_ok)


@given(fst.array_specs("w", fst.shapes(min_side=1)), fst.layout_policies())
def test_a_law_that_cannot_fail_would_be_no_law(array, policy):
    """Forget the only write of a plan, and the law says so."""
    world = World([[ShardSpec(array, array.box)]])
    plan = plan_save(world, policy)
    with pytest.raises(AssertionError, match="are written 0 times"):
        laws.check_plan(attrs.evolve(plan, pieces=plan.pieces.take([])), world)
