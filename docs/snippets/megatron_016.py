from megatron.core import dist_checkpointing

from functional_ckpt.torch.megatron.plugin import ZarrSaveStrategy


def save(state, path, **options):  # async_sharded_save=True as well
    return dist_checkpointing.save(state, path, ZarrSaveStrategy(), **options)


def load(state, path):
    return dist_checkpointing.load(state, path)
