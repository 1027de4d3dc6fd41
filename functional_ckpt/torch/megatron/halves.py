"""The halves of a checkpoint in Megatron's layout: their places, and the check that both are of one save.

The sharded half is committed by its root; Megatron or a strategy writes the files of the common half before. So the
root holds digests of them: while another save to the directory is unfinished they do not match, and a load fails.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from functional_ckpt.errors import AlreadyExistsError, CorruptionError, StorageError
from functional_ckpt.run.policy import Commit
from functional_ckpt.store.access import StorePolicy
from functional_ckpt.store.base import Store, storage_errors
from functional_ckpt.store.beside import BESIDE, bound_beside, digests_beside, require_beside
from functional_ckpt.store.claims import take_claim
from functional_ckpt.store.commit import clear_in_place
from functional_ckpt.store.directories import check_exchange, remove_tree, sync_directory, why_fixed
from functional_ckpt.store.encoding import MANIFEST, ROOT, node_name
from functional_ckpt.store.file_claim import Claim
from functional_ckpt.store.opening import directory_of, local_path, open_store
from functional_ckpt.store.reading import read_manifest
from functional_ckpt.store.sweep import leftover_names
from functional_ckpt.store.temporary import claim_name, new_save_id, working_name
from functional_ckpt.torch.megatron.core import CONFIG_FNAME, CheckpointingConfig, read_config

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
    "note_common",
    "root_of",
]

#: The name of this format in ``metadata.json``. Not "zarr": old versions of Megatron used that for another format.
BACKEND, VERSION = "functional_ckpt", 1
#: The directories of a common half that is a checkpoint (no array can have these names); and Megatron's own file.
COMMON, OBJECTS, COMMON_FILE = ".common", ".objects", "common.pt"
_BESIDE = (COMMON_FILE, f"{COMMON}/{MANIFEST}", f"{OBJECTS}/{MANIFEST}")

# Where this process has saved a common half of which the sharded half is still to come: URL -> its manifest's digest.
_COMMON_SAVED: dict[str, str] = {}


def format_of(checkpoint_dir: str | Path, access: StorePolicy = StorePolicy()) -> CheckpointingConfig | None:
    """Return the format of the checkpoint in a directory; None if there is none. Only this function detects formats.

    A root with digests of the common half is a complete checkpoint: it lacks ``metadata.json`` if the process was
    killed before Megatron wrote that. A root without such digests and without a common half was written through DCP or
    by `functional_ckpt.save`.

    Raises
    ------
    CheckpointingException
        If ``metadata.json`` is damaged, and the root does not determine the format either.

    Examples
    --------
    >>> import tempfile
    >>> format_of(tempfile.mkdtemp()) is None
    True
    """
    torn: CorruptionError | None = None
    store = open_store(checkpoint_dir, access=access)
    try:
        config = read_config(store)
    except CorruptionError as error:
        config, torn = None, error
    if config is None and store.nbytes_of(ROOT) is not None:
        config = _format_of_root(checkpoint_dir, access)
    if config is None and torn is not None:
        raise torn
    return config


def _format_of_root(checkpoint_dir: str | Path, access: StorePolicy) -> CheckpointingConfig | None:
    bound = bound_beside(read_manifest(checkpoint_dir, store=access)) or {}
    if COMMON_FILE in bound:
        return CheckpointingConfig(BACKEND, VERSION)
    ours = _BESIDE[1] in bound or is_without_halves(checkpoint_dir, access)
    return CheckpointingConfig(BACKEND, VERSION, BACKEND, VERSION) if ours else None


def is_without_halves(checkpoint_dir: str | Path, access: StorePolicy = StorePolicy()) -> bool:
    """Tell whether a directory holds a checkpoint written through DCP or by `save`, not by Megatron's functions.

    Megatron's functions write the common half first, so an unfinished save of theirs has one.

    Examples
    --------
    >>> import functional_ckpt
    >>> functional_ckpt.save({"step": 3}, "memory://halves-example")
    Manifest(...)
    >>> is_without_halves("memory://halves-example")
    True
    """
    store, directory = open_store(checkpoint_dir, access=access), directory_of(checkpoint_dir)
    if store.nbytes_of(ROOT) is None or (directory is not None and os.path.isdir(directory / COMMON)):
        return False
    return store.nbytes_of(f"{COMMON}/{ROOT}") is None and store.nbytes_of(COMMON_FILE) is None


def note_common(checkpoint_dir: str | Path, digest: str) -> None:
    """Remember the common half that this process has saved, by its manifest's digest, until its sharded half is."""
    _COMMON_SAVED[open_store(checkpoint_dir).url] = digest


def attributes_for(checkpoint_dir: str | Path, access: StorePolicy = StorePolicy()) -> dict[str, Any] | None:
    """Return the attributes of the root that hold the digests of the files beside it; None if there are no files.

    Raises
    ------
    AlreadyExistsError
        If the common half is not the one that this process has saved: two saves write into one directory.
    """
    store = open_store(checkpoint_dir, access=access)
    found, mine = digests_beside(store, _BESIDE), _COMMON_SAVED.pop(store.url, None)
    if mine is not None:
        require_beside(store, {_BESIDE[1]: mine}, found)
    return {BESIDE: found} if found else None


def check_halves(checkpoint_dir: str | Path, access: StorePolicy = StorePolicy()) -> None:
    """Raise unless the sharded half is committed, and the files beside it are those that were saved with it.

    Roots of earlier versions have no digests, and pass.

    Raises
    ------
    CheckpointingException
        If a save to this directory has not finished, or a file was changed.
    """
    bound = bound_beside(read_manifest(checkpoint_dir, store=access))
    if bound is None:
        return
    found = digests_beside(open_store(checkpoint_dir, access=access), _BESIDE)
    for name in sorted({*bound, *found}):
        if bound.get(name) != found.get(name):
            raise CorruptionError(
                "the common half is not the one that was saved with the tensors: another save to this directory has "
                "not finished, or a file was changed",
                path=f"{checkpoint_dir}/{name}",
                expected=bound.get(name),
                found=found.get(name),
                remedy="Load another checkpoint; a save to this directory replaces this one",
            )


def root_of(checkpoint_dir: str | Path, access: StorePolicy = StorePolicy()) -> bytes | None:
    """Return the identity of the committed sharded half; None if there is none."""
    root = open_store(checkpoint_dir, access=access).read(ROOT)
    return None if root is None else xxhash.xxh3_128_digest(root)


def make_way(checkpoint_dir: str | Path, *stale: str, access: StorePolicy = StorePolicy()) -> None:
    """Invalidate the checkpoint of Megatron in a directory, and remove `stale` halves.

    Their directories stay, empty: they show that a root beside them is only half of a checkpoint. Where nothing can be
    renamed, in an object store, a committed checkpoint is never replaced.

    Raises
    ------
    AlreadyExistsError
        In an object store, if the place holds a committed checkpoint, or another save is running there.
    """
    directory = directory_of(checkpoint_dir)
    if COMMON in stale:
        _COMMON_SAVED.pop(open_store(checkpoint_dir).url, None)
    if directory is None:
        _make_way_among_objects(open_store(checkpoint_dir, access=access), stale, access)
        return
    with storage_errors("making way for a save", str(directory)):
        for name in (CONFIG_FNAME, *stale):
            path = directory / name
            if not path.is_dir():
                path.unlink(missing_ok=True)
                continue
            for inner in path.iterdir():
                remove_tree(inner) if inner.is_dir() else inner.unlink()


def _make_way_among_objects(store: Store, stale: Sequence[str], access: StorePolicy) -> None:
    """Remove what a save that came to nothing has left, under a claim: it may be that of a save that is running."""
    if store.nbytes_of(ROOT) is not None:
        raise AlreadyExistsError(
            "the path holds a committed checkpoint or Zarr group", path=store.url,
            remedy="Save to a new path, such as one for each step: a checkpoint in an object store is not replaced",
        )  # fmt: skip

    def left() -> list[str]:
        return [name for name in store.names() if name.partition("/")[0] in (CONFIG_FNAME, *stale)]

    if not left():
        return
    claim, there = take_claim(store, new_save_id(), False)
    try:
        clear_in_place(store, claim.label, there)
        for name in stale:
            clear_in_place(open_store(below(store.url, name), access=access), "")
        store.delete(left())
    except BaseException as error:
        claim.release_after(error)
        raise
    claim.release()


def commit_over(checkpoint_dir: str | Path, access: StorePolicy = StorePolicy()) -> Commit:
    """Return how to commit a sharded half: in place, or in one step that replaces an existing one.

    If directories cannot be exchanged, the existing half is removed.
    """
    store = open_store(checkpoint_dir, access=access)
    if not store.capabilities.rename or store.nbytes_of(ROOT) is None:
        return "marker"
    final = local_path(checkpoint_dir).resolve()
    with storage_errors("making way for a save", str(final)):
        if _can_be_exchanged(final):
            return "rename"
        _remove(store, final, [node_name(entry.spec.key) for entry in read_manifest(final).arrays])
    return "marker"


def _remove(store: Store, final: Path, nodes: Sequence[str]) -> None:
    """Remove a sharded half, its root first, under a claim: if the process is killed, the rest counts as a leftover."""
    save_id = new_save_id()
    mine = claim_name(save_id)
    claim = Claim.take(final / mine, save_id)
    try:
        claim.name([*nodes, MANIFEST], durable=True)
        os.unlink(final / ROOT)
        sync_directory(final)
        store.delete([name for name in leftover_names(store, [mine]) if name != mine])
        sync_directory(final)  # a power cut must not restore files that no claim names
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
    """Return the path of `name` below a directory.

    Examples
    --------
    >>> below("memory://a/", ".common")
    'memory://a/.common'
    """
    return f"{os.fspath(checkpoint_dir).rstrip('/')}/{name}"
