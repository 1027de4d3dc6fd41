"""Calls of DCP that stand beside one another or differ by rank: two groups at once, values of each rank's own."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import functional_ckpt as fc
from tests.mp import launch
from tests.mp.test_dcp import dcp, placed, reader, writer

pytestmark = [pytest.mark.mp, pytest.mark.filterwarnings("ignore")]

PATIENT = fc.SavePolicy(object_codec="torch", timeout_s=launch.NEVER_S, durability="none")


# ---- Two groups at once ---------------------------------------------------------------------------


def save_over_two_groups(path, crosswise, how):
    """Two threads save over a group each; with `crosswise` the ranks begin with different ones."""
    import torch
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]) for _ in range(2)]
    w = placed(launch.values(64, 8), "S0")

    def save(number, step):
        state = {"w": w, "copy": torch.full((3,), 10 * number + step)}
        options = {"storage_writer": writer(f"{path}/{number}.{step}", policy=PATIENT), "process_group": groups[number]}
        if how == "async":
            dcp().async_save(state, **options).result(60)
        else:
            dcp().save(state, **options)

    order = (1, 0) if crosswise and launch.rank() else (0, 1)
    with ThreadPoolExecutor(2) as pool:
        for step in range(4):
            for future in [pool.submit(save, number, step) for number in order]:
                future.result()
            dist.barrier()


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("crosswise", [False, True])
def test_threads_save_over_two_groups_at_once(two, tmp_path, crosswise, how):
    two.run(save_over_two_groups, str(tmp_path), crosswise, how)
    names = [f"{number}.{step}" for number in range(2) for step in range(4)]
    assert sorted(os.listdir(tmp_path)) == names
    for name in names:
        assert fc.verify(tmp_path / name).ok
        assert fc.open_checkpoint(tmp_path / name)["copy"][0] == 10 * int(name[0]) + int(name[2])


# ---- Values of each rank's own --------------------------------------------------------------------


def save_own_values(path, keys, use_collectives, policy):
    """Save what differs by rank, under one key or under a key for each rank, and load it."""
    import torch

    mine = launch.rank() + 1
    tail = f".{launch.rank()}" if keys == "own" else ""
    state = {f"rng{tail}": torch.full((2,), mine), f"n{tail}": mine, "w": placed(launch.values(6, 4), "S0")}
    dcp().save(state, storage_writer=writer(path, policy=policy), use_collectives=use_collectives)
    found = {f"rng{tail}": torch.zeros(2, dtype=torch.int64), f"n{tail}": 0, "w": placed(torch.zeros(6, 4), "S1")}
    dcp().load(found, storage_reader=reader(path))
    launch.same(found["w"], placed(launch.values(6, 4), "S1"))
    return found[f"rng{tail}"].tolist(), found[f"n{tail}"]


TRUST = fc.SavePolicy(object_codec="torch", timeout_s=launch.NEVER_S, replicated="trust")


def test_values_that_differ_by_rank_are_refused_with_ways_out_that_work(two, tmp_path):
    for outcome in two.outcomes(save_own_values, str(tmp_path / "c"), "one", False, PATIENT):
        for key in ("'n'", "'rng'"):
            problem = next(
                line for line in outcome.text.splitlines() if "ReplicaError" in line and f"key {key}" in line
            )
            assert "through torch.distributed.checkpoint: give each rank a key of its own" in problem
            assert "SavePolicy(replicated='trust')" in problem
    assert not list(tmp_path.iterdir())
    for use_collectives in (False, True):
        own = two.run(save_own_values, str(tmp_path / "own"), "own", use_collectives, PATIENT)
        assert own == [([1, 1], 1), ([2, 2], 2)]
    # One rank's, the same for all.
    assert two.run(save_own_values, str(tmp_path / "trust"), "one", False, TRUST) == [([1, 1], 1)] * 2


# ---- Steps that one rank leaves out ---------------------------------------------------------------


def load_without_an_item(path, dropping):
    """Load with a planner that loses an item on one rank."""
    from dataclasses import replace

    import torch
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Dropping(DefaultLoadPlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            left = [item for item in plan.items if launch.rank() != dropping or item.dest_index.fqn != "w"]
            return replace(plan, items=left)

    found = {"w": placed(torch.zeros(16, 4), "S0"), "n": 0}
    dcp().load(found, storage_reader=reader(path), planner=Dropping())


def save_rows(path):
    dcp().save({"w": placed(launch.values(16, 4), "S0"), "n": 1}, storage_writer=writer(path, policy=PATIENT))


def test_an_item_that_one_ranks_load_planner_loses_is_told_to_all(two, tmp_path):
    path = str(tmp_path / "c")
    two.run(save_rows, path)
    for outcome in two.outcomes(load_without_an_item, path, 1):
        assert "GapError: the plan reads nothing for a key: key 'w'" in outcome.text
    two.run(load_without_an_item, path, None)


def save_without_an_item(path, lost, use_collectives):
    """Save with a planner that loses the items of a key after DCP has planned; of "w", those of one rank."""
    from dataclasses import replace

    import torch
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    class Losing(DefaultSavePlanner):
        def finish_plan(self, plan):
            plan = super().finish_plan(plan)
            loses = lost if lost != "w" or launch.rank() == 1 else None
            return replace(plan, items=[item for item in plan.items if item.index.fqn != loses])

    state = {"w": placed(launch.values(16, 4), "S0"), "copy": torch.ones(3), "n": 1}
    options = {"storage_writer": writer(path, policy=PATIENT), "use_collectives": use_collectives}
    dcp().save(state, planner=Losing(), **options)


@pytest.mark.parametrize("use_collectives", [True, False])
@pytest.mark.parametrize("lost", ["w", "copy", "n"])
def test_an_item_that_a_save_planner_loses_is_told_to_all(two, tmp_path, lost, use_collectives):
    for outcome in two.outcomes(save_without_an_item, str(tmp_path / "c"), lost, use_collectives):
        assert "GapError" in outcome.text
        assert f"'{lost}'" in outcome.text
    assert not list(tmp_path.iterdir())
    two.run(save_without_an_item, str(tmp_path / "c"), None, use_collectives)
