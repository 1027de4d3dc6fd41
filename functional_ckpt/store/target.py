"""The place of a checkpoint: what may be replaced there, and the step in which a finished directory takes it."""

import json
import os
import stat
from collections.abc import Callable
from errno import EEXIST, ENOTDIR, ENOTEMPTY
from pathlib import Path

import attrs
import xxhash

from functional_ckpt.errors import AlreadyExistsError, CheckpointError, StorageError
from functional_ckpt.plan.manifest import FORMAT, Manifest
from functional_ckpt.store.base import storage_errors
from functional_ckpt.store.directories import (
    Identity,
    exchange_paths,
    identity_of,
    is_directory,
    is_mount_point,
    remove_tree,
    sync_directory,
)
from functional_ckpt.store.encoding import node_name
from functional_ckpt.store.files import FileStore
from functional_ckpt.store.sweep import is_node_file
from functional_ckpt.store.temporary import is_claim_name

__all__ = [
    "MANIFEST",
    "PROVENANCE",
    "ROOT",
    "Replaceable",
    "check_target",
    "exchange",
    "manifest_digest",
    "put_in_place",
    "synced",
]

ROOT, MANIFEST, PROVENANCE = "zarr.json", "manifest.json", "provenance.json"


@attrs.frozen
class Replaceable:
    """What a save may replace: what was there when it began, and what a save of `earlier`, begun before it, puts there.

    So of two saves to one path the one that began last stays, whichever ends last.
    """

    identity: Identity | None
    earlier: tuple[str, ...]

    def require(self, found_at: Path, final: Path) -> Identity | None:
        """Return what tells the checkpoint at `found_at` from others; fail if it was saved to `final` too late."""
        found = identity_of(found_at)
        if found == self.identity:
            return found
        try:
            save_id = json.loads(FileStore(found_at).read(PROVENANCE) or b"{}").get("save_id")
        except (ValueError, RecursionError, AttributeError):
            save_id = None
        if save_id in self.earlier:
            return found
        raise AlreadyExistsError(
            "another checkpoint was saved here after this save had begun", path=str(final), found=f"save {save_id}",
            remedy="It stays; save again if this one is to replace it",
        )  # fmt: skip


def manifest_digest(data: bytes) -> str:
    """Return the digest of a manifest's text, as the root records it."""
    return xxhash.xxh3_128_hexdigest(data)


def check_target(final: Path, overwrite: bool) -> None:
    """Fail unless a directory may take this place: nothing, an empty one, or with `overwrite` a checkpoint of ours.

    Raises
    ------
    AlreadyExistsError
        If something else is there, or what nothing can replace.
    """
    try:
        found = os.stat(final)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode):
        raise AlreadyExistsError("the path is a file", path=str(final), remedy="Save under a new path")
    if is_mount_point(final) or os.path.samefile(final, "."):
        what = "the working directory of this process" if os.path.samefile(final, ".") else "a mount point"
        raise AlreadyExistsError(
            f"the path is {what}, which another directory cannot replace", path=str(final),
            remedy="Save to a directory below it, or use commit='marker'",
        )  # fmt: skip
    if not any(final.iterdir()):
        return
    foreign = _foreign_names(final)
    if foreign:
        raise AlreadyExistsError(
            "the path holds files that are not part of a checkpoint of functional_ckpt", path=str(final),
            found=", ".join(foreign[:5]), remedy="Save under a new path; what is not ours is never replaced",
        )  # fmt: skip
    if not overwrite:
        raise AlreadyExistsError(
            "the path holds a checkpoint", path=str(final), remedy="Pass overwrite=True, or save under a new path"
        )


def _foreign_names(final: Path) -> list[str]:
    """Return what lies in a directory and is no part of the committed checkpoint there; everything if there is none."""
    found = sorted(path.name for path in final.iterdir())
    if not all((final / name).is_file() for name in (ROOT, MANIFEST)):
        return found
    store = FileStore(final)
    data, text = store.read(MANIFEST) or b"", store.read(ROOT) or b""
    try:
        root = json.loads(text)
        if root["attributes"][FORMAT]["manifest"] != manifest_digest(data):
            return found
        nodes = {node_name(entry.spec.key) for entry in Manifest.from_json(data).arrays}
    except (ValueError, KeyError, TypeError, RecursionError, CheckpointError):
        return found
    foreign: list[str] = []
    for name in found:
        path = final / name
        if name in nodes and path.is_dir():
            foreign += [f"{name}/{inner}" for inner in _foreign_to_node(path)]
        elif path.is_dir() or not (name in (ROOT, MANIFEST, PROVENANCE) or is_claim_name(name)):
            foreign.append(name)
    return foreign


def _foreign_to_node(path: Path) -> list[str]:
    with os.scandir(path) as found:
        return sorted(e.name for e in found if not is_node_file(e.name) or e.is_dir(follow_symlinks=False))


def put_in_place(
    work: Path,
    final: Path,
    replaceable: Replaceable | None,
    durable: bool,
    confirm: Callable[[], None],
) -> tuple[str, ...]:
    """Give the finished directory `work` the name `final`; return what failed after that, in words.

    A checkpoint there is replaced if it is `replaceable`.

    Raises
    ------
    AlreadyExistsError
        If something else is there.
    """
    mine = identity_of(work)
    if mine is None:
        raise StorageError("the directory that was written is gone", path=str(work), remedy="Save again")
    if replaceable is not None and is_directory(final) and os.listdir(final):
        return _replace(work, final, replaceable, durable, confirm)
    notes = _keep_mode(final, work) if is_directory(final) else []
    confirm()
    try:
        os.rename(work, final)  # onto nothing or an empty directory; anything else is refused by the system
    except OSError as error:
        if _is_at(final, mine):
            notes.append(f"the system reported an error ({error})")
        elif error.errno in (EEXIST, ENOTEMPTY, ENOTDIR):
            found = error.strerror
            raise AlreadyExistsError("the path appeared while saving", path=str(final), found=found) from error
        else:
            raise
    return (*notes, *(synced(final.parent) if durable else ()))


def _replace(
    work: Path, final: Path, replaceable: Replaceable, durable: bool, confirm: Callable[[], None]
) -> tuple[str, ...]:
    """Change places with the checkpoint at the path, if it is the one to replace, and remove that."""
    check_target(final, overwrite=True)  # files of others may have come while we were writing
    replaced = replaceable.require(final, final)
    notes = _keep_mode(final, work)
    confirm()
    notes += exchange(work, final)
    left = _looked_at(work, final, replaced, replaceable)
    if durable:
        notes += synced(final.parent)
    if left is not None:
        return (*notes, left)
    try:
        remove_tree(work)
    except OSError as error:
        notes.append(f"the checkpoint that it replaces is left to functional_ckpt.sweep at {work} ({error})")
    return tuple(notes)


def exchange(work: Path, final: Path) -> tuple[str, ...]:
    """Exchange two directories; return what the system says has failed although it has not, in words.

    Raises
    ------
    StorageError
        If they are where they were.
    """
    with storage_errors("looking at", str(work)):
        mine = identity_of(work)
    try:
        exchange_paths(work, final)
    except StorageError as error:
        if not _is_at(final, mine):
            raise
        return (f"the system reported an error ({error})",)
    return ()


def _looked_at(work: Path, final: Path, replaced: Identity | None, replaceable: Replaceable) -> str | None:
    """Make sure that what was exchanged away is what was looked at before; return why it has to be left, in words.

    Another save may have published between our look and the exchange. It came later: the exchange is undone.
    """
    try:
        if identity_of(work) != replaced:
            replaceable.require(work, final)
    except AlreadyExistsError:
        try:
            exchange_paths(work, final)
        except StorageError as error:
            return f"it has replaced one that was saved meanwhile, which is left at {work} ({error})"
        raise
    except (OSError, StorageError) as error:
        return f"the checkpoint that it replaces could not be looked at, and is left at {work} ({error})"
    return None


def _is_at(final: Path, mine: Identity | None) -> bool:
    """Tell whether a step took effect although the system reported an error, as network file systems do."""
    try:
        return identity_of(final) == mine
    except OSError:
        return False


def _keep_mode(final: Path, work: Path) -> list[str]:
    """Give the new directory the group and mode of the one that it replaces; return what failed."""
    old, new = os.stat(final), os.stat(work)
    try:
        if old.st_gid != new.st_gid:
            os.chown(work, -1, old.st_gid)
        if stat.S_IMODE(old.st_mode) != stat.S_IMODE(new.st_mode):
            os.chmod(work, stat.S_IMODE(old.st_mode))
    except OSError as error:
        return [f"the group and mode of the directory could not be kept ({error})"]
    return []


def synced(directory: Path) -> tuple[str, ...]:
    """Make the new name durable; the checkpoint is there already, so that a failure is returned in words."""
    try:
        sync_directory(directory)
    except OSError as error:
        return (f"a power cut may undo it: {directory} could not be synced ({error})",)
    return ()
