"""The names of `functional_ckpt.torch.megatron.strategies.checkpointable`, by a shorter path."""

from functional_ckpt.torch.megatron.strategies.checkpointable import *  # noqa: F403
from functional_ckpt.torch.megatron.strategies.checkpointable import __all__ as __all__
