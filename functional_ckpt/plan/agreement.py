"""What ranks tell one another before a save: a few digests each, whatever they hold.

Ranks that describe the world alike need no more: each plans its own part. Ranks that have planned the same world
before need no plan. Only otherwise do they gather what they hold.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from math import prod
from zlib import crc32

import attrs
import numpy as np

from functional_ckpt.plan.local import needs_gathering
from functional_ckpt.plan.state import EMPTY_TEXTS, LocalState
from functional_ckpt.spec.columns import Ints, mix
from functional_ckpt.spec.mesh import Sharding
from functional_ckpt.spec.sharding import ShardSpec
from functional_ckpt.spec.table import ShardTable

__all__ = ["Proposal", "contents_agree", "is_plannable_alone", "propose", "world_digest"]

_MODULUS = 2**64


@attrs.frozen
class Proposal:
    """What one rank says: digests of the specs that may be alike on all ranks, of its shards, and of the contents.

    `is_alone` says that the specs tell how the whole world holds its arrays; `fold` adds up to `whole` over ranks that
    hold every cell of all regular grids once. `planned` is the world digest of the last plan for these specs. `own` is
    what only this rank has, if anything.
    """

    specs: bytes
    shards: bytes
    contents: bytes
    is_alone: bool
    fold: int
    whole: int
    budget_nbytes: int
    own: LocalState | None = None
    planned: bytes | None = None


def propose(common: LocalState, own: LocalState, replicas: str, budget_nbytes: int) -> Proposal:
    """Return what a rank says of its state, split into what may be alike on all ranks and what is its own."""
    grids = {shard.key: shard.grid for shard in common.shards}
    alone = not any(needs_gathering(0, shard, replicas) for shard in common.shards)
    alone = alone and all(leaf.is_copy for leaf in own.arrays)
    alone = alone and all(leaf.is_copy or leaf.sharding or leaf.key in grids for leaf in common.arrays)
    return Proposal(
        _digest(_spec_lines(common, grids)),
        _digest([*_spec_lines(own, {}), *_shard_bytes(common.shards), *_shard_bytes(own.shards)]),
        _digest(_content_lines(common)),
        alone,
        _fold(common.shards) if alone else 0,
        _begun(list({shard.key: shard for shard in common.shards}.values())) if alone else 0,
        budget_nbytes,
        own if own.arrays or own.values else None,
    )


def is_plannable_alone(proposals: Sequence[Proposal]) -> bool:
    """Tell whether each rank can plan its part by itself; the same answer on all ranks."""
    alike = len({proposal.specs for proposal in proposals}) == 1
    complete = (sum(proposal.fold for proposal in proposals) - proposals[0].whole) % _MODULUS == 0
    return alike and complete and all(proposal.is_alone for proposal in proposals)


def contents_agree(proposals: Sequence[Proposal]) -> bool:
    """Tell whether all ranks have the same plain values and copies."""
    return len({proposal.contents for proposal in proposals}) == 1


def world_digest(proposals: Iterable[Proposal], budget_nbytes: int) -> bytes:
    """Return what names a plan: it changes if any rank's specs or shards do."""
    told = (part for proposal in proposals for part in (proposal.specs, proposal.shards))
    return _digest([*told, str(budget_nbytes)])


def _digest(parts: Iterable[str | bytes]) -> bytes:
    hasher = blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.digest()


def _spec_lines(state: LocalState, grids: dict[str, tuple[int, ...] | None]) -> list[str]:
    """Return everything but the contents as text, and of shards only what is the same for all cells of a grid."""
    numbers: dict[Sharding, int] = {}
    lines = [
        f"{leaf.key} {leaf.spec.dtype} {leaf.spec.shape} {leaf.path} {leaf.codec} {leaf.tied_to} {leaf.is_copy} "
        f"{numbers.setdefault(leaf.sharding, len(numbers)) if leaf.sharding else None} {grids.get(leaf.key)}"
        for leaf in state.arrays
    ]
    lines += [f"{value.key} {value.path} {value.text in EMPTY_TEXTS}" for value in state.values]
    return [*lines, *map(str, numbers), str(state.per_rank), state.terms]


def _content_lines(state: LocalState) -> list[str]:
    lines = [value.text for value in state.values]
    lines += [leaf.copy_digest.hex() for leaf in state.arrays if leaf.copy_digest is not None]
    return [*lines, state.attributes]


def _shard_bytes(shards: Sequence[ShardSpec]) -> list[str | bytes]:
    table = ShardTable.of(0, shards)
    return [str(table.replicas), str(table.arrays), *table.rows.column_bytes()]


def _fold(shards: Sequence[ShardSpec]) -> int:
    """Return a number that adds up, over all ranks, to `_begun` of each grid if each cell has one main replica.

    Cell i adds ``g(i + 1) - g(i)`` for a random-looking g, and the first cell takes off what all should add up to, so
    that complete grids add nothing; but it adds `_begun`, so that no cells at all, or all of them twice, add too little
    or too much.
    """
    mains = [shard for shard in shards if shard.is_main]
    name = _names(mains)
    cell = np.array([_cell(shard) for shard in mains], np.int64)
    last = np.array([prod(shard.grid or ()) for shard in mains], np.int64)
    zero = np.zeros(len(mains), np.int64)
    with np.errstate(over="ignore"):  # numbers of 64 bits wrap around
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


def _begun(shards: Sequence[ShardSpec]) -> int:
    """Return what complete grids add up to, one shard of each given."""
    names = _names(shards)
    return int(mix(names, np.full(len(names), -1)).sum(dtype=np.uint64))


def _names(shards: Sequence[ShardSpec]) -> Ints:
    texts = (f"{shard.key} {shard.array.dtype} {shard.array.shape} {shard.grid}" for shard in shards)
    return np.array([crc32(text.encode()) for text in texts], np.int64)
