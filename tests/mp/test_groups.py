"""Process groups as an argument: the default one, subgroups, ranks that belong to several."""

import numpy as np
import pytest

import functional_ckpt as fc
from functional_ckpt.errors import SpecError
from tests.mp import launch

pytestmark = pytest.mark.mp


def uneven_groups(path):
    """Ranks 0 and 1 have made a group of their own before the whole world saves."""
    import torch.distributed as dist

    own = dist.new_group([0, 1])
    fc.save({"w": launch.values(4, 3)}, path, policy=fc.SavePolicy(timeout_s=10))
    if launch.rank() < 2:
        dist.destroy_process_group(own)


def test_ranks_may_belong_to_different_numbers_of_groups(four, tmp_path):
    four.run(uneven_groups, tmp_path / "a")
    assert fc.verify(tmp_path / "a").ok


def through_subgroup(path):
    """Ranks 3 and 1 save and load by themselves; the others are not asked."""
    import torch.distributed as dist

    group = dist.new_group([1, 3])
    if launch.rank() in (1, 3):
        state = {"w": np.arange(4.0), "seed": fc.PerRank(launch.rank())}
        fc.save(state, path, process_group=group, policy=fc.SavePolicy(timeout_s=10))
        fc.async_save(state, path.with_name("b"), process_group=group, policy=fc.SavePolicy(timeout_s=10)).result(20)
        found = fc.load({"w": np.zeros(4), "seed": fc.PerRank(0)}, path, process_group=group)
        assert found["w"].tolist() == [0, 1, 2, 3]
        return found["seed"].value
    with pytest.raises(SpecError, match="not a member"):
        fc.save({"w": np.arange(4.0)}, path, process_group=group)
    return None


def test_a_subgroup_saves_by_itself(four, tmp_path):
    assert four.run(through_subgroup, tmp_path / "a") == [None, 1, None, 3]
    for name in ("a", "b"):
        assert fc.verify(tmp_path / name).ok
    assert fc.read_manifest(tmp_path / "a").per_rank[0].world_size == 2


def two_subgroups(path):
    """Both halves of the world save at the same time, each to a place of its own."""
    import torch.distributed as dist

    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = launch.rank() // 2
    for n in range(3):
        fc.save({"w": np.full(3, mine)}, path / f"{mine}.{n}", process_group=halves[mine])
    fc.save({"w": np.ones(3)}, path / "all")


def test_two_subgroups_save_at_once(four, tmp_path):
    four.run(two_subgroups, tmp_path)
    assert len(list(tmp_path.iterdir())) == 7
    assert fc.open_checkpoint(tmp_path / "1.2")["w"][0] == 1


def single(path):
    """A group of one needs nobody."""
    import torch.distributed as dist

    groups = [dist.new_group([rank]) for rank in range(4)]
    if launch.rank() == 2:
        fc.save({"w": np.ones(3)}, path, process_group=groups[2])


def test_a_group_of_one(four, tmp_path):
    four.run(single, tmp_path / "a")
    assert fc.verify(tmp_path / "a").ok


def other_world(path):
    """Every rank passes LocalGather: four saves that know nothing of each other."""
    from functional_ckpt.run.comm import LocalGather

    fc.save({"w": np.full(2, launch.rank())}, path / str(launch.rank()), process_group=LocalGather())


def test_a_gather_of_ones_own(four, tmp_path):
    four.run(other_world, tmp_path)
    assert [fc.open_checkpoint(tmp_path / str(r))["w"][0] for r in range(4)] == [0, 1, 2, 3]


def rejoined(path):
    """The default group is destroyed and made anew, as after an elastic restart."""
    import torch.distributed as dist

    store = dist.group.WORLD.get_group_store()
    for n in range(2):
        fc.save({"w": np.ones(2)}, path / str(n), policy=fc.SavePolicy(timeout_s=10))
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        launch.meshes.clear()
        dist.init_process_group("gloo", store=dist.PrefixStore(f"again{n}", store), rank=rank, world_size=size)


def test_the_default_group_may_be_made_anew(four, tmp_path):
    four.run(rejoined, tmp_path)
    assert fc.verify(tmp_path / "1").ok


def unpicklable():
    from functional_ckpt.torch.group.link import torch_gather

    gather = torch_gather(None, 10, "sync")
    with pytest.raises(fc.errors.RankFailedError, match=r"rank 1.*pickle"):
        gather.all_gather((lambda: 0) if launch.rank() == 1 else 1)
    return gather.all_gather("x" * 10 ** launch.rank())


def test_a_value_that_cannot_travel_stops_nobody(four):
    assert four.run(unpicklable)[2] == ["x" * 10**rank for rank in range(4)]


def copies_elsewhere(path, members):
    """Two of four ranks save DTensors of which the other two hold copies: no plan may count on those."""
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard

    group = dist.new_group(list(members))
    mesh = launch.mesh(2, 2)
    state = {
        f"w{i}": launch.distributed(launch.values(8, 4), mesh, how)
        for i, how in enumerate([[Replicate(), Replicate()], [Replicate(), Shard(0)]])
    }
    if launch.rank() in members:
        fc.save(state, path, policy=fc.SavePolicy(timeout_s=5), process_group=group)


@pytest.mark.parametrize("members", [(0, 1), (2, 3)])
def test_some_of_the_ranks_hold_all_of_it(four, tmp_path, members):
    four.run(copies_elsewhere, tmp_path / "a", members)
    assert fc.verify(tmp_path / "a").ok
