"""Plans that DCP would not make itself: what a planner of the user's own may hand to our writer."""

import os
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402 - it needs torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402 - it needs torch

from functional_ckpt.torch.storage import ZarrStorageWriter  # noqa: E402 - it needs torch

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_planner_that_plans_a_tensor_twice_is_told(tmp_path):
    class Doubled(DefaultSavePlanner):
        def finish_plan(self, new_plan):
            plan = super().finish_plan(new_plan)
            return replace(plan, items=[plan.items[0], *plan.items])

    writer = ZarrStorageWriter(tmp_path / "c")
    with pytest.raises(BaseException, match="writes a whole tensor twice: key 'a'"):
        dcp.save({"a": torch.ones(4), "b": torch.zeros(4)}, storage_writer=writer, planner=Doubled())
    assert os.listdir(tmp_path) == []
