from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

from functional_ckpt.torch.megatron.plugin import ZarrLoadStrategy, ZarrSaveStrategy


def save(state, path, **options):  # async_sharded_save=True as well
    saver = FullyParallelSaveStrategyWrapper(ZarrSaveStrategy())
    saver.backend = "functional_ckpt"
    return dist_checkpointing.save(state, path, saver, **options)


def load(state, path):
    return dist_checkpointing.load(state, path, ZarrLoadStrategy())
