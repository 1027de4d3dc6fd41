"""`sweep`: remove the leftovers of dead saves, never files of live saves or of committed checkpoints."""

import re
import warnings
from collections.abc import Collection
from pathlib import Path

from functional_ckpt.errors import CheckpointWarning, StorageError
from functional_ckpt.store.access import StorePolicy
from functional_ckpt.store.base import Store, storage_errors
from functional_ckpt.store.claims import claims_in, may_be_ours, names_in
from functional_ckpt.store.directories import remove_tree
from functional_ckpt.store.encoding import BEGINNINGS
from functional_ckpt.store.file_claim import claimed_nodes, state_of
from functional_ckpt.store.files import NEW
from functional_ckpt.store.opening import directory_of, open_store
from functional_ckpt.store.temporary import is_claim_name, part_of

__all__ = ["is_node_file", "leftover_names", "remove_leftovers", "sweep"]

# How the metadata of an array begin.
_HEADER = b'{"attributes":{"functional_ckpt":'
_NODE_FILE = re.compile(r"zarr\.json|c(\.\d+)*(\.__lock)?")
# Stands for the content of a file that cannot be read, such as a pipe: no file of functional_ckpt begins so.
_UNREADABLE = b"?"


def sweep(path: str | Path, *, store: StorePolicy = StorePolicy()) -> tuple[str, ...]:
    """Remove leftovers of dead saves in a directory, and return what was removed, sorted.

    In the parent directory of checkpoints, leftovers are the unpublished directories of saves that were killed; in a
    directory that a save in ``marker`` mode left without a root, its arrays. Committed checkpoints, live saves and
    foreign files stay. In an object store it looks at everything below the path. Whether a saver is alive it knows at
    once, or after waiting as long as the saver's lease (`StorePolicy.lease_s`): this may take a minute.

    Parameters
    ----------
    path
        The directory that holds the checkpoints, or one that a save in ``marker`` mode wrote into.
    store
        How to reach an object store, see `StorePolicy`.

    Warns
    -----
    CheckpointWarning
        For each claim that was made on another machine: its lock may be invisible here, so the files of its save stay.

    Examples
    --------
    >>> import tempfile
    >>> sweep(tempfile.mkdtemp())
    ()
    """
    root = directory_of(path)
    if root is None:
        return tuple(sorted(_sweep_below(path, store)))
    with storage_errors("sweeping", str(root)):
        removed, doubtful = _sweep_directory(root)
    for claim in dict.fromkeys(doubtful):
        warnings.warn(
            f"the files of the save with the claim {claim} were left: it ran on another machine, whose locks may be "
            "invisible here. Sweep there; or, if that save is dead, delete the claim and sweep again",
            CheckpointWarning,
            stacklevel=2,
        )
    return tuple(sorted(removed))


def _sweep_directory(root: Path) -> tuple[list[str], list[Path]]:
    """Return what was removed, and the claims whose state only another machine can tell."""
    removed: list[str] = []
    doubtful: list[Path] = []
    for name in names_in(root):
        claim_name = part_of(name)
        if claim_name is None or not may_be_ours(root / name):
            continue
        claim = root / claim_name
        # Beside its claim also the file of a claim that is being created.
        states = {state_of(claim), state_of(root / name) if name.endswith(NEW) else "dead"}
        if states == {"dead"}:
            (remove_tree if name.endswith(".saving") else _remove_file)(root / name)
            removed.append(str(root / name))
        elif "foreign" in states:
            doubtful.append(claim)
    with claims_in(open_store(root)) as (dead, live):
        if not live and (dead or f"zarr.json{NEW}" in names_in(root)):
            removed += _sweep_in_place(open_store(root), dead)
    return removed, doubtful + [root / name for name in live if state_of(root / name) == "foreign"]


def _sweep_below(path: str | Path, policy: StorePolicy) -> list[str]:
    """Remove the leftovers in a place, and in those below it that hold a claim."""
    whole = open_store(path, access=policy)
    claims = [name for name in whole.names() if is_claim_name(name.rpartition("/")[2])]
    places = sorted({"", *(name.rpartition("/")[0] for name in claims)})
    removed: list[str] = []
    for below in places if whole.capabilities.shared else [""]:
        store = open_store(f"{whole.url}/{below}".rstrip("/"), access=policy)
        with claims_in(store) as (dead, live):
            if not live and (dead or not whole.capabilities.shared):
                removed += _sweep_in_place(store, dead)
    return removed


def _remove_file(path: Path) -> None:
    path.unlink(missing_ok=True)


def _sweep_in_place(store: Store, dead: Collection[str] = ()) -> tuple[str, ...]:
    return tuple(f"{store.url}/{name}" for name in remove_leftovers(store, dead))


def remove_leftovers(store: Store, dead: Collection[str]) -> list[str]:
    """Delete what `leftover_names` names, and return it: claims last, so that it is known what a killed one leaves."""
    names = leftover_names(store, dead)
    signs = [name for name in names if is_claim_name(name)]
    store.delete([name for name in names if name not in signs])
    store.delete(signs)
    return names


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
    """Tell whether `data` begins with `beginning`, or is a truncated part of it; zeros may follow after a power cut."""
    return beginning.startswith(data.rstrip(b"\0")[: len(beginning)])


def _is_unnamed_root(store: Store, name: str) -> bool:
    """Tell whether this is the file of a root that `publish` has written and links, or has linked, to its name."""
    return name == f"zarr.json{NEW}" and _begins(_content(store, name), b'{"')


def leftover_names(store: Store, dead: Collection[str]) -> list[str]:
    """Return the objects that saves in marker mode wrote, if no root was ever published there; else none.

    There are leftovers only if a claim in `dead`, or a root without its final name, shows that a save began here. They
    are manifest and provenance, and nodes of which every object has the name of a chunk or of array metadata: those
    that a claim names, or, if all claims are lost or truncated, those whose metadata functional_ckpt wrote. A node that
    a claim names may be an empty directory, whose name ends with a slash. Claims come last, so that leftovers can still
    be recognised if the deletion is killed.
    """
    names = sorted(store.names())
    named = [claimed_nodes(_content(store, n)) for n in names if n in dead and not n.endswith(NEW)]
    unnamed_roots = [name for name in names if _is_unnamed_root(store, name)]
    signs = [*unnamed_roots, *(name for name in names if name in dead)]
    memory = store.url.startswith("memory://")  # only this process writes there, and no claim is needed
    # A save whose claim names no nodes was killed before it could write.
    begun = memory or bool(unnamed_roots) or any(nodes != [] for nodes in named)
    if "zarr.json" in names or not begun:
        return signs
    torn_too = memory or bool(named)
    found = [name for name in names if name in BEGINNINGS and _is_ours(store, name, BEGINNINGS[name], torn_too)]
    claimed = {node for nodes in named for node in nodes or ()}
    known = None if memory or None in named or not named else claimed
    for node, leaves in _nodes(names).items():
        if (known is None or node in known) and all(map(is_node_file, leaves)):
            header = f"{node}/zarr.json"
            if _is_ours(store, header, _HEADER, memory or node in claimed):
                found += [f"{node}/{leaf}" for leaf in leaves]
    return found + _empty(store, claimed.difference(name.partition("/")[0] for name in names)) + signs


def _empty(store: Store, nodes: Collection[str]) -> list[str]:
    """Return those of `nodes`, in none of which is an object, that are directories."""
    if not nodes or not store.capabilities.rename:
        return []
    return [name for name in sorted(store.children()) if name.endswith("/") and name[:-1] in nodes]


def _nodes(names: Collection[str]) -> dict[str, list[str]]:
    """Return the objects one level below the root, by their directory."""
    nodes: dict[str, list[str]] = {}
    for name in names:
        node, _, leaf = name.rpartition("/")
        if node and "/" not in node:
            nodes.setdefault(node, []).append(leaf)
    return nodes


def _is_ours(store: Store, name: str, beginning: bytes, torn_too: bool) -> bool:
    """Tell whether an object begins as a save writes it; with `torn_too` also if it is truncated there, or missing."""
    data = _content(store, name)
    return data.startswith(beginning) or (torn_too and _begins(data, beginning))
