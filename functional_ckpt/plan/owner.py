"""Owned chunks: which rank writes a chunk whose pieces several ranks hold, and in which wave."""

from collections.abc import Sequence

import attrs
import numpy as np

from functional_ckpt.errors import PolicyError
from functional_ckpt.plan.layout import ArrayPlan
from functional_ckpt.plan.pieces import Pieces
from functional_ckpt.spec.columns import Columns, Ints, mix, runs, to_column
from functional_ckpt.spec.table import key_hashes

__all__ = ["Owners", "choose_owners", "pick_owner", "with_waves"]

#: A rank holds at a time the chunks that it assembles, one received message and one message to send.
_SHARES = 3


@attrs.frozen(eq=False)
class Owners(Columns):
    """Rank `rank` is responsible for chunk number `chunk` of array number `array`, or (-1) for the whole array."""

    array: Ints = attrs.field(converter=to_column)
    chunk: Ints = attrs.field(converter=to_column)
    rank: Ints = attrs.field(converter=to_column)

    @classmethod
    def of_arrays(cls, pairs: Sequence[tuple[int, int]]) -> "Owners":
        """Return rows for whole arrays, from ``(array, rank)``."""
        return cls([array for array, _ in pairs], [-1] * len(pairs), [rank for _, rank in pairs])


def choose_owners(pieces: Pieces, arrays: Sequence[ArrayPlan]) -> tuple[Pieces, Owners]:
    """Return `pieces` (cut at chunks, sorted) with their targets, and the owner of each chunk.

    A rank that holds a largest piece owns the chunk, so that as little as possible moves. A hash of key and chunk picks
    among equals, so that chunks spread over the ranks and every rank computes the same answer.
    """
    if not len(pieces):
        return pieces, Owners([], [], [])
    begin, counts = runs(pieces.array, pieces.chunk)
    sizes = pieces.sizes
    largest = np.flatnonzero(sizes == np.repeat(np.maximum.reduceat(sizes, begin), counts))
    group = np.repeat(np.arange(len(begin)), counts)[largest]
    rivals = np.bincount(group, minlength=len(begin))
    chunk, array = pieces.chunk[begin], pieces.array[begin]
    picked = pick_owner(key_hashes([plan.spec for plan in arrays])[array], chunk, rivals)
    owner = pieces.source[largest[np.cumsum(rivals) - rivals + picked]]
    return attrs.evolve(pieces, target=np.repeat(owner, counts)), Owners(array, chunk, owner)


def pick_owner(key_hash: Ints, chunk: Ints, rivals: Ints) -> Ints:
    """Return which of the `rivals` largest pieces, row-major, determines the owner of a chunk.

    Examples
    --------
    >>> bool(pick_owner(np.array([5]), np.array([0]), np.array([4]))[0] < 4)
    True
    """
    return (mix(key_hash, chunk) % rivals.astype(np.uint64)).astype(np.int64)


def with_waves(pieces: Pieces, owned: Owners, arrays: Sequence[ArrayPlan], budget_nbytes: int) -> Pieces:
    """Return `pieces` with the wave in which each one moves; no rank holds more than the budget in any wave.

    `owned` are the chunks of all ranks and of all `arrays`; `pieces` may be those of one rank.

    Raises
    ------
    PolicyError
        If the budget does not hold a chunk and the messages to and from it.
    """
    nbytes = np.array([plan.layout.chunk_nbytes for plan in arrays], np.int64)[owned.array]
    limit = budget_nbytes // _SHARES
    if len(owned) and nbytes.max() > limit:
        plan = arrays[owned.array[np.argmax(nbytes)]]
        raise PolicyError(
            "the byte budget is too small for a chunk and the messages that fill it",
            plan.spec.key,
            shape=plan.spec.shape,
            expected=f"at least {_SHARES * plan.layout.chunk_nbytes} bytes",
            found=budget_nbytes,
            remedy="Pass a larger budget_nbytes, or a smaller LayoutPolicy(target_chunk_nbytes=...)",
        )
    held = np.bincount(owned.rank, nbytes) if len(owned) else np.zeros(1)
    if held.max() <= limit:
        return pieces
    # A new wave begins where the bytes of an owner's earlier chunks pass a multiple of `share`: the last chunk of a
    # wave may exceed it, by less than the largest chunk.
    share = limit - int(nbytes.max()) + 1
    order = np.argsort(owned.rank, kind="stable")
    before = np.cumsum(nbytes[order]) - nbytes[order]
    begin, counts = runs(owned.rank[order])
    before -= np.repeat(before[begin], counts)
    waves = np.zeros(len(owned), np.int64)
    waves[order] = before // share
    # Chunks are numbered through all arrays, in whose order both tables are.
    first = np.cumsum([0, *(plan.grid.size for plan in arrays)])
    at = np.searchsorted(first[owned.array] + owned.chunk, first[pieces.array] + pieces.chunk)
    return attrs.evolve(pieces, wave=waves[at])
