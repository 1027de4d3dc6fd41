"""`sharding_of` a DTensor: its mesh and placements as values of ours."""

from functools import lru_cache
from typing import Any

from functional_ckpt.errors import UnsupportedLeafError
from functional_ckpt.spec.mesh import Mesh
from functional_ckpt.spec.placement import Placement, Replicate, Shard, StridedShard
from functional_ckpt.spec.sharding import Sharding

__all__ = ["sharding_of"]


def sharding_of(key: str, mesh: Any, placements: tuple[Any, ...], rank: int) -> Sharding:
    """Return the sharding of a DTensor, as `rank` of the world sees it; `key` is for errors.

    Raises
    ------
    UnsupportedLeafError
        For a partial placement.
    """
    known = _SHARDINGS.get((mesh, placements, rank))
    if known is None:
        known = Sharding(_mesh(mesh, rank), tuple(_placement(key, placement) for placement in placements))
        if len(_SHARDINGS) >= _MAX_SHARDINGS:
            _SHARDINGS.clear()
        _SHARDINGS[mesh, placements, rank] = known
    return known


#: Meshes and placements as values: a state has thousands of tensors and few of these.
_SHARDINGS: dict[tuple[Any, tuple[Any, ...], int], Sharding] = {}
_MAX_SHARDINGS = 256


@lru_cache(maxsize=64)
def _mesh(mesh: Any, rank: int) -> Mesh:
    """Return a device mesh as a value; a part of a mesh is equal on all ranks, and tells of which rank it is asked."""
    return Mesh(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))


def _placement(key: str, placement: Any) -> Placement:
    # In some versions the strided class is a subclass of Shard, so it is tested first.
    factor = getattr(placement, "split_factor", None)
    if factor is not None:
        return StridedShard(placement.dim, int(factor))
    if placement.is_shard():
        return Shard(placement.dim)
    if placement.is_replicate():
        return Replicate()
    raise UnsupportedLeafError(
        "a DTensor with a partial placement holds partial sums, not values",
        key,
        found=str(placement),
        remedy="Call redistribute with Replicate or Shard before saving",
    )
