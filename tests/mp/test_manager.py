"""`Checkpoints` over real ranks: others resume, a signal to one stops all at one step, a failure is told to all."""

import os
import signal

import numpy as np
import pytest

import functional_ckpt as fc
from tests.mp import launch

pytestmark = pytest.mark.mp

SOON = fc.SavePolicy(timeout_s=20)
LOAD = fc.LoadPolicy(timeout_s=20, per_rank="first")


def state(step, size):
    import torch
    from torch.distributed.tensor import Shard

    w = launch.distributed(torch.full((13, 5), float(step)), launch.mesh(size), [Shard(0)])
    return {"w": w, "step": step, "mine": fc.PerRank(launch.rank())}


def train(root, size, last, told=None):
    """Train to step `last`; but one rank, `told`, gets a signal while the step before that is being saved."""
    keep = fc.KeepLast(2) | fc.KeepBest("loss")
    options = {"policy": SOON, "load_policy": LOAD, "on_signal": (signal.SIGTERM,)}
    with fc.Checkpoints(root, keep=keep, **options) as checkpoints:
        found = checkpoints.resume(state(0, size))
        assert found["w"].full_tensor().unique().tolist() == [found["step"]]
        for step in range(found["step"] + 1, last + 1):
            checkpoints.async_save(step, state(step, size), {"loss": abs(step - 2) + launch.rank()})
            if launch.rank() == told and step == last - 1:
                signal.raise_signal(signal.SIGTERM)
            if checkpoints.should_stop():
                break
        checkpoints.wait()
        return found["step"], checkpoints.steps(), checkpoints.best("loss")


def test_a_run_goes_on_with_another_number_of_ranks(four, two, tmp_path):
    assert four.run(train, tmp_path, 4, 5) == [(0, (2, 4, 5), 2)] * 4
    assert two.run(train, tmp_path, 2, 7) == [(5, (2, 6, 7), 2)] * 2
    assert four.run(train, tmp_path, 4, 8) == [(7, (2, 7, 8), 2)] * 4
    assert sorted(os.listdir(tmp_path)) == [f"step-{step:08d}" for step in (2, 7, 8)]


def test_a_signal_to_one_rank_stops_all_at_one_step(four, tmp_path):
    found = four.run(train, tmp_path, 4, 9, 1)
    assert found == [(0, (2, 7, 8), 2)] * 4
    assert four.run(handler) == [signal.SIG_DFL] * 4


def handler():
    return signal.getsignal(signal.SIGTERM)


def fail_on_one(root):
    """A save fails on rank 3 in the background, and nobody asks; all hear of it in the next call, once."""
    checkpoints = fc.Checkpoints(root, policy=SOON)
    checkpoints.save(1, {"w": np.ones(3)})

    def report(progress):
        if progress.phase == "write" and launch.rank() == 3:
            raise OSError(28, "No space left on device")

    checkpoints.async_save(2, {"w": np.ones(3)}, progress=report)
    try:
        checkpoints.save(3, {"w": np.ones(3)})
    except fc.errors.CheckpointError as error:
        told = str(error)
    checkpoints.save(4, {"w": np.ones(3)})
    checkpoints.close()
    return told, checkpoints.steps()


def test_a_failure_of_one_rank_is_told_to_all_by_the_next_call(four, tmp_path):
    found = four.run(fail_on_one, tmp_path)
    assert len({*found}) == 1
    told, steps = found[0]
    assert "No space" in told
    assert "rank 3" in told
    assert steps == (1, 4)
