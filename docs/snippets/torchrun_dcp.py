# ruff: noqa: E402 - each part of a page has the imports that it needs
# --8<-- [start:state]
# torchrun --nproc-per-node=2 train.py
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
state_dict = {"w": distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]), "step": 100}
# --8<-- [end:state]

# --8<-- [start:switch]
import torch.distributed.checkpoint as dcp

from functional_ckpt.torch import ZarrStorageReader, ZarrStorageWriter

dcp.save(state_dict, storage_writer=ZarrStorageWriter("checkpoints/step-100"))
dcp.load(state_dict, storage_reader=ZarrStorageReader("checkpoints/step-100"))
# --8<-- [end:switch]

# --8<-- [start:install]
from functional_ckpt.torch import install

install()
dcp.save(state_dict, checkpoint_id="checkpoints/step-300")
dcp.load(state_dict, checkpoint_id="checkpoints/step-300")
# --8<-- [end:install]

# --8<-- [start:strict]
from functional_ckpt.torch import StrictLoadPlanner, StrictSavePlanner

writer, reader = ZarrStorageWriter("checkpoints/step-200"), ZarrStorageReader("checkpoints/step-200")
dcp.save(state_dict, storage_writer=writer, planner=StrictSavePlanner())
dcp.load(state_dict, storage_reader=reader, planner=StrictLoadPlanner())
# --8<-- [end:strict]
dist.destroy_process_group()
