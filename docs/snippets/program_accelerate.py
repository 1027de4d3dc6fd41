# ruff: noqa: F821 - `model`, `optimizer` and `train` are the reader's own
# --8<-- [start:train]
import os
from pathlib import Path

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import merge_fsdp_weights

import functional_ckpt.torch

functional_ckpt.torch.install()  # on every rank

plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
accelerator = Accelerator(fsdp_plugin=plugin)
model, optimizer = accelerator.prepare(model, optimizer)
last = max(Path("steps").glob("*/random_states_0.pkl"), key=os.path.getmtime, default=None)  # which is written last
if last:
    accelerator.load_state(str(last.parent))
step = train(accelerator, model, optimizer)
accelerator.save_state(f"steps/{step}")
merge_fsdp_weights(f"steps/{step}/pytorch_model_fsdp_0", "merged")  # makes one model.safetensors
# --8<-- [end:train]
