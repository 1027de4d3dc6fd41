"""`AsyncRequest` and `AsyncCallsQueue`, under the module name of ``megatron.core.dist_checkpointing.strategies``."""

from functional_ckpt.torch.megatron.strategies.async_calls import AsyncCallsQueue, AsyncRequest

__all__ = ["AsyncCallsQueue", "AsyncRequest"]
