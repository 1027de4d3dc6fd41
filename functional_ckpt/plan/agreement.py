"""The agreement before a save: each rank sends a few fingerprints, whatever the size of its state.

If all ranks describe the world in the same way, each plans its own part. If they have planned the same world before,
they use the cached plan. Otherwise they gather their specs.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from math import prod

import attrs
import numpy as np

from functional_ckpt.plan.fingerprint import fingerprint
from functional_ckpt.plan.layout import LayoutPolicy
from functional_ckpt.plan.local import local_array_plans, needs_gathering
from functional_ckpt.plan.state import LocalState
from functional_ckpt.spec.columns import Ints, mix
from functional_ckpt.spec.sharding import ShardSpec

__all__ = ["Basis", "Proposal", "contents_agree", "is_plannable_alone", "propose", "world_digest"]

_MODULUS = 2**64


@attrs.frozen
class Basis:
    """All inputs of one rank to a plan: rank, abilities of the store and the group, policy, structure of its state.

    `common` may be equal on all ranks, `own` is what only this rank has; `counts` are the numbers of buffers behind
    the leaves of both. A plan depends on the bases of all ranks and the smallest budget, and on nothing else.
    """

    rank: int
    size: int
    shared_ok: bool
    owned_ok: bool
    layout: LayoutPolicy
    replicas: str
    common: LocalState
    own: LocalState
    counts: tuple[int, ...]

    @cached_property
    def grids(self) -> tuple[tuple[str, tuple[int, ...] | None], ...]:
        """The regular grid of each key with shards in `common`, if they have one."""
        return tuple(sorted({shard.key: shard.grid for shard in self.common.shards}.items()))

    @property
    def alike(self) -> tuple[object, ...]:
        """What must be equal on all ranks so that each knows what the others hold: all but its cells of grids."""
        rules = (self.size, self.shared_ok, self.owned_ok, self.layout, self.replicas)
        return *rules, attrs.evolve(self.common, shards=()), self.grids

    def is_plannable_alone(self) -> bool:
        """Tell whether the specs of this rank determine how the whole world holds its arrays."""
        common, gridded = self.common, dict(self.grids)
        if any(needs_gathering(self.rank, shard, self.replicas) for shard in common.shards):
            return False
        if not all(leaf.is_copy for leaf in self.own.arrays):
            return False
        if not all(leaf.is_copy or leaf.sharding or leaf.key in gridded for leaf in common.arrays):
            return False
        # Where the shards of a grid are so small that pieces move, a rank must know which ranks hold the others.
        plans = local_array_plans(common.shards, self.layout, self.shared_ok, self.owned_ok)
        return not any(plan.layout.ownership == "owned" for plan in plans)


@attrs.frozen
class Proposal:
    """What one rank sends: fingerprints of its basis, of the part that must be equal, and of the contents of its state.

    `is_alone`: the specs determine how the whole world holds its arrays. The sum of `fold` over the ranks is `whole`
    if they hold every cell of all regular grids once. `planned` is the world of the last plan for this basis. `own` is
    what only this rank has, contents included, or None.
    """

    basis: bytes
    alike: bytes
    contents: bytes
    is_alone: bool
    fold: int
    whole: int
    budget_nbytes: int
    own: LocalState | None = None
    planned: bytes | None = None


def propose(basis: Basis, contents: LocalState, own: LocalState, budget_nbytes: int) -> Proposal:
    """Return what a rank sends about `basis`; `contents` are those of the part that may be equal on all ranks."""
    alone = basis.is_plannable_alone()
    firsts = {shard.key: shard for shard in basis.common.shards}
    return Proposal(
        fingerprint(basis),
        fingerprint(*basis.alike),
        fingerprint(contents),
        alone,
        _fold(basis.common.shards) if alone else 0,
        _expected_fold(list(firsts.values())) if alone else 0,
        budget_nbytes,
        own if own.arrays or own.values else None,
    )


def is_plannable_alone(proposals: Sequence[Proposal]) -> bool:
    """Tell whether each rank can plan its part by itself; all ranks compute the same answer."""
    alike = len({proposal.alike for proposal in proposals}) == 1
    complete = (sum(proposal.fold for proposal in proposals) - proposals[0].whole) % _MODULUS == 0
    return alike and complete and all(proposal.is_alone for proposal in proposals)


def contents_agree(proposals: Sequence[Proposal]) -> bool:
    """Tell whether all ranks have the same plain values and copies, under the same keys."""
    return len({proposal.contents for proposal in proposals}) == 1


def world_digest(proposals: Iterable[Proposal], budget_nbytes: int) -> bytes:
    """Return the key of a plan in the cache: a digest of the bases of all ranks and the smallest budget."""
    return fingerprint(tuple(proposal.basis for proposal in proposals), budget_nbytes)


def _fold(shards: Sequence[ShardSpec]) -> int:
    """Return a number whose sum over all ranks is `_expected_fold` if each cell of each grid has one main replica.

    Cell i adds ``g(i + 1) - g(i)`` for a pseudo-random g. The first cell subtracts the sum of these over the grid, so
    that a complete grid adds zero, and then adds its share of `_expected_fold`, so that a grid without any cell, or
    with every cell twice, gives another sum.
    """
    mains = [shard for shard in shards if shard.is_main]
    name = _names(mains)
    cell = np.array([_cell(shard) for shard in mains], np.int64)
    last = np.array([prod(shard.grid or ()) for shard in mains], np.int64)
    zero = np.zeros(len(mains), np.int64)
    with np.errstate(over="ignore"):  # 64-bit integers wrap around
        whole = mix(name, last) - mix(name, zero)
        steps = mix(name, cell + 1) - mix(name, cell)
        firsts = np.where(cell == 0, mix(name, zero - 1) - whole, np.uint64(0))
        return int((steps + firsts).sum(dtype=np.uint64))


def _cell(shard: ShardSpec) -> int:
    """Return the row-major number of a shard in its grid."""
    number = 0
    for low, extent, count in zip(shard.box.start, shard.box.shape, shard.grid or (), strict=True):
        number = number * count + low // max(extent, 1)
    return number


def _expected_fold(shards: Sequence[ShardSpec]) -> int:
    """Return the sum of `_fold` over complete grids, from one shard of each grid."""
    names = _names(shards)
    return int(mix(names, np.full(len(names), -1)).sum(dtype=np.uint64))


def _names(shards: Sequence[ShardSpec]) -> Ints:
    texts = (f"{shard.key} {shard.array.dtype} {shard.array.shape} {shard.grid}" for shard in shards)
    hashes = b"".join([blake2b(text.encode(), digest_size=8).digest() for text in texts])
    return np.frombuffer(hashes, np.int64)
