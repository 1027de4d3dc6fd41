"""Plans that DCP would not make itself: what a planner of the user's own may hand to our writer."""

import os
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402 - it needs torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner  # noqa: E402 - it needs torch

from functional_ckpt.torch.dcp.storage_writer import ZarrStorageReader, ZarrStorageWriter  # noqa: E402 - it needs torch

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_planner_that_changes_its_mind_is_told(tmp_path):
    class Fickle(DefaultSavePlanner):
        asked = 0

        def transform_object(self, write_item, object):
            self.asked += 1
            return object.to(torch.float64 if self.asked > 3 else torch.float32)

    state = {name: torch.ones(4) for name in "abc"}
    with pytest.raises(BaseException, match="another tensor than before"):
        dcp.save(state, storage_writer=ZarrStorageWriter(tmp_path / "c"), planner=Fickle())
    assert os.listdir(tmp_path) == []


def test_a_planner_that_gives_another_shape_than_it_planned_is_told(tmp_path):
    class Shorter(DefaultSavePlanner):
        def resolve_data(self, write_item):
            return super().resolve_data(write_item)[:2]

    writer = ZarrStorageWriter(tmp_path / "c")
    with pytest.raises(BaseException, match=r"ShapeError.*expected \(4,\), found \(2,\)"):
        dcp.save({"w": torch.ones(4)}, storage_writer=writer, planner=Shorter())


def test_a_planner_that_plans_a_tensor_twice_is_told(tmp_path):
    class Doubled(DefaultSavePlanner):
        def finish_plan(self, new_plan):
            plan = super().finish_plan(new_plan)
            return replace(plan, items=[plan.items[0], *plan.items])

    writer = ZarrStorageWriter(tmp_path / "c")
    with pytest.raises(BaseException, match="writes a whole tensor twice: key 'a'"):
        dcp.save({"a": torch.ones(4), "b": torch.zeros(4)}, storage_writer=writer, planner=Doubled())
    assert os.listdir(tmp_path) == []


def test_a_load_planner_that_gives_a_tensor_without_memory_is_told(tmp_path):
    class Nowhere(DefaultLoadPlanner):
        def resolve_tensor(self, read_item):
            return super().resolve_tensor(read_item).to("meta")

    dcp.save({"w": torch.ones(4)}, storage_writer=ZarrStorageWriter(tmp_path / "c"))
    with pytest.raises(BaseException, match="only a plain tensor can be filled: key 'w'"):
        dcp.load({"w": torch.zeros(4)}, storage_reader=ZarrStorageReader(tmp_path / "c"), planner=Nowhere())
