"""Foreign files in the directory of a checkpoint, which a save with ``foreign="keep"`` carries over to the new one.

They are linked into the new directory before it replaces the old one, so that they exist at every moment.
"""

import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from errno import EMLINK, ENOSYS, EOPNOTSUPP, EPERM, EXDEV
from pathlib import Path

from functional_ckpt.store.directories import sync_directory

__all__ = ["carry", "carry_late"]

# Errors if a file cannot be linked: then it is copied.
_NO_LINK = (EMLINK, ENOSYS, EOPNOTSUPP, EPERM, EXDEV)


def carry(names: Iterable[str], old: Path, new: Path, durable: bool) -> dict[str, os.stat_result]:
    """Link the files and directories of these names in `old` into `new`, recursively; return what was linked.

    A node of the checkpoint may already have a directory of this name in `new`; foreign files are added to it.

    Examples
    --------
    >>> import tempfile
    >>> old, new = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
    >>> _ = (old / "meta.pt").write_text("theirs")
    >>> list(carry(["meta.pt"], old, new, False)), (new / "meta.pt").read_text()
    (['meta.pt'], 'theirs')
    """
    carried: dict[str, os.stat_result] = {}
    directories: dict[Path, None] = {}
    for name in _files_of(names, old):
        target = new / name
        _make_parents(old, new, name)
        with suppress(FileNotFoundError):  # another process has removed it
            carried[name] = os.lstat(old / name)
            if stat.S_ISDIR(carried[name].st_mode):
                _make_like(old / name, target)
            else:
                _link(old / name, target, durable)
            directories.update(dict.fromkeys(new / parent for parent in Path(name).parents))
    for directory in directories if durable else ():
        sync_directory(directory)
    return carried


def carry_late(names: Iterable[str], old: Path, new: Path, carried: Mapping[str, os.stat_result]) -> tuple[str, ...]:
    """Move files of these names that appeared in `old` after others were `carried`; return failures as text."""
    problems: list[str] = []
    for name in _files_of(names, old):
        try:
            found = os.lstat(old / name)
            if name in carried and os.path.samestat(found, carried[name]):
                continue
            if stat.S_ISDIR(found.st_mode):
                continue
            _make_parents(old, new, name)
            os.rename(old / name, new / name)
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{name}, which appeared during the save, could not be kept ({error})")
    return tuple(problems)


def _files_of(names: Iterable[str], old: Path) -> list[str]:
    """Return the files under these names, and the directories without files."""
    found: list[str] = []
    for name in names:
        path = old / name
        if path.is_symlink() or not path.is_dir():
            found.append(name)
            continue
        inner = sorted(os.listdir(path))
        found += _files_of([f"{name}/{each}" for each in inner], old) if inner else [name]
    return found


def _make_parents(old: Path, new: Path, name: str) -> None:
    for parent in reversed(Path(name).parents[:-1]):
        if not (new / parent).is_dir():
            _make_like(old / parent, new / parent)


def _make_like(old: Path, new: Path) -> None:
    with suppress(FileExistsError):
        os.mkdir(new)
        shutil.copystat(old, new)


def _link(old: Path, new: Path, durable: bool) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINK or not stat.S_ISREG(os.lstat(old).st_mode):
            raise
        shutil.copy2(old, new)
        if durable:
            sync_directory(new)  # works for a file too
