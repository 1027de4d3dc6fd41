"""The names of `functional_ckpt.torch.megatron.strategies.base`, by a shorter path."""

from functional_ckpt.torch.megatron.strategies.base import *  # noqa: F403
from functional_ckpt.torch.megatron.strategies.base import __all__ as __all__
