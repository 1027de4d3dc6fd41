"""A save, step by step: begin, write, publish, after `planning` has described and planned it.

`api` calls it now or in the background.

Every step runs on all ranks through `together`, so that the failure of one rank is raised on all and none hangs.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import attrs
import numpy as np

from functional_ckpt.errors import (
    CheckpointError,
    CheckpointErrors,
    CheckpointWarning,
    OutcomeUnknownError,
    RankFailedError,
    SaveCancelledError,
    SpecError,
    StorageError,
    add_notes,
    raise_problems,
)
from functional_ckpt.plan.layout import ArrayPlan
from functional_ckpt.plan.manifest import Manifest
from functional_ckpt.plan.prefixes import check_prefixes, prefixes_of
from functional_ckpt.plan.save import SavePlan
from functional_ckpt.plan.state import ChunkRows, GlobalState, build_manifest
from functional_ckpt.run.capture import Captured
from functional_ckpt.run.closing import closing_texts
from functional_ckpt.run.comm import Gather, LocalGather, agree, together
from functional_ckpt.run.planning import Plan, PlanMemory, Planner
from functional_ckpt.run.policy import SavePolicy
from functional_ckpt.run.progress import Tracker
from functional_ckpt.run.timed import TimedStore
from functional_ckpt.store.base import SaveClaim, Store
from functional_ckpt.store.buffer import Buffer
from functional_ckpt.store.chunk import absent_chunks, check_chunks, is_there, only_chunk
from functional_ckpt.store.commit import Site, abandon, begin, publish, seen_from
from functional_ckpt.store.encoding import METADATA_FILE, node_name
from functional_ckpt.store.exchange import Exchange
from functional_ckpt.store.execute import Receipt, digest_shared, write_plan

__all__ = [
    "Prepared",
    "Written",
    "abandon_written",
    "abandoning",
    "prepare_captured",
    "publish_alone",
    "publish_written",
    "write",
    "write_parts",
]

# Above this many files one flush of the file system costs less than a sync of each (docs/adr).
_MANY_FILES = 256


@attrs.frozen(eq=False)
class Prepared:
    """A save that all ranks agree on: where it goes, its plan, the `state` of all, and the memory of this part."""

    gather: Gather
    policy: SavePolicy
    plan: Plan
    state: GlobalState
    buffers: tuple[Buffer, ...]
    site: Site
    store: Store
    claim: SaveClaim | None
    started: float


def prepare_captured(
    describe: Callable[[], Captured],
    path: str | Path,
    policy: SavePolicy,
    gather: Gather,
    overwrite: bool,
    memory: PlanMemory,
) -> Prepared:
    """Agree with all ranks on the save of the state that `describe` returns, and create the place to write to.

    No data are written yet. `memory` caches plans.

    Raises
    ------
    CheckpointError
        On every rank, if any rank has a problem.
    """
    started = time.time()
    plan, state, held = Planner(path, policy, gather, memory).agree(describe)
    _check_codecs(policy, plan)
    names = [node_name(array.spec.key) for array in plan.arrays] if gather.rank == 0 else []
    names += [METADATA_FILE] if policy.metadata_file else []
    sync = _sync_mode(policy.durability, plan.mine, gather.rank)
    site, store, claim = _begin(path, policy, gather, overwrite, names, sync)
    return Prepared(gather, policy, plan, state, held.buffers, site, store, claim, started)


def _check_codecs(policy: SavePolicy, plan: Plan) -> None:
    """Raise for a prefix of the policy that matches no key of any rank; all ranks know all keys."""
    prefixes = [prefix for prefix, _ in policy.layout.codecs]
    if prefixes:
        keys = [array.spec.key for array in plan.arrays]
        keys += [alias.key for alias in plan.structure.aliases] + [value.key for value in plan.structure.values]
        raise_problems(check_prefixes([prefixes_of("LayoutPolicy.codecs", prefixes, keys)]))


def _begin(
    path: str | Path, policy: SavePolicy, gather: Gather, overwrite: bool, names: Sequence[str], sync: str
) -> tuple[Site, Store, SaveClaim | None]:
    """Let rank 0 create the place to write to, which all ranks open."""
    begun: list[tuple[Site, SaveClaim | None]] = []

    def coordinate() -> Site | None:
        if gather.rank == 0:
            begun.append(begin(path, policy.commit, overwrite, names, policy.durability, policy.foreign, policy.store))
        return begun[0][0] if begun else None

    try:
        site = together(gather, coordinate)[0]
        if site is None:
            raise SpecError("the group has no rank 0", rank=gather.rank)
        seen, store = agree(gather, lambda: ((mine := seen_from(site, path, gather.rank)), mine.store(sync)))
    except BaseException as error:
        for mine in begun:
            add_notes(error, abandon(*mine))
        raise
    return seen, store, begun[0][1] if begun else None


@attrs.frozen(eq=False)
class Written:
    """A save whose chunks are all in storage, not published yet.

    `receipts` are those of the ranks, with arrays as the plan numbers them.
    `checked_s` is when this rank checked that, before any other began to wait for the end, by ``time.monotonic``.
    """

    prepared: Prepared
    store: Store
    manifest: Manifest
    receipts: tuple[Receipt, ...]
    checked_s: float = 0.0


def write(prepared: Prepared, tracker: Tracker) -> Manifest:
    """Write this rank's part, collect the others' receipts and publish; on failure nothing is published.

    Raises
    ------
    CheckpointError
        On every rank, if any rank has failed.
    """
    written = write_parts(prepared, tracker)
    publish_written(written)
    try:
        tracker.enter("done")
    except Exception as error:  # the caller's callback; the checkpoint is published on all ranks all the same
        warnings.warn(f"the progress callback failed after the save: {error!r}", CheckpointWarning, stacklevel=3)
    return attrs.evolve(written.manifest, timings=tracker.timings)


def write_parts(prepared: Prepared, tracker: Tracker) -> Written:
    """Write this rank's part and collect the others' receipts; on failure the written files are removed."""
    gather, plan, mine = prepared.gather, prepared.plan, prepared.plan.mine
    store = cast("Store", TimedStore(prepared.store, tracker))
    budget = prepared.policy.budget_nbytes

    exchange = gather if isinstance(gather, Exchange) else None

    def write_mine() -> Receipt:
        failure: Exception | None = None
        try:
            tracker.enter("write", mine.written_nbytes(gather.rank))
        except Exception as error:  # the caller's callback; other ranks wait for pieces all the same
            failure = error
        with store.batch():
            receipt = write_plan(mine, prepared.buffers, store, budget, tracker.add, exchange, failure)
        if gather.rank:  # rank 0 does it when it publishes
            store.flush()
        return receipt

    def digest_mine() -> Receipt:
        tracker.enter("digest")
        return digest_shared(mine, store, budget)

    with abandoning(prepared):
        receipts = together(gather, write_mine)
        digested = receipts
        if any(array.layout.ownership == "shared" for array in plan.arrays):
            digested = receipts + together(gather, digest_mine)

        def check() -> Written:
            numbered = _renumbered(plan.arrays, digested)
            manifest = build_manifest(prepared.state, plan.arrays, ChunkRows.joined([r.chunks for r in numbered]))
            return _checked(Written(prepared, store, manifest, numbered[: len(receipts)]), tracker)

        return agree(gather, check)


def publish_written(written: Written) -> Manifest:
    """Publish what all ranks have written; all ranks call it.

    Raises
    ------
    CheckpointError
        On every rank, if it cannot be published; the written files are removed then.

    Warns
    -----
    CheckpointWarning
        On every rank, if it is published, but a later step failed.
    """
    with abandoning(written.prepared):
        problems = _publish(written)
    written.store.unpin()
    for problem in problems:
        warnings.warn(f"the checkpoint is published, but {problem}", CheckpointWarning, stacklevel=2)
    return written.manifest


def publish_alone(written: Written) -> Manifest:
    """Publish from rank 0 alone, if it knows by other means that all ranks have written; the others do not wait."""
    return publish_written(attrs.evolve(written, prepared=attrs.evolve(written.prepared, gather=LocalGather())))


def abandon_written(written: Written) -> None:
    """Remove on rank 0 the files of a save that will not be published."""
    written.store.unpin()
    if written.prepared.gather.rank == 0:
        for problem in abandon(written.prepared.site, written.prepared.claim):
            warnings.warn(f"a save was abandoned, and {problem}", CheckpointWarning, stacklevel=2)


def _checked(written: Written, tracker: Tracker) -> Written:
    """Fail if this rank has cancelled, or a chunk is missing; note when that was known."""
    gather = written.prepared.gather
    tracker.enter("publish")
    if tracker.cancelled.is_set():
        raise SaveCancelledError("the save was cancelled")
    # Each rank checks the files of its neighbour: no rank checks all files, and none only its own.
    # A process alone checks too: a sweep may have removed its files.
    receipts = [written.receipts[(gather.rank + 1) % gather.size]]
    if not written.store.capabilities.sized:  # a listing has everything: it is asked for once
        receipts = [] if gather.rank else list(written.receipts)
    _check_presence(written.store, written.prepared.plan, receipts)
    return attrs.evolve(written, checked_s=time.monotonic())


def _publish(written: Written) -> tuple[str, ...]:
    """Let rank 0 publish, unless it takes too long; return failures after that as text."""
    prepared = written.prepared
    gather, claim, timeout_s = prepared.gather, prepared.claim, prepared.policy.timeout_s
    published: list[tuple[str, ...]] = []

    def stands() -> bool:
        return claim is None or claim.is_held()

    def confirm() -> None:
        if not stands():
            raise StorageError(
                "the claim of this save was removed while it ran, and perhaps its files too",
                path=prepared.site.url, remedy="Save again; sweep only on machines that see the locks of this job",
            )  # fmt: skip
        # The other ranks have given up by then and raised that the save failed.
        if gather.size > 1 and time.monotonic() > written.checked_s + timeout_s:
            raise StorageError(
                "rank 0 took longer to publish than the other ranks wait", path=prepared.site.url,
                expected=f"at most {timeout_s} s", remedy="Pass a longer SavePolicy(timeout_s=...)",
            )  # fmt: skip

    def finish() -> tuple[str, ...]:
        if gather.rank == 0:
            site = prepared.site
            files, root = closing_texts(
                written.manifest, prepared.plan, prepared.policy, written.receipts, site.save_id, prepared.started
            )
            published.append(publish(site, written.store, written.manifest, files, root, confirm, stands))
            unreleased = None if claim is None else claim.release()
            published[0] += () if unreleased is None else (unreleased,)
        return published[0] if published else ()

    try:
        return together(gather, finish)[0]
    except CheckpointError as error:
        if not published:
            raise
        return (*published[0], f"not all other ranks received that ({error})")


@contextmanager
def abandoning(prepared: Prepared) -> Iterator[None]:
    """Close the store of a save that fails, and remove its files on rank 0."""
    try:
        yield
    except BaseException as error:
        prepared.store.unpin()
        if prepared.gather.rank == 0 and _is_any(error, OutcomeUnknownError):
            if prepared.claim is not None:
                prepared.claim.drop()
        elif prepared.gather.rank == 0:
            add_notes(error, abandon(prepared.site, prepared.claim, prepared.gather.size > 1 and _is_broken(error)))
        raise


def _is_any(error: BaseException, kind: type[CheckpointError]) -> bool:
    """Tell whether an error, or one of a group, is of a kind."""
    return any(isinstance(each, kind) for each in getattr(error, "exceptions", (error,)))


def _is_broken(error: BaseException) -> bool:
    """Tell whether other ranks may not know of the failure, and go on writing."""
    if isinstance(error, CheckpointErrors):
        return any(map(_is_broken, error.exceptions))
    return not isinstance(error, CheckpointError) or isinstance(error, RankFailedError)


def _renumbered(arrays: Sequence[ArrayPlan], receipts: Sequence[Receipt]) -> tuple[Receipt, ...]:
    """Return the receipts of all ranks, with arrays as the plan of all of them numbers them."""
    keys = tuple([array.spec.key for array in arrays])
    numbers = {key: number for number, key in enumerate(keys)}

    def renumbered(receipt: Receipt) -> Receipt:
        array = np.array([numbers[key] for key in receipt.keys], np.int64)[receipt.chunks.array]
        return attrs.evolve(receipt, keys=keys, chunks=attrs.evolve(receipt.chunks, array=array))

    return tuple([receipt if receipt.keys == keys else renumbered(receipt) for receipt in receipts])


def _check_presence(store: Store, plan: Plan, receipts: Sequence[Receipt]) -> None:
    if not receipts:
        return
    arrays, rows = plan.arrays, ChunkRows.joined([receipt.chunks for receipt in receipts])
    numbers = list(zip(rows.array.tolist(), rows.chunk.tolist(), strict=True))
    if store.capabilities.sized:
        only = plan.derived(_only_chunks)
        numbers = [each for each in numbers if not is_there(store, *only[each[0]])]
    wanted = ((array := arrays[number], array.grid.index(chunk)) for number, chunk in numbers)
    raise_problems(check_chunks(store, wanted, absent_chunks(store, arrays)))


def _only_chunks(plan: Plan) -> tuple[tuple[str, int], ...]:
    return tuple([only_chunk(array) for array in plan.arrays])


def _sync_mode(durability: str, mine: SavePlan, rank: int) -> str:
    if durability != "auto":
        return durability
    return "syncfs" if mine.file_count(rank) > _MANY_FILES else "fsync"
