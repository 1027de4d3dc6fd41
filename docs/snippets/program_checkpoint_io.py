# --8<-- [start:io]
import shutil

from lightning.pytorch.plugins import CheckpointIO

import functional_ckpt
from functional_ckpt.run.comm import LocalGather


class ZarrCheckpointIO(CheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):  # rank 0 alone calls it
        policy = functional_ckpt.SavePolicy(object_codec="torch")
        functional_ckpt.save(checkpoint, path, policy=policy, overwrite=True, process_group=LocalGather())

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        trusted = "trust" if weights_only is False else ()
        return functional_ckpt.open_checkpoint(path).state("torch", safe_globals=trusted)

    def remove_checkpoint(self, path):
        shutil.rmtree(path)


# --8<-- [end:io]
