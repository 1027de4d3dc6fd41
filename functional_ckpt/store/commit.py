"""Begin, publish or abandon a save, so that a path holds a whole checkpoint or none.

*rename*: everything is written to ``.<name>.<id>.saving`` beside the path, which then takes the path's name in one
step; with `overwrite` the two directories change places in one step and the old one is removed. Killed before the step,
the old checkpoint survives; after it, the new one does.
*marker*: written in place; the root ``zarr.json`` is created last, and only if there is none. Other files may live in
the directory.
"""

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from errno import EEXIST, ENOTDIR, ENOTEMPTY
from pathlib import Path
from typing import Any

import attrs
import xxhash

from functional_ckpt.errors import (
    AlreadyExistsError,
    CheckpointError,
    CheckpointWarning,
    PathNotSharedError,
    PolicyError,
)
from functional_ckpt.plan.manifest import FORMAT, Manifest
from functional_ckpt.spec.array import BITS
from functional_ckpt.store.base import Store, storage_errors
from functional_ckpt.store.claim import Claim, claimed_by, is_live
from functional_ckpt.store.encoding import array_metadata, node_name, to_json
from functional_ckpt.store.files import FileStore, exchange_paths, sync_directory
from functional_ckpt.store.opening import local_path, open_store
from functional_ckpt.store.sweep import is_claim_name, is_node_file, leftover_names

__all__ = [
    "MANIFEST",
    "PROVENANCE",
    "ROOT",
    "Site",
    "abandon",
    "begin",
    "manifest_digest",
    "publish",
    "root_metadata",
    "seen_from",
]

ROOT, MANIFEST, PROVENANCE = "zarr.json", "manifest.json", "provenance.json"


@attrs.frozen
class Site:
    """Where one save writes and what it becomes; equal on all ranks.

    `url` is the final place, `work_url` the place written to (the same in marker mode).
    """

    url: str
    work_url: str
    mode: str
    overwrite: bool
    save_id: str

    def claim_path(self) -> Path | None:
        """Return the path of the claim file (none in memory)."""
        if self.url.startswith("memory://"):
            return None
        final = Path(self.url)
        if self.mode == "marker":
            return final / f".{self.save_id}.claim"
        return final.parent / f".{final.name}.{self.save_id}.claim"


def begin(url: str | Path, mode: str, overwrite: bool, nodes: Sequence[str]) -> tuple[Site, Claim | None]:
    """Choose and create the place to write `nodes` to; called by the coordinator only.

    Raises
    ------
    AlreadyExistsError
        If the path holds a checkpoint and `overwrite` is off, or anything that is not a checkpoint.
    """
    save_id = secrets.token_hex(8)
    store = open_store(url)
    if mode == "auto":
        mode = "rename" if store.capabilities.rename else "marker"
    if mode == "rename" and not store.capabilities.rename:
        raise PolicyError("this store cannot rename a directory", found=store.url, remedy="Use commit='marker'")
    if mode == "marker":
        return _begin_marker(store, overwrite, save_id, nodes)
    final = local_path(url)
    with storage_errors("looking at", str(final)):
        if final.is_symlink():
            final = final.resolve()  # replace what the link points to, not the link
        _check_target(final, overwrite)
    site = Site(str(final), str(final.parent / f".{final.name}.{save_id}.saving"), "rename", overwrite, save_id)
    with storage_errors("creating the directory to save to", site.work_url):
        final.parent.mkdir(parents=True, exist_ok=True)
        claim = Claim.take(site.claim_path() or final, save_id)
        try:
            Path(site.work_url).mkdir()
        except BaseException:
            claim.release()
            raise
    return site, claim


def seen_from(site: Site, url: str | Path, rank: int) -> Site:
    """Return `site` under the path that this rank was given; mounts may differ, the file system may not.

    Raises
    ------
    PathNotSharedError
        Unless the claim that the coordinator has made is found there.
    """
    if site.claim_path() is None:
        return site
    final, work = local_path(url), Path(site.work_url)
    final = final.resolve() if final.is_symlink() else final
    mine = attrs.evolve(
        site, url=str(final), work_url=str(final if site.mode == "marker" else final.parent / work.name)
    )
    claim = mine.claim_path()
    if claim is None or not (claimed_by(claim, site.save_id) and Path(mine.work_url).is_dir()):
        raise PathNotSharedError(
            "this rank does not see the directory that rank 0 has created", None, rank, path=str(final),
            expected=site.work_url, remedy="Save to one path on a file system that all ranks share",
        )  # fmt: skip
    return mine


def publish(
    site: Site,
    store: Store,
    manifest: Manifest,
    provenance: Mapping[str, Any],
    consolidate: bool,
    confirm: Callable[[], None],
) -> None:
    """Write manifest, provenance and root, in this order, and make the checkpoint appear.

    `confirm` is called right before the step after which the checkpoint is there; it may still raise.
    """
    text = manifest.to_json()
    for name, data in ((MANIFEST, text), (PROVENANCE, to_json(provenance))):
        store.create(name, [memoryview(data)], len(data))
    root = root_metadata(manifest, manifest_digest(text), consolidate)
    if site.mode == "marker":
        store.flush()
        confirm()
        store.publish(ROOT, root)
        store.flush()
        return
    store.create(ROOT, [memoryview(root)], len(root))
    store.flush()
    confirm()
    with storage_errors("publishing", site.url):
        _rename(site, isinstance(store, FileStore) and store.sync != "none")


def abandon(site: Site, claim: Claim | None) -> None:
    """Remove what a failed save has written; called by the coordinator when no rank writes any more."""
    if site.mode == "rename":
        shutil.rmtree(site.work_url, ignore_errors=True)
    else:
        store = open_store(site.url)
        store.delete(leftover_names(store))
    if claim is not None:
        claim.release()


def manifest_digest(data: bytes) -> str:
    """Return the digest of a manifest's text, as the root records it."""
    return xxhash.xxh3_128_hexdigest(data)


def _begin_marker(store: Store, overwrite: bool, save_id: str, nodes: Sequence[str]) -> tuple[Site, Claim | None]:
    if store.nbytes_of(ROOT) is not None:
        raise AlreadyExistsError(
            "the path holds a committed checkpoint or Zarr group", path=store.url,
            remedy="Save under a new path: commit='marker' never overwrites" if overwrite else "Save under a new path",
        )  # fmt: skip
    site = Site(store.url, store.url, "marker", overwrite, save_id)
    claim = _claim_in_place(site, nodes)
    try:
        store.delete(leftover_names(store, None if claim.path is None else claim.path.name))
        taken = sorted({name.partition("/")[0] for name in store.names()} & {*nodes, MANIFEST, PROVENANCE})
        if taken:
            raise AlreadyExistsError(
                "names that the checkpoint needs are taken by others", path=store.url, found=", ".join(taken[:5]),
                remedy="Save under a new path; what is not ours is never replaced",
            )  # fmt: skip
    except BaseException:
        claim.release()
        raise
    return site, claim


def _claim_in_place(site: Site, nodes: Sequence[str]) -> Claim:
    """Take the claim of a save in marker mode, and make sure that it is the only live one."""
    path = site.claim_path()
    if path is None:
        return Claim.take_in_memory(site.url)
    with storage_errors("creating the directory to save to", site.url):
        path.parent.mkdir(parents=True, exist_ok=True)
        claim = Claim.take(path, site.save_id, nodes)
        # Looked for after taking ours: of two that begin at once, at least one sees the other.
        others = [other.name for other in path.parent.glob(".*.claim") if other != path and is_live(other)]
    if others:
        claim.release()
        raise AlreadyExistsError("another save to this path is running", path=site.url, found=others[0])
    return claim


def _check_target(final: Path, overwrite: bool) -> None:
    if not final.exists():
        return
    if not final.is_dir():
        raise AlreadyExistsError("the path is a file", path=str(final), remedy="Save under a new path")
    if not any(final.iterdir()):
        return
    foreign = _foreign_names(final)
    if foreign:
        raise AlreadyExistsError(
            "the path holds files that are not part of a checkpoint of functional_ckpt", path=str(final),
            found=", ".join(foreign[:5]), remedy="Save under a new path; what is not ours is never replaced",
        )  # fmt: skip
    if not overwrite:
        raise AlreadyExistsError(
            "the path holds a checkpoint", path=str(final), remedy="Pass overwrite=True, or save under a new path"
        )


def _foreign_names(final: Path) -> list[str]:
    """Return what lies in a directory and is no part of the committed checkpoint there; everything if there is none."""
    found = sorted(path.name for path in final.iterdir())
    try:
        store = FileStore(final)
        data = store.read(MANIFEST) or b""
        root = json.loads(store.read(ROOT) or b"")
        if root["attributes"][FORMAT]["manifest"] != manifest_digest(data):
            return found
        nodes = {node_name(entry.spec.key) for entry in Manifest.from_json(data).arrays}
    except (ValueError, KeyError, TypeError, RecursionError, CheckpointError):
        return found
    foreign: list[str] = []
    for name in found:
        path = final / name
        if name in nodes and path.is_dir():
            foreign += [f"{name}/{inner}" for inner in _foreign_to_node(path)]
        elif path.is_dir() or not (name in (ROOT, MANIFEST, PROVENANCE) or is_claim_name(name)):
            foreign.append(name)
    return foreign


def _foreign_to_node(path: Path) -> list[str]:
    with os.scandir(path) as found:
        return sorted(e.name for e in found if not is_node_file(e.name) or e.is_dir(follow_symlinks=False))


def _rename(site: Site, durable: bool) -> None:
    work, final = Path(site.work_url), Path(site.url)
    if site.overwrite and final.is_dir() and any(final.iterdir()):
        _check_target(final, overwrite=True)  # files of others may have come while we were writing
        exchange_paths(work, final)
        _sync_parent(final, durable)
        shutil.rmtree(work, ignore_errors=True)  # published: what is left of the old one is for `sweep`
        return
    try:
        os.rename(work, final)  # onto nothing or an empty directory; anything else is refused by the system
    except OSError as error:
        if error.errno not in (EEXIST, ENOTEMPTY, ENOTDIR):
            raise
        raise AlreadyExistsError("the path appeared while saving", path=site.url, found=error.strerror) from error
    _sync_parent(final, durable)


def _sync_parent(final: Path, durable: bool) -> None:
    """Make the new name durable. The checkpoint is there already, so that a failure is a warning."""
    try:
        if durable:
            sync_directory(final.parent)
    except OSError as error:
        warnings.warn(f"published, but a power cut may undo it: {error}", CheckpointWarning, stacklevel=2)


def root_metadata(manifest: Manifest, digest: str, consolidate: bool) -> bytes:
    """Return the root's ``zarr.json`` for a manifest whose text has `digest`."""
    attributes = json.loads(manifest.attributes)
    values = {entry.key: json.loads(entry.text) for entry in manifest.values}
    ours = {"format": FORMAT, "version": list(manifest.version), "manifest": digest, "values": values}
    root: dict[str, Any] = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {**attributes, "functional_ckpt": ours},
    }
    # One array of a type that stock zarr-python does not know would keep it from opening the group at all.
    if not consolidate or any(entry.layout.stored in BITS for entry in manifest.arrays):
        return to_json(root)
    members = b",".join(
        to_json(node_name(e.spec.key)) + b":" + array_metadata(e.spec, e.layout) for e in manifest.arrays
    )
    inline = b'"consolidated_metadata":{"kind":"inline","metadata":{' + members + b'},"must_understand":false},'
    return b"{" + inline + to_json(root)[1:]
