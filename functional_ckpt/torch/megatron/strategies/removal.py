"""Remove arrays from a committed checkpoint atomically: a reader finds all of them or none."""

import json
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from functional_ckpt.errors import AlreadyExistsError, CheckpointWarning, KeyMismatchError, PolicyError, add_notes
from functional_ckpt.plan.manifest import ArrayEntry, Manifest
from functional_ckpt.store.base import storage_errors
from functional_ckpt.store.commit import Site, abandon, manifest_digest
from functional_ckpt.store.directories import Identity, identity_of
from functional_ckpt.store.encoding import MANIFEST, ROOT, array_metadata, metadata_path, node_name
from functional_ckpt.store.file_claim import Claim
from functional_ckpt.store.files import FileStore
from functional_ckpt.store.opening import directory_of, local_path
from functional_ckpt.store.reading import read_manifest
from functional_ckpt.store.root import members, root_metadata
from functional_ckpt.store.target import exchange, synced
from functional_ckpt.store.temporary import claim_name, new_save_id, working_name

__all__ = ["remove_arrays"]


def remove_arrays(path: str | Path, keys: Iterable[str]) -> None:
    """Remove the arrays of these keys from the checkpoint at `path`; everything else there stays.

    Of tied arrays only the names are removed: the data are removed with the last name, and until then belong to the
    first remaining name in alphabetical order.

    A directory of hard links to the remaining files, with a new manifest and root, replaces the old one in one step. If
    the process is killed before the step, the old checkpoint stays; after it, the new one. `functional_ckpt.sweep`
    removes the leftovers.

    Raises
    ------
    CheckpointError
        If there is no checkpoint or no such array, the file system cannot exchange directories, or the checkpoint lies
        in an object store.

    Examples
    --------
    >>> import tempfile, numpy as np, functional_ckpt
    >>> path = Path(tempfile.mkdtemp(), "checkpoint")
    >>> _ = functional_ckpt.save({"a": np.ones(2), "b": np.ones(2)}, path)
    >>> remove_arrays(path, ["a"])
    >>> list(functional_ckpt.open_checkpoint(path)), functional_ckpt.verify(path).ok
    (['b'], True)
    """
    gone = frozenset(keys)
    if directory_of(path) is None:
        raise PolicyError(
            "a checkpoint in an object store is not changed: that would take several steps", path=str(path),
            remedy="Load what is to stay, and save it under another path",
        )  # fmt: skip
    with storage_errors("looking at", str(path)):
        final = local_path(path).resolve()
        seen = identity_of(final)
    manifest = read_manifest(final)
    unknown = sorted(gone - manifest.by_key.keys())
    if unknown:
        raise KeyMismatchError("the checkpoint has no such array", unknown[0], path=str(final))
    if not gone:
        return
    left, moved = _without(manifest, gone)
    text = left.to_json()
    with storage_errors("reading", ROOT):
        consolidated = "consolidated_metadata" in json.loads((final / ROOT).read_bytes())
    root = root_metadata(left, manifest_digest(text), members(left.arrays) if consolidated else None)
    files = {MANIFEST: text, ROOT: root}
    headers = {metadata_path(e.spec.key): array_metadata(e.spec, e.layout) for e in moved.values()}
    nodes = {node_name(key) for key in gone}
    renamed = {node_name(old): node_name(entry.spec.key) for old, entry in moved.items()}
    _replace(final, seen, nodes, renamed, {**headers, **files})


def _without(manifest: Manifest, gone: frozenset[str]) -> tuple[Manifest, dict[str, ArrayEntry]]:
    """Return a manifest without some keys, and old key -> entry of each tied array that now has another key."""
    aliases = sorted((alias for alias in manifest.aliases if alias.key not in gone), key=lambda alias: alias.key)
    heirs = {alias.target: alias for alias in reversed(aliases) if alias.target in gone}
    moved = {
        entry.spec.key: attrs.evolve(entry, spec=attrs.evolve(entry.spec, key=heir.key), path=heir.path)
        for entry in manifest.arrays
        if (heir := heirs.get(entry.spec.key)) is not None
    }
    kept = [*(entry for entry in manifest.arrays if entry.spec.key not in gone), *moved.values()]
    still = [
        attrs.evolve(alias, target=heirs[alias.target].key) if alias.target in heirs else alias
        for alias in aliases
        if alias is not heirs.get(alias.target)
    ]
    arrays = tuple(sorted(kept, key=lambda entry: entry.spec.key))
    return attrs.evolve(manifest, arrays=arrays, aliases=tuple(still)), moved


def _replace(
    final: Path, seen: Identity | None, nodes: set[str], moved: Mapping[str, str], files: Mapping[str, bytes]
) -> None:
    """Exchange a directory for one without `nodes`, in which `moved` nodes have other names, with new `files`.

    `seen` is the identity of the checkpoint from which the files were made.
    """
    save_id = new_save_id()
    work = final.parent / working_name(final.name, save_id)
    site = Site(str(final), str(work), "rename", save_id)
    with storage_errors("removing arrays", str(final)):
        claim = Claim.take(final.parent / claim_name(save_id, final.name), save_id)
    try:
        with storage_errors("removing arrays", str(final)):
            _link_tree(final, work, {*nodes, *files})
            for old, new in moved.items():
                _link_tree(final / old, work / new, {ROOT})
            # Links are new names in many new directories: syncing the whole file system is faster.
            store = FileStore(work, "syncfs").pinned()
            for name, data in files.items():
                store.create(name, [memoryview(data)], len(data))
            store.flush()
            store.unpin()
            if identity_of(final) != seen:
                raise AlreadyExistsError(
                    "another checkpoint was saved here meanwhile", path=str(final), remedy="Remove from that one"
                )
            notes = exchange(work, final)
    except BaseException as error:
        add_notes(error, abandon(site, claim))
        raise
    for problem in (*notes, *synced(final.parent), *abandon(site, claim)):
        warnings.warn(f"the arrays are removed, but {problem}", CheckpointWarning, stacklevel=3)


def _link_tree(source: Path, target: Path, left_out: set[str]) -> None:
    """Make a directory of hard links to the files in `source`, except those directly in it with `left_out` names."""
    shutil.copytree(
        source,
        target,
        symlinks=True,
        copy_function=os.link,
        ignore=lambda at, _: left_out if Path(at) == source else set(),
    )
