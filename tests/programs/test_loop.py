"""The loop of docs/programs.md: FSDP2 with tensor parallelism, a schedule, and a loader that keeps its place."""

import os

import pytest

import functional_ckpt
from tests import pages
from tests.programs.setting import LIMIT_S, whole

pytestmark = pytest.mark.mp

WIDTH = 12


def run_to(folder, last, size, seed):
    """Run the page's program up to a step; return what a resumed run must equal."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torchdata.stateful_dataloader import StatefulDataLoader

    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    mesh, model = sharded(size, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))
    loader = StatefulDataLoader(data[mesh.get_local_rank("dp") :: size // 2], batch_size=2, shuffle=False)
    losses = []

    def train(batch):
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())

    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    pages.shown("programs.md", "program_loop.py", **given, train=train, last=last)
    moments = get_optimizer_state_dict(model, optimizer)
    state = {"model": whole(get_model_state_dict(model)), "optimizer": whole(moments)}
    return {**state, "rate": scheduler.state_dict(), "losses": losses}


def sharded(size, seed):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(seed)
    up, down = torch.nn.Linear(WIDTH, 20), torch.nn.Linear(20, WIDTH, bias=False)
    model = torch.nn.Sequential(up, torch.nn.Tanh(), down)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return mesh, fully_shard(model, mesh=mesh["dp"])


def test_a_run_that_goes_on_equals_one_that_never_stopped(four, two, tmp_path, same):
    unbroken = four.run(run_to, tmp_path / "unbroken", 4, 4, 0, limit_s=LIMIT_S)
    first = four.run(run_to, tmp_path / "run", 2, 4, 0, limit_s=LIMIT_S)
    resumed = four.run(run_to, tmp_path / "run", 4, 4, 1, limit_s=LIMIT_S)
    for rank, state in enumerate(resumed):
        state["losses"] = first[rank]["losses"] + state["losses"]
    same(resumed, unbroken)
    exported = functional_ckpt.open_checkpoint(tmp_path / "run" / "weights").state("torch")["model"]
    same(exported, {key: value.bfloat16() for key, value in unbroken[0]["model"].items()})
    on_two = two.run(run_to, tmp_path / "run", 4, 2, 2, limit_s=LIMIT_S)[0]  # nothing is left to train
    same({**on_two, "losses": unbroken[0]["losses"]}, unbroken[0])
