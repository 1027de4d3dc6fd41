"""Leaves that are neither tensors nor plain values: one rank's shards of an array, and an object as it is."""

from typing import Any

import attrs
import torch

from functional_ckpt.spec.shard import ShardSpec

__all__ = ["LocalTensors", "OpaqueObject"]


@attrs.frozen(eq=False)
class LocalTensors:
    """A leaf that is this rank's shards of one array, at least one: where each lies, and a tensor of its box's shape.

    The data of a flat shard has one axis. The torch side of `functional_ckpt.LocalShards`: tensors of any device.

    Examples
    --------
    >>> import functional_ckpt
    >>> from functional_ckpt import ArraySpec, Box
    >>> part = ShardSpec(ArraySpec("w", (2, 3), "int64"), Box((0, 0), (2, 3)), flat=(0, 5))
    >>> rest = ShardSpec(ArraySpec("w", (2, 3), "int64"), Box((0, 0), (2, 3)), flat=(5, 6))
    >>> leaf = LocalTensors((part, rest), (torch.arange(5), torch.tensor([9])))
    >>> _ = functional_ckpt.save({"w": leaf}, "memory://local-tensors-example")
    >>> functional_ckpt.open_checkpoint("memory://local-tensors-example")["w"][...].tolist()
    [[0, 1, 2], [3, 4, 9]]
    """

    shards: tuple[ShardSpec, ...]
    data: tuple[torch.Tensor, ...]


@attrs.frozen(eq=False)
class OpaqueObject:
    """A leaf that is saved as one object by ``torch.save``, whatever its type; its contents are not separate leaves.

    Examples
    --------
    >>> import functional_ckpt
    >>> _ = functional_ckpt.save({"o": OpaqueObject({"a": [1, (2, 3)]})}, "memory://opaque-example")
    >>> functional_ckpt.load({"o": None}, "memory://opaque-example")
    {'o': {'a': [1, (2, 3)]}}
    """

    value: Any
