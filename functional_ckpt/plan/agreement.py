"""The agreement before a save: each rank sends a few fingerprints, whatever the size of its state.

If all ranks describe the world in the same way, each plans its own part. If they have planned the same world before,
they use the cached plan. Otherwise they gather their specs.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

import attrs

from functional_ckpt.plan.fingerprint import fingerprint
from functional_ckpt.plan.layout import LayoutPolicy
from functional_ckpt.plan.state import LocalState
from functional_ckpt.spec.grid import Block, block_of, sharding_of_blocks
from functional_ckpt.spec.shard import ShardSpec
from functional_ckpt.spec.sharding import Sharding

__all__ = ["Basis", "Proposal", "contents_agree", "known_shardings", "propose", "world_digest"]

#: Shape and grid of an array. Ranks mostly hold the same cells of all arrays of one kind, and tell them once.
Kind: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
#: A proposal stays a few words.
_MOST_KINDS = 64


@attrs.frozen
class Cells:
    """The arrays of which a rank has shards that are cells: their `keys`, and by number the kind of each.

    `kinds` are all kinds there are, and `blocks` the block of cells that the rank holds of each array of a kind.
    """

    keys: tuple[str, ...]
    numbers: tuple[int, ...]
    kinds: tuple[Kind, ...]
    blocks: tuple[Block, ...]


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
    def digest(self) -> bytes:
        """The fingerprint of the basis: of what is alike, with all of `common` but its shards, and of the rest."""
        return fingerprint(self.alike_digest, attrs.evolve(self, common=LocalState(shards=self.common.shards)))

    @cached_property
    def alike_digest(self) -> bytes:
        """The fingerprint of what is alike."""
        return fingerprint(*self.alike)

    @cached_property
    def cells(self) -> Cells | None:
        """The arrays of which `common` has shards, and the block of cells held of each kind.

        None if the shards of an array form no block of cells, arrays of one kind have different blocks, or there
        are too many kinds.
        """
        held: dict[str, list[ShardSpec]] = {}
        for shard in self.common.shards:
            held.setdefault(shard.key, []).append(shard)
        numbers: list[int] = []
        known: dict[Kind, int] = {}
        blocks: list[Block] = []
        keys = sorted(held)
        for shards in map(held.__getitem__, keys):
            found = block_of(shards)
            if found is None:
                return None
            number = known.setdefault((shards[0].array.shape, found[0]), len(known))
            blocks += [found[1]] if number == len(blocks) else []
            if blocks[number] != found[1] or len(blocks) > _MOST_KINDS:
                return None
            numbers.append(number)
        return Cells(tuple(keys), tuple(numbers), tuple(known), tuple(blocks))

    @property
    def alike(self) -> tuple[object, ...]:
        """What must be equal on all ranks so that each knows what the others hold: all but its blocks of cells."""
        rules = (self.size, self.shared_ok, self.owned_ok, self.layout, self.replicas)
        return *rules, attrs.evolve(self.common, shards=()), self.cells and attrs.evolve(self.cells, blocks=())

    @cached_property
    def blocks(self) -> tuple[Block, ...] | None:
        """What other ranks must know to plan, besides what is alike; None if they must know every shard."""
        told = {*self.cells.keys} if self.cells else set()
        known = all(leaf.is_copy or leaf.sharding or leaf.key in told for leaf in self.common.arrays)
        return self.cells.blocks if self.cells and known and all(leaf.is_copy for leaf in self.own.arrays) else None


@attrs.frozen
class Proposal:
    """What one rank sends: fingerprints of its basis, of the part that must be equal, and of the contents of its state.

    `blocks` are the cells of regular grids that it holds, one block for each kind of array; None if its shards are no
    such blocks. `planned` is the world of the last plan for this basis. `own` is what only this rank has,
    contents included, if there is anything.
    """

    basis: bytes
    alike: bytes
    contents: bytes
    blocks: tuple[Block, ...] | None
    budget_nbytes: int
    own: LocalState | None = None
    planned: bytes | None = None


def propose(basis: Basis, contents: LocalState, own: LocalState, budget_nbytes: int) -> Proposal:
    """Return what a rank sends about `basis`; `contents` are those of the part that may be equal on all ranks."""
    return Proposal(
        basis.digest,
        basis.alike_digest,
        fingerprint(contents),
        basis.blocks,
        budget_nbytes,
        own if own.arrays or own.values else None,
    )


def known_shardings(basis: Basis, proposals: Sequence[Proposal]) -> Mapping[str, Sharding] | None:
    """Return how all ranks hold the arrays of which `basis` has shards, by key, if each can plan its part by itself.

    None if ranks must gather; the same answer on all ranks.
    """
    blocks = [proposal.blocks for proposal in proposals if proposal.blocks is not None]
    if basis.cells is None or len(blocks) < len(proposals) or len({proposal.alike for proposal in proposals}) > 1:
        return None
    shardings: list[Sharding] = []
    known: dict[object, Sharding | None] = {}  # arrays of many shapes are cut alike
    for kind, held in zip(basis.cells.kinds, zip(*blocks, strict=True), strict=True):
        cut = (kind[1], held)
        if cut not in known:
            known[cut] = sharding_of_blocks(*cut, basis.replicas)
        sharding = known[cut]
        if sharding is None:
            return None
        shardings.append(sharding)
    return {key: shardings[number] for key, number in zip(basis.cells.keys, basis.cells.numbers, strict=True)}


def contents_agree(proposals: Sequence[Proposal]) -> bool:
    """Tell whether all ranks have the same plain values and copies, under the same keys."""
    return len({proposal.contents for proposal in proposals}) == 1


def world_digest(proposals: Iterable[Proposal], budget_nbytes: int) -> bytes:
    """Return the key of a plan in the cache: a digest of the bases of all ranks and the smallest budget."""
    return fingerprint(tuple(proposal.basis for proposal in proposals), budget_nbytes)
