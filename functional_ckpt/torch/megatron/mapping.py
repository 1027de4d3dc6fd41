"""Sharded leaves of state dicts, by the names of ``megatron.core.dist_checkpointing.mapping``.

`ShardedTensor` is a part of a global tensor that a rank holds, `ShardedObject` an object of a grid of objects,
`ShardedTensorFactory` a tensor that is stored in another form, `LocalNonpersistentObject` an object that is not stored.
They are mutable; `ShardedTensor.spec` and `ShardedObject.spec` return immutable values.
"""

from typing import Any

from functional_ckpt.torch.megatron.exceptions import AxisError
from functional_ckpt.torch.megatron.factory import (
    FactoryBuildFn,
    FactoryMergeFn,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)
from functional_ckpt.torch.megatron.sharded_base import (
    CheckpointingException,
    CommonStateDict,
    ReplicaId,
    ShardedBase,
    ShardedStateDict,
    StateDict,
    _logged_deprecations,
    is_main_replica,
    logger,
    of_megatron,
)
from functional_ckpt.torch.megatron.sharded_object import ShardedObject
from functional_ckpt.torch.megatron.sharded_tensor import ShardedTensor

__all__ = [
    "AxisError",
    "CheckpointingException",
    "CommonStateDict",
    "FactoryBuildFn",
    "FactoryMergeFn",
    "LocalNonpersistentObject",
    "ReplicaId",
    "ShardedBase",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "_logged_deprecations",
    "apply_factories",
    "apply_factory_merges",
    "is_main_replica",
    "logger",
]


class LocalNonpersistentObject:
    """An object that is not stored; a load puts the local one back in its place.

    Examples
    --------
    >>> LocalNonpersistentObject([1, 2]).unwrap()
    [1, 2]
    """

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # used by isinstance: Megatron's class is not an abstract base class
        return of_megatron("LocalNonpersistentObject") or LocalNonpersistentObject

    def unwrap(self) -> Any:
        """Return the object itself."""
        return self.obj
