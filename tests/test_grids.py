"""Regular grids that no rank needs to gather: complete ones, and those that only look so."""

from collections import Counter

import numpy as np
import pytest

import functional_ckpt
from functional_ckpt import LocalShards, SavePolicy
from functional_ckpt.errors import CheckpointErrors, GapError, OverlapError, ReplicaError
from functional_ckpt.run import planning
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.grid import block_of
from functional_ckpt.spec.mesh import Mesh
from functional_ckpt.spec.placement import Shard
from functional_ckpt.spec.sharding import Sharding, ShardSpec, from_rank_offsets, relabelled
from functional_ckpt.testing.simulate import run_ranks, try_ranks

POLICY = SavePolicy(replicas="declared", durability="none")


def saved(tmp_path, shards, policy=POLICY):
    def save(gather):
        shard = shards[gather.rank]
        leaf = LocalShards(shard, np.zeros(shard.box.shape, "f4"))
        return functional_ckpt.save({"w": leaf}, tmp_path / "a", policy=policy, process_group=gather)

    (one, other) = try_ranks(2, save, 10)
    assert str(one) == str(other)
    return one.exceptions if isinstance(one, CheckpointErrors) else [one]


def test_two_main_replicas_of_a_grid_of_one_cell(tmp_path):
    (problem,) = saved(tmp_path, [from_rank_offsets("w", "float32", (4,))] * 2)
    assert isinstance(problem, ReplicaError)
    assert problem.rank == (0, 1)


@pytest.mark.parametrize("cells", [1, 2])
def test_no_main_replica_at_all(tmp_path, cells):
    shards = [from_rank_offsets("w", "float32", (4,), (0, r % cells, cells), replica_id=1) for r in range(2)]
    problems = saved(tmp_path, shards)
    assert all(isinstance(problem, ReplicaError) for problem in problems), problems
    assert problems


def test_cells_that_do_not_begin_where_cells_of_their_grid_do(tmp_path):
    w = ArraySpec("w", (4,), "float32")
    shards = [ShardSpec(w, Box((i,), (i + 2,)), 0, None, (2,)) for i in (1, 2)]
    found = {type(problem) for problem in saved(tmp_path, shards)}
    assert found == {OverlapError, GapError}, found


@pytest.mark.parametrize("members", [(0, 1), (1, 2)])
def test_a_sharding_over_ranks_outside_the_group_is_none_of_its(members):
    assert relabelled(Sharding(Mesh.line(4), (Shard(0),)), members) is None


W = ArraySpec("w", (4, 2), "int8")


@pytest.mark.parametrize(
    "shards",
    [
        [ShardSpec(W, Box((1, 0), (3, 2)))],
        [ShardSpec(W, Box((0, 0), (3, 2)))],
        [ShardSpec(W, Box((0, 0), (2, 2)), flat=(0, 3))],
        [ShardSpec(W, Box((0, 0), (2, 2))), ShardSpec(W, Box((2, 0), (3, 2)))],
        [ShardSpec(W, Box((2, 0), (4, 2))), ShardSpec(W, Box((0, 0), (2, 2)))],
        [ShardSpec(W, Box((0, 0), (2, 2))), ShardSpec(W, Box((2, 0), (4, 2)), 1)],
        [ShardSpec(W, Box((0, 0), (1, 1))), ShardSpec(W, Box((1, 1), (2, 2)))],
        [ShardSpec(ArraySpec("w", (0, 2), "int8"), Box((0, 0), (0, 2)))],
    ],
    ids=["off the grid", "no divisor", "flat", "two shapes", "turned", "two copies", "a diagonal", "empty"],
)
def test_shards_that_are_no_block_of_cells(shards):
    assert block_of(shards) is None
    assert block_of([ShardSpec(W, Box((0, i), (2, i + 1))) for i in (0, 1)])[1].stop == (1, 2)


def planned(tmp_path, monkeypatch, state_of, size, **policy):
    """Save and return which planners the ranks have called."""
    calls = Counter()
    for name in ("plan_save", "plan_local_save"):
        plan = getattr(planning, name)
        monkeypatch.setattr(planning, name, lambda *a, name=name, plan=plan: calls.update([name]) or plan(*a))

    def save(gather):
        policy_of = SavePolicy(durability="none", **policy)
        return functional_ckpt.save(state_of(gather.rank), tmp_path / "a", policy=policy_of, process_group=gather)

    run_ranks(size, save)
    assert functional_ckpt.verify(tmp_path / "a").ok
    return {*calls}


@pytest.mark.parametrize("replicas", ["declared", "elect"])
@pytest.mark.parametrize("declared", [True, False])
def test_cells_too_small_for_chunks_of_their_own_are_planned_alone(tmp_path, monkeypatch, replicas, declared):
    """One array whose pieces move does not send the whole save to gathering; nor need the grid be declared."""

    def state(rank):
        shards = [
            from_rank_offsets("", "int32", (3,), (0, 2 * (rank % 2) + i, 4), replica_id=rank // 2) for i in (0, 1)
        ]
        shards = shards if declared else [ShardSpec(s.array, s.box, s.replica_id) for s in shards]
        return {"w": LocalShards(shards, [np.arange(3, dtype="i4") + s.box.start[0] for s in shards]), "step": 3}

    assert planned(tmp_path, monkeypatch, state, 4, replicas=replicas) == {"plan_local_save"}
    assert functional_ckpt.open_checkpoint(tmp_path / "a")["w"][:].tolist() == [*range(12)]
    assert functional_ckpt.read_manifest(tmp_path / "a").arrays[0].layout.ownership == "owned"


def test_ranks_that_hold_the_same_in_another_order_plan_alone(tmp_path, monkeypatch):
    def state(rank):
        leaves = {"a": np.arange(3), "b": {"c": 1, "d": np.ones(2)}, "e": "x"}
        return dict(sorted(leaves.items(), reverse=bool(rank)))

    assert planned(tmp_path, monkeypatch, state, 2) == {"plan_local_save"}


def test_arrays_of_one_kind_of_which_a_rank_holds_other_cells_are_gathered(tmp_path, monkeypatch):
    def state(rank):
        places = {"v": rank, "w": 1 - rank if rank < 2 else rank}
        return {key: LocalShards(from_rank_offsets("", "int8", (2,), (0, i, 3)), np.zeros(2, "i1"))
                for key, i in places.items()}  # fmt: skip

    assert planned(tmp_path, monkeypatch, state, 3) == {"plan_save"}


def test_specs_can_be_imported_from_where_they_were_documented():
    from functional_ckpt.spec import mesh, shard, sharding

    assert mesh.Sharding is sharding.Sharding
    for name in ("Fragment", "ShardSpec", "World", "fragments", "from_rank_offsets", "narrow"):
        assert getattr(sharding, name) is getattr(shard, name)
    with pytest.raises(AttributeError, match="no attribute 'Absent'"):
        mesh.Absent  # noqa: B018
