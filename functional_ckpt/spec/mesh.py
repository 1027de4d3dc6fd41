"""`Mesh`: ranks in an n-d grid, and `CellMesh`, on which a rank may have several places."""

from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from math import prod
from typing import Any

import attrs
import numpy as np

from functional_ckpt.errors import ShapeError

__all__ = ["CellMesh", "Mesh"]


def __getattr__(name: str) -> Any:
    """Return `Sharding`, which used to be documented here."""
    if name != "Sharding":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("functional_ckpt.spec.sharding"), name)


def _ints(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


@attrs.frozen(cache_hash=True)
class Mesh:
    """Ranks in an n-d grid: its `shape`, and its `ranks` row-major, each at most once.

    Raises
    ------
    ShapeError
        If the number of ranks is not the product of the shape.

    Examples
    --------
    >>> Mesh((2, 2), (0, 1, 4, 5)).coordinate(4)
    (1, 0)
    """

    shape: tuple[int, ...] = attrs.field(converter=_ints)
    ranks: tuple[int, ...] = attrs.field(converter=_ints)

    def __attrs_post_init__(self) -> None:
        if prod(self.shape) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise ShapeError(
                "a mesh needs one rank per position",
                shape=self.shape,
                expected=prod(self.shape),
                found=len(set(self.ranks)),
            )

    @classmethod
    def line(cls, size: int) -> "Mesh":
        """Return ranks 0 to `size` in a row.

        Examples
        --------
        >>> Mesh.line(3).ranks
        (0, 1, 2)
        """
        return cls((size,), tuple(range(size)))

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the position of `rank`, or None if it is not on the mesh."""
        return next(iter(self.coordinates(rank)), None)

    def coordinates(self, rank: int) -> list[tuple[int, ...]]:
        """Return all positions of `rank`, row-major: more than one only on a `CellMesh`."""
        return [tuple(int(i) for i in np.unravel_index(place, self.shape)) for place in _places(self).get(rank, ())]


@attrs.frozen(cache_hash=True)
class CellMesh(Mesh):
    """A mesh whose places are the cells of a regular grid: a rank may hold several of them.

    Examples
    --------
    >>> CellMesh((3,), (0, 1, 0)).coordinates(0)
    [(0,), (2,)]
    """

    def __attrs_post_init__(self) -> None:
        """Accept a rank more than once."""


@lru_cache(maxsize=64)
def _places(mesh: Mesh) -> dict[int, list[int]]:
    places: dict[int, list[int]] = {}
    for place, rank in enumerate(mesh.ranks):
        places.setdefault(rank, []).append(place)
    return places
