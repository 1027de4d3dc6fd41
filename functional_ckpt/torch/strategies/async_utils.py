"""The names of `functional_ckpt.torch.megatron.strategies.async_utils`, by a shorter path."""

from functional_ckpt.torch.megatron.strategies.async_utils import *  # noqa: F403
from functional_ckpt.torch.megatron.strategies.async_utils import __all__ as __all__
