"""A save, step by step: capture, agree, plan, begin, write, publish. `api` calls it now or in the background.

Every step runs on all ranks through `together`, so that one rank's failure is everybody's and nobody waits.
"""

import platform
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from functional_ckpt.capture import capture
from functional_ckpt.comm import Gather, agree, together
from functional_ckpt.errors import (
    CheckpointError,
    CheckpointWarning,
    DuplicateKeyError,
    ProblemError,
    SaveCancelledError,
    SpecError,
    StorageError,
    raise_problems,
)
from functional_ckpt.plan.manifest import Manifest
from functional_ckpt.plan.save import SavePlan, plan_save, restrict
from functional_ckpt.plan.state import GlobalState, LocalState, build_manifest, merge_states
from functional_ckpt.policy import SavePolicy
from functional_ckpt.progress import Tracker
from functional_ckpt.store.base import Store
from functional_ckpt.store.buffer import Buffer, HostBuffer
from functional_ckpt.store.claim import Claim
from functional_ckpt.store.commit import Site, abandon, begin, publish, seen_from
from functional_ckpt.store.encoding import node_name
from functional_ckpt.store.execute import ChunkDigest, Receipt, check_chunk, digest_shared, write_plan
from functional_ckpt.store.opening import open_store

__all__ = ["Prepared", "prepare", "stage", "write"]

# Above this many files one flush of the file system costs less than a sync of each (docs/adr).
_MANY_FILES = 256
# In place of what this rank does not write, so that a save in the background keeps no hold on it.
_NOTHING = HostBuffer(np.empty(0, np.uint8))


@attrs.frozen(eq=False)
class Prepared:
    """A save that all ranks have agreed on: where, what, and what of it is `mine`, this rank's part."""

    gather: Gather
    policy: SavePolicy
    state: GlobalState
    plan: SavePlan
    mine: SavePlan
    buffers: tuple[Buffer, ...]
    site: Site
    claim: Claim | None
    started: float


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
        state, buffers = capture(tree, gather, policy, overwrite, attributes)
        kept.update(buffers)
        return state

    states = together(gather, describe)
    state, plan = agree(gather, lambda: _plan(states, path, policy, gather.size))
    stored = {leaf.key for leaf in state.leaves}
    buffers = tuple(b for leaf in states[gather.rank].arrays if leaf.key in stored for b in kept[leaf.key])
    mine = restrict(plan, gather.rank) if gather.size > 1 else plan
    nodes = [node_name(array.spec.key) for array in plan.arrays] if gather.rank == 0 else []
    site, claim = _begin(path, policy, gather, overwrite, nodes)
    return Prepared(gather, policy, state, plan, mine, buffers, site, claim, started)


def _plan(
    states: Sequence[LocalState], path: str | Path, policy: SavePolicy, size: int
) -> tuple[GlobalState, SavePlan]:
    """Merge and plan; every rank does it for itself and comes to the same answer."""
    state, problems = merge_states(states, policy.replicated)
    store = open_store(path)
    if size > 1 and not store.capabilities.shared:
        raise SpecError("other ranks cannot see this store", path=store.url, remedy="Save to a shared file system")
    try:
        plan = plan_save(state.world, policy.layout, policy.replicas, store.capabilities.shared_chunks)
    except CheckpointError as error:
        raise_problems([*problems, error])
        raise
    raise_problems([*problems, *_name_collisions(plan)])
    return state, plan


def _begin(
    path: str | Path, policy: SavePolicy, gather: Gather, overwrite: bool, nodes: Sequence[str]
) -> tuple[Site, Claim | None]:
    """Let rank 0 create the place to write to, and check that all ranks see it."""
    begun: list[tuple[Site, Claim | None]] = []

    def coordinate() -> Site | None:
        if gather.rank == 0:
            begun.append(begin(path, policy.commit, overwrite, nodes))
        return begun[0][0] if begun else None

    try:
        site = together(gather, coordinate)[0]
        if site is None:
            raise SpecError("no rank calls itself 0", rank=gather.rank)
        seen = agree(gather, lambda: seen_from(site, path, gather.rank))
    except BaseException:
        for mine in begun:
            abandon(*mine)
        raise
    return seen, begun[0][1] if begun else None


def stage(prepared: Prepared, background: Gather, tracker: Tracker) -> Prepared:
    """Copy what this rank will write, so that the caller's memory is free to change; `background` takes over."""

    def copy() -> tuple[Buffer, ...]:
        tracker.enter("stage", _nbytes(prepared.mine))
        wanted = {w.shard for w in prepared.mine.writes}
        return tuple(b.staged() if i in wanted else _NOTHING for i, b in enumerate(prepared.buffers))

    with _abandoning(prepared):
        buffers = agree(prepared.gather, copy)
    return attrs.evolve(prepared, buffers=buffers, gather=background)


def write(prepared: Prepared, tracker: Tracker) -> Manifest:
    """Write this rank's part, collect the others' receipts and publish; on failure nothing is published.

    Raises
    ------
    CheckpointError
        On every rank, if any rank has failed.
    """
    gather = prepared.gather
    mine = prepared.mine
    with _abandoning(prepared):
        store = open_store(prepared.site.work_url, _sync_mode(prepared.policy.durability, mine))
    budget = prepared.policy.budget_nbytes

    def write_mine() -> Receipt:
        tracker.enter("write", _nbytes(mine))
        receipt = write_plan(mine, prepared.buffers, store, budget, tracker.add)
        store.flush()
        return receipt

    def digest_mine() -> tuple[ChunkDigest, ...]:
        tracker.enter("digest")
        return digest_shared(mine, store, budget)

    with _abandoning(prepared):
        receipts = together(gather, write_mine)
        digests = [d for receipt in receipts for d in receipt.digests]
        if prepared.plan.digests:
            digests += [d for found in together(gather, digest_mine) for d in found]
        chunks = [(d.key, d.position, d.digest) for d in digests]
        manifest = agree(gather, lambda: build_manifest(prepared.state, prepared.plan, chunks))
        _publish(prepared, store, manifest, receipts, tracker)
    if prepared.claim is not None:
        prepared.claim.release()
    try:
        tracker.enter("done")
    except Exception as error:  # the caller's callback; the checkpoint stands on all ranks all the same
        warnings.warn(f"the progress callback failed after the save: {error!r}", CheckpointWarning, stacklevel=3)
    return manifest


def _publish(prepared: Prepared, store: Store, manifest: Manifest, receipts: list[Receipt], tracker: Tracker) -> None:
    """Let rank 0 publish, unless a rank has cancelled, a chunk is missing, or it takes too long."""
    gather, timeout_s = prepared.gather, prepared.policy.timeout_s
    coordinates = gather.rank == 0

    def check() -> None:
        tracker.enter("publish")
        if tracker.cancelled.is_set():
            raise SaveCancelledError("the save was cancelled")
        if coordinates and (gather.size > 1 or prepared.site.mode == "marker"):
            _check_presence(store, manifest)

    def confirm() -> None:
        # The others have given up by then and said that the save failed.
        if gather.size > 1 and time.monotonic() > checked + timeout_s:
            raise StorageError(
                "rank 0 took longer to publish than the other ranks wait", path=prepared.site.url,
                expected=f"at most {timeout_s} s", remedy="Pass a longer SavePolicy(timeout_s=...)",
            )  # fmt: skip

    def finish() -> None:
        if coordinates:
            provenance = _provenance(prepared, receipts)
            publish(prepared.site, store, manifest, provenance, prepared.policy.consolidate, confirm)

    agree(gather, check)
    checked = time.monotonic()
    agree(gather, finish)


@contextmanager
def _abandoning(prepared: Prepared) -> Iterator[None]:
    """Remove on rank 0 what a failing save has written."""
    try:
        yield
    except BaseException:
        if prepared.gather.rank == 0:
            abandon(prepared.site, prepared.claim)
        raise


def _nbytes(plan: SavePlan) -> int:
    itemsizes = {array.spec.key: array.spec.itemsize for array in plan.arrays}
    return sum(w.box.size * itemsizes[w.key] for w in plan.writes)


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
            problems.append(
                DuplicateKeyError("two keys have one node name", array.spec.key, expected=other, found=name)
            )
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
    grids = {array.spec.key: array.grid for array in mine.arrays}
    files = len(mine.headers) + sum(grids[w.key].count_touched(w.box) for w in mine.writes)
    return "syncfs" if files > _MANY_FILES else "fsync"
