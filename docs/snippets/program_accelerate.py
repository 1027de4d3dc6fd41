# ruff: noqa: F821 - `model`, `optimizer` and `train` are the reader's own
# --8<-- [start:train]
from pathlib import Path

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import merge_fsdp_weights

import functional_ckpt.torch

functional_ckpt.torch.install()  # on every rank

plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
accelerator = Accelerator(fsdp_plugin=plugin)
model, optimizer = accelerator.prepare(model, optimizer)
if Path("checkpoint/random_states_0.pkl").exists():
    accelerator.load_state("checkpoint")
train(accelerator, model, optimizer)
accelerator.save_state("checkpoint")
merge_fsdp_weights("checkpoint/pytorch_model_fsdp_0", "merged")  # one model.safetensors
# --8<-- [end:train]
