"""Regular grids that no rank needs to gather: complete ones, and those that only look so."""

import numpy as np
import pytest

import functional_ckpt
from functional_ckpt import LocalShards, SavePolicy
from functional_ckpt.errors import CheckpointErrors, GapError, OverlapError, ReplicaError
from functional_ckpt.plan.local import needs_gathering
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.mesh import Mesh, Sharding, relabelled
from functional_ckpt.spec.placement import Shard
from functional_ckpt.spec.sharding import ShardSpec, from_rank_offsets
from functional_ckpt.testing.simulate import try_ranks

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


@pytest.mark.parametrize(
    ("shape", "box", "grid", "flat"),
    [
        ((4,), Box((1,), (3,)), (2,), None),
        ((4,), Box((0,), (2,)), (3,), None),
        ((4,), Box((0,), (2,)), (2, 1), None),
        ((4,), Box((0,), (2,)), None, None),
        ((4,), Box((0,), (2,)), (2,), (0, 1)),
        ((0,), Box((0,), (0,)), (2,), None),
    ],
)
def test_what_is_no_complete_grid_is_gathered(shape, box, grid, flat):
    shard = ShardSpec(ArraySpec("w", shape, "int8"), box, 0, flat, grid)
    assert needs_gathering(0, shard, "declared") is not None
    good = from_rank_offsets("w", "int8", (2,), (0, 1, 2))
    assert needs_gathering(0, good, "declared") is None
    assert needs_gathering(0, good, "elect") is not None
