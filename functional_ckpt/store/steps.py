"""The directory of a run's checkpoints: one checkpoint per step, and small files that pin some of them.

A step is a committed checkpoint named ``step-00000010``: its root exists, and its attributes hold the metrics that
were saved with it. Other files in the directory are neither read nor changed. `access` says how to reach an
object store.
"""

import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from functional_ckpt.errors import AlreadyExistsError, NotACheckpointError, PolicyError, StorageError
from functional_ckpt.plan.manifest import FORMAT
from functional_ckpt.plan.retention import STEP, StepInfo, metrics_of
from functional_ckpt.store.access import StorePolicy
from functional_ckpt.store.base import Store, storage_errors
from functional_ckpt.store.directories import remove_tree, sync_directory
from functional_ckpt.store.encoding import MANIFEST, PROVENANCE, ROOT
from functional_ckpt.store.file_claim import ABANDONED
from functional_ckpt.store.opening import directory_of, open_store
from functional_ckpt.store.reading import root_attributes
from functional_ckpt.store.sweep import sweep
from functional_ckpt.store.target import foreign_in
from functional_ckpt.store.temporary import claim_name, new_save_id, working_name

__all__ = [
    "PIN",
    "check_removable",
    "check_root",
    "find_steps",
    "is_pinned",
    "pin_step",
    "read_step",
    "remove_checkpoint",
    "remove_step",
    "step_path",
    "sweep_steps",
    "unpin_step",
]

_STEP = re.compile(r"step-([0-9]{8,})")
#: Suffix of a file that pins the checkpoint of that name.
PIN = ".pin"
_PIN_TEXT = b"While this file is here, functional_ckpt does not remove the step that it names.\n"


def step_path(root: str | os.PathLike[str], step: int) -> str:
    """Return the path or URL of a step below `root`.

    Examples
    --------
    >>> step_path("runs/a", 10), step_path("memory://a/", 10)
    ('runs/a/step-00000010', 'memory://a/step-00000010')
    """
    return f"{os.fspath(root).rstrip('/')}/{_name(step)}"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _step_of(name: str) -> int | None:
    """Return the step of a name; None for any other name, also for a number in another form."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match is not None and _name(int(match[1])) == name else None


def find_steps(root: str | os.PathLike[str], access: StorePolicy = StorePolicy()) -> dict[int, bool]:
    """Return the committed steps below `root`, ascending, and of each whether it is pinned.

    Examples
    --------
    >>> import functional_ckpt
    >>> for step in (20, 10):
    ...     _ = functional_ckpt.save({"step": step}, step_path("memory://find-example", step))
    >>> pin_step("memory://find-example", 10)
    >>> find_steps("memory://find-example")
    {10: True, 20: False}
    """
    store = open_store(root, access=access)
    names = set(store.children())
    return {step: _name(step) + PIN in names for step in _named(names) if _is_committed(store, step)}


def _named(names: Iterable[str]) -> list[int]:
    """Return the steps among the names below the root, committed or not, ascending."""
    return sorted(step for name in names if name[-1:] == "/" and (step := _step_of(name[:-1])) is not None)


def _is_committed(store: Store, step: int) -> bool:
    # A directory may have the name without a root: a copy that was interrupted, or a step in marker mode.
    return store.nbytes_of(f"{_name(step)}/{ROOT}") is not None


def is_pinned(root: str | os.PathLike[str], step: int, access: StorePolicy = StorePolicy()) -> bool:
    """Tell whether a step is pinned.

    Examples
    --------
    >>> is_pinned("memory://pinned-example", 3)
    False
    """
    return _is_pinned(open_store(root, access=access), _name(step))


def _is_pinned(store: Store, name: str) -> bool:
    return store.nbytes_of(name + PIN) is not None


def read_step(root: str | os.PathLike[str], step: int, access: StorePolicy = StorePolicy()) -> StepInfo:
    """Return what is known of a step, from its root and provenance.

    Raises
    ------
    NotACheckpointError
        If there is no such step.

    Examples
    --------
    >>> import functional_ckpt
    >>> _ = functional_ckpt.save({"step": 3}, step_path("memory://read-example", 3), attributes={"git": "1f2e"})
    >>> info = read_step("memory://read-example", 3)
    >>> info.step, info.nbytes, info.metrics, info.attributes, info.pinned
    (3, 0, {}, {'git': '1f2e'}, False)
    """
    path = step_path(root, step)
    store = open_store(path, access=access).pinned()
    try:
        attributes = root_attributes(store, store.read(ROOT))
        time, nbytes = _provenance(store)
    finally:
        store.unpin()
    others = {name: value for name, value in attributes.items() if name not in (FORMAT, STEP)}
    return StepInfo(step, path, time, nbytes, metrics_of(attributes), others, is_pinned(root, step, access))


def _provenance(store: Store) -> tuple[float | None, int | None]:
    """Return when the checkpoint was finished and the bytes of its elements, as far as it says so."""
    try:
        found: Any = json.loads(store.read(PROVENANCE) or b"")
        return float(found["finished"]), sum(int(rank["nbytes"]) for rank in found["ranks"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None, None


def pin_step(root: str | os.PathLike[str], step: int, access: StorePolicy = StorePolicy()) -> None:
    """Keep a step from being removed, until it is unpinned.

    Raises
    ------
    NotACheckpointError
        If there is no such step; also if it is being removed.
    """
    store = open_store(root, access=access)
    if not _is_committed(store, step):
        raise _missing(root, step, access)
    with suppress(AlreadyExistsError):  # pinned already; the content of the file does not matter
        store.create(_name(step) + PIN, [memoryview(_PIN_TEXT)], len(_PIN_TEXT))
    # Checked again: a process that removes the step looks for a pin only after it has renamed the step.
    if not _is_committed(store, step):
        unpin_step(root, step, access)
        raise _missing(root, step, access)


def unpin_step(root: str | os.PathLike[str], step: int, access: StorePolicy = StorePolicy()) -> None:
    """Let a step be removed again; nothing happens if it is not pinned."""
    open_store(root, access=access).delete([_name(step) + PIN])


def remove_step(root: str | os.PathLike[str], step: int, access: StorePolicy = StorePolicy()) -> None:
    """Remove a step: first rename it away in one step, then remove its files; after a kill `sweep` removes the rest.

    Raises
    ------
    NotACheckpointError
        If there is no such step.
    StorageError
        If it is pinned, holds files of others or is a link: then it stays as it is.

    Examples
    --------
    >>> import tempfile, functional_ckpt
    >>> root = tempfile.mkdtemp()
    >>> _ = functional_ckpt.save({"step": 3}, step_path(root, 3))
    >>> remove_step(root, 3)
    >>> find_steps(root)
    {}
    """
    if not _is_committed(open_store(root, access=access), step):
        raise _missing(root, step, access)
    _remove(root, _name(step), access)


def remove_checkpoint(path: str | os.PathLike[str], access: StorePolicy = StorePolicy()) -> None:
    """Remove a checkpoint of any name as `remove_step` does.

    Raises
    ------
    NotACheckpointError
        If there is none.
    StorageError
        If it is pinned, holds files of others or is a link: then it stays as it is.

    Examples
    --------
    >>> import tempfile, functional_ckpt
    >>> path = f"{tempfile.mkdtemp()}/last"
    >>> _ = functional_ckpt.save({"step": 3}, path)
    >>> remove_checkpoint(path), os.path.exists(path)
    (None, False)
    """
    check_removable(path, access)
    root, name = _parent(path)
    if root is None:
        _remove_objects(open_store(path, access=access))
    else:
        _remove(root, name, access)


def check_removable(path: str | os.PathLike[str], access: StorePolicy = StorePolicy()) -> None:
    """Raise what `remove_checkpoint` would, before anything is removed."""
    store, (root, name), directory = open_store(path, access=access), _parent(path), directory_of(path)
    root_attributes(store, store.read(ROOT))
    if root is not None and _is_pinned(open_store(root, access=access), name):
        raise _pinned(root, name)
    if directory is not None:
        _check_ours(directory)


def _parent(path: str | os.PathLike[str]) -> tuple[str | None, str]:
    """Return where a checkpoint is, and its name there; of a URL with one name, None."""
    directory = directory_of(path)
    root, _, name = (os.fspath(path) if directory is None else str(directory)).rstrip("/").rpartition("/")
    return (None if root.endswith(":/") else root or "/"), name


def _remove(root: str | os.PathLike[str], name: str, access: StorePolicy) -> None:
    store, directory = open_store(root, access=access), directory_of(root)
    if _is_pinned(store, name):
        raise _pinned(root, name)
    if directory is None or not store.capabilities.rename:
        _remove_objects(open_store(f"{os.fspath(root).rstrip('/')}/{name}", access=access))
        return
    final = directory / name
    with storage_errors("removing a checkpoint", str(final)):
        _check_ours(final)
        work = directory / working_name(final.name, new_save_id())
        os.rename(final, work)
        if _is_pinned(store, name):  # pinned meanwhile: it stays
            os.rename(work, final)
            raise _pinned(root, name)
        sync_directory(
            directory
        )  # before any file is removed: after a power cut the step is complete, or does not have its name
        remove_tree(work)


def _remove_objects(store: Store) -> None:
    """Remove the objects of a checkpoint, its root first: what a kill leaves is named for a sweep."""
    names, save_id = sorted(store.names()), new_save_id()
    nodes = sorted({name.partition("/")[0] for name in names if "/" in name})
    sign = claim_name(save_id) + ABANDONED
    store.publish(sign, json.dumps({"save_id": save_id, "nodes": [*nodes, MANIFEST]}).encode() + b"\n")
    store.delete([ROOT])
    store.delete([name for name in names if name != ROOT])
    store.delete([sign])


def _check_ours(final: Path) -> None:
    foreign = ["a symbolic link"] if final.is_symlink() else foreign_in(final)
    if foreign:
        raise StorageError(
            "not removed: it holds files that are not part of a checkpoint of functional_ckpt",
            path=str(final),
            found=", ".join(foreign[:5]),
            remedy="Move these files, or remove the directory yourself",
        )


def sweep_steps(root: str | os.PathLike[str], access: StorePolicy = StorePolicy()) -> tuple[str, ...]:
    """Remove leftovers of dead saves and removals below `root`, also in the directories of steps; return their names.

    Examples
    --------
    >>> import tempfile
    >>> sweep_steps(tempfile.mkdtemp())
    ()
    """
    store = open_store(root, access=access)
    unfinished = [step for step in _named(store.children()) if not _is_committed(store, step)]
    beside = sweep(os.fspath(root), store=access) if store.capabilities.rename else ()
    return (*beside, *(name for step in unfinished for name in sweep(step_path(root, step), store=access)))


def check_root(root: str | os.PathLike[str], access: StorePolicy = StorePolicy()) -> None:
    """Raise `PolicyError` if `root` is a file, or itself a checkpoint: no steps are looked for in one."""
    directory = directory_of(root)
    with storage_errors("looking at", os.fspath(root)):
        above = () if directory is None else (directory, *directory.parents)
        there = next((each for each in above if each.exists()), None)
        is_file = there is not None and not there.is_dir()
    if is_file:
        raise PolicyError(
            "the directory of a run's steps is a file",
            path=str(there),
            expected="a directory, or nothing yet",
            remedy="Pass another path",
        )
    store = open_store(root, access=access)
    if store.nbytes_of(ROOT) is not None:
        raise PolicyError(
            "the directory of a run's steps is itself a checkpoint",
            expected="the directory above it",
            found=store.url,
            remedy="Pass its parent, or load it with functional_ckpt.load",
        )


def _missing(root: str | os.PathLike[str], step: int, access: StorePolicy) -> NotACheckpointError:
    there = [*find_steps(root, access)]
    found = f"{len(there)} others, from {there[0]} to {there[-1]}" if there else "none"
    return NotACheckpointError("there is no such step", path=step_path(root, step), found=found)


def _pinned(root: str | os.PathLike[str], name: str) -> StorageError:
    return StorageError("not removed: it is pinned", path=f"{os.fspath(root)}/{name}", remedy="Unpin it first")
