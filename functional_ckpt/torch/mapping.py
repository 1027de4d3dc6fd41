"""The names of `functional_ckpt.torch.megatron.mapping`, by a shorter path."""

from functional_ckpt.torch.megatron.mapping import *  # noqa: F403
from functional_ckpt.torch.megatron.mapping import __all__ as __all__
