"""What a manifest lists: `ArrayEntry`, `ValueEntry`, `Alias`, `PerRankEntry`; and `RankItem`, a component of paths."""

from typing import Any

import attrs

from functional_ckpt.plan.layout import ArrayPlan, ChunkGrid, Layout, grid_of
from functional_ckpt.spec.array import ArraySpec

__all__ = ["DIGEST_NBYTES", "Alias", "ArrayEntry", "PerRankEntry", "RankItem", "ValueEntry"]

DIGEST_NBYTES = 16


@attrs.frozen
class RankItem:
    """The path component of the value of `rank` below a `PerRank`.

    Examples
    --------
    >>> str(RankItem(3))
    'rank3'
    """

    rank: int

    def __str__(self) -> str:
        return f"rank{self.rank}"


@attrs.frozen
class ArrayEntry:
    """A stored array: spec, layout, one 16-byte xxh3-128 digest per chunk, row-major, and its place in the tree.

    With a `codec` the array holds the bytes of a leaf: ``"json"`` of a plain value, ``"torch"`` of an object.
    """

    spec: ArraySpec
    layout: Layout
    digests: bytes = attrs.field(repr=False)
    path: tuple[Any, ...] | None = None
    codec: str | None = None

    @property
    def grid(self) -> ChunkGrid:
        """The chunk grid."""
        return grid_of(self.spec.shape, self.layout.chunk)

    @property
    def plan(self) -> ArrayPlan:
        """The array and its layout, as in the plan of its save."""
        return ArrayPlan(self.spec, self.layout)

    def digest(self, position: int) -> bytes:
        """Return the digest of chunk number `position`, row-major."""
        return self.digests[position * DIGEST_NBYTES : (position + 1) * DIGEST_NBYTES]


@attrs.frozen
class ValueEntry:
    """A plain value, as the canonical JSON text of its tagged encoding."""

    key: str
    text: str
    path: tuple[Any, ...] | None = None


@attrs.frozen
class Alias:
    """Leaf `key` is the array stored under `target` (tied tensors are stored once)."""

    key: str
    target: str
    path: tuple[Any, ...] | None = None


@attrs.frozen
class PerRankEntry:
    """The values under `key` differ by rank and were saved by `world_size` ranks."""

    key: str
    world_size: int
    path: tuple[Any, ...] | None = None
