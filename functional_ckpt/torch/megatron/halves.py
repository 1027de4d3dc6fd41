"""The halves of a checkpoint in Megatron's layout: where they lie, and that those of two saves never load together.

The sharded half is committed by its root; what lies beside it is written before, by other hands. So the root holds
digests of it: in the time between two saves to one directory they do not agree, and nothing is loaded.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from functional_ckpt.errors import CorruptionError, StorageError
from functional_ckpt.plan.manifest import FORMAT, Manifest
from functional_ckpt.run.policy import Commit
from functional_ckpt.store.base import UNSIZED, Store, storage_errors
from functional_ckpt.store.claim import Claim
from functional_ckpt.store.commit import MANIFEST, ROOT
from functional_ckpt.store.directories import check_exchange, remove_tree, sync_directory, why_fixed
from functional_ckpt.store.encoding import node_name
from functional_ckpt.store.opening import directory_of, local_path, open_store
from functional_ckpt.store.reading import read_manifest
from functional_ckpt.store.sweep import leftover_names
from functional_ckpt.store.temporary import claim_name, new_save_id, working_name
from functional_ckpt.torch.megatron.core import CONFIG_FNAME, CheckpointingConfig, maybe_load_config

__all__ = [
    "BACKEND",
    "COMMON",
    "COMMON_FILE",
    "OBJECTS",
    "VERSION",
    "attributes_for",
    "below",
    "check_halves",
    "commit_over",
    "format_of",
    "is_without_halves",
    "make_way",
    "root_of",
]

#: What ``metadata.json`` calls this format. Not "zarr": old versions of Megatron used that for another one.
BACKEND, VERSION = "functional_ckpt", 1
#: The common half as a checkpoint of its own, names that no stored array can have; and as Megatron writes it.
COMMON, OBJECTS, COMMON_FILE = ".common", ".objects", "common.pt"
#: Attribute of the root: name of a file beside it -> digest of what it held when the root was committed.
_ATTRIBUTE = f"{FORMAT}_beside"
_BESIDE = (COMMON_FILE, f"{COMMON}/{MANIFEST}", f"{OBJECTS}/{MANIFEST}")


def format_of(checkpoint_dir: str | Path) -> CheckpointingConfig | None:
    """Return what reads the checkpoint in a directory; None if there is none. Formats are told apart here only.

    A root that binds the common half is a whole checkpoint: it lacks ``metadata.json`` where the process was killed
    before Megatron wrote that. A root that binds nothing and lies alone is that of DCP or `functional_ckpt.save`.

    Raises
    ------
    CheckpointingException
        If ``metadata.json`` is torn, and the root does not say as much.

    Examples
    --------
    >>> import tempfile
    >>> format_of(tempfile.mkdtemp()) is None
    True
    """
    torn: CorruptionError | None = None
    try:
        config = maybe_load_config(checkpoint_dir)
    except CorruptionError as error:
        config, torn = None, error
    if config is None and open_store(checkpoint_dir).nbytes_of(ROOT) is not None:
        config = _format_of_root(checkpoint_dir)
    if config is None and torn is not None:
        raise torn
    return config


def _format_of_root(checkpoint_dir: str | Path) -> CheckpointingConfig | None:
    bound = _bound(read_manifest(checkpoint_dir)) or {}
    if COMMON_FILE in bound:
        return CheckpointingConfig(BACKEND, VERSION)
    ours = _BESIDE[1] in bound or is_without_halves(checkpoint_dir)
    return CheckpointingConfig(BACKEND, VERSION, BACKEND, VERSION) if ours else None


def is_without_halves(checkpoint_dir: str | Path) -> bool:
    """Tell whether a directory holds a checkpoint that was not written by Megatron's functions, but by DCP or `save`.

    Those write the common half first, so what they have left unfinished is none.

    Examples
    --------
    >>> import functional_ckpt
    >>> functional_ckpt.save({"step": 3}, "memory://halves-example")
    Manifest(...)
    >>> is_without_halves("memory://halves-example")
    True
    """
    store, directory = open_store(checkpoint_dir), directory_of(checkpoint_dir)
    if store.nbytes_of(ROOT) is None or (directory is not None and os.path.isdir(directory / COMMON)):
        return False
    return store.nbytes_of(f"{COMMON}/{ROOT}") is None and store.nbytes_of(COMMON_FILE) is None


def attributes_for(checkpoint_dir: str | Path) -> dict[str, Any] | None:
    """Return the attributes by which the root of a sharded half binds what lies beside it now; None for nothing."""
    found = _digests(checkpoint_dir)
    return {_ATTRIBUTE: found} if found else None


def check_halves(checkpoint_dir: str | Path) -> None:
    """Raise unless the sharded half is committed, and what lies beside it is what was saved with it.

    Roots of earlier versions bind nothing, and pass.

    Raises
    ------
    CheckpointingException
        If a save to this directory has not finished, or a file was changed.
    """
    bound = _bound(read_manifest(checkpoint_dir))
    if bound is None:
        return
    found = _digests(checkpoint_dir)
    for name in sorted({*bound, *found}):
        if bound.get(name) != found.get(name):
            raise CorruptionError(
                "the common half is not the one that was saved with the tensors: another save to this directory has "
                "not finished, or a file was changed", path=f"{checkpoint_dir}/{name}", expected=bound.get(name),
                found=found.get(name), remedy="Load another checkpoint; a save to this directory replaces this one",
            )  # fmt: skip


def root_of(checkpoint_dir: str | Path) -> bytes | None:
    """Return what tells the sharded half that is committed from another; None if there is none."""
    root = open_store(checkpoint_dir).read(ROOT)
    return None if root is None else xxhash.xxh3_128_digest(root)


def make_way(checkpoint_dir: str | Path, *stale: str) -> None:
    """Make what a directory holds no checkpoint of Megatron's any more, and remove `stale` halves.

    Their directories stay, empty: they tell that a root beside them is half of a checkpoint.
    """
    directory = directory_of(checkpoint_dir)
    if directory is None:
        return
    with storage_errors("making way for a save", str(directory)):
        for name in (CONFIG_FNAME, *stale):
            path = directory / name
            if not path.is_dir():
                path.unlink(missing_ok=True)
                continue
            for inner in path.iterdir():
                remove_tree(inner) if inner.is_dir() else inner.unlink()


def commit_over(checkpoint_dir: str | Path) -> Commit:
    """Return how to commit a sharded half: in place, or in one step instead of the one that is there.

    Where directories cannot be exchanged, the one that is there is removed.
    """
    store = open_store(checkpoint_dir)
    if store.nbytes_of(ROOT) is None or not store.capabilities.rename:
        return "marker"
    final = local_path(checkpoint_dir).resolve()
    with storage_errors("making way for a save", str(final)):
        if _can_be_exchanged(final):
            return "rename"
        _remove(store, final, [node_name(entry.spec.key) for entry in read_manifest(final).arrays])
    return "marker"


def _remove(store: Store, final: Path, nodes: Sequence[str]) -> None:
    """Remove a sharded half, its root first; one that is half removed is what a dead save has left, by its claim."""
    save_id = new_save_id()
    mine = claim_name(save_id)
    claim = Claim.take(final / mine, save_id)
    try:
        claim.name([*nodes, MANIFEST], durable=True)
        os.unlink(final / ROOT)
        sync_directory(final)
        store.delete([name for name in leftover_names(store, [mine]) if name != mine])
        sync_directory(final)  # a power cut must not bring back what no claim names
        claim.release()
    finally:
        claim.drop()


def _can_be_exchanged(final: Path) -> bool:
    if why_fixed(final) is not None:
        return False
    work = final.parent / working_name(final.name, new_save_id())
    try:
        os.mkdir(work)
        check_exchange(work)
    except (OSError, StorageError):
        return False
    finally:
        remove_tree(work)
    return True


def below(checkpoint_dir: str | Path, name: str) -> str:
    """Return the path of what lies below a directory.

    Examples
    --------
    >>> below("memory://a/", ".common")
    'memory://a/.common'
    """
    return f"{os.fspath(checkpoint_dir).rstrip('/')}/{name}"


def _bound(manifest: Manifest) -> dict[str, str] | None:
    found = json.loads(manifest.attributes).get(_ATTRIBUTE)
    return found if isinstance(found, dict) else None


def _digests(checkpoint_dir: str | Path) -> dict[str, str]:
    store, found = open_store(checkpoint_dir), {}
    for name in _BESIDE:
        nbytes = store.nbytes_of(name)
        if nbytes is not None:
            digest = xxhash.xxh3_128()
            store.scan(name, nbytes, digest.update) if nbytes != UNSIZED else digest.update(store.read(name) or b"")
            found[name] = digest.hexdigest()
    return found
