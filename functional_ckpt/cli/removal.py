"""The commands `rm` and `sweep`: what can be removed, and its removal."""

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from functional_ckpt.errors import CheckpointWarning, NotACheckpointError
from functional_ckpt.show.text import clean, count, size
from functional_ckpt.store.opening import directory_of
from functional_ckpt.store.reading import read_manifest
from functional_ckpt.store.steps import check_removable, remove_checkpoint, sweep_steps

__all__ = ["is_agreed", "removable", "removed", "swept"]

Facts = dict[str, Any]


def removable(paths: Sequence[str]) -> Facts:
    """Return what `rm` would remove: the size of each checkpoint, None where its manifest cannot be read.

    Raises
    ------
    NotACheckpointError, StorageError
        If one of them is not a checkpoint or cannot be removed; raised before any is removed.
    """
    for path in paths:
        check_removable(path)
    return {"checkpoints": [{"path": path, "nbytes": read_manifest(path).nbytes} for path in paths]}


def removed(found: Facts) -> Facts:
    """Remove the checkpoints that `removable` has found, and return them."""
    for each in found["checkpoints"]:
        remove_checkpoint(each["path"])
    return found


def is_agreed(found: Facts) -> bool:
    """Ask on the terminal whether to go on."""
    for each in found["checkpoints"]:
        print(f"{clean(each['path'])}  {size(each['nbytes'])}", file=sys.stderr)
    print(f"Remove {count(len(found['checkpoints']), 'checkpoint')}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def swept(path: str) -> Facts:
    """Remove the leftovers of dead saves in a directory; return their names, and those left for another machine.

    Raises
    ------
    NotACheckpointError
        If there is no such directory.
    """
    directory = directory_of(path)
    if directory is not None and not os.path.isdir(directory):
        raise NotACheckpointError("there is no such directory", path=path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        names = sweep_steps(path)
    return {"path": path, "removed": list(names), "left": [str(each.message) for each in caught]}
