"""`DeviceCopier`: copies of a device's tensors to pinned memory of the host, on a stream of their own."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import attrs
import numpy as np
import torch

from functional_ckpt.store.buffer import address_of
from functional_ckpt.store.encoding import Array
from functional_ckpt.store.pool import host_memory

__all__ = ["DeviceCopier", "begin_to_copy", "copier_of", "wait_for"]

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of this process
#: What a device puts in order at a time, in memory of its own, before it sends it.
_PART_NBYTES = 32 * 2**20


class _Pinned:
    """What an array of pinned memory refers to: it unpins the memory, and only then lets go of it.

    Not a finalizer of the array: numpy 2.5 gives up what an array refers to before it tells that the array is gone.
    """

    def __init__(self, memory: Array, copier: "DeviceCopier") -> None:
        self._memory, self._copier, self._process = memory, copier, os.getpid()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._memory.__array_interface__

    def __del__(self) -> None:
        # Not at the end of the process, and not in a forked child, which has no device.
        if not sys.is_finalizing() and os.getpid() == self._process:
            self._copier.unpin(address_of(self._memory))


@attrs.frozen(eq=False)
class DeviceCopier:
    """Copies tensors of `device` by `api`: ``torch.cuda``, or what is like it.

    What the device still computes on the caller's stream comes first. All copies are begun, and then waited for once.
    """

    device: torch.device
    api: Any
    _side: list[Any] = attrs.field(factory=list, init=False)

    def allocate(self, nbytes: int) -> Array:
        """Return memory that the device can write to by itself; ordinary memory, which is slower, if it cannot."""
        memory = host_memory(nbytes)
        if not hasattr(self.api, "cudart"):
            return memory
        # Not torch's own pinned memory: that is rounded up to a power of two.
        if not int(self.api.cudart().cudaHostRegister(address_of(memory), nbytes, _PORTABLE)):
            return np.asarray(_Pinned(memory, self))
        with suppress(RuntimeError):  # the runtime would report it at the next kernel, which may be the user's
            torch.zeros(1, device=self.device)
        return memory

    def unpin(self, address: int) -> None:
        """Let the device no longer write to memory that it could; on whatever thread, which may have another device."""
        # A thread that has chosen none would open the first of the machine.
        with self.api.device(self.device):
            self.api.cudart().cudaHostUnregister(address)

    def begin(self, buffers: Sequence[Any], copies: Sequence[Array]) -> Callable[[], None]:
        """Begin to copy; return what waits for the end."""
        if not self._side:
            self._side.append(self.api.Stream(device=self.device))
        [side] = self._side[:1]
        side.wait_stream(self.api.current_stream(self.device))
        try:
            with self.api.stream(side):
                for buffer, into in zip(buffers, copies, strict=True):
                    buffer.copy_to(into)
        except BaseException:
            side.synchronize()
            raise
        wait: Callable[[], None] = side.synchronize
        return wait


@lru_cache(maxsize=64)
def copier_of(device: torch.device) -> DeviceCopier | None:
    """Return the copier of a device; None if it has no streams, and the host copies tensor by tensor.

    Examples
    --------
    >>> copier_of(torch.device("meta")) is None
    True
    """
    api = getattr(torch, device.type, None)
    has_streams = all(hasattr(api, name) for name in ("Stream", "current_stream", "stream"))
    return DeviceCopier(device, api) if has_streams else None


def begin_to_copy(tensor: torch.Tensor, into: torch.Tensor) -> None:
    """Begin to copy a tensor to memory of the host, on the stream that is current; a strided one part by part.

    Examples
    --------
    >>> into = torch.zeros(3, 2)
    >>> begin_to_copy(torch.arange(6.0).reshape(2, 3).t(), into)
    >>> into.tolist()
    [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    """
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes <= _PART_NBYTES or tensor.is_contiguous():
        into.copy_(tensor, non_blocking=True)
        return
    axis = next(axis for axis, extent in enumerate(tensor.shape) if extent > 1)
    rows = max(1, tensor.shape[axis] * _PART_NBYTES // nbytes)
    for part, place in zip(torch.split(tensor, rows, axis), torch.split(into, rows, axis), strict=True):
        begin_to_copy(part, place)


def wait_for(device: torch.device) -> None:
    """Wait for what this thread has asked a device to do.

    Examples
    --------
    >>> wait_for(torch.device("meta"))
    """
    stream = getattr(getattr(torch, device.type, None), "current_stream", None)
    if stream is not None:
        stream(device).synchronize()
