"""X: pieces that move between ranks reach storage whole, in waves under the budget, whoever the ranks are."""

import json
import re
from random import Random

import attrs
import numpy as np
import pytest
from hypothesis import event, find, given, settings
from hypothesis import strategies as st

import functional_ckpt
from functional_ckpt.errors import PolicyError
from functional_ckpt.plan.save import plan_save, restrict
from functional_ckpt.run.comm import GatherOnly
from functional_ckpt.run.policy import LoadPolicy
from functional_ckpt.spec.sharding import World
from functional_ckpt.testing import laws, model
from functional_ckpt.testing import strategies as fst
from functional_ckpt.testing.simulate import run_ranks
from property_tests.test_roundtrip import directory, joined, load_world, tree_bytes, trees

OWNERSHIPS = st.sampled_from(["owned", "joined", "exclusive", "shared"])
# Each example saves and loads several times.
FEWER = settings(max_examples=settings.default.max_examples // 3)
FEWEST = settings(max_examples=settings.default.max_examples // 6)


@st.composite
def moves(draw, max_arrays=2):
    """Two worlds that hold the same arrays, the arrays, and a policy of small chunks and few of them at a time."""
    names = draw(st.lists(fst.keys(), min_size=1, max_size=max_arrays, unique=True))
    long = fst.shapes(1, 48, 4, 1) | fst.shapes(2, 12, 3, 2) | fst.shapes(3, 6, 2, 3)
    specs = [draw(fst.array_specs(name, long | fst.shapes(3, 6, 1, 1))) for name in names]
    source = joined([draw(fst.scattered(spec) | fst.scattered(spec) | fst.shardings(spec)) for spec in specs])
    target = joined([draw(fst.scattered(spec) | fst.shardings(spec)) for spec in specs])
    policy = owned_as(draw(fst.moving_policies()), draw(st.sampled_from(["owned", "owned", "joined"])))
    return source, target, {spec.key: draw(fst.arrays(spec)) for spec in specs}, policy


def owned_as(policy, ownership):
    """Return `policy` such that shards have chunks of their own, or chunks of several shards."""
    if ownership not in ("exclusive", "joined"):
        return policy
    few = 0 if ownership == "joined" else 2**20
    return attrs.evolve(policy, layout=attrs.evolve(policy.layout, min_chunk_nbytes=0, few_files=few))


def plan_of(world, policy, ownership="owned"):
    policy = owned_as(policy, ownership)
    return plan_save(world, policy.layout, policy.replicas, True, ownership != "shared", policy.budget_nbytes)


def save_on(ownership, world, arrays, path, policy):
    states = trees(world, model.deal(world, arrays))

    def save(gather):
        group = GatherOnly(gather) if ownership == "shared" else gather
        return functional_ckpt.save(states[gather.rank], path, policy=owned_as(policy, ownership), process_group=group)

    return run_ranks(world.size, save)[0]


def waves_that_move(plan):
    """Return the numbers of the waves in which something goes to another rank."""
    rows = plan.pieces
    return {*rows.wave[(rows.source != rows.target)].tolist()}


def described(plan):
    ownerships = sorted({array.layout.ownership for array in plan.arrays})
    return f"ownerships: {ownerships}, waves: {min(3, len(waves_that_move(plan)))}"


@FEWEST
@given(moves(), OWNERSHIPS)
def test_what_one_world_writes_any_other_reads(case, ownership):
    source, target, arrays, policy = case
    plan = plan_of(source, policy, ownership)
    event(described(plan))
    laws.check_plan(plan, source)
    with directory() as path:
        manifest = save_on(ownership, source, arrays, path, policy)
        assert [entry.layout for entry in manifest.arrays] == [array.layout for array in plan.arrays]
        expected = model.deal(target, arrays)
        # A chunk of one shard may be larger than what the budget of the save was drawn for: only owned ones keep to it.
        budget = max(policy.budget_nbytes, *(3 * entry.layout.chunk_nbytes for entry in manifest.arrays))
        for once in (False, True):
            load = LoadPolicy(strict="ignore", verify="full", read_once=once, budget_nbytes=budget)
            found = load_world(target, arrays, path, load)
            for rank, shards in enumerate(target.ranks):
                for at, shard in enumerate(shards):
                    assert model.bits(found[rank][at]) == model.bits(expected[rank][at]), (once, rank, shard)
        assert functional_ckpt.verify(path).ok


@pytest.mark.parametrize("kind", ["flat", "copies", "empty ranks", "codecs"])
def test_the_cases_reach_several_waves_of_real_moves(kind):
    """Of every kind that matters, cases come up in which pieces move between ranks in three waves or more."""

    def is_one(case):
        source, _, _, policy = case
        shards = [shard for held in source.ranks for shard in held]
        is_kind = {
            "flat": any(shard.flat and shard.box.ndim > 1 and 0 < shard.size < shard.box.size for shard in shards),
            "copies": any(not shard.is_main for shard in shards),
            "empty ranks": not all(source.ranks),
            "codecs": bool(policy.layout.codecs),
        }
        return is_kind[kind] and len(waves_that_move(plan_of(source, policy))) >= 3

    budget = settings(max_examples=3000, database=None, phases=[*settings().phases][:3])
    assert find(moves(), is_one, settings=budget, random=Random(0))


@FEWEST
@given(moves(), OWNERSHIPS, st.data())
def test_what_lands_on_disk_does_not_know_the_ranks_names(case, ownership, data):
    source, _, arrays, policy = case
    order = data.draw(st.permutations(range(source.size)))
    event(described(plan_of(source, policy, ownership)))
    with directory() as one, directory() as other:
        save_on(ownership, source, arrays, one, policy)
        save_on(ownership, World([source.ranks[rank] for rank in order]), arrays, other, policy)
        assert tree_bytes(one) == tree_bytes(other)


@FEWER
@given(moves(), st.data())
def test_relabelled_ranks_own_what_they_owned_before(case, data):
    """Who owns a chunk follows from what is held: the plan of the renamed ranks is the renamed plan."""
    source, _, _, policy = case
    order = data.draw(st.permutations(range(source.size)))  # the new rank r is the old order[r]
    plan, other = plan_of(source, policy), plan_of(World([source.ranks[rank] for rank in order]), policy)
    assert other.arrays == plan.arrays
    renamed = np.array(order, np.int64)
    assert attrs.evolve(other.pieces, source=renamed[other.pieces.source], target=renamed[other.pieces.target]) == (
        plan.pieces
    )


@FEWER
@given(moves())
def test_a_chunk_is_owned_by_one_of_its_largest_holders_and_they_take_turns(case):
    source, _, _, policy = case
    plan = plan_of(source, policy)
    assert plan_of(source, policy) == plan
    for array in plan.arrays:
        mine = [move for move in plan.moves if move.key == array.spec.key]
        for index in {move.index for move in mine}:
            pieces = [move for move in mine if move.index == index]
            largest = max(piece.box.size for piece in pieces)
            assert {piece.target for piece in pieces} <= {p.source for p in pieces if p.box.size == largest}


@FEWER
@given(moves())
def test_no_wave_holds_more_than_its_share_of_the_budget(case):
    source, _, _, policy = case
    plan, limit = plan_of(source, policy), policy.budget_nbytes // 3
    arrays = {array.spec.key: array for array in plan.arrays}
    held, messages = {}, {}
    for move in plan.moves:
        array = arrays[move.key]
        held.setdefault((move.wave, move.target), {})[move.key, move.index] = array.layout.chunk_nbytes
        if move.source != move.target:
            pair = (move.wave, move.source, move.target)
            messages[pair] = messages.get(pair, 0) + move.box.size * array.spec.itemsize
    assert all(sum(chunks.values()) <= limit for chunks in held.values())
    assert all(nbytes <= limit for nbytes in messages.values())
    event(f"waves: {min(5, len({wave for wave, _ in held}))}")


@FEWER
@given(moves())
def test_the_smallest_budget_that_works_is_named_and_works(case):
    source, _, _, policy = case
    plan = plan_of(source, policy)
    owned = {array.spec.key: array.layout.chunk_nbytes for array in plan.arrays if array.layout.ownership == "owned"}
    event(f"owned: {bool(owned)}")
    if not owned:
        assert plan_of(source, attrs.evolve(policy, budget_nbytes=1)) == plan
        return
    with pytest.raises(PolicyError, match="at least") as caught:
        plan_of(source, attrs.evolve(policy, budget_nbytes=1))
    smallest = int(re.fullmatch(r"at least (\d+) bytes", caught.value.expected).group(1))
    plan = plan_of(source, attrs.evolve(policy, budget_nbytes=smallest))
    laws.check_plan(plan, source)
    with pytest.raises(PolicyError, match=str(smallest)) as caught:
        plan_of(source, attrs.evolve(policy, budget_nbytes=smallest - 1))
    assert smallest == 3 * owned[caught.value.key] == 3 * max(owned.values())


@FEWEST
@given(moves())
def test_a_save_sends_the_messages_of_its_plan(case):
    source, _, arrays, policy = case
    plan = plan_of(source, policy)
    with directory() as path:
        save_on("owned", source, arrays, path, policy)
        told = json.loads((path / "provenance.json").read_text())["ranks"]
    assert [(rank["messages"], rank["moved_nbytes"], rank["nbytes"]) for rank in told] == [
        (*sent_by(restrict(plan, rank), rank), written_by(plan, rank)) for rank in range(source.size)
    ]


def sent_by(plan, rank):
    """Return the messages that leave a rank, and the bytes in them."""
    itemsizes = {array.spec.key: array.spec.itemsize for array in plan.arrays}
    leaving = [move for move in plan.moves if move.source == rank != move.target]
    nbytes = sum(move.box.size * itemsizes[move.key] for move in leaving)
    return len({(move.wave, move.target) for move in leaving}), nbytes


def written_by(plan, rank):
    itemsizes = {array.spec.key: array.spec.itemsize for array in plan.arrays}
    boxes = [(w.key, w.box) for w in plan.writes if w.rank == rank]
    boxes += [(m.key, m.box) for m in plan.moves if m.target == rank]
    return sum(box.size * itemsizes[key] for key, box in boxes)


@FEWER
@given(moves())
def test_storage_sees_whole_chunks_and_one_metadata_file_per_array(case):
    source, _, arrays, policy = case
    plain = attrs.evolve(policy, layout=attrs.evolve(policy.layout, codecs=()))
    plan = plan_of(source, plain)
    with directory() as path:
        save_on("owned", source, arrays, path, plain)
        sizes = {name: len(data) for name, data in tree_bytes(path).items() if "/" in name}
    chunks = [array.layout.chunk_nbytes for array in plan.arrays for _ in range(array.grid.size)]
    assert len(sizes) == len(chunks) + len(plan.arrays)
    assert sorted(n for name, n in sizes.items() if not name.endswith("zarr.json")) == sorted(chunks)
