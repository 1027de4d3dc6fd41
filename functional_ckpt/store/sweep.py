"""`sweep`: remove what dead saves have left behind, and nothing that a live one claims or a commit published."""

import re
import shutil
import stat
from pathlib import Path

from functional_ckpt.errors import StorageError
from functional_ckpt.store.base import Store, storage_errors
from functional_ckpt.store.claim import claimed_nodes, is_live, is_live_in_memory
from functional_ckpt.store.files import NEW
from functional_ckpt.store.opening import local_path, open_store

__all__ = ["is_claim_name", "is_node_file", "leftover_names", "sweep"]

_SAVING = re.compile(r"\.(?P<name>.+)\.(?P<id>[0-9a-f]{16})\.(saving|claim|claim\.new)")
_IN_PLACE = re.compile(r"\.[0-9a-f]{16}\.claim(\.new)?")
# How our canonical JSON begins: other people have files of these names too.
_BEGINNINGS = {"manifest.json": b'{"aliases":[', "provenance.json": b'{"finished":'}
_HEADER = b'{"attributes":{"functional_ckpt":'
_NODE_FILE = re.compile(r"zarr\.json|c(\.\d+)*(\.__lock)?")
# Stands for what cannot be read, such as a pipe: nothing of ours begins so.
_UNREADABLE = b"?"


def sweep(path: str | Path) -> tuple[str, ...]:
    """Remove leftovers of dead saves in a directory, and return what was removed, sorted.

    In the parent of checkpoints these are the unpublished siblings of saves that nobody runs any more; in a
    directory that a save in ``marker`` mode left without a root, its arrays. Committed checkpoints, live
    saves and files of others stay.

    Examples
    --------
    >>> import tempfile
    >>> sweep(tempfile.mkdtemp())
    ()
    """
    if str(path).startswith("memory://"):
        store = open_store(path)
        return () if is_live_in_memory(store.url) else _sweep_in_place(store)
    root = local_path(path)
    with storage_errors("sweeping", str(root)):
        return tuple(sorted(_sweep_directory(root)))


def _sweep_directory(root: Path) -> list[str]:
    removed: list[str] = []
    for item in sorted(root.iterdir()) if root.is_dir() else ():
        match = _SAVING.fullmatch(item.name)
        if match is None or not _may_be_ours(item) or is_live(root / f".{match['name']}.{match['id']}.claim"):
            continue
        if item.name.endswith(".new") and is_live(item):  # a claim that is just being made
            continue
        shutil.rmtree(item) if item.is_dir() else item.unlink(missing_ok=True)
        removed.append(str(item))
    claims = [item for item in root.glob(".*.claim*") if is_claim_name(item.name) and _may_be_ours(item)]
    begun = bool(claims) or (root / f"zarr.json{NEW}").is_file()
    if begun and not any(is_live(claim) for claim in claims):
        removed += _sweep_in_place(open_store(root))
    return removed


def _may_be_ours(item: Path) -> bool:
    """Tell whether this is a plain file, or a directory where a save makes one: never a link or a pipe."""
    mode = item.lstat().st_mode
    return stat.S_ISDIR(mode) if item.name.endswith(".saving") else stat.S_ISREG(mode)


def _sweep_in_place(store: Store) -> tuple[str, ...]:
    names = leftover_names(store)
    store.delete(names)
    return tuple(f"{store.url}/{name}" for name in names)


def is_claim_name(name: str) -> bool:
    """Tell whether a file is named as the claim of a save in marker mode.

    Examples
    --------
    >>> is_claim_name(".0123456789abcdef.claim"), is_claim_name("a.claim")
    (True, False)
    """
    return _IN_PLACE.fullmatch(name) is not None


def is_node_file(name: str) -> bool:
    """Tell whether a save gives this name to a file of an array: metadata, a chunk, or TensorStore's lock of one.

    Examples
    --------
    >>> is_node_file("c.0.1"), is_node_file("notes.txt")
    (True, False)
    """
    return _NODE_FILE.fullmatch(name) is not None


def _content(store: Store, name: str) -> bytes:
    try:
        return store.read(name) or b""
    except StorageError:
        return _UNREADABLE


def _begins(data: bytes, beginning: bytes) -> bool:
    """Tell whether `data` begins so, or was torn off within it."""
    return beginning.startswith(data[: len(beginning)])


def _is_unnamed_root(store: Store, name: str) -> bool:
    """Tell whether this is a root of ours that was written but not yet, or already, linked to its name."""
    return name == f"zarr.json{NEW}" and _begins(_content(store, name), b'{"')


def leftover_names(store: Store, but: str | None = None) -> list[str]:
    """Return the objects that a save in marker mode wrote, if no root was ever published there; else none.

    Nothing is a leftover unless a claim (other than `but`), or a root that never got its name, says that a save began
    here. Ours are then manifest and provenance, and nodes of which every object has the name of a chunk or of array
    metadata: those that a claim names, or, where no claim names any, those with metadata of ours. Claims come last, so
    that what a killed deletion leaves can still be told.
    """
    names = sorted(store.names())
    claims = {name: _content(store, name) for name in names if is_claim_name(name) and name != but}
    claims = {name: data for name, data in claims.items() if data != _UNREADABLE}
    signs = [*(name for name in names if _is_unnamed_root(store, name)), *claims]
    memory = store.url.startswith("memory://")  # nobody else writes there, and no claim is needed
    if "zarr.json" in names or not (signs or memory):
        return signs
    torn_too = memory or bool(claims)
    found = [name for name in names if name in _BEGINNINGS and _is_ours(store, name, _BEGINNINGS[name], torn_too)]
    claimed = {node for data in claims.values() for node in claimed_nodes(data)}
    nodes: dict[str, list[str]] = {}
    for name in names:
        node, _, leaf = name.rpartition("/")
        if node and "/" not in node:
            nodes.setdefault(node, []).append(leaf)
    for node, leaves in nodes.items():
        known = node in claimed if claimed else True
        if known and all(map(is_node_file, leaves)):
            header = f"{node}/zarr.json"
            if _is_ours(store, header, _HEADER, memory or node in claimed):
                found += [f"{node}/{leaf}" for leaf in leaves]
    return found + signs


def _is_ours(store: Store, name: str, beginning: bytes, torn_too: bool) -> bool:
    """Tell whether an object begins as we write it; with `torn_too` also one that was torn off there, or is missing."""
    data = _content(store, name)
    return data.startswith(beginning) or (torn_too and _begins(data, beginning))
