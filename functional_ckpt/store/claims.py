"""The claims of saves in place: which kind a store has, and how claims are taken, found and judged."""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import cast

from functional_ckpt.store.base import SaveClaim, Store
from functional_ckpt.store.directories import is_directory, make_directories
from functional_ckpt.store.file_claim import Claim, claimed_by, is_live_in_memory, save_id_of
from functional_ckpt.store.files import NEW, FileStore
from functional_ckpt.store.lease import Lease, LeasedStore, expired
from functional_ckpt.store.temporary import claim_name, is_claim_name

__all__ = ["claims_in", "has_claim", "may_be_ours", "names_in", "take_claim"]


def take_claim(store: Store, save_id: str, durable: bool) -> tuple[SaveClaim, list[str] | None]:
    """Claim the place of a store for a save; a directory that is missing is made.

    Returns the names in the place too, or None if they have not been listed.
    """
    if isinstance(store, FileStore):
        make_directories(store.root, durable)
        return Claim.take(store.root / claim_name(save_id), save_id), None
    if not store.capabilities.shared:
        return Claim.take_in_memory(store.url), None
    return Lease.take(cast("LeasedStore", store), save_id)


def has_claim(store: Store, save_id: str) -> bool:
    """Tell whether the claim of a save is found in a store, as seen from here."""
    label = claim_name(save_id)
    if isinstance(store, FileStore):
        return claimed_by(store.root / label, save_id) and is_directory(store.root)
    return not store.capabilities.shared or save_id_of(store.read(label) or b"") == save_id


def claims_in(
    store: Store, but: str | None = None, there: Sequence[str] | None = None
) -> AbstractContextManager[tuple[list[str], list[str]]]:
    """Hold the claims of dead saves in a place, so that nobody else cleans up after them; also return the live ones.

    `there` are the names in an object store, if they were listed already.
    """
    if isinstance(store, FileStore):
        return _dead_claims(store.root, but)
    if not store.capabilities.shared:
        return _in_memory(store.url, but)
    return expired(cast("LeasedStore", store), but, there)


@contextmanager
def _in_memory(url: str, but: str | None) -> Iterator[tuple[list[str], list[str]]]:
    yield [], [url] if but is None and is_live_in_memory(url) else []


def names_in(root: Path) -> list[str]:
    """Return the names in a directory, sorted; none if there is no directory."""
    try:
        return sorted(os.listdir(root))
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextmanager
def _dead_claims(root: Path, but: str | None = None) -> Iterator[tuple[list[str], list[str]]]:
    """Hold the claims of dead saves in a directory, as `claims_in` does.

    A claim that is being created counts as neither: its creator will find ours.
    """
    dead: list[str] = []
    live: list[str] = []
    with ExitStack() as held:
        for name in names_in(root):
            if not is_claim_name(name) or name == but or not may_be_ours(root / name):
                continue
            claim = Claim.adopt(root / name)
            if claim is not None:
                held.callback(claim.drop)
                dead.append(name)
            elif not name.endswith(NEW) and (root / name).exists():
                live.append(name)
        yield dead, live


def may_be_ours(item: Path) -> bool:
    """Tell whether this is a plain file, or a directory where a save makes one: never a link or a pipe."""
    try:
        mode = item.lstat().st_mode
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(mode) if item.name.endswith(".saving") else stat.S_ISREG(mode)
