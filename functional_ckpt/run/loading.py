"""A load, step by step: read the manifest, find a target for every leaf, plan, agree, read, and rebuild the tree."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import attrs

from functional_ckpt.errors import (
    CheckpointError,
    PathNotSharedError,
    PerRankError,
    PolicyError,
    SpecError,
    raise_problems,
)
from functional_ckpt.plan.load import LoadPlan, plan_load, plan_read_once, wanted_pieces
from functional_ckpt.plan.manifest import ArrayEntry, RankItem
from functional_ckpt.plan.pieces import Pieces
from functional_ckpt.run.arguments import check_load
from functional_ckpt.run.comm import Gather, agree, together
from functional_ckpt.run.leaves import LeafAdapter, PerRank, adapter_of
from functional_ckpt.run.objects import ObjectReader
from functional_ckpt.run.policy import LoadPolicy
from functional_ckpt.run.progress import Tracker
from functional_ckpt.run.wanted import KeySummary, WantedKeys
from functional_ckpt.spec.shard import ShardSpec
from functional_ckpt.spec.table import widest
from functional_ckpt.spec.tree import Path as TreePath
from functional_ckpt.spec.tree import key_of, map_leaves
from functional_ckpt.store.buffer import Buffer
from functional_ckpt.store.chunk import absent_chunks
from functional_ckpt.store.distribute import nbytes_read, read_and_distribute
from functional_ckpt.store.exchange import Exchange
from functional_ckpt.store.fill import check_needed, read_plan
from functional_ckpt.store.machine import boot_id
from functional_ckpt.store.reading import Opened
from functional_ckpt.store.sharing import Memory
from functional_ckpt.store.values import decode_text

__all__ = ["load_tree"]

_content = attrgetter("spec.shape", "spec.dtype", "layout", "digests")


def load_tree(like: Any, path: str | Path, policy: LoadPolicy, gather: Gather, tracker: Tracker) -> Any:
    """Load the checkpoint at `path` into a tree shaped as `like`, on all ranks of `gather` together.

    Raises
    ------
    CheckpointError
        On every rank, if any rank has a problem; before the first byte is read, unless stored bytes are corrupt.
    """
    found: list[Opened] = []

    def open_it() -> tuple[str, frozenset[str] | None]:
        check_load(like, path, policy, tracker.report)
        found.append(Opened.at(path, policy.store))
        return found[0].digest, None if gather.rank else absent_chunks(found[0].store, found[0].manifest.arrays)

    try:
        opened = together(gather, open_it)
        if len({digest for digest, _ in opened}) > 1:
            remedy = "If it is being overwritten, load it again; else load from a path that all ranks share"
            raise PathNotSharedError("ranks see different checkpoints under one path", path=str(path), remedy=remedy)
        return _load(like, found[0], policy, gather, tracker, opened[0][1])
    finally:
        for mine in found:
            mine.close()


def _load(
    like: Any, opened: Opened, policy: LoadPolicy, gather: Gather, tracker: Tracker, absent: frozenset[str] | None
) -> Any:
    loader = _Loader(opened, policy, gather, absent)
    kept: list[tuple[Any, LoadPlan]] = []

    def plan() -> _Request:
        tracker.enter("plan")
        with opened.guard():
            skeleton = loader.seek(like)
            kept.append((skeleton, loader.plan()))
        return loader.request(kept[0][1])

    requests = together(gather, plan)
    skeleton, load_plan = kept[0]

    def share() -> tuple[LoadPlan, Pieces | None]:
        with opened.guard():
            loader.check(requests)
        return loader.share(load_plan, requests)

    mine, moved = agree(gather, share)

    def read() -> None:
        with opened.guard():
            loader.read(mine, moved, tracker)
        opened.check()

    agree(gather, read)

    def finish() -> Any:
        loaded = _resolved(skeleton)
        tracker.enter("done")
        return loaded

    return agree(gather, finish)


@attrs.frozen(eq=False)
class _Request:
    """What a rank sends to the others before a load: its keys, and with `read_once` the pieces that it wants."""

    keys: KeySummary
    wanted: Pieces | None
    budget_nbytes: int
    machine: str


@attrs.frozen(eq=False)
class _Deferred:
    """A placeholder in the tree for a leaf that is made once the bytes are read."""

    result: Callable[[], Any]


class _Loader:
    """Finds for each leaf of `like` what is stored for it; one object per load."""

    def __init__(self, opened: Opened, policy: LoadPolicy, gather: Gather, absent: frozenset[str] | None) -> None:
        self.manifest = manifest = opened.manifest
        self.store, self.policy, self.gather, self.rank, self.absent = opened.store, policy, gather, gather.rank, absent
        self.keys = WantedKeys(manifest, policy)
        self.shards: list[ShardSpec] = []
        self.buffers: list[Buffer] = []
        self._problems: list[CheckpointError] = []
        self._objects = ObjectReader(opened.store, policy.safe_globals)
        self._values = {value.key: value for value in manifest.values}
        self._per_rank = {entry.key: entry for entry in manifest.per_rank}
        self._filled: dict[Hashable, ArrayEntry] = {}
        self._made: dict[Hashable, Any] = {}

    def seek(self, like: Any) -> Any:
        """Return `like` with every leaf replaced: by its value, by the array to fill, or by a `_Deferred`.

        Leaves without a matching stored value stay; `check` reports them together with all other problems.
        """
        return map_leaves(self._leaf, like)

    def plan(self) -> LoadPlan:
        """Plan the reads and look for every chunk they need; `check` reports the problems."""
        entries = self.manifest.by_key
        self.memory = Memory.of(self.shards, self.buffers, entries)
        self._problems += self.memory.problems
        self._problems += [self._objects.problem] if self._objects.problem is not None else []
        try:
            plan = plan_load(entries, self.shards, self.policy.cast, self.policy.allow_shape_mismatch)
        except CheckpointError as error:
            self._problems.append(error)
            return LoadPlan()
        self._problems += check_needed(plan, self.store, self.absent)
        return plan

    @property
    def _reads_once(self) -> bool:
        """Whether ranks read for one another: as the policy says, else where reading is dear."""
        dear = self.gather.size > 1 and not self.store.capabilities.sized
        return dear if self.policy.read_once is None else self.policy.read_once

    def request(self, plan: LoadPlan) -> _Request:
        """Return what the other ranks must know."""
        wanted: Pieces | None = None
        if self._reads_once and isinstance(self.gather, Exchange):
            entries = self.manifest.arrays
            numbers = {entry.spec.key: number for number, entry in enumerate(entries)}
            numbers |= {alias.key: numbers[alias.target] for alias in self.manifest.aliases}
            wanted = wanted_pieces(plan, numbers, widest(entry.spec for entry in entries), self.rank)
        return _Request(self.keys.summary(), wanted, self.policy.budget_nbytes, boot_id())

    def check(self, requests: Sequence[_Request]) -> None:
        """Raise what is wrong with this rank's leaves, and with the keys of all ranks.

        Raises
        ------
        CheckpointError
            All problems at once.
        """
        problems, self._problems = self._problems, []  # an error that is raised refers to this object
        raise_problems([*self.keys.problems([request.keys for request in requests]), *problems])

    def share(self, plan: LoadPlan, requests: Sequence[_Request]) -> tuple[LoadPlan, Pieces | None]:
        """Return what this rank reads by itself, and what it reads for others or gets from them."""
        wanted = [request.wanted for request in requests if request.wanted is not None]
        if len(wanted) < len(requests):
            if wanted:
                raise SpecError(
                    "read_once differs between ranks", expected="one value", remedy="Pass one LoadPolicy on all ranks"
                )
            here = sum(request.machine == boot_id() != "" for request in requests)
            self.store = self.store.read_by(max(1, here))
            return plan, None
        arrays = [entry.plan for entry in self.manifest.arrays]
        budget = min(request.budget_nbytes for request in requests)
        try:
            alone, moved = plan_read_once(arrays, wanted, self.rank, budget)
        except PolicyError:  # on every rank: all plan the same moves
            if self.policy.read_once:
                raise
            return plan, None
        return LoadPlan(self.manifest.arrays, alone, plan.fills), moved

    def read(self, plan: LoadPlan, moved: Pieces | None, tracker: Tracker) -> None:
        """Fill the targets."""
        policy, entries = self.policy, self.manifest.by_key
        budget, verify, failure = self.memory.budget(policy.budget_nbytes), policy.verify, None
        arrays = self.manifest.arrays
        shared = 0 if moved is None else nbytes_read([entry.layout for entry in arrays], moved, self.rank)

        def begin(nbytes: int) -> None:
            tracker.enter("read", nbytes + shared)

        try:
            read_plan(plan, self.buffers, self.store, budget, verify, tracker.add, begin)
        except Exception as error:
            if moved is None:
                raise
            failure = error
        if moved is not None and isinstance(self.gather, Exchange):
            buffers, store, exchange = self.buffers, self.store, self.gather
            read_and_distribute(moved, arrays, buffers, store, exchange, budget, verify, tracker.add, failure)
        self.memory.check(entries, self.store, policy.cast, policy.allow_shape_mismatch, budget)

    def _leaf(self, path: TreePath, leaf: Any) -> Any:
        key = key_of(path)
        if not self.keys.selects(key):
            return leaf
        try:
            if isinstance(leaf, PerRank):
                return self._per_rank_leaf(path, key, leaf)
            return self._stored_leaf(self.policy.stored_key(key), leaf)
        except CheckpointError as error:
            self._problems.append(error)
            return leaf

    def _stored_leaf(self, key: str, leaf: Any) -> Any:
        adapter = adapter_of(leaf)
        entry = self.manifest.by_key.get(key)
        if key in self._values or entry is not None:
            self.keys.use_one(key)
        if entry is not None and entry.codec is not None:
            if adapter is not None:
                raise _unlike(key, "an object", "an array", "any plain value")
            return self._objects.read(entry)
        if key in self._values:
            if adapter is not None:
                raise _unlike(key, "a plain value", "an array", "any plain value", found=self._values[key].text)
            return decode_text(key, self._values[key].text)
        if entry is None:
            return self._unstored_leaf(key, leaf)
        if adapter is None and type(leaf) in (bool, int, float, complex) and entry.spec.shape == ():
            array = adapter_of(entry.spec)
            return self._array_leaf(key, entry, entry.spec, array, lambda value: value.item()) if array else leaf
        if adapter is None:
            raise _unlike(
                key,
                "an array",
                "a plain value",
                "a tensor, an array or an ArraySpec",
                shape=entry.spec.shape,
                found=type(leaf).__name__,
            )
        return self._array_leaf(key, entry, leaf, adapter)

    def _array_leaf(
        self,
        key: str,
        entry: ArrayEntry,
        leaf: Any,
        adapter: LeafAdapter,
        convert: Callable[[Any], Any] | None = None,
    ) -> Any:
        # Leaves that `like` allocates alike and the checkpoint has tied become one new array.
        plan = adapter.blueprint(leaf)
        fresh = None if plan is None or convert is not None else (entry.spec.key, plan)
        if fresh in self._made:
            return self._made[fresh]
        target = adapter.target(key, leaf, self.rank, self.policy.device)
        finish = convert or target.finish
        loaded = target.leaf if finish is None else _Deferred(partial(finish, target.leaf))
        if fresh is not None:
            self._made[fresh] = loaded
        known = len(self._filled)
        filled = self._filled.setdefault(target.identity, entry)
        if len(self._filled) > known:
            self.shards += target.shards
            self.buffers += target.buffers
        elif _content(filled) != _content(entry):
            raise SpecError(
                "two leaves of `like` share one memory, and the checkpoint has two arrays",
                key,
                expected=filled.spec.key,
                found=entry.spec.key,
                remedy="Untie them in `like`",
            )
        return loaded

    def _unstored_leaf(self, key: str, leaf: Any) -> Any:
        """Return the leaf, for which nothing is stored under its own key."""
        is_empty = type(leaf) in (dict, list)
        if key not in self.keys.holders and not (is_empty and not key):  # a checkpoint of nothing has no key at all
            self.keys.miss(key)
        elif is_empty:  # stands for what other ranks hold there
            self.keys.leave(key)
        else:
            self.keys.use_below(key)
            if key in self._per_rank:
                raise _unlike(key, "values that differ by rank", "one value", "a PerRank(...)")
            what = "its state_dict()" if hasattr(leaf, "state_dict") else "a dict or list"
            raise SpecError(
                "the checkpoint has several leaves, `like` one",
                key,
                found=type(leaf).__name__,
                remedy=f"Put {what} in its place in `like`, or read all with open_checkpoint(path).state()",
            )
        return leaf

    def _per_rank_leaf(self, path: TreePath, key: str, leaf: PerRank) -> Any:
        stored = self._per_rank.get(self.policy.stored_key(key))
        if stored is None:
            key = self.policy.stored_key(key)
            if key in self.keys.holders or key in self.manifest.by_key or key in self._values:
                self.keys.use_below(key)
                raise SpecError(
                    "the checkpoint has one value, `like` values that differ by rank",
                    key,
                    remedy="Put the value itself in its place in `like`, not a PerRank",
                )
            self.keys.miss(key)
            return leaf
        start = f"{stored.key}.rank".lstrip(".")
        below = [k for k in self.keys.stored if k.startswith(start)]
        self.keys.use(below)
        saved, now, rule = stored.world_size, self.gather.size, self.policy.per_rank
        if saved == now or rule == "first":
            rank = self.rank if saved == now else 0
            inner = self._rank_value(stored.key, rank, leaf.value)
            return _Deferred(lambda: PerRank(_resolved(inner)))
        if callable(rule):
            if len(below) < saved:
                raise PerRankError("values of some ranks are not stored", key, expected=f"{saved} ranks")
            values = [
                self._rank_value(stored.key, rank, self._fresh(stored.key, rank, leaf.value)) for rank in range(saved)
            ]
            return _Deferred(lambda: PerRank(rule(tuple(map(_resolved, values)), self.rank, now)))
        before, after = (f"{count} rank{'s' * (count > 1)}" for count in (saved, now))
        raise PerRankError(
            "values that differ by rank were saved by another number of ranks",
            key,
            expected=before,
            found=after,
            remedy="Pass LoadPolicy(per_rank='first') or a function that picks a value for each rank",
        )

    def _rank_value(self, key: str, rank: int, like: Any) -> Any:
        return map_leaves(
            lambda inner, leaf: self._stored_leaf(_rank_key(key, rank, inner), leaf),
            like,
        )

    def _fresh(self, key: str, rank: int, like: Any) -> Any:
        """Return `like` with new arrays of the stored shapes, so that the values of many ranks fit side by side."""

        def fresh(inner: TreePath, leaf: Any) -> Any:
            adapter = adapter_of(leaf)
            entry = self.manifest.by_key.get(_rank_key(key, rank, inner))
            return adapter.empty(leaf, entry.spec) if adapter is not None and entry is not None else leaf

        return map_leaves(fresh, like)


def _rank_key(key: str, rank: int, inner: TreePath) -> str:
    """Return the key of leaf `inner` of what `rank` saved under `key`."""
    return ".".join(part for part in (key, str(RankItem(rank)), key_of(inner)) if part)


def _resolved(tree: Any) -> Any:
    return map_leaves(lambda _, leaf: leaf.result() if isinstance(leaf, _Deferred) else leaf, tree)


def _unlike(key: str, stored: str, like: str, instead: str, **facts: Any) -> SpecError:
    """Return the error for a leaf of `like` that is of another kind than what is stored under its key."""
    remedy = f"Put {instead} in its place in `like`"
    return SpecError(f"the checkpoint has {stored}, `like` {like}", key, remedy=remedy, **facts)
