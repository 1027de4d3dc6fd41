"""`ShardedObject`: one cell of a grid of objects, each of which is stored whole."""

from dataclasses import dataclass, replace

from functional_ckpt.errors import ShapeError
from functional_ckpt.spec.array import ObjectSpec
from functional_ckpt.torch.megatron.exceptions import SpecAssertionError
from functional_ckpt.torch.megatron.sharded_base import ReplicaId, ShardedBase, about, warn_once

__all__ = ["ShardedObject"]


@dataclass
class ShardedObject(ShardedBase):
    """One cell of a grid of objects. Objects are never cut: a load asks for the cells that were saved.

    Parameters
    ----------
    key
        Name of the grid, unique in the checkpoint.
    data
        The object; None if only its place is needed.
    global_shape
        Shape of the grid, in objects.
    global_offset
        Index of this object in the grid.
    replica_id
        0 or all zeros on the one rank that holds the main copy, something else on the others.

    Raises
    ------
    CheckpointingException
        If shape and offset differ in length; names the key.

    Examples
    --------
    >>> ShardedObject("rng", {"seed": 1}, (2, 3), (1, 0)).unique_key
    'rng/shard_1.0_2.3'
    """

    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def __str__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"

    @property
    def spec(self) -> ObjectSpec:
        """The spec of the stored object; its key is `unique_key`."""
        return ObjectSpec(self.unique_key)

    def validate_metadata_integrity(self) -> None:
        """Repeat the checks of the constructor, after fields were changed.

        Raises
        ------
        CheckpointingException
            If shape and offset differ in length; names the key.
        """
        with about(self.key):
            if len(self.global_shape) != len(self.global_offset):
                raise ShapeError(
                    "shape and offset of an object differ in length",
                    self.key,
                    shape=tuple(self.global_shape),
                    offset=tuple(self.global_offset),
                )

    def without_data(self) -> "ShardedObject":
        """Return a copy whose `data` is None.

        Examples
        --------
        >>> ShardedObject("rng", 5, (1,), (0,)).without_data().data is None
        True
        """
        return replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """Name of this cell: ``<key>/shard_<offset>_<shape>``, numbers joined by dots."""
        offset, shape = (".".join(map(str, numbers)) for numbers in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> "ShardedObject":
        """Return the object, without data, that a `unique_key` names; the inverse for every key.

        Names from old Megatron versions lack the last extent of the shape: it is -1 then, and a warning is logged.

        Raises
        ------
        CheckpointingException
            If this is not the name of an object; an ``AssertionError`` and a ``ValueError`` too, as in Megatron.

        Examples
        --------
        >>> ShardedObject.empty_from_unique_key("a/b_c/shard_1.0_2.3").key
        'a/b_c'
        """
        # The part after the last slash holds digits, dots and underscores only, so the key may hold anything.
        key, slash, name = unique_key.rpartition("/")
        parts = name.split("_")
        with about(unique_key):
            if not slash or len(parts) != 3 or parts[0] != "shard":
                raise SpecAssertionError("this is not the name of an object", expected="<key>/shard_<offset>_<shape>")
            offset, shape = (tuple(map(int, part.split("."))) if part else () for part in parts[1:])
        if len(shape) == len(offset) - 1:
            warn_once("the name of an object lacks the last extent of its shape, as in old versions of Megatron")
            shape = (*shape, -1)
        return cls(key, None, shape, offset, replica_id)
