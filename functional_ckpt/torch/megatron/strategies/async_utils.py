"""`AsyncRequest` and `AsyncCallsQueue` by the module's name in ``megatron.core.dist_checkpointing.strategies``."""

from functional_ckpt.torch.megatron.strategies.async_calls import AsyncCallsQueue, AsyncRequest

__all__ = ["AsyncCallsQueue", "AsyncRequest"]
