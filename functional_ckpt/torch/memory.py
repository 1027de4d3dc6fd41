"""Torch tensors as memory: `DeviceBuffer`, `buffer_of` any tensor, `host_memory` of most, at less cost."""

from collections.abc import Hashable
from math import prod
from typing import Any

import attrs
import numpy as np
import torch

from functional_ckpt.errors import UnsupportedLeafError
from functional_ckpt.spec.strided import View
from functional_ckpt.store.buffer import Buffer, Copier, HostBuffer, copy_cast
from functional_ckpt.store.encoding import Array, numpy_dtype
from functional_ckpt.torch.devices import begin_to_copy, copier_of, wait_for
from functional_ckpt.torch.host_view import DTYPE_NAMES, host_view, to_torch

__all__ = ["PLAIN_TYPES", "DeviceBuffer", "buffer_of", "detached", "host_memory"]

#: The types of tensors whose memory holds their elements, if they are dense.
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its history; itself, if it has none."""
    return tensor.detach() if tensor.requires_grad else tensor


@attrs.frozen(eq=False)
class DeviceBuffer:
    """A tensor in memory that the host cannot address; regions are copied to and from the host on demand."""

    tensor: torch.Tensor = attrs.field(converter=detached)

    def view(self, shape: tuple[int, ...], run: int) -> Array | None:
        """Return None: there is no host view."""
        return None

    def get(self, shape: tuple[int, ...], run: int, region: tuple[Any, ...]) -> Array:
        """Copy a region to the host."""
        piece = self._piece(shape, run, region).cpu()
        return host_view(piece, DTYPE_NAMES[piece.dtype])

    def put(self, shape: tuple[int, ...], run: int, region: tuple[Any, ...], values: Array) -> None:
        """Copy a region to the device; the host converts the data type first, as for memory of its own."""
        piece = self._piece(shape, run, region)
        name = DTYPE_NAMES[piece.dtype]
        host = np.empty(tuple(piece.shape), numpy_dtype(name))
        copy_cast(host, values)
        piece.copy_(to_torch(host, name))
        # `copy_` returns while the device still puts the elements of a strided piece in their places.
        wait_for(piece.device)

    def form(self) -> Array:
        """Return an array of the tensor's shape and data type, of one element that repeats."""
        return np.broadcast_to(np.empty((), numpy_dtype(DTYPE_NAMES[self.tensor.dtype])), tuple(self.tensor.shape))

    def copier(self) -> Copier | None:
        """Return the device's copier."""
        return copier_of(self.tensor.device)

    def copy_to(self, into: Array) -> None:
        """Begin to copy the tensor to memory of the host, on the stream that is current."""
        begin_to_copy(self.tensor, to_torch(into, DTYPE_NAMES[self.tensor.dtype]))

    def memory(self) -> tuple[Hashable, View | range]:
        """Return where the tensor is."""
        tensor, itemsize = self.tensor, self.tensor.element_size()
        if tensor.is_contiguous():
            address = tensor.data_ptr()
            return tensor.device, range(address, address + tensor.numel() * itemsize)
        strides = tuple(step * itemsize for step in tensor.stride())
        return tensor.device, View(tensor.data_ptr(), tuple(tensor.shape), strides, itemsize)

    def _piece(self, shape: tuple[int, ...], run: int, region: tuple[Any, ...]) -> torch.Tensor:
        size = prod(shape)
        if size == self.tensor.numel():
            return self.tensor.reshape(shape)[region]
        return self.tensor.view(-1)[run : run + size].view(shape)[region]


def buffer_of(key: str, tensor: torch.Tensor) -> Buffer:
    """Return the memory of a tensor, which is dense, and neither conjugated nor negated.

    Raises
    ------
    UnsupportedLeafError
        If its storage was freed.
    """
    if tensor.is_cpu:
        return _host_buffer(key, tensor, DTYPE_NAMES[tensor.dtype])
    if tensor.is_cuda:
        _check_memory(key, tensor)
    # Threads with streams of their own copy the regions: the operations that computed the tensor must finish first.
    wait_for(tensor.device)
    return DeviceBuffer(tensor)


def host_memory(key: str, tensor: torch.Tensor) -> tuple[str, Buffer] | None:
    """Return data type and memory of a plain dense tensor of the host; None if it is anything else.

    It calls torch as seldom as can be: a state has thousands of tensors.

    Examples
    --------
    >>> host_memory("w", torch.zeros(2, dtype=torch.int8))[0]
    'int8'
    >>> host_memory("w", torch.zeros(2, dtype=torch.complex64).conj()) is None
    True
    """
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is not None and tensor.is_cpu and type(tensor) in PLAIN_TYPES:
        try:  # torch gives no array of a tensor that is not dense, or conjugated, or negated: one call instead of nine
            return dtype, _host_buffer(key, tensor, dtype)
        except (RuntimeError, TypeError):
            pass
    return None


def _host_buffer(key: str, tensor: torch.Tensor, dtype: str) -> HostBuffer:
    address = tensor.data_ptr()
    if not address or tensor.untyped_storage().nbytes() < tensor.nbytes:
        _check_memory(key, tensor)
    return HostBuffer(host_view(tensor, dtype), address)


def _check_memory(key: str, tensor: torch.Tensor) -> None:
    """Raise for a tensor whose storage was given back, as FSDP does between steps: its address is anybody's."""
    if not tensor.numel():
        return
    last = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    found = tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0
    if found < needed:
        raise UnsupportedLeafError(
            "a tensor has no memory: its storage was freed or made smaller",
            key,
            shape=tuple(tensor.shape),
            expected=f"{needed} bytes",
            found=f"{found} bytes",
            remedy="Gather it first, as with summon_full_params, or pass the sharded parameter",
        )
