"""CPU tensors that say they are on a GPU, for what of megatron-core insists on one. Its files stay as they are.

In a process that calls `pretend`, ``tensor.type()`` names CUDA, ``device="cuda"`` means the CPU, and ``tensor.cuda()``
returns the tensor. What is computed, and where each element is kept, is Megatron's doing.
"""

import contextlib

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Lets every function of torch that is told of CUDA work on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "cpu")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.", 1)
        return found


def pretend():
    """Do so from now on, in this process; where there is a GPU, do nothing."""
    if torch.cuda.is_available():
        return
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    OnCpu().__enter__()
