"""The names of `functional_ckpt.torch.megatron.serialization`, by a shorter path."""

from functional_ckpt.torch.megatron.serialization import *  # noqa: F403
from functional_ckpt.torch.megatron.serialization import __all__ as __all__
