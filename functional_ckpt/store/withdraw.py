"""Withdraw a committed checkpoint, to save another in its place where directories cannot be exchanged.

Its root goes first. What is left then is what a killed save leaves in place, with a claim that names it.
"""

from collections.abc import Collection
from pathlib import Path

from functional_ckpt.store.base import Store, storage_errors
from functional_ckpt.store.claim import Claim
from functional_ckpt.store.directories import sync_directory
from functional_ckpt.store.sweep import is_node_file
from functional_ckpt.store.target import MANIFEST, METADATA_FILE, METADATA_TEXT, PROVENANCE, ROOT

__all__ = ["names_of_others", "withdraw"]


def names_of_others(store: Store, nodes: Collection[str]) -> list[str]:
    """Return the objects that are no part of the checkpoint in a store, whose nodes these are.

    Examples
    --------
    >>> import functional_ckpt, numpy
    >>> from functional_ckpt.store.opening import open_store
    >>> _ = functional_ckpt.save({"w": numpy.ones(2)}, "memory://others-example")
    >>> names_of_others(open_store("memory://others-example"), ["w"])
    []
    """
    return [name for name in store.names() if not _belongs_to(store, nodes, name)]


def _belongs_to(store: Store, nodes: Collection[str], name: str) -> bool:
    if name == METADATA_FILE:
        return store.read(name) == METADATA_TEXT
    node, _, leaf = name.partition("/")
    return name in (ROOT, MANIFEST, PROVENANCE) or (node in nodes and is_node_file(leaf))


def withdraw(store: Store, claim: Claim, nodes: Collection[str], durable: bool) -> None:
    """Take away the root of a checkpoint with these `nodes`; `claim` names them first, so that they can be removed."""
    if claim.path is not None:
        claim.name([*sorted(nodes), MANIFEST], durable)
    store.delete([ROOT])
    if durable and claim.path is not None:
        with storage_errors("syncing", store.url):
            # Before a chunk goes: after a power cut there must be no root of a checkpoint that lacks some.
            sync_directory(Path(store.url))
