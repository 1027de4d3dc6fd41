# ruff: noqa: F821 - `module` and `batches` are the reader's own
# --8<-- [start:train]
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

import functional_ckpt.torch

functional_ckpt.torch.install()  # on every rank, before the trainer saves or loads

keeper = ModelCheckpoint("checkpoints", "{step}", save_last=True)
strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
trainer = Trainer(devices=2, strategy=strategy, callbacks=[keeper], max_epochs=3)
trainer.fit(module, batches, ckpt_path="last")
# --8<-- [end:train]
