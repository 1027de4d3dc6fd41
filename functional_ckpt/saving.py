"""A save, step by step: capture, agree, plan, begin, write, publish. `api` calls it now or in the background.

Every step runs on all ranks through `together`, so that one rank's failure is everybody's and nobody waits.
"""

import platform
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Event, Lock
from typing import Any

import attrs

from functional_ckpt.comm import Gather, together
from functional_ckpt.errors import (
    CheckpointError,
    DuplicateKeyError,
    ProblemError,
    SaveCancelledError,
    SpecError,
    UnsupportedLeafError,
    raise_problems,
)
from functional_ckpt.leaves import HeldArray, NumpyLeaves, PerRank, adapter_of
from functional_ckpt.objects import object_bytes
from functional_ckpt.plan.manifest import Manifest, PerRankEntry, RankItem, ValueEntry, canonical
from functional_ckpt.plan.save import SavePlan, plan_save, restrict
from functional_ckpt.plan.state import ArrayLeaf, GlobalState, LocalState, build_manifest, merge_states
from functional_ckpt.policy import SavePolicy
from functional_ckpt.spec.sharding import Fragment, ShardSpec
from functional_ckpt.spec.tree import DictKey, Path as TreePath, flatten, key_of
from functional_ckpt.store.base import Store, open_store
from functional_ckpt.store.buffer import Buffer, region_of
from functional_ckpt.store.claim import Claim
from functional_ckpt.store.commit import Site, abandon, begin, check_shared, publish
from functional_ckpt.store.encoding import digest, node_name
from functional_ckpt.store.execute import Receipt, check_chunk, digest_shared, write_plan
from functional_ckpt.store.values import encode_value, is_plain

__all__ = ["Prepared", "Progress", "Tracker", "capture", "prepare", "write"]

# Above this many files one flush of the file system costs less than a sync of each (docs/adr).
_MANY_FILES = 256


@attrs.frozen
class Progress:
    """How far a save or load of this rank has come; bytes of elements.

    Examples
    --------
    >>> Progress("write", 3, 12).fraction
    0.25
    """

    phase: str
    done_nbytes: int
    total_nbytes: int

    @property
    def fraction(self) -> float:
        """Share of the bytes that is done, 1.0 where there are none."""
        return self.done_nbytes / self.total_nbytes if self.total_nbytes else 1.0


class Tracker:
    """Counts bytes from several threads, tells a callback, and stops the work when cancelled."""

    def __init__(self, report: Callable[[Progress], None] | None = None) -> None:
        self.now = Progress("plan", 0, 0)
        self.cancelled = Event()
        self._report = report
        self._lock = Lock()

    def enter(self, phase: str, total_nbytes: int | None = None) -> None:
        """Begin a phase."""
        total = self.now.total_nbytes if total_nbytes is None else total_nbytes
        self._set(Progress(phase, self.now.done_nbytes, total))

    def add(self, nbytes: int) -> None:
        """Count bytes; raises in the working thread once the save is cancelled."""
        if self.cancelled.is_set():
            raise SaveCancelledError("the save was cancelled")
        with self._lock:
            now = attrs.evolve(self.now, done_nbytes=self.now.done_nbytes + nbytes)
            self._set(now)

    def _set(self, now: Progress) -> None:
        self.now = now
        if self._report is not None:
            self._report(now)


@attrs.frozen(eq=False)
class Prepared:
    """A save that all ranks have agreed on: where, what, and this rank's part of it."""

    gather: Gather
    policy: SavePolicy
    state: GlobalState
    plan: SavePlan
    buffers: tuple[Buffer, ...]
    site: Site
    claim: Claim | None
    started: float

    @property
    def mine(self) -> SavePlan:
        """This rank's part of the plan."""
        return restrict(self.plan, self.gather.rank) if self.gather.size > 1 else self.plan


def capture(
    tree: Any, gather: Gather, policy: SavePolicy, attributes: Mapping[str, Any] | None
) -> tuple[LocalState, dict[str, tuple[Buffer, ...]]]:
    """Describe this rank's leaves, and return the buffers by key.

    Raises
    ------
    CheckpointError
        All leaves that cannot be saved, at once.
    """
    seen = _Capture(gather, policy)
    for path, leaf in flatten(tree):
        seen.guard(seen.add, path, leaf)
    seen.guard(seen.set_attributes, attributes or {})
    raise_problems(seen.problems)
    return seen.state(), seen.buffers


class _Capture:
    """Collects leaves into a `LocalState`; one object per save, gone before the first byte moves."""

    def __init__(self, gather: Gather, policy: SavePolicy) -> None:
        self.gather, self.policy = gather, policy
        self.problems: list[CheckpointError] = []
        self.buffers: dict[str, tuple[Buffer, ...]] = {}
        self._shards: list[ShardSpec] = []
        self._arrays: list[tuple[ArrayLeaf, Any]] = []
        self._values: list[ValueEntry] = []
        self._per_rank: list[PerRankEntry] = []
        self._attributes = "{}"
        self._keys: dict[str, TreePath] = {}

    def guard(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call `function`, and keep its problem for the report of all of them."""
        try:
            function(*arguments)
        except CheckpointError as error:
            self.problems.append(error)

    def state(self) -> LocalState:
        """Return what was collected; equal memory under several keys becomes a tie to the first of them."""
        first: dict[Any, str] = {}
        for leaf, identity in sorted(self._arrays, key=lambda item: item[0].key):
            first.setdefault(identity, leaf.key)
        arrays = tuple(
            attrs.evolve(leaf, tied_to=first[identity]) if first[identity] != leaf.key else leaf
            for leaf, identity in self._arrays
        )
        return LocalState(tuple(self._shards), arrays, tuple(self._values), tuple(self._per_rank), self._attributes)

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Check and keep the user's attributes."""
        try:
            self._attributes = canonical(dict(attributes))
        except (TypeError, ValueError) as error:
            raise SpecError("attributes must be JSON", "attributes", found=str(error)) from None
        if "functional_ckpt" in attributes:
            raise SpecError("this attribute name is ours", "functional_ckpt", remedy="Rename the attribute")

    def add(self, path: TreePath, leaf: Any) -> None:
        """Collect one leaf."""
        key = self._claim_key(path)
        if isinstance(leaf, PerRank):
            self._per_rank.append(PerRankEntry(key, self.gather.size, path))
            below = (*path, RankItem(self.gather.rank))
            for inner, value in flatten(leaf.value):
                if isinstance(value, PerRank):
                    raise UnsupportedLeafError("a PerRank holds another", key_of((*path, *inner)))
                self.guard(self.add, (*below, *inner), value)
            return
        adapter = adapter_of(leaf)
        if adapter is not None:
            self._add_array(key, path, adapter.hold(key, leaf, self.gather.rank), None)
        elif is_plain(leaf):
            self._values.append(ValueEntry(key, canonical(encode_value(leaf)), path))
        elif self.policy.object_codec is None:
            raise UnsupportedLeafError(
                "a leaf is neither an array nor a plain value", key, None, None, None,
                "arrays, numbers, text, bytes, None, and tuples of them", _type_name(leaf),
                "Convert it, or pass SavePolicy(object_codec='torch') to store what torch.save makes of it",
            )  # fmt: skip
        else:
            self._add_object(key, path, leaf)

    def _claim_key(self, path: TreePath) -> str:
        key = key_of(path)
        for item in path:
            value = item.value if isinstance(item, DictKey) else None
            if not (value is None or isinstance(value, bool | int | float | str)):
                raise SpecError("a dict key of this type has no representation", key, found=_type_name(value),
                                remedy="Use text, ints, floats, bools or None")  # fmt: skip
        if key in self._keys:
            raise DuplicateKeyError("two leaves have one key", key, None, None, None, self._keys[key], path,
                                    "Rename one: a key is the path joined by dots")  # fmt: skip
        self._keys[key] = path
        return key

    def _add_object(self, key: str, path: TreePath, leaf: Any) -> None:
        data = object_bytes(key, leaf)
        self._add_array(key, path, NumpyLeaves().hold(key, data, self.gather.rank), self.policy.object_codec)

    def _add_array(self, key: str, path: TreePath, held: HeldArray, codec: str | None) -> None:
        self._shards += [shard for shard, _ in held.parts]
        self.buffers[key] = tuple(buffer for _, buffer in held.parts)
        checked = held.copy and self.policy.replicated == "check" and self.gather.size > 1
        copy_digest = _content_digest(held) if checked and not _is_per_rank(path) else None
        self._arrays.append((ArrayLeaf(key, path, codec, None, copy_digest), held.identity))


def prepare(
    tree: Any,
    path: str | Path,
    policy: SavePolicy,
    gather: Gather,
    overwrite: bool,
    attributes: Mapping[str, Any] | None,
) -> Prepared:
    """Agree with all ranks on the save and create the place to write to; nothing is written yet.

    Raises
    ------
    CheckpointError
        On every rank, if any rank has a problem.
    """
    started = time.time()
    kept: dict[str, tuple[Buffer, ...]] = {}

    def describe() -> LocalState:
        state, buffers = capture(tree, gather, policy, attributes)
        kept.update(buffers)
        return state

    states = together(gather, describe)
    claims: list[Claim | None] = []

    def plan_and_begin() -> tuple[GlobalState, SavePlan, Site | None]:
        merged, problems = merge_states(states, policy.replicated)
        raise_problems(problems)
        store = open_store(path)
        plan = plan_save(merged.world, policy.layout, policy.replicas, store.capabilities.shared_chunks)
        raise_problems(_name_collisions(plan))
        if gather.size > 1 and not store.capabilities.shared:
            raise SpecError("other ranks cannot see this store", store.url, remedy="Save to a shared file system")
        if gather.rank != 0:
            return merged, plan, None
        site, claim = begin(path, policy.commit, overwrite)
        claims.append(claim)
        return merged, plan, site

    site: Site | None = None
    try:
        planned: list[Any] = []

        def local() -> Site | None:
            planned.extend(plan_and_begin())
            return planned[2]

        site = together(gather, local)[0]
        if site is None:
            raise SpecError("rank 0 has begun nothing")
        together(gather, lambda: check_shared(site, gather.rank))
    except BaseException:
        if claims and len(planned) > 2:
            abandon(planned[2], claims[0])
        raise
    state, plan = planned[0], planned[1]
    stored = {leaf.key for leaf in state.leaves}
    buffers = tuple(b for leaf in states[gather.rank].arrays if leaf.key in stored for b in kept[leaf.key])
    return Prepared(gather, policy, state, plan, buffers, site, claims[0] if claims else None, started)


def write(prepared: Prepared, tracker: Tracker) -> Manifest:
    """Write this rank's part, collect the others' receipts and publish; on failure nothing is published.

    Raises
    ------
    CheckpointError
        On every rank, if any rank has failed.
    """
    gather, policy, mine = prepared.gather, prepared.policy, prepared.mine
    store = open_store(prepared.site.work_url, _sync_mode(policy.durability, mine))
    try:
        tracker.enter("write", sum(w.box.size for w in mine.writes))
        receipts = together(gather, lambda: _write_mine(mine, prepared.buffers, store, policy, tracker))
        digests = [d for receipt in receipts for d in receipt.digests]
        if prepared.plan.digests:
            tracker.enter("digest")
            shared = together(gather, lambda: digest_shared(mine, store, policy.budget_nbytes))
            digests += [d for found in shared for d in found]
        manifest = build_manifest(prepared.state, prepared.plan, ((d.key, d.position, d.digest) for d in digests))
        tracker.enter("publish")

        def finish() -> None:
            if tracker.cancelled.is_set():
                raise SaveCancelledError("the save was cancelled")
            if gather.rank == 0:
                if gather.size > 1:
                    _check_presence(store, manifest)
                publish(prepared.site, store, manifest, _provenance(prepared, receipts), policy.consolidate)

        together(gather, finish)
    except BaseException:
        if gather.rank == 0:
            abandon(prepared.site, prepared.claim)
        raise
    if prepared.claim is not None:
        prepared.claim.release()
    tracker.enter("done")
    return manifest


def _write_mine(
    mine: SavePlan, buffers: tuple[Buffer, ...], store: Store, policy: SavePolicy, tracker: Tracker
) -> Receipt:
    receipt = write_plan(mine, buffers, store, policy.budget_nbytes, tracker.add)
    store.flush()
    return receipt


def _check_presence(store: Store, manifest: Manifest) -> None:
    raise_problems(
        problem
        for entry in manifest.arrays
        for index in entry.grid.touched(entry.spec.box)
        if (problem := check_chunk(store, entry, index)) is not None
    )


def _name_collisions(plan: SavePlan) -> list[ProblemError]:
    first: dict[str, str] = {}
    problems: list[ProblemError] = []
    for array in plan.arrays:
        name = node_name(array.spec.key).casefold()
        other = first.setdefault(name, array.spec.key)
        if other != array.spec.key:
            problems.append(DuplicateKeyError("two keys have one node name", array.spec.key, expected=other, found=name))
    return problems


def _provenance(prepared: Prepared, receipts: list[Receipt]) -> dict[str, Any]:
    names = ("functional_ckpt", "tensorstore", "numpy", "zarr", "torch")
    keys: list[dict[str, None]] = [{} for _ in receipts]
    for w in prepared.plan.writes:
        keys[w.rank][w.key] = None
    return {
        "save_id": prepared.site.save_id,
        "started": prepared.started,
        "finished": time.time(),
        "python": platform.python_version(),
        "versions": {name: found for name in names if (found := _version(name)) is not None},
        "ranks": [{"nbytes": r.nbytes, "arrays": list(k)} for r, k in zip(receipts, keys, strict=True)],
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _sync_mode(durability: str, mine: SavePlan) -> str:
    if durability != "auto":
        return durability
    return "syncfs" if len(mine.headers) + len(mine.writes) > _MANY_FILES else "fsync"


def _content_digest(held: HeldArray) -> bytes:
    _, buffer = held.parts[0]
    box = held.spec.box
    return digest(buffer.get(Fragment(box, 0), region_of(box.start, box.start, box.stop)))


def _is_per_rank(path: TreePath) -> bool:
    return any(isinstance(item, RankItem) for item in path)


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
