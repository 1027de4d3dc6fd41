"""Begin, publish or abandon a save, so that a path holds a whole checkpoint or none.

*rename*: everything is written to a directory beside the path, which is then renamed to the path in one step; with
`overwrite` the two directories are exchanged in one step and the old one is removed. If the process is killed before
the step, the old checkpoint survives; after it, the new one does.
*marker*: everything is written in place; the root ``zarr.json`` is created last, and only if there is none. The
directory may hold other files.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import attrs

from functional_ckpt.errors import (
    AlreadyExistsError,
    CheckpointError,
    OutcomeUnknownError,
    PathNotSharedError,
    PolicyError,
    StorageError,
    add_notes,
)
from functional_ckpt.plan.manifest import Manifest
from functional_ckpt.store.access import StorePolicy
from functional_ckpt.store.base import SaveClaim, Store, storage_errors
from functional_ckpt.store.beside import bound_beside, digests_beside, require_beside
from functional_ckpt.store.claims import claims_in, has_claim, take_claim
from functional_ckpt.store.directories import (
    check_exchange,
    identity_of,
    is_directory,
    make_directories,
    remove_tree,
)
from functional_ckpt.store.encoding import MANIFEST, PROVENANCE, ROOT
from functional_ckpt.store.file_claim import Claim, claimed_by
from functional_ckpt.store.opening import local_path, open_store
from functional_ckpt.store.sweep import leftover_names, remove_leftovers
from functional_ckpt.store.target import (
    Replaceable,
    check_target,
    manifest_digest,
    put_in_place,
    synced,
)
from functional_ckpt.store.temporary import claim_name, claims_for, new_save_id, working_name
from functional_ckpt.store.work import at_once

__all__ = [
    "Site",
    "abandon",
    "begin",
    "manifest_digest",
    "publish",
    "seen_from",
]

# With these values of `durability` single names are not synced.
_NOT_EACH = ("none", "syncfs")


@attrs.frozen
class Site:
    """The place to which one save writes, and its final place; equal on all ranks.

    `url` is the final place, `work_url` the place written to (the same in marker mode). `replaceable` describes the
    checkpoint that may be replaced, None if there is none. `access` says how to reach an object store.
    """

    url: str
    work_url: str
    mode: str
    save_id: str
    replaceable: Replaceable | None = None
    access: StorePolicy = attrs.field(factory=StorePolicy)

    def claim_path(self) -> Path:
        """Return the path of the claim file in rename mode: beside the final place."""
        final = Path(self.url)
        return final.parent / claim_name(self.save_id, final.name)

    def store(self, sync: str = "none") -> Store:
        """Return the store to write to; in marker mode nothing is written there once the claim is gone."""
        # A handle of the directory: the system finds it once, not for each file; `syncfs` tells of errors since then.
        if self.mode == "rename":
            return open_store(self.work_url, sync).pinned()
        guarded = open_store(self.url).capabilities.shared
        return open_store(self.work_url, sync, claim_name(self.save_id) if guarded else None, self.access).pinned()


def begin(
    url: str | Path,
    mode: str,
    overwrite: bool,
    names: Sequence[str],
    durability: str = "none",
    foreign: str = "refuse",
    access: StorePolicy = StorePolicy(),
) -> tuple[Site, SaveClaim | None]:
    """Choose and create the place to write `names` to; called by the coordinator only.

    `durability`, what to do with files of others (`foreign`), and `access` to an object store are those of the policy.

    Raises
    ------
    AlreadyExistsError
        If the path holds a checkpoint and `overwrite` is off, or anything that is not a checkpoint.
    StorageError
        If the path could not be replaced at the end of the save: a mount point, or a file system that cannot exchange
        two directories.
    """
    save_id = new_save_id()
    store = open_store(url, access=access)
    if mode == "auto":
        mode = "rename" if store.capabilities.rename else "marker"
    if mode == "rename" and not store.capabilities.rename:
        raise PolicyError("this store cannot rename a directory", found=store.url, remedy="Use commit='marker'")
    if mode == "marker":
        return _begin_marker(
            store, Site(store.url, store.url, "marker", save_id, access=access), overwrite, names, durability
        )
    final = local_path(url)
    with storage_errors("looking at", str(final)):
        if final.is_symlink():
            final = final.resolve()  # replace the target of the link, not the link
        kept = check_target(final, overwrite, names if foreign == "keep" else None)
    site = Site(str(final), str(final.parent / working_name(final.name, save_id)), "rename", save_id)
    with storage_errors("creating the directory to save to", site.work_url):
        make_directories(final.parent, durability not in _NOT_EACH)
        _clear_beside(final)
        claim = Claim.take(site.claim_path(), save_id)
    try:
        with storage_errors("creating the directory to save to", site.work_url):
            os.mkdir(site.work_url)
            return (_with_target(site, overwrite, foreign == "keep") if overwrite or kept else site), claim
    except BaseException as error:
        add_notes(error, abandon(site, claim))
        raise


def _clear_beside(final: Path) -> None:
    """Remove what dead saves to this path have left beside it; what does not go is left to `sweep`."""
    for save_id in claims_for(final.name, os.listdir(final.parent)):
        with suppress(OSError):
            claim = Claim.adopt(final.parent / claim_name(save_id, final.name))
            if claim is not None:
                try:
                    remove_tree(final.parent / working_name(final.name, save_id))
                except OSError:
                    claim.drop()
                    raise
                claim.release()


def _with_target(site: Site, overwrite: bool, keeps_foreign: bool) -> Site:
    """Return `site` with its `replaceable`; raise if the file system cannot replace that."""
    final, work = Path(site.url), Path(site.work_url)
    # In this order: a save that publishes meanwhile is noticed by its claim or by its checkpoint.
    begun = claims_for(final.name, os.listdir(final.parent))
    earlier = tuple(save_id for save_id in begun if overwrite and save_id != site.save_id)
    found_there = identity_of(final)
    if found_there is not None and os.listdir(final):
        check_exchange(work)
    return attrs.evolve(site, replaceable=Replaceable(found_there, earlier, overwrite, keeps_foreign))


def seen_from(site: Site, url: str | Path, rank: int) -> Site:
    """Return `site` under the path that this rank was given; ranks may mount the same file system in different places.

    Raises
    ------
    PathNotSharedError
        Unless this rank finds the claim of the coordinator there.
    """
    if site.mode == "marker":
        store = open_store(url, access=site.access)
        mine = attrs.evolve(site, url=store.url, work_url=store.url)
        found = rank == 0 or has_claim(store, site.save_id)  # rank 0 has just written it
    else:
        with storage_errors("looking for the directory that rank 0 has created", str(url)):
            final = local_path(url)
            final = final.resolve() if final.is_symlink() else final
            mine = attrs.evolve(site, url=str(final), work_url=str(final.parent / Path(site.work_url).name))
            found = claimed_by(mine.claim_path(), site.save_id) and is_directory(Path(mine.work_url))
    if not found:
        raise PathNotSharedError(
            "this rank does not see the directory that rank 0 has created",
            rank=rank,
            path=mine.url,
            expected=site.work_url,
            remedy="Save to one path on a file system or object store that all ranks share",
        )
    return mine


def publish(
    site: Site,
    store: Store,
    manifest: Manifest,
    files: Iterable[tuple[str, bytes]],
    root: bytes,
    confirm: Callable[[], None],
    stands: Callable[[], bool] = lambda: True,
) -> tuple[str, ...]:
    """Write `files` (name, content) beside the arrays, then the `root`, and publish the checkpoint.

    `confirm` is called right before the step that publishes the checkpoint; it may still raise. Failures after that
    step cannot undo it; they are returned as text. In an object store the root is
    removed again if the claim no longer `stands` then: a sweep has taken this save for dead, and removed chunks.
    """
    at_once(
        [partial(store.create, name, [memoryview(data)], len(data)) for name, data in files],
        store.capabilities.concurrency,
    )
    durable = store.sync != "none"
    if site.mode == "marker":
        store.flush()
        bound = bound_beside(manifest) or {}  # nobody replaces these any more: our claim is here
        require_beside(store, bound, digests_beside(store, bound))
        confirm()
        if not store.capabilities.sized:
            _publish_object(store, root)
            return _taken_back(store, stands)
        store.publish(ROOT, root)
        return synced(Path(site.url)) if durable else ()
    store.create(ROOT, [memoryview(root)], len(root))
    store.flush()
    with storage_errors("publishing", site.url):
        return put_in_place(Path(site.work_url), Path(site.url), site.replaceable, durable, confirm)


def _publish_object(store: Store, root: bytes) -> None:
    """Write the root by one conditional request; where its answer is lost, look what became of it."""
    try:
        store.publish(ROOT, root)
    except AlreadyExistsError:
        raise
    except StorageError as error:
        with suppress(StorageError):
            if store.read(ROOT) == root:
                return
        # The request may still be on its way: chunks are not removed under a root that comes.
        raise OutcomeUnknownError(
            "it is not known whether the checkpoint was published",
            path=f"{store.url}/{ROOT}",
            found=error.found,
            remedy="Look at the path: it holds the whole checkpoint or none; what is left otherwise is for "
            "functional_ckpt.sweep, or for the next save",
        ) from error


def _taken_back(store: Store, stands: Callable[[], bool]) -> tuple[str, ...]:
    """Remove the root if the claim has gone meanwhile; return what could not be known, in words."""
    try:
        if stands():
            return ()
    except CheckpointError as error:
        return (f"it could not be known whether its claim has held until then ({error}); verify it",)
    store.delete([ROOT])
    raise StorageError(
        "the claim of this save was taken over while it published: it was taken for dead",
        path=store.url,
        remedy="Save again, with a longer StorePolicy(lease_s=...)",
    )


def abandon(site: Site, claim: SaveClaim | None, late: bool = False) -> tuple[str, ...]:
    """Remove the files of a failed save, and return as text what could not be removed; this never raises.

    `late`: other ranks may still be writing.
    """
    problems: list[str] = []
    try:
        if site.mode == "rename":
            remove_tree(Path(site.work_url))
        else:
            _remove_in_place(site, claim, late)
    except (OSError, CheckpointError) as error:
        problems.append(f"its files could not be removed; functional_ckpt.sweep removes them later ({error})")
        if claim is not None and site.mode == "marker":
            claim.drop()  # the file stays: by it a sweep recognises the files of this save
    problem = None if claim is None else claim.release()
    return (*problems, *([problem] if problem else []))


def _remove_in_place(site: Site, claim: SaveClaim | None, late: bool) -> None:
    """Remove the files of a failed save in marker mode.

    If it is `late`, the claim is left under another name: by it the next save, or a sweep, recognises the files that
    other ranks still write.
    """
    store = open_store(site.url, access=site.access)
    name = claim.label if claim is not None else ""
    names = leftover_names(store, {name})
    if late and claim is not None:
        claim.set_aside()
    store.delete([found for found in names if found != name])


def _begin_marker(
    store: Store, site: Site, overwrite: bool, nodes: Sequence[str], durability: str
) -> tuple[Site, SaveClaim]:
    _check_names([] if store.nbytes_of(ROOT) is None else [ROOT], nodes, store.url, overwrite)
    with storage_errors("creating the directory to save to", site.url):
        claim, there = take_claim(store, site.save_id, durability not in _NOT_EACH)
    try:
        with storage_errors("creating the directory to save to", site.url):
            is_clean = clear_in_place(store, claim.label, there)
            names = [*store.names()] if there is None or not is_clean else there
            _check_names(names, nodes, store.url, overwrite)  # the root too: another save may have ended meanwhile
            # Only now: files under these names are of this save. It names one at least, even without any array.
            claim.name([*nodes, MANIFEST], durability != "none")
    except BaseException as error:
        claim.release_after(error)
        raise
    return site, claim


def clear_in_place(store: Store, mine: str, there: Sequence[str] | None = None) -> bool:
    """Remove the leftovers of dead saves; raise if a live one is writing. Tell whether there were no leftovers.

    Raises
    ------
    AlreadyExistsError
        If there is another claim than `mine`, of a save that is running.
    """
    # Other claims are listed after ours is taken: of two saves that begin at once, at least one sees the other.
    with claims_in(store, mine, there) as (dead, live):
        if live:
            raise AlreadyExistsError(
                "another save to this path is running, or is being swept",
                path=store.url,
                found=live[0],
                remedy="Save under a new path; if that save ran on another machine and is dead, delete its claim",
            )
        if dead or store.capabilities.sized:  # otherwise only a claim tells of leftovers, and a listing is expensive
            remove_leftovers(store, dead)
        return not dead


def _check_names(there: Sequence[str], nodes: Sequence[str], url: str, overwrite: bool) -> None:
    if ROOT in there:
        never = ": a checkpoint that is committed in place is never overwritten" if overwrite else ""
        remedy = f"Save to a new path, such as one for each step{never}"
        raise AlreadyExistsError("the path holds a committed checkpoint or Zarr group", path=url, remedy=remedy)
    taken = sorted({name.partition("/")[0] for name in there} & {*nodes, MANIFEST, PROVENANCE})
    if taken:
        raise AlreadyExistsError(
            "other files have names that the checkpoint needs",
            path=url,
            found=", ".join(taken[:5]),
            remedy="Save under a new path, or move these files: they are never replaced",
        )
