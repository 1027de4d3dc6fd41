"""What a load planner leaves out is named, and does not keep its old value in silence."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from functional_ckpt.torch.dcp.storage_writer import ZarrStorageReader, ZarrStorageWriter  # noqa: E402 - it needs torch

pytestmark = pytest.mark.filterwarnings("ignore")


class Dropping(dcp.DefaultLoadPlanner):
    """A planner that loses the items of one key in one of its steps."""

    def __init__(self, step, key, **options):
        super().__init__(**options)
        self.step, self.key = step, key

    def left(self, plan, step):
        kept = [item for item in plan.items if item.dest_index.fqn != self.key]
        return dataclasses.replace(plan, items=kept) if step == self.step else plan

    def create_local_plan(self):
        return self.left(super().create_local_plan(), "local")

    def create_global_plan(self, plans):
        return [self.left(plan, "global") for plan in super().create_global_plan(plans)]

    def finish_plan(self, plan):
        return self.left(super().finish_plan(plan), "finish")


@pytest.mark.parametrize("step", ["local", "global", "finish"])
@pytest.mark.parametrize("key", ["w", "n", "long"])
def test_a_load_plan_that_leaves_out_a_whole_key_is_told(step, key, tmp_path):
    state = {"w": torch.ones(2), "v": torch.ones(2), "n": 1, "long": "x" * 70_000, "none": torch.ones(0)}
    dcp.save(state, storage_writer=ZarrStorageWriter(tmp_path / "c"))
    reader = ZarrStorageReader(tmp_path / "c")
    found = {"w": torch.zeros(2), "v": torch.zeros(2), "n": 0, "long": "", "none": torch.zeros(0)}
    with pytest.raises(BaseException, match=f"GapError: the plan reads nothing for a key: key '{key}'"):
        dcp.load(found, storage_reader=reader, planner=Dropping(step, key))
    assert not found["v"].any()
    dcp.load(found, storage_reader=reader, planner=Dropping(step, key, allow_partial_load=True))
    assert found["v"].all()
    assert bool(found["w"].all()) == (key != "w")
    dcp.load(found, storage_reader=reader, planner=Dropping(step, "none"))
