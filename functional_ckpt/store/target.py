"""The final place of a checkpoint: what may be replaced there, and the step that renames the finished directory."""

import json
import os
import re
import stat
from collections.abc import Callable, Collection, Mapping
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
    remove_tree,
    sync_directory,
    why_fixed,
)
from functional_ckpt.store.encoding import MANIFEST, METADATA_FILE, METADATA_TEXT, PROVENANCE, ROOT, node_name
from functional_ckpt.store.files import FileStore
from functional_ckpt.store.kept import carry, carry_late
from functional_ckpt.store.sweep import is_node_file
from functional_ckpt.store.temporary import is_claim_name

__all__ = [
    "Replaceable",
    "check_target",
    "exchange",
    "foreign_in",
    "is_of_dcp",
    "manifest_digest",
    "put_in_place",
    "synced",
]

_PICKLE = b"\x80"
#: Most times that a directory is looked at which others replace meanwhile.
_LOOKS = 5
_DCP_FILE = re.compile(r"__\d+(_\d+\.distcp|\.metadata)")


@attrs.frozen
class Replaceable:
    """What a save may replace: the checkpoint that was there when it began, and those of the `earlier` saves.

    So of two saves to one path the one that began last stays, whichever ends last. `checkpoints` allows it to replace a
    checkpoint; with `keeps_foreign`, foreign files are carried over.
    """

    identity: Identity | None
    earlier: tuple[str, ...]
    checkpoints: bool = True
    keeps_foreign: bool = False

    def require(self, found_at: Path, final: Path) -> Identity | None:
        """Return the identity of the checkpoint at `found_at`; raise if this save may not replace it at `final`."""
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
            "another checkpoint was saved here after this save had begun",
            path=str(final),
            found=f"save {save_id}",
            remedy="The other checkpoint stays; save again to replace it",
        )


def manifest_digest(data: bytes) -> str:
    """Return the digest of a manifest's text, as the root records it."""
    return xxhash.xxh3_128_hexdigest(data)


def check_target(final: Path, overwrite: bool, needed: Collection[str] | None = None) -> tuple[str, ...]:
    """Raise unless a save may use this path: it must be free, an empty directory, or with `overwrite` a checkpoint.

    Foreign files are an error. But if the names `needed` by the new checkpoint are given, only foreign files with one
    of these names are, and the others are returned; a checkpoint of DCP may be replaced then, too.

    Raises
    ------
    AlreadyExistsError
        If something else is there, or something that cannot be replaced.
    """
    try:
        found = os.stat(final)
    except FileNotFoundError:
        return ()
    if not stat.S_ISDIR(found.st_mode):
        raise AlreadyExistsError("the path is a file", path=str(final), remedy="Save under a new path")
    fixed = why_fixed(final)
    if fixed is not None:
        raise AlreadyExistsError(
            f"the path is {fixed}, which cannot be replaced",
            path=str(final),
            remedy="Save to a directory below it, or use commit='marker'",
        )
    nodes, foreign = _foreign_in(final)
    if overwrite and needed is not None:
        foreign = [name for name in foreign if not is_of_dcp(final / name)]
    if foreign and needed is None:
        raise AlreadyExistsError(
            "the path holds files that are not part of a checkpoint of functional_ckpt",
            path=str(final),
            found=", ".join(foreign[:5]),
            remedy="Save under a new path, or pass SavePolicy(foreign='keep') to carry them over",
        )
    taken = sorted({*foreign} & {ROOT, MANIFEST, PROVENANCE, METADATA_FILE, *(needed or ())})
    if taken:
        raise AlreadyExistsError(
            "other files have names that the checkpoint needs",
            path=str(final),
            found=", ".join(taken[:5]),
            remedy="Save under a new path, or move these files: they are never replaced",
        )
    if nodes is not None and not overwrite:
        raise AlreadyExistsError(
            "the path holds a checkpoint", path=str(final), remedy="Pass overwrite=True, or save under a new path"
        )
    return tuple(foreign)


def foreign_in(final: Path) -> tuple[str, ...]:
    """Return the names in a directory that are no part of a committed checkpoint there; all of them if there is none.

    Examples
    --------
    >>> import tempfile, functional_ckpt
    >>> path = Path(tempfile.mkdtemp(), "checkpoint")
    >>> _, _ = functional_ckpt.save({"step": 3}, path), (path / "notes").mkdir()
    >>> foreign_in(path)
    ('notes',)
    """
    return tuple(_foreign_in(final)[1])


def _foreign_in(final: Path) -> tuple[frozenset[str] | None, list[str]]:
    """Return the directories of the arrays of the checkpoint there, None if there is none, and the foreign names.

    It is looked at again if it was replaced meanwhile: names of one checkpoint would be foreign in another.
    """
    for _ in range(_LOOKS):
        before = identity_of(final)
        names = sorted(path.name for path in final.iterdir())
        nodes = _committed_nodes(final) if ROOT in names and MANIFEST in names else None
        foreign = _foreign_names(final, names, nodes)
        if identity_of(final) == before:
            break
    return nodes, foreign


def _committed_nodes(final: Path) -> frozenset[str] | None:
    """Return the directories of the arrays of the committed checkpoint at a path; None if there is none."""
    store = FileStore(final)
    data, text = store.read(MANIFEST) or b"", store.read(ROOT) or b""
    try:
        root = json.loads(text)
        if root["attributes"][FORMAT]["manifest"] != manifest_digest(data):
            return None
        return frozenset(node_name(entry.spec.key) for entry in Manifest.from_json(data).arrays)
    except (ValueError, KeyError, TypeError, RecursionError, CheckpointError):
        return None


def _foreign_names(final: Path, names: list[str], nodes: frozenset[str] | None) -> list[str]:
    """Return the names in a directory that are not part of the checkpoint there; all of them if there is none."""
    if nodes is None:
        return names
    foreign: list[str] = []
    for name in names:
        path = final / name
        if name in nodes and path.is_dir():
            foreign += [f"{name}/{inner}" for inner in _foreign_to_node(path)]
        elif path.is_dir() or not _is_ours(path):
            foreign.append(name)
    return foreign


def _is_ours(path: Path) -> bool:
    if path.name == METADATA_FILE:
        return path.stat().st_size == len(METADATA_TEXT) and path.read_bytes() == METADATA_TEXT
    return path.name in (ROOT, MANIFEST, PROVENANCE) or is_claim_name(path.name)


def is_of_dcp(path: Path) -> bool:
    """Tell whether this is a file of a checkpoint of DCP, which are pickles.

    Examples
    --------
    >>> is_of_dcp(Path("nowhere/.metadata")), is_of_dcp(Path("nowhere/model.pt"))
    (False, False)
    """
    if path.name != METADATA_FILE and _DCP_FILE.fullmatch(path.name) is None:
        return False
    if path.name != METADATA_FILE or not path.is_file():
        return path.is_file()
    with open(path, "rb") as file:
        return file.read(1) == _PICKLE


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
    """Rename the finished directory `work` to `final`; return failures after that step as text.

    A checkpoint at `final` is replaced if it is `replaceable`.

    Raises
    ------
    AlreadyExistsError
        If something else is there.
    """
    mine = identity_of(work)
    if mine is None:
        raise StorageError("the directory of this save has disappeared", path=str(work), remedy="Save again")
    if replaceable is not None and is_directory(final) and os.listdir(final):
        return _replace(work, final, replaceable, durable, confirm)
    notes = _keep_mode(final, work) if is_directory(final) else []
    confirm()
    try:
        os.rename(work, final)  # to a free name or an empty directory; the system refuses anything else
    except OSError as error:
        if _is_at(final, mine):
            notes.append(f"the system reported an error ({error})")
        elif error.errno in (EEXIST, ENOTEMPTY, ENOTDIR):
            found = error.strerror
            raise AlreadyExistsError(
                "the path was created by another process during the save", path=str(final), found=found
            ) from error
        else:
            raise
    return (*notes, *(synced(final.parent) if durable else ()))


def _replace(
    work: Path, final: Path, replaceable: Replaceable, durable: bool, confirm: Callable[[], None]
) -> tuple[str, ...]:
    """Exchange the new directory with the checkpoint at the path, if that is `replaceable`, and remove the old one."""
    needed = os.listdir(work) if replaceable.keeps_foreign else None
    # Foreign files may have appeared during the save.
    foreign = check_target(final, replaceable.checkpoints, needed)
    replaced = replaceable.require(final, final)
    carried = carry(foreign, final, work, durable)
    notes = _keep_mode(final, work)
    confirm()
    notes += exchange(work, final)
    left = _looked_at(work, final, replaced, replaceable)
    if left is None and replaceable.keeps_foreign:
        notes += _carried_late(work, final, carried)
    if durable:
        notes += synced(final.parent)
    if left is not None:
        return (*notes, left)
    try:
        remove_tree(work)
    except OSError as error:
        notes.append(f"the old checkpoint could not be removed; functional_ckpt.sweep removes it at {work} ({error})")
    return tuple(notes)


def _carried_late(work: Path, final: Path, carried: Mapping[str, os.stat_result]) -> tuple[str, ...]:
    """Keep foreign files that appeared at the path between the check and the exchange; return failures as text."""
    try:
        return carry_late(check_target(work, True, ()), work, final, carried)
    except (OSError, CheckpointError) as error:
        return (f"a search for files that other programs added during the save failed ({error})",)


def exchange(work: Path, final: Path) -> tuple[str, ...]:
    """Exchange two directories; return as text an error that the system reported although they were exchanged.

    Raises
    ------
    StorageError
        If they were not exchanged.
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
    """Check that the directory which was exchanged away is `replaced`; return as text why it must be left.

    Another save may have published between the check and the exchange. It began later: the exchange is undone.
    """
    try:
        if identity_of(work) != replaced:
            replaceable.require(work, final)
    except AlreadyExistsError:
        try:
            exchange_paths(work, final)
        except StorageError as error:
            return f"this save has replaced a checkpoint that was saved meanwhile, which is left at {work} ({error})"
        raise
    except (OSError, StorageError) as error:
        return f"the old checkpoint could not be read, and is left at {work} ({error})"
    return None


def _is_at(final: Path, mine: Identity | None) -> bool:
    """Tell whether a step took effect although the system reported an error, as on network file systems."""
    try:
        return identity_of(final) == mine
    except OSError:
        return False


def _keep_mode(final: Path, work: Path) -> list[str]:
    """Give the new directory the group and mode of the one that it replaces; return failures as text."""
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
    """Sync the new name; the checkpoint is published already, so a failure is returned as text."""
    try:
        sync_directory(directory)
    except OSError as error:
        return (f"a power cut may undo this save: {directory} could not be synced ({error})",)
    return ()
