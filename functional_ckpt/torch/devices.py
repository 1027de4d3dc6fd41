"""`DeviceCopier`: copies of a device's tensors to pinned memory of the host, on a stream of their own."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any
from weakref import finalize

import attrs
import torch

from functional_ckpt.store.encoding import Array
from functional_ckpt.store.pool import host_memory

__all__ = ["DeviceCopier", "copier_of"]

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of this process


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
        if hasattr(self.api, "cudart"):
            # Not torch's own pinned memory: that is rounded up to a power of two.
            runtime, address = self.api.cudart(), memory.__array_interface__["data"][0]
            if int(runtime.cudaHostRegister(address, nbytes, _PORTABLE)):
                with suppress(RuntimeError):  # the runtime would report it at the next kernel, which may be the user's
                    torch.zeros(1, device=self.device)
            else:
                # It runs before the pages go, since those are what the array refers to.
                finalize(memory, runtime.cudaHostUnregister, address).atexit = False
        return memory

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
