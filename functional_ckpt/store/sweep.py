"""`sweep`: remove what dead saves have left behind, and nothing that a live one claims or a commit published."""

import re
import shutil
from pathlib import Path

from functional_ckpt.store.base import Store
from functional_ckpt.store.claim import claimed_nodes, is_live
from functional_ckpt.store.files import NEW
from functional_ckpt.store.opening import local_path, open_store

__all__ = ["is_claim_name", "leftover_names", "sweep"]

_SAVING = re.compile(r"\.(?P<name>.+)\.(?P<id>[0-9a-f]{16})\.(saving|claim|claim\.new)")
_IN_PLACE = re.compile(r"\.[0-9a-f]{16}\.claim(\.new)?")
# How our canonical JSON begins: other people have files of these names too.
_BEGINNINGS = {"manifest.json": b'{"aliases":[', "provenance.json": b'{"finished":'}
_HEADER = b'{"attributes":{"functional_ckpt":'
_OURS = b'"functional_ckpt"'
_CHUNK = re.compile(r"c(\.\d+)*(\.__lock)?")


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
        return _sweep_in_place(store)
    root = local_path(path)
    removed: list[str] = []
    for item in sorted(root.iterdir()) if root.is_dir() else ():
        match = _SAVING.fullmatch(item.name)
        if match is None or is_live(root / f".{match['name']}.{match['id']}.claim"):
            continue
        if item.name.endswith(".new") and is_live(item):  # a claim that is just being made
            continue
        shutil.rmtree(item) if item.is_dir() else item.unlink(missing_ok=True)
        removed.append(str(item))
    claims = [item for item in root.glob(".*.claim*") if is_claim_name(item.name)]
    begun = bool(claims) or (root / f"zarr.json{NEW}").is_file()
    if begun and not any(is_live(claim) for claim in claims):
        removed += _sweep_in_place(open_store(root))
    return tuple(sorted(removed))


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


def _is_ours(store: Store, name: str) -> bool:
    return _begins(store.read(name) or b"", _BEGINNINGS[name])


def _begins(data: bytes, beginning: bytes) -> bool:
    """Tell whether `data` begins so, or was torn off within it."""
    return beginning.startswith(data[: len(beginning)])


def _is_unnamed_root(store: Store, name: str) -> bool:
    """Tell whether this is a root of ours that was written but not yet, or already, linked to its name."""
    return name == f"zarr.json{NEW}" and _begins(store.read(name) or b"", b'{"')


def leftover_names(store: Store) -> list[str]:
    """Return the objects that a save in marker mode wrote, if no root was ever published there; else none.

    Our objects are manifest and provenance (whole or torn), claims, a root that never got its name, and nodes of which
    every object has the name of a chunk or of array metadata that carries our attribute or is torn. A node without
    metadata is ours if a claim names it.
    """
    names = sorted(store.names())
    if "zarr.json" in names:
        return [name for name in names if is_claim_name(name) or _is_unnamed_root(store, name)]
    memory = store.url.startswith("memory://")  # nobody else writes there, and no claim is needed
    claimed = {node for name in names if is_claim_name(name) for node in claimed_nodes(store.read(name) or b"")}
    nodes: dict[str, list[str]] = {}
    for name in names:
        node, _, leaf = name.rpartition("/")
        if node and "/" not in node:
            nodes.setdefault(node, []).append(leaf)
    found = [
        name
        for name in names
        if is_claim_name(name) or _is_unnamed_root(store, name) or (name in _BEGINNINGS and _is_ours(store, name))
    ]
    for node, leaves in nodes.items():
        if all(_CHUNK.fullmatch(leaf) or leaf == "zarr.json" for leaf in leaves):
            header = store.read(f"{node}/zarr.json")
            known = node in claimed or memory if header is None else _begins(header, _HEADER) or _OURS in header
            if known:
                found += [f"{node}/{leaf}" for leaf in leaves]
    return found
