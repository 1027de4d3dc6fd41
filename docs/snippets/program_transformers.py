# ruff: noqa: F821 - `model` and `data` are the reader's own
# --8<-- [start:train]
from pathlib import Path

from transformers import Trainer, TrainingArguments

import functional_ckpt.torch

functional_ckpt.torch.install()  # on every rank

shards = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}  # the default gathers on rank 0
arguments = TrainingArguments("run", fsdp=True, fsdp_config=shards, max_steps=2, save_steps=1, report_to=[])
trainer = Trainer(model, arguments, train_dataset=data)
whole = [path.parent for path in Path("run").glob("checkpoint-*/trainer_state.json")]  # which it writes last
newest = max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
trainer.train(resume_from_checkpoint=newest and str(newest))
# --8<-- [end:train]
