"""Withdraw a committed checkpoint, to save another in its place where directories cannot be exchanged.

Its root goes first. What is left then is what a killed save leaves in place, with a claim that names it.
"""

import json
from collections.abc import Collection
from pathlib import Path

from functional_ckpt.errors import AlreadyExistsError, CheckpointError
from functional_ckpt.plan.manifest import FORMAT, Manifest
from functional_ckpt.store.base import Store, storage_errors
from functional_ckpt.store.claim import Claim
from functional_ckpt.store.directories import sync_directory
from functional_ckpt.store.encoding import node_name
from functional_ckpt.store.sweep import is_node_file
from functional_ckpt.store.target import MANIFEST, PROVENANCE, ROOT, manifest_digest

__all__ = ["belongs_to", "committed_nodes", "withdraw"]


def committed_nodes(store: Store) -> frozenset[str]:
    """Return the names of the nodes of the checkpoint that is committed here.

    Raises
    ------
    AlreadyExistsError
        If the root is not that of a checkpoint of ours, or the manifest not the one that it names.
    """
    data, text = store.read(MANIFEST) or b"", store.read(ROOT) or b""
    try:
        if json.loads(text)["attributes"][FORMAT]["manifest"] == manifest_digest(data):
            return frozenset(node_name(entry.spec.key) for entry in Manifest.from_json(data).arrays)
    except (ValueError, KeyError, TypeError, RecursionError, CheckpointError):
        pass
    raise AlreadyExistsError(
        "the path holds a Zarr group that is no checkpoint of functional_ckpt, or a damaged one", path=store.url,
        remedy="Save under a new path; what is not known to be ours is never replaced",
    )  # fmt: skip


def belongs_to(nodes: Collection[str], name: str) -> bool:
    """Tell whether an object is part of a checkpoint with these nodes.

    Examples
    --------
    >>> [belongs_to({"w"}, name) for name in ("w/c.0", "manifest.json", "w/notes.txt", "common.pt")]
    [True, True, False, False]
    """
    node, _, leaf = name.partition("/")
    return name in (ROOT, MANIFEST, PROVENANCE) or (node in nodes and is_node_file(leaf))


def withdraw(store: Store, claim: Claim, nodes: Collection[str], durable: bool) -> None:
    """Take away the root of a checkpoint with these `nodes`; `claim` names them first, so that they can be removed."""
    if claim.path is not None:
        claim.name(sorted(nodes), durable)
    store.delete([ROOT])
    if durable and claim.path is not None:
        with storage_errors("syncing", store.url):
            # Before a chunk goes: after a power cut there must be no root of a checkpoint that lacks some.
            sync_directory(Path(store.url))
