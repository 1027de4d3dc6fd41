"""The callback of docs/programs.md within transformers' Trainer, on one device and with DDP."""

import os

import pytest

import functional_ckpt
from tests.programs.setting import LIMIT_S, as_torchrun, pool, shown
from tests.programs.test_transformers import llama

pytestmark = pytest.mark.mp


def run_to(folder, last, size, seed):
    """Run the page's program up to a step; return what a resumed run must equal."""
    import torch

    folder.mkdir(exist_ok=True)
    if size > 1:
        as_torchrun(size)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    words = torch.arange(96).reshape(16, 6) % 32
    data = [{"input_ids": each, "labels": each} for each in words]
    trainer = shown("program_callback.py", folder, model=llama(seed), data=data, last=last)["trainer"]
    moments = trainer.optimizer.optimizer.state_dict()["state"]
    return {"step": trainer.state.global_step, "model": dict(trainer.model.state_dict()), "optimizer": moments}


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_goes_on_has_the_state_that_was_saved(size, tmp_path, same):
    """What is loaded is what was saved: the run that goes on begins with other values and a new optimizer."""
    with pool(size) as ranks:
        first = ranks.run(run_to, tmp_path, 2, size, 0, limit_s=LIMIT_S)
        again = ranks.run(run_to, tmp_path, 2, size, 1, limit_s=LIMIT_S)
        same(again, first)
        assert ranks.run(run_to, tmp_path, 3, size, 1, limit_s=LIMIT_S)[0]["step"] == 3
    found = sorted(path.parents[1].name for path in tmp_path.glob("run/checkpoint-*/zarr/zarr.json"))
    assert found == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert functional_ckpt.verify(tmp_path / "run" / "checkpoint-3" / "zarr").ok
