"""Wrappers that spread writing and reading over the ranks that hold copies."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from functional_ckpt.errors import PolicyError
from functional_ckpt.plan.fingerprint import fingerprint
from functional_ckpt.run.comm import TIMEOUT_S, Gather, agree, together
from functional_ckpt.spec.shard import ShardSpec
from functional_ckpt.spec.table import ShardTable
from functional_ckpt.torch.group.link import torch_gather
from functional_ckpt.torch.megatron.exceptions import AlgorithmError
from functional_ckpt.torch.megatron.sharded_base import ShardedStateDict, StateDict
from functional_ckpt.torch.megatron.sharded_state import as_tensor, is_tensor
from functional_ckpt.torch.megatron.state_tree import leaves_of, map_leaves
from functional_ckpt.torch.megatron.strategies.async_calls import AsyncRequest
from functional_ckpt.torch.megatron.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
)
from functional_ckpt.torch.megatron.strategies.zarr import ZarrLoadShardedStrategy

__all__ = ["FullyParallelLoadStrategyWrapper", "FullyParallelSaveStrategyWrapper", "knowing"]


class FullyParallelSaveStrategyWrapper(AsyncSaveShardedStrategy):
    """Spreads the writing of tensors over the ranks of a group that hold copies; `strategy` saves them and the rest.

    Shards whose main copy is in the group are assigned to ranks, the largest first, each to the rank with the least so
    far.

    Parameters
    ----------
    strategy
        Saves the shards that are assigned to each rank.
    parallelization_group
        Ranks that hold copies of one another's shards; None for the default group.
    do_cache_distribution
        Assign once, and again when any rank of the group has other shards than then.

    Examples
    --------
    >>> from functional_ckpt.torch.megatron.strategies.zarr import ZarrSaveShardedStrategy
    >>> str(FullyParallelSaveStrategyWrapper(ZarrSaveShardedStrategy()))
    'FullyParallelSaveStrategyWrapper(functional_ckpt, 1)'
    """

    def __init__(
        self, strategy: SaveShardedStrategy, parallelization_group: Any = None, do_cache_distribution: bool = False
    ) -> None:
        super().__init__(strategy.backend, strategy.version)
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        #: The cached places of the shards that this rank writes; None before the first save.
        self.cached_distribution: frozenset[Any] | None = None
        self._gathered: Sequence[ShardTable] | None = None
        #: A digest of the shards of all ranks for which the places were cached.
        self._cached_world = b""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether the wrapped strategy does."""
        return self.base_strategy.can_handle_sharded_objects

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Save now; all ranks call it."""
        self.base_strategy.save(self.apply_saving_parallelization(sharded_state_dict), checkpoint_dir)

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> AsyncRequest:
        """Prepare a save and return the request.

        Raises
        ------
        CheckpointingException
            If the wrapped strategy cannot save in the background.
        """
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            raise PolicyError("this strategy cannot save in the background", found=str(self.base_strategy))
        return self.base_strategy.async_save(self.apply_saving_parallelization(sharded_state_dict), checkpoint_dir)

    def apply_saving_parallelization(self, sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
        """Return the state dict with replica ids that follow the assignment; all ranks of the group call it.

        Raises
        ------
        CheckpointingException
            On every rank of the group, if any rank has a leaf whose fields contradict each other.
        """
        gather = torch_gather(self.parallelization_group, TIMEOUT_S, "deal", "FullyParallelSaveStrategyWrapper")
        left = set(self._assigned(sharded_state_dict, gather))

        def relabelled(leaf: Any) -> Any:
            if not is_tensor(leaf):
                return leaf
            shard = as_tensor(leaf).spec
            place = _place(shard)
            # A rank that holds a shard twice writes only the first one.
            is_writer = place in left
            left.discard(place)
            return _relabelled(leaf, 0 if is_writer else 1)

        return agree(gather, lambda: map_leaves(relabelled, sharded_state_dict))

    def _assigned(self, sharded_state_dict: ShardedStateDict, gather: Gather) -> frozenset[Any]:
        """Return the places of the shards that this rank writes; those cached, if all ranks hold what they held."""
        if not self.do_cache_distribution:
            return _dealt(self._held(lambda: _table(sharded_state_dict, gather.rank), gather), gather.rank)
        mine: list[ShardTable] = []

        def describe() -> tuple[bytes, bytes]:
            mine.append(_table(sharded_state_dict, gather.rank))
            return fingerprint(mine[0]), b"" if self.cached_distribution is None else self._cached_world

        proposals = together(gather, describe)
        world = fingerprint(tuple(each for each, _ in proposals))
        # If one rank does not remember this world, all deal anew: else it would wait for shards that no rank sends.
        if self.cached_distribution is None or any(known != world for _, known in proposals):
            self.cached_distribution = _dealt(self._held(lambda: mine[0], gather), gather.rank)
            self._cached_world = world
        return self.cached_distribution

    def _held(self, describe: Callable[[], ShardTable], gather: Gather) -> Sequence[ShardTable]:
        """Return the shards that each rank of the group holds, from `knowing` if possible."""
        if self._gathered is not None:
            members: Sequence[int] = getattr(gather, "members", None) or range(gather.size)
            return [self._gathered[number] for number in members]
        return together(gather, describe)


@contextmanager
def knowing(strategy: SaveShardedStrategy, gathered: Sequence[ShardTable] | None) -> Iterator[None]:
    """Pass gathered shards of all ranks of the default group to `strategy`, if it is the wrapper, during a save.

    Examples
    --------
    >>> from functional_ckpt.torch.megatron.strategies.zarr import ZarrSaveShardedStrategy
    >>> with knowing(ZarrSaveShardedStrategy(), None):
    ...     pass
    """
    if not isinstance(strategy, FullyParallelSaveStrategyWrapper):
        yield
        return
    strategy._gathered = gathered
    try:
        yield
    finally:
        strategy._gathered = None


def _table(sharded_state_dict: ShardedStateDict, rank: int) -> ShardTable:
    specs = [as_tensor(leaf).spec for leaf in leaves_of(sharded_state_dict) if is_tensor(leaf)]
    return ShardTable.of(rank, specs)


def _place(shard: ShardSpec) -> Any:
    return shard.key, *shard.identity


def _relabelled(leaf: Any, replica_id: int) -> Any:
    """Return a shallow copy of a leaf under another replica id."""
    copy = object.__new__(type(leaf))
    copy.__dict__.update(leaf.__dict__, replica_id=replica_id)
    return copy


@attrs.frozen
class _Held:
    """A shard, the ranks that hold it, and its size."""

    place: Any
    ranks: tuple[int, ...]
    nbytes: int


def _dealt(held: Sequence[ShardTable], rank: int) -> frozenset[Any]:
    """Return the places of the shards that are assigned to `rank`, its position in the group."""
    ranks: dict[Any, list[int]] = {}
    sizes: dict[Any, int] = {}
    mains: dict[Any, None] = {}
    for holder, table in enumerate(held):
        for shard in map(table.shard, range(len(table.rows.array))):
            place = _place(shard)
            ranks.setdefault(place, []).append(holder)
            sizes[place] = shard.size * shard.array.itemsize
            if shard.is_main:
                mains[place] = None
    items = [_Held(place, tuple(sorted({*ranks[place]})), sizes[place]) for place in mains]
    load = [0] * len(held)
    mine = []
    for item in sorted(items, key=lambda item: (len(item.ranks), -item.nbytes, repr(item.place))):
        writer = min(item.ranks, key=lambda r: (load[r], r))
        load[writer] += item.nbytes
        if writer == rank:
            mine.append(item.place)
    return frozenset(mine)


class FullyParallelLoadStrategyWrapper(LoadShardedStrategy):
    """Makes the ranks of a group read each stored chunk once and exchange the pieces.

    Parameters
    ----------
    strategy
        A `ZarrLoadShardedStrategy`. With any other strategy, each rank reads by itself what it wants.
    parallelization_group
        Ranks that read for one another; None for the default group.
    do_cache_distribution
        Ignored; accepted for compatibility with Megatron. Each load plans its reads anew, which costs one exchange.
    exchange_algo
        Ignored too, except that it must be an algorithm of Megatron.

    Raises
    ------
    CheckpointingException
        If `strategy` cannot load, or for an exchange algorithm that Megatron does not know (a ``NotImplementedError``
        too).

    Examples
    --------
    >>> FullyParallelLoadStrategyWrapper(ZarrLoadShardedStrategy()).can_handle_sharded_objects
    True
    """

    def __init__(
        self,
        strategy: LoadShardedStrategy,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
    ) -> None:
        if isinstance(strategy, type) or not callable(getattr(strategy, "load", None)):
            raise PolicyError("this is not a strategy that loads", found=repr(strategy), expected="LoadShardedStrategy")
        if exchange_algo not in ("broadcast", "gather_object", "gather_rounds"):
            raise AlgorithmError(
                "exchange_algo is unknown",
                found=exchange_algo,
                expected="'broadcast', 'gather_object' or 'gather_rounds'",
            )
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.exchange_algo = exchange_algo

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether the wrapped strategy does."""
        return self.base_strategy.can_handle_sharded_objects

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Return the state dict with each leaf replaced; all ranks of the group call it."""
        strategy = self.base_strategy
        if isinstance(strategy, ZarrLoadShardedStrategy):
            strategy = strategy.reading_once(self.parallelization_group)
        return strategy.load(sharded_state_dict, checkpoint_dir)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return the result of the wrapped strategy."""
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return the result of the wrapped strategy."""
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Call the wrapped strategy."""
        self.base_strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise if the wrapped strategy does."""
        self.base_strategy.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise if the wrapped strategy does."""
        self.base_strategy.check_version_compatibility(loaded_version)
