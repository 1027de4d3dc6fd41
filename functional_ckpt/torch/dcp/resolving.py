"""Tensors that a planner creates on demand, as buffers: they are requested when they are written, and then released.

DCP's planner returns the tensors of the state dict themselves, which cost no extra memory. A planner with its own
`transform_object` may create a new tensor each time, so only a few can be in memory at once.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from threading import Lock
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from functional_ckpt.errors import CheckpointError, ShapeError, SpecError, UnsupportedLeafError
from functional_ckpt.spec.strided import View
from functional_ckpt.store.buffer import Buffer, Copier
from functional_ckpt.store.encoding import Array
from functional_ckpt.torch.dcp.bridge import DefaultSavePlanner, WriteItem
from functional_ckpt.torch.dcp.packed import Items
from functional_ckpt.torch.tensors import readable

__all__ = ["PlannedBuffer", "Resolver", "is_stock", "local_tensor"]

#: Tensors kept at once: the one whose chunks are being written, and the next, which another thread has begun.
_KEPT = 2
#: Placements of memory that holds elements, not sums; of others each is asked, which takes longer.
_HELD = frozenset([Shard, Replicate])
_STOCK = ("resolve_data", "lookup_object", "transform_object")


class Resolver:
    """Asks a planner for the data of items; keeps the last tensors, so that one of many chunks is made once."""

    def __init__(self, planner: Any, rank: int) -> None:
        self.planner, self.rank = planner, rank
        #: Whether tensors may be created anew each time: then not all may be kept.
        self.makes_tensors = not is_stock(planner, DefaultSavePlanner, _STOCK)
        self._recent: OrderedDict[tuple[str, Any], Resolved] = OrderedDict()
        self._lock = Lock()

    def data(self, item: WriteItem) -> Any:
        """Return the data of an item.

        Raises
        ------
        CheckpointError
            If the planner raises.
        """
        return self._asking(item, lambda: self.planner.resolve_data(item))

    def _asking(self, item: WriteItem, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except CheckpointError:
            raise
        except Exception as error:  # a planner is the user's code
            raise UnsupportedLeafError(
                "the planner cannot give an item's data", item.index.fqn, found=f"{type(error).__name__}: {error}"
            ) from error

    def value(self, item: WriteItem) -> tuple[Any] | None:
        """Return the object of an item from the state dict, unless the planner transforms it."""
        return None if self.makes_tensors else (self._asking(item, lambda: self.planner.lookup_object(item.index)),)

    def held(self, items: Items, number: int) -> tuple[tuple[int, ...], str, Buffer]:
        """Return shape, data type and memory of the tensor of an item."""
        if self.makes_tensors:
            item = items.item(number)
            made = self.resolved(item)
            return made.shape, made.dtype, PlannedBuffer(self, item, (made.shape, made.dtype))
        name = items.names[number]
        data = local_tensor(self.planner.state_dict, name)
        if data is None:
            found = self._asked(items.item(number))
            return found.shape, found.dtype, found.buffer
        return data.shape, *readable(name, data, self.rank)

    def resolved(self, item: WriteItem) -> "Resolved":
        """Return the tensor of an item that may have to be made, unless it is one of the last requested ones."""
        place = item.index.fqn, item.index.offset
        with self._lock:
            known = self._recent.get(place)
            if known is None:
                known = self._recent[place] = self._asked(item)
                while len(self._recent) > _KEPT:
                    self._recent.popitem(last=False)
            return known

    def _asked(self, item: WriteItem) -> "Resolved":
        key = item.index.fqn
        data = self.data(item)
        if isinstance(data, DTensor):
            data = self._asking(item, lambda: data.__get_tensor_shard__(item.index))
        if not isinstance(data, torch.Tensor):
            raise UnsupportedLeafError(
                "the planner did not return a tensor", key, rank=self.rank, found=type(data).__name__
            )
        dtype, buffer = readable(key, data, self.rank)
        return Resolved(tuple(data.shape), dtype, buffer)


@attrs.frozen(eq=False)
class Resolved:
    """A plain tensor that a planner returned."""

    shape: tuple[int, ...]
    dtype: str
    buffer: Buffer


@attrs.frozen(eq=False)
class PlannedBuffer:
    """The tensor of an item, requested from the planner when a region of it is needed."""

    resolver: Resolver
    item: WriteItem
    expected: tuple[tuple[int, ...], str]

    def view(self, shape: tuple[int, ...], run: int) -> Array | None:
        """Return None: a view would keep the tensor in memory."""
        return None

    def get(self, shape: tuple[int, ...], run: int, region: tuple[Any, ...]) -> Array:
        """Return a region of the tensor."""
        return self._now().get(shape, run, region)

    def put(self, shape: tuple[int, ...], run: int, region: tuple[Any, ...], values: Array) -> None:
        """Raise: a change would have no effect."""
        raise SpecError("a tensor of a planner is read-only", self.item.index.fqn)

    def form(self) -> Array:
        """Return the form of a copy on the host."""
        return self._now().form()

    def copier(self) -> Copier | None:
        """Return who copies the tensor to the host."""
        return self._now().copier()

    def memory(self) -> tuple[Hashable, View | range]:
        """Return where the tensor is now."""
        return self._now().memory()

    def _now(self) -> Buffer:
        found, expected = self.resolver.resolved(self.item), self.expected
        if (found.shape, found.dtype) != expected:
            raise ShapeError(
                "the planner gives another tensor than before",
                self.item.index.fqn,
                expected=expected,
                found=(found.shape, found.dtype),
            )
        return found.buffer


def local_tensor(state: Mapping[str, Any], key: str) -> torch.Tensor | None:
    """Return the tensor behind DTensor `key` of a planner's `state`; None for anything else: ask the planner.

    It returns a view of the same memory. It makes it through autograd, which takes longer than to copy a
    small tensor.
    """
    leaf = state.get(key)
    if type(leaf) is not DTensor or not _are_held(leaf.placements):
        return None
    local: Any = getattr(leaf, "_local_tensor", None)
    return local if type(local) is torch.Tensor else None


def _are_held(placements: tuple[Any, ...]) -> bool:
    return _HELD.issuperset(map(type, placements)) or not any(placement.is_partial() for placement in placements)


def is_stock(planner: Any, kind: type, names: Sequence[str]) -> bool:
    """Tell whether a planner has these methods of `kind`, a planner of DCP: not its own, nor those of a patch.

    Examples
    --------
    >>> is_stock(DefaultSavePlanner(), DefaultSavePlanner, ["resolve_data"])
    True
    """
    theirs = [getattr(kind, name, None) for name in names]
    own = [getattr(getattr(planner, name, None), "__func__", None) for name in names]
    file = _file_of(vars(kind).get("__init__"))
    return own == theirs and file is not None and all(_file_of(method) == file for method in theirs)


def _file_of(function: Any) -> str | None:
    return getattr(getattr(function, "__code__", None), "co_filename", None)
