"""Torch tensors and DTensors as leaves: their specs, host views, and filling them in place."""

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from functional_ckpt.errors import ShapeError, SpecError, UnsupportedLeafError
from functional_ckpt.plan.field import refuse
from functional_ckpt.run.leaves import HeldArray, NumpyLeaves, Target
from functional_ckpt.run.objects import object_bytes
from functional_ckpt.spec.array import ArraySpec, known_spec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.shard import known_shard
from functional_ckpt.spec.sharding import Sharding
from functional_ckpt.store.buffer import Buffer, HostBuffer
from functional_ckpt.torch.host_view import DTYPE_NAMES, TORCH_DTYPES, dtype_name_of
from functional_ckpt.torch.local import LocalTensors, OpaqueObject
from functional_ckpt.torch.memory import PLAIN_TYPES, buffer_of, detached, host_memory
from functional_ckpt.torch.placements import sharding_of

__all__ = ["TORCH_LEAVES", "TorchLeaves", "fillable", "readable"]


class TorchLeaves:
    """Tensors (any stride; meta tensors are allocated on load), DTensors (any mesh; no partial sums), local shards."""

    def accepts_type(self, kind: type) -> bool:
        """Tell whether leaves of a type are tensors, or hold tensors or an object."""
        return issubclass(kind, _LEAF_TYPES)

    def hold(self, key: str, leaf: Any, rank: int) -> HeldArray:
        """Describe a leaf that is saved."""
        if type(leaf) not in PLAIN_TYPES:
            if isinstance(leaf, OpaqueObject):
                return attrs.evolve(NumpyLeaves().hold(key, object_bytes(key, leaf.value), rank), codec="torch")
            if isinstance(leaf, LocalTensors):
                return _held_shards(key, leaf, [_resolved(tensor) for tensor in leaf.data])
            if isinstance(leaf, DTensor):
                local = _local(leaf)
                found = host_memory(key, local)
                if found is None:
                    _check_readable(key, leaf, rank)
                    local = _resolved(local)
                return _held_parts(key, leaf, local, found)
        dtype, buffer = readable(key, leaf, rank)
        return HeldArray(known_spec(key, leaf.shape, dtype), (buffer,), True, _whole_identity(leaf, buffer))

    def target(self, key: str, leaf: Any, rank: int, device: str) -> Target:
        """Describe a leaf that is loaded."""
        if isinstance(leaf, LocalTensors):
            for tensor in leaf.data:
                _check_fillable(key, tensor, rank)
            return Target.of(_held_shards(key, leaf, leaf.data), rank, leaf)
        if isinstance(leaf, OpaqueObject):
            raise SpecError("the checkpoint has an array, `like` an object", key, remedy="Put a tensor in its place")
        if type(leaf) not in PLAIN_TYPES and not isinstance(leaf, DTensor):
            _check_type(key, leaf)  # a subclass may be a plain tensor once it is detached
        local = _local(leaf)
        found = host_memory(key, local)
        if found is None:
            _check_type(key, leaf)
            leaf = _allocated(leaf, device) if leaf.is_meta else leaf
            local = _local(leaf)
            _check_fillable(key, local, rank)
        if isinstance(leaf, DTensor):
            return Target.of(_held_parts(key, leaf, local, found), rank, leaf)
        dtype, buffer = found or (dtype_name_of(key, leaf), buffer_of(key, local))
        spec = known_spec(key, leaf.shape, dtype)
        return Target(_whole_identity(leaf, buffer), (known_shard(spec, spec.box, rank),), (buffer,), leaf)

    def blueprint(self, leaf: Any) -> Hashable | None:
        """Return type, shape, data type, mesh and placements of a meta tensor."""
        if not isinstance(leaf, torch.Tensor) or not leaf.is_meta:
            return None
        mesh = (leaf.device_mesh, leaf.placements) if isinstance(leaf, DTensor) else None
        return type(leaf), leaf.shape, leaf.dtype, leaf.stride(), leaf.requires_grad, mesh

    def empty(self, leaf: Any, spec: ArraySpec) -> torch.Tensor:
        """Return a new tensor on the CPU."""
        return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])


def _held_parts(key: str, leaf: DTensor, local: torch.Tensor, found: tuple[str, Buffer] | None) -> HeldArray:
    """Describe the parts of a DTensor that this rank holds; `found` are data type and memory of its local tensor."""
    dtype, whole = found or (dtype_name_of(key, leaf), buffer_of(key, local))
    spec = known_spec(key, leaf.shape, dtype)
    # Not get_rank(), which checks ten times as long as this takes.
    world = dist.group.WORLD
    rank = dist.get_rank() if world is None else world.rank()
    sharding = sharding_of(key, leaf.device_mesh, leaf.placements, rank)
    # One memory is other parts of an array on another mesh.
    # An empty local tensor has no address, but all ranks must find the same ties: its storage identifies it.
    # The storage lives as long as `leaf`; the id of `local`, which does not, could be reused.
    identity: Hashable
    if isinstance(whole, HostBuffer) and whole.address:
        identity = whole, sharding
    elif local.numel():
        identity = _identity(local, sharding)
    else:
        identity = (local.untyped_storage()._cdata, spec.shape, spec.dtype, sharding)
    return HeldArray(spec, _placed(spec, sharding, local, whole, rank), False, identity, sharding, place=rank)


def readable(key: str, tensor: torch.Tensor, rank: int) -> tuple[str, Buffer]:
    """Return data type and memory of a plain tensor, which is to be saved.

    Raises
    ------
    UnsupportedLeafError, DTypeError
        If it cannot be.

    Examples
    --------
    >>> readable("w", torch.zeros(2, dtype=torch.int8), 0)[0]
    'int8'
    """
    found = host_memory(key, tensor)
    if found is not None:
        return found
    _check_readable(key, tensor, rank)
    return dtype_name_of(key, tensor), buffer_of(key, _resolved(tensor))


def _check_readable(key: str, tensor: torch.Tensor, rank: int) -> None:
    _check_type(key, tensor)
    if tensor.is_meta:
        raise UnsupportedLeafError("a meta tensor has no data to save", key, rank=rank, shape=tuple(tensor.shape))


def fillable(key: str, tensor: torch.Tensor) -> tuple[str, Buffer]:
    """Return data type and memory of a plain tensor, which is to be filled.

    Raises
    ------
    UnsupportedLeafError, SpecError, DTypeError
        If it cannot be.

    Examples
    --------
    >>> fillable("w", torch.zeros(2))[0]
    'float32'
    """
    _check_type(key, tensor)
    if tensor.is_meta or isinstance(tensor, DTensor):
        found = "a meta tensor" if tensor.is_meta else "a DTensor"
        raise SpecError("only a plain tensor can be filled", key, shape=tuple(tensor.shape), found=found)
    _check_fillable(key, tensor)
    return dtype_name_of(key, tensor), buffer_of(key, tensor)


def _resolved(leaf: torch.Tensor) -> torch.Tensor:
    plain = detached(leaf)
    return plain.resolve_conj().resolve_neg() if plain.is_conj() or plain.is_neg() else plain


def _check_fillable(key: str, local: torch.Tensor, rank: int | None = None) -> None:
    if local.is_conj() or local.is_neg():
        raise SpecError("a conjugated or negated view cannot be filled", key, rank=rank, shape=tuple(local.shape))


def _held_shards(key: str, leaf: LocalTensors, tensors: Sequence[torch.Tensor]) -> HeldArray:
    """Describe the local shards of one array, that of the first shard."""
    shards = leaf.shards
    if any(shard.key != key for shard in shards):
        shards = tuple(attrs.evolve(shard, array=attrs.evolve(shard.array, key=key)) for shard in shards)
    array = shards[0].array
    for shard, tensor in zip(shards, tensors, strict=True):
        _check_type(key, tensor)
        expected = array, shard.data_shape, array.dtype
        found = shard.array, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype]
        if tensor.is_meta or expected != found:
            raise ShapeError(
                "a local shard does not fit its array",
                key,
                shape=array.shape,
                offset=shard.box.start,
                expected=expected,
                found="no memory" if tensor.is_meta else found,
            )
    return HeldArray(array, tuple(buffer_of(key, tensor) for tensor in tensors), False, id(leaf), None, shards)


def _local(leaf: torch.Tensor) -> torch.Tensor:
    """Return the local part of a tensor, detached."""
    if not isinstance(leaf, DTensor):
        return detached(leaf)
    # to_local goes through autograd, which costs more than the rest of the work for a small tensor.
    local: torch.Tensor | None = getattr(leaf, "_local_tensor", None)
    return detached(leaf.to_local() if local is None else local)


def _placed(spec: ArraySpec, sharding: Sharding, local: torch.Tensor, whole: Buffer, rank: int) -> tuple[Buffer, ...]:
    """Return the memory of each part, that of the `local` tensor if it is one part."""
    shape = local.shape
    buffers: list[Buffer] = []
    for box, _, region in sharding.places(spec.shape, rank):
        if region.stop == shape and not any(region.start):
            buffers.append(whole)
            continue
        if not Box.from_shape(shape).contains(region):
            raise SpecError(
                "a DTensor's local tensor does not fit its placements",
                spec.key,
                shape=spec.shape,
                offset=box.start,
                expected=region.shape,
                found=tuple(shape),
            )
        buffers.append(buffer_of(spec.key, local[region.slices] if region.size else local))
    return tuple(buffers)


def _allocated(leaf: torch.Tensor, device: str) -> torch.Tensor:
    if isinstance(leaf, DTensor):
        local = torch.empty_like(leaf.to_local(), device=leaf.device_mesh.device_type)
        empty: torch.Tensor = DTensor.from_local(
            local, leaf.device_mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
        )
    else:
        empty = torch.empty_like(leaf, device=_checked(device))
    if isinstance(leaf, torch.nn.Parameter):
        return torch.nn.Parameter(empty, leaf.requires_grad)
    return empty.requires_grad_(leaf.requires_grad)


def _checked(device: str) -> str:
    """Return the name of a device on which a tensor can be made."""
    try:
        torch.empty(0, device=device)
    except Exception:  # torch raises RuntimeError or AssertionError, by device
        raise refuse("LoadPolicy", "device", "a device of this machine", device) from None
    return device


def _check_type(key: str, leaf: torch.Tensor) -> None:
    plain = type(leaf) in PLAIN_TYPES or isinstance(leaf, DTensor)
    if not plain or leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
        shape = None if leaf.is_nested else tuple(leaf.shape)
        raise UnsupportedLeafError(
            "a tensor of this kind has no representation",
            key,
            shape=shape,
            expected="a dense torch.Tensor, Parameter, Buffer or DTensor",
            found=f"{type(leaf).__qualname__}, {leaf.layout}",
            remedy="Convert it to dense tensors (indices, values, scales) before saving",
        )


def _whole_identity(leaf: torch.Tensor, buffer: Buffer) -> Hashable:
    """Return what plain tensors that share one memory have in common; a view on the host tells it at less cost."""
    # A conjugated or negated view was resolved to a copy, which nothing else shares.
    if isinstance(buffer, HostBuffer) and buffer.address and buffer.address == leaf.data_ptr():
        return buffer
    return _identity(leaf, None)


def _identity(tensor: torch.Tensor, sharding: Sharding | None) -> Hashable:
    address = tensor.data_ptr()
    if not address:  # meta tensors and empty ones
        return id(tensor)
    form = _same_form((tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()))
    return address, tensor.device, form, sharding


# Thousands of tensors have one form: each would keep its own, with a shape, for the collector to look at.
@lru_cache(maxsize=1024)
def _same_form(form: tuple[Any, ...]) -> tuple[Any, ...]:
    return form


_LEAF_TYPES = (torch.Tensor, LocalTensors, OpaqueObject)
TORCH_LEAVES = TorchLeaves()
