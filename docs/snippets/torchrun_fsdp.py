# ruff: noqa: E402 - each part of a page has the imports that it needs
# --8<-- [start:save]
# torchrun --nproc-per-node=2 train.py
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import functional_ckpt

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(8, 64)).sum().backward()
optimizer.step()

model_state, optim_state = get_state_dict(model, optimizer)  # DTensors, by name
state = {
    "model": model_state,
    "optim": optim_state,
    "step": 1,
    "rng": functional_ckpt.PerRank(torch.get_rng_state()),  # legitimately differs
}
functional_ckpt.save(state, "checkpoint")  # every rank calls it
# --8<-- [end:save]
saved = {key: tensor.full_tensor() for key, tensor in model_state.items()}
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(0.0)

# --8<-- [start:load]
model_state, optim_state = get_state_dict(model, optimizer)  # what is to be filled
like = {
    "model": model_state,
    "optim": optim_state,
    "step": 0,
    "rng": functional_ckpt.PerRank(torch.get_rng_state()),
}
state = functional_ckpt.load(like, "checkpoint")
set_state_dict(
    model,
    optimizer,
    model_state_dict=state["model"],
    optim_state_dict=state["optim"],
)
torch.set_rng_state(state["rng"].value)
# --8<-- [end:load]
for key, tensor in get_state_dict(model, optimizer)[0].items():
    assert torch.equal(tensor.full_tensor(), saved[key]), key

# --8<-- [start:reshard]
from torch.distributed.tensor import Shard, zeros

# Saved by rows, wanted by columns: any placement will do.
wanted = zeros(256, 64, device_mesh=mesh, placements=[Shard(1)])
policy = functional_ckpt.LoadPolicy(keys="model.0.weight")
functional_ckpt.load({"model": {"0.weight": wanted}}, "checkpoint", policy=policy)
# --8<-- [end:reshard]
assert torch.equal(wanted.full_tensor(), saved["0.weight"])
dist.barrier()
dist.destroy_process_group()
