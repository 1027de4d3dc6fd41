"""Tensors that a planner creates on demand, as buffers: they are requested when they are written, and then released.

DCP's planner returns the tensors of the state dict themselves, which cost no extra memory. A planner with its own
`transform_object` may create a new tensor each time, so only a few can be in memory at once.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any

import attrs
import torch

from functional_ckpt.errors import CheckpointError, ShapeError, SpecError, UnsupportedLeafError
from functional_ckpt.run.leaves import HeldArray
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.strided import View
from functional_ckpt.store.buffer import Buffer, Copier
from functional_ckpt.store.encoding import Array
from functional_ckpt.torch.dcp.bridge import DefaultSavePlanner, WriteItem
from functional_ckpt.torch.tensors import TORCH_LEAVES

__all__ = ["PlannedBuffer", "Resolver"]

#: Tensors kept at once: the one whose chunks are being written, and the next, which another thread has begun.
_KEPT = 2
_STOCK = ("resolve_data", "lookup_object", "transform_object")


class Resolver:
    """Asks a planner for the data of items; keeps the last tensors, so that one of many chunks is made once."""

    def __init__(self, planner: Any, rank: int) -> None:
        self.planner, self.rank = planner, rank
        #: Whether tensors may be created anew each time: then not all may be kept.
        self.makes_tensors = not all(_is_stock(planner, name) for name in _STOCK)
        self._recent: OrderedDict[tuple[str, Any], HeldArray] = OrderedDict()
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

    def held(self, item: WriteItem) -> HeldArray:
        """Return the tensor of an item, from the last requested ones if possible."""
        place = item.index.fqn, item.index.offset
        with self._lock:
            known = self._recent.get(place)
            if known is None:
                known = self._recent[place] = self._asked(item)
                while len(self._recent) > _KEPT:
                    self._recent.popitem(last=False)
            return known

    def _asked(self, item: WriteItem) -> HeldArray:
        key, data = item.index.fqn, self.data(item)
        if not isinstance(data, torch.Tensor):
            raise UnsupportedLeafError(
                "the planner did not return a tensor", key, rank=self.rank, found=type(data).__name__
            )
        return TORCH_LEAVES.hold(key, data.detach(), self.rank)


@attrs.frozen(eq=False)
class PlannedBuffer:
    """The tensor of an item, requested from the planner when a region of it is needed."""

    resolver: Resolver
    item: WriteItem
    expected: ArraySpec

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
        found, expected = self.resolver.held(self.item), self.expected
        if found.spec != expected:
            raise ShapeError(
                "the planner gives another tensor than before",
                expected.key,
                expected=(expected.shape, expected.dtype),
                found=(found.spec.shape, found.spec.dtype),
            )
        return found.buffers[0]


def _is_stock(planner: Any, name: str) -> bool:
    own = getattr(getattr(planner, name, None), "__func__", None)
    return own is not None and own is getattr(DefaultSavePlanner, name, None)
