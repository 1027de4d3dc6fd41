"""A model under FSDP2 and tensor parallelism, trained with AdamW, through torch's own state dict helpers."""

import numpy as np
import pytest

import functional_ckpt as fc
from tests.mp import launch

pytestmark = pytest.mark.mp

SOON = fc.SavePolicy(timeout_s=30)
WIDTH = 10


def model_of(seed):
    """Return a model that has weights with fewer rows than there are ranks."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, 3), nn.LayerNorm(3))


def sharded(model):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    mesh = launch.mesh(dist.get_world_size())
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def two_dimensional(model):
    """Return the model under tensor parallelism within pairs of ranks, FSDP across them; the norm is copied."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = launch.mesh(2, 2, names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["dp"])
    return model


def alone(model):
    return model


def optimizer_of(model):
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def step(model, optimizer, seed):
    model(launch.values(4, WIDTH, seed=seed)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state, "progress": {"step": 2}}


def whole(state):
    """Return all tensors of a state, whole, by key."""
    from torch.distributed.tensor import DTensor

    from functional_ckpt.spec.tree import flatten, key_of

    leaves = ((key_of(path), leaf) for path, leaf in flatten(state))
    tensors = {key: leaf for key, leaf in leaves if hasattr(leaf, "dtype")}
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().numpy().copy() for k, v in tensors.items()}


def train_and_save(parallel, path):
    model = parallel(model_of(1))
    optimizer = optimizer_of(model)
    for seed in range(2):
        step(model, optimizer, seed)
    state = state_of(model, optimizer)
    fc.save(state, path, policy=SOON)
    return whole(state)


def resume(parallel, path):
    from torch.distributed.checkpoint.state_dict import set_state_dict

    model = parallel(model_of(2))
    optimizer = optimizer_of(model)
    like = state_of(model, optimizer)
    found = fc.load(like, path)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
    after = whole(state_of(model, optimizer))
    step(model, optimizer, 2)
    return after, found["progress"]


def check_equal(found, expected):
    assert sorted(found) == sorted(expected)
    for key, array in expected.items():
        assert found[key].dtype == array.dtype, key
        assert found[key].tobytes() == array.tobytes(), key


def check_stored(path, expected):
    assert fc.verify(path).ok
    stored = fc.open_checkpoint(path)
    check_equal({key: stored[key][...] for key in stored}, expected)


def test_fsdp_resumes_under_any_number_of_ranks(four, two, tmp_path):
    saved = four.run(train_and_save, sharded, tmp_path / "a")[0]
    assert any("exp_avg_sq" in key for key in saved)
    check_stored(tmp_path / "a", saved)
    for ranks in (four, two):
        for found, progress in ranks.run(resume, sharded, tmp_path / "a"):
            check_equal(found, saved)
            assert progress == {"step": 2}
    check_equal(resume(alone, tmp_path / "a")[0], saved)


def test_fsdp_over_tensor_parallelism_resumes_under_fsdp_alone(four, two, tmp_path):
    saved = four.run(train_and_save, two_dimensional, tmp_path / "a")[0]
    check_stored(tmp_path / "a", saved)
    check_equal(four.run(resume, two_dimensional, tmp_path / "a")[0][0], saved)
    check_equal(two.run(resume, sharded, tmp_path / "a")[1][0], saved)


def test_one_process_resumes_under_fsdp_over_tensor_parallelism(four, tmp_path):
    saved = train_and_save(alone, tmp_path / "a")
    for found, _ in four.run(resume, two_dimensional, tmp_path / "a"):
        check_equal(found, saved)


def as_ranks_hold(path):
    """Return what a replicated-by-hand (DDP-like) state gives: every rank holds the same plain tensors."""
    model = model_of(1)
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    fc.save(state_of(model, optimizer), path, policy=SOON)
    return whole(state_of(model, optimizer))


def test_copies_on_every_rank_are_checked_and_stored_once(four, tmp_path):
    saved = four.run(as_ranks_hold, tmp_path / "a")
    check_stored(tmp_path / "a", saved[0])
    np.testing.assert_array_equal(saved[0]["model.2.bias"], saved[3]["model.2.bias"])
