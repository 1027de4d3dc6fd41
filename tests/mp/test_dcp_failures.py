"""What goes wrong while DCP uses our storage: an error on every rank, and the old checkpoint or none, never a mix."""

import os
from unittest.mock import patch

import attrs
import pytest

import functional_ckpt as fc
from tests.mp import launch
from tests.mp.test_dcp import EXCLUSIVE, dcp, load, placed, reader, save, writer

pytestmark = [pytest.mark.mp, pytest.mark.filterwarnings("ignore")]


def save_part(path):
    import torch.distributed as dist

    tensor = placed(launch.values(8, 2), "S0")
    if dist.get_rank() == 0:
        dcp().save({"w": tensor}, storage_writer=writer(path), no_dist=True)


def test_a_shard_saved_alone_is_an_error_and_no_hole(four, tmp_path):
    outcomes = four.outcomes(save_part, str(tmp_path / "c"))
    assert "GapError" in outcomes[0].text
    assert os.listdir(tmp_path) == []


def save_and_fail(path, broken, where):
    """Save with rank `broken` unable to do its part."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from functional_ckpt.store.files import FileStore

    tensor = placed(launch.values(4096, 64, seed=11), "S0")
    fails = launch.rank() == broken

    def create(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    def resolve(*_arguments):
        raise RuntimeError("no such data")

    target = {"write": (FileStore, "create", create), "data": (DefaultSavePlanner, "resolve_data", resolve)}[where]
    with patch.object(*target) if fails else patch.object(launch, "unused", None, create=True):
        dcp().save({"w": tensor, "n": 1}, storage_writer=writer(path, policy=EXCLUSIVE))


@pytest.mark.parametrize("where", ["write", "data"])
@pytest.mark.parametrize("broken", [0, 3])
def test_one_rank_fails_so_all_do_and_the_old_checkpoint_stays(four, tmp_path, broken, where):
    path = str(tmp_path / "c")
    four.run(save, path)
    before = (tmp_path / "c" / "manifest.json").read_bytes()
    outcomes = four.outcomes(save_and_fail, path, broken, where)
    assert all("CheckpointException" in outcome.text for outcome in outcomes)
    assert os.listdir(tmp_path) == ["c"]
    assert (tmp_path / "c" / "manifest.json").read_bytes() == before
    four.run(load, path)
    four.run(save, path)


#: Every step of a save, and which of writer and planner takes it. Only the coordinator takes those that are global.
STEPS = (
    ("planner", "set_up_planner"), ("writer", "storage_meta"), ("writer", "set_up_storage_writer"),
    ("planner", "create_local_plan"), ("writer", "prepare_local_plan"), ("planner", "create_global_plan"),
    ("writer", "prepare_global_plan"), ("planner", "finish_plan"), ("writer", "write_data"),
    ("planner", "resolve_data"), ("writer", "write_data result"), ("writer", "finish"),
)  # fmt: skip


def save_broken(path, broken, who, step):
    """Save with a step that fails on rank `broken`; return the ranks that DCP says have failed."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from functional_ckpt.torch.dcp.bridge import Future

    planner, storage = DefaultSavePlanner(), writer(path, policy=attrs.evolve(EXCLUSIVE, timeout_s=launch.NEVER_S))
    name, late = step.removesuffix(" result"), step.endswith("result")
    owner = planner if who == "planner" else storage
    was = getattr(type(owner), name)

    def fail(*arguments, **options):
        if launch.rank() != broken:
            return was(owner, *arguments, **options)
        if late:
            was(owner, *arguments, **options)
            future = Future()
            future.set_exception(ValueError("broken on purpose"))
            return future
        raise ValueError("broken on purpose")

    if step == "set_up_planner":  # DCP looks at its signature
        owner.set_up_planner = lambda state_dict, storage_meta=None, is_coordinator=False: fail(
            state_dict, storage_meta, is_coordinator
        )
    else:
        setattr(owner, name, fail)
    with pytest.raises(BaseException, match="broken on purpose") as caught:
        dcp().save({"w": placed(launch.values(64, 8), "S0"), "n": 1}, storage_writer=storage, planner=planner)
    assert type(caught.value).__name__ == "CheckpointException"
    return sorted(caught.value.failures)


@pytest.mark.parametrize(("who", "step"), STEPS)
def test_a_step_that_fails_on_one_rank_is_told_to_all_at_once(four, tmp_path, who, step):
    path = str(tmp_path / "c")
    four.run(save_small, path)
    broken = 0 if step in ("create_global_plan", "prepare_global_plan", "finish") else 2
    for _ in range(2):
        assert four.run(save_broken, path, broken, who, step) == [[broken]] * 4
    assert fc.open_checkpoint(path)["copy"][:].tolist() == [1, 1, 1]
    four.run(save_small, path)
    assert os.listdir(tmp_path) == ["c"]
    assert fc.verify(path).ok


def save_different(path, strict):
    import torch

    from functional_ckpt.torch.dcp.planner import StrictSavePlanner

    state = {"copy": torch.ones(3), "rng": torch.full((2,), float(launch.rank())), "w": placed(launch.values(4), "R")}
    if strict == "equal":
        state["rng"] = torch.zeros(2)
    dcp().save(state, storage_writer=writer(path), planner=StrictSavePlanner())


def test_another_value_under_one_key_is_an_error_with_our_planner(four, tmp_path):
    outcomes = four.outcomes(save_different, str(tmp_path / "c"), "different")
    assert all("ReplicaError" in o.text and "'rng'" in o.text and "'copy'" not in o.text for o in outcomes)
    assert os.listdir(tmp_path) == []
    four.run(save_different, str(tmp_path / "c"), "equal")
    assert fc.open_checkpoint(tmp_path / "c")["rng"][:].tolist() == [0.0, 0.0]


def load_strictly(path, wanted):
    import torch

    from functional_ckpt.torch.dcp.planner import StrictLoadPlanner

    found = {"w": placed(launch.values(7, 4, seed=1), "S0"), "n": 0, "copy": torch.zeros(3)}
    found = {key: found[key] for key in wanted if key in found}
    found |= {key: torch.zeros(1) for key in wanted if key not in found}
    dcp().load(found, storage_reader=reader(path), planner=StrictLoadPlanner())
    launch.same(found["w"], placed(launch.values(7, 4), "S0"))


def save_small(path):
    import torch

    dcp().save({"w": placed(launch.values(7, 4), "S0"), "n": 1, "copy": torch.ones(3)}, storage_writer=writer(path))


def test_our_load_planner_reports_missing_and_unexpected_keys(four, tmp_path):
    path = str(tmp_path / "c")
    four.run(save_small, path)
    four.run(load_strictly, path, ("w", "n", "copy"))
    for wanted, key in ((("w", "n"), "copy"), (("w", "n", "copy", "more"), "more")):
        outcomes = four.outcomes(load_strictly, path, wanted)
        assert all("KeyMismatchError" in o.text and repr(key) in o.text for o in outcomes)


def load_hole(path):
    """Load with a plan that leaves the destination's last rows alone."""
    from dataclasses import replace

    import torch
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Holey(DefaultLoadPlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            plan.items = [
                replace(i, lengths=torch.Size([1, *i.lengths[1:]])) if i.dest_index.fqn == "w" else i
                for i in plan.items
            ]
            return plan

    dcp().load({"w": placed(torch.zeros(16, 4), "S0")}, storage_reader=reader(path), planner=Holey())


def save_rows(path):
    dcp().save({"w": placed(launch.values(16, 4), "S0")}, storage_writer=writer(path))


def load_as(path, dtype, cast="error"):
    import torch

    found = {"w": placed(torch.zeros(16, 4, dtype=getattr(torch, dtype)), "S0")}
    dcp().load(found, storage_reader=reader(path, policy=fc.LoadPolicy(cast=cast)))


def test_holes_casts_and_lost_chunks_are_errors(four, tmp_path):
    path = str(tmp_path / "c")
    four.run(save_rows, path)
    assert all("GapError" in o.text for o in four.outcomes(load_hole, path))
    assert all("CastError" in o.text for o in four.outcomes(load_as, path, "int8"))
    four.run(load_as, path, "float16", "same_kind")
    chunk = next(p for p in (tmp_path / "c" / "w").iterdir() if p.name != "zarr.json")
    data = chunk.read_bytes()
    chunk.write_bytes(data[:-1])
    assert all("CorruptionError" in o.text for o in four.outcomes(load_as, path, "float32"))
    chunk.unlink()
    assert all("CorruptionError" in o.text for o in four.outcomes(load_as, path, "float32"))


def test_no_checkpoint_is_an_error_on_every_rank(four, tmp_path):
    outcomes = four.outcomes(load_as, str(tmp_path / "none"), "float32")
    assert all("CheckpointException" in outcome.text for outcome in outcomes)


PATIENT = fc.SavePolicy(object_codec="torch", timeout_s=launch.NEVER_S)


def held(step, broken=None):
    """Return a state; on rank `broken` it holds a tensor without data, which our writer finds and nothing before it."""
    import torch

    device = "meta" if launch.rank() == broken else "cpu"
    own = {f"own{launch.rank()}": torch.ones(3, device=device)}
    return {"w": placed(launch.values(64, 8, seed=step), "S0"), **own}


def save_in_turn(path, kinds):
    """Save again and again in several ways; those that fail on one rank must fail on all, the others must not."""
    from torch.distributed.checkpoint import DefaultSavePlanner

    for step, kind in enumerate(kinds):
        target = f"{path}/{step}"
        options = {"storage_writer": writer(target, policy=PATIENT)}
        if "cached" in kind:
            options["planner"] = DefaultSavePlanner(enable_plan_caching=True)
        if "alone" in kind:
            options["use_collectives"] = False
        if "broken" in kind:
            with pytest.raises(BaseException, match="meta"):
                dcp().save(held(step, broken=1), **options)
        elif "async" in kind:
            dcp().async_save(held(step), **options).result()
        else:
            dcp().save(held(step), **options)


@pytest.mark.parametrize(
    "kinds",
    [
        ("async", "async", "broken", "async", "async", "save") * 2,
        ("broken", "async", "broken", "async"),
        ("broken", "alone", "broken", "save", "alone"),
        ("alone and broken", "alone", "alone and broken", "async", "alone and broken", "save"),
        ("cached", "cached, broken", "cached async", "cached, broken", "async", "cached", "cached async"),
    ],
    ids=["all", "async", "alone", "alone and broken", "cached"],
)
def test_saves_after_one_that_failed_on_one_rank(two, tmp_path, kinds):
    """What waits for ranks of a save that failed elsewhere must not meet those of the next one."""
    two.run(save_in_turn, str(tmp_path), kinds, limit_s=100.0)  # who waits for the timeout hangs
    whole = [str(step) for step, kind in enumerate(kinds) if "broken" not in kind]
    assert sorted(os.listdir(tmp_path)) == sorted(whole)
    assert all(fc.verify(tmp_path / name).ok for name in whole)
