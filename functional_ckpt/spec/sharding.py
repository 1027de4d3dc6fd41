"""`Sharding`: how the ranks of a device mesh hold an array. It tells what every rank holds, without communication.

The shards themselves are in `functional_ckpt.spec.shard`, and can be imported from here too.
"""

from collections.abc import Iterable
from functools import lru_cache
from math import prod

import attrs

from functional_ckpt.errors import ShapeError
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.mesh import Mesh
from functional_ckpt.spec.placement import PlacedShard, Placement, Replicate, StridedShard, from_placements
from functional_ckpt.spec.shard import Fragment, ShardSpec, World, fragments, from_rank_offsets, narrow

__all__ = [
    "Fragment",
    "PlacedArray",
    "ShardSpec",
    "Sharding",
    "World",
    "fragments",
    "from_rank_offsets",
    "narrow",
    "relabelled",
]


def _placements(values: Iterable[Placement]) -> tuple[Placement, ...]:
    return tuple(values)


@attrs.frozen(cache_hash=True)
class Sharding:
    """One placement per mesh axis.

    Examples
    --------
    >>> from functional_ckpt.spec.placement import Shard
    >>> Sharding(Mesh.line(4), (Shard(0),)).copies
    1
    """

    mesh: Mesh
    placements: tuple[Placement, ...] = attrs.field(converter=_placements)

    def __attrs_post_init__(self) -> None:
        if len(self.mesh.shape) != len(self.placements):
            raise ShapeError(
                "a sharding needs one placement per mesh axis",
                shape=self.mesh.shape,
                expected=len(self.mesh.shape),
                found=len(self.placements),
            )

    @property
    def replicated(self) -> tuple[int, ...]:
        """Mesh axes along which ranks hold copies."""
        return tuple(i for i, placement in enumerate(self.placements) if isinstance(placement, Replicate))

    @property
    def copies(self) -> int:
        """How many ranks hold each shard."""
        return prod(self.mesh.shape[axis] for axis in self.replicated)

    def parts(self, array: ArraySpec, rank: int) -> tuple[PlacedShard, ...]:
        """Return what `rank` holds of `array`, and where in its local tensor."""
        return tuple(
            PlacedShard(ShardSpec(array, box, replica), local) for box, replica, local in self.places(array.shape, rank)
        )

    def places(self, shape: tuple[int, ...], rank: int) -> "tuple[Place, ...]":
        """Return box, replica id and region of the local tensor of each shard that `rank` holds; cached."""
        return _places_of(self, shape, rank)

    def axes_of(self, dim: int, ndim: int) -> tuple[int, ...]:
        """Return the mesh axes that cut axis `dim` of an array with `ndim` axes."""
        return tuple(i for i, p in enumerate(self.placements) if not isinstance(p, Replicate) and p.dim % ndim == dim)

    def cuts_of(self, dim: int, ndim: int) -> tuple[tuple[int, int], ...]:
        """Return ``(split factor, size)`` of each mesh axis that cuts axis `dim`, in mesh order."""
        placed = [(self.placements[axis], self.mesh.shape[axis]) for axis in self.axes_of(dim, ndim)]
        return tuple((p.split_factor if isinstance(p, StridedShard) else 1, size) for p, size in placed)


#: Where a shard lies in the array, its replica id, and where it lies in the rank's local tensor.
Place = tuple[Box, tuple[int, ...], Box]


@lru_cache(maxsize=4096)
def _places_of(sharding: Sharding, shape: tuple[int, ...], rank: int) -> tuple[Place, ...]:
    mesh = sharding.mesh
    any_array = ArraySpec("", shape, "bool")
    parts = from_placements(any_array, mesh.shape, mesh.coordinate(rank), sharding.placements)
    return tuple((part.shard.box, part.shard.replica_id, part.local) for part in parts)


@lru_cache(maxsize=256)
def relabelled(sharding: Sharding, members: tuple[int, ...] | None) -> Sharding | None:
    """Return `sharding` with each rank replaced by its position in `members`, or None if one is not there.

    Without `members` ranks keep their numbers.

    Examples
    --------
    >>> relabelled(Sharding(Mesh((2,), (4, 6)), (Replicate(),)), (4, 5, 6)).mesh.ranks
    (0, 2)
    """
    if members is None:
        return sharding
    places = {rank: place for place, rank in enumerate(members)}
    if not places.keys() >= set(sharding.mesh.ranks):
        return None
    return Sharding(Mesh(sharding.mesh.shape, [places[rank] for rank in sharding.mesh.ranks]), sharding.placements)


@attrs.frozen
class PlacedArray:
    """An array, and how the ranks hold it.

    Examples
    --------
    >>> from functional_ckpt.spec.placement import Shard
    >>> PlacedArray(ArraySpec("w", (4,), "int8"), Sharding(Mesh.line(2), [Shard(0)])).key
    'w'
    """

    array: ArraySpec
    sharding: Sharding

    @property
    def key(self) -> str:
        """Key of the array."""
        return self.array.key
