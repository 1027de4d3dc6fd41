"""Remove arrays from a committed checkpoint, so that a reader finds it with all of them or with none."""

import json
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

import attrs

from functional_ckpt.errors import KeyMismatchError
from functional_ckpt.store.base import storage_errors
from functional_ckpt.store.claim import Claim
from functional_ckpt.store.commit import MANIFEST, ROOT, manifest_digest, root_metadata
from functional_ckpt.store.directories import exchange_paths, sync_directory
from functional_ckpt.store.encoding import node_name
from functional_ckpt.store.files import FileStore
from functional_ckpt.store.opening import local_path
from functional_ckpt.store.reading import read_manifest

__all__ = ["remove_arrays"]


def remove_arrays(path: str | Path, keys: Iterable[str]) -> None:
    """Remove the arrays of these keys from the checkpoint at `path`, and nothing else that lies there.

    A directory of hard links to what stays, with a manifest and root of its own, takes the place of the old one in one
    step. Killed before it, the old checkpoint stands, after it the new one; the rest is for `functional_ckpt.sweep`.

    Raises
    ------
    CheckpointError
        If there is no checkpoint or no such array, or the file system cannot exchange directories.

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
    final = local_path(path).resolve()
    manifest = read_manifest(final)
    unknown = sorted(gone - {entry.spec.key for entry in manifest.arrays})
    if unknown:
        raise KeyMismatchError("the checkpoint has no such array", unknown[0], path=str(final))
    if not gone:
        return
    kept = tuple(entry for entry in manifest.arrays if entry.spec.key not in gone)
    aliases = tuple(alias for alias in manifest.aliases if alias.target not in gone)
    text = attrs.evolve(manifest, arrays=kept, aliases=aliases).to_json()
    consolidated = "consolidated_metadata" in json.loads((final / ROOT).read_bytes())
    root = root_metadata(attrs.evolve(manifest, arrays=kept, aliases=aliases), manifest_digest(text), consolidated)
    _replace(final, {node_name(key) for key in gone}, {MANIFEST: text, ROOT: root})


def _replace(final: Path, nodes: set[str], files: dict[str, bytes]) -> None:
    """Exchange a directory for one without `nodes` and with other `files`."""
    save_id = secrets.token_hex(8)
    work = final.parent / f".{final.name}.{save_id}.saving"
    with storage_errors("removing arrays", str(final)):
        claim = Claim.take(final.parent / f".{final.name}.{save_id}.claim", save_id)
        try:
            left_out = shutil.ignore_patterns(*files)
            shutil.copytree(
                final, work, symlinks=True, copy_function=os.link,
                ignore=lambda at, names: {*nodes, *left_out(at, names)} if Path(at) == final else set(),
            )  # fmt: skip
            store = FileStore(work, "fsync")
            for name, data in files.items():
                store.create(name, [memoryview(data)], len(data))
            store.flush()
            exchange_paths(work, final)
            sync_directory(final.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
            claim.release()
