"""The error for a path without a committed checkpoint: it tells what is there instead, and how to load that."""

import json
import os
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice

import attrs

from functional_ckpt.errors import CorruptionError, NotACheckpointError, StorageError
from functional_ckpt.plan.manifest import FORMAT
from functional_ckpt.store.base import Store
from functional_ckpt.store.encoding import BEGINNINGS, MANIFEST, PROVENANCE, ROOT
from functional_ckpt.store.files import NEW, FileStore
from functional_ckpt.store.temporary import is_claim_name

__all__ = ["why_not"]

_OURS = frozenset([MANIFEST, PROVENANCE, f"{ROOT}{NEW}"])
#: So many names are inspected, those in the directory itself first.
_MAX_NAMES = 10_000
_MAX_BESIDE = 1_000


@attrs.frozen
class _Format:
    """A format of another program, and how to load it."""

    name: str
    remedy: str


def _read_by(call: str) -> str:
    return f"Load it with {call}, then save the result with functional_ckpt.save"


_DCP = _Format("a checkpoint of torch.distributed.checkpoint (DCP)", _read_by("torch.distributed.checkpoint.load"))
_MEGATRON = _Format("a checkpoint of Megatron-LM", _read_by("megatron.core.dist_checkpointing.load"))
_ITERATIONS = _Format("a directory of checkpoints of Megatron-LM", "Pass the path of one iteration")
_ORBAX = _Format("a checkpoint of Orbax", _read_by("orbax.checkpoint"))
_TORCH = _Format("written by torch.save", _read_by("torch.load(..., weights_only=True)"))
_SAFETENSORS = _Format("safetensors", _read_by("safetensors.torch.load_file"))
_ZARR = _Format("Zarr, but not a checkpoint of functional_ckpt", "Open it with zarr")
_NUMPY = _Format("written by numpy", _read_by("numpy.load"))

# File name -> the format that has such a file; the first name that exists decides.
_BY_NAME = {
    "latest_checkpointed_iteration.txt": _ITERATIONS,
    "common.pt": _MEGATRON,
    ".metadata": _DCP,
    "_CHECKPOINT_METADATA": _ORBAX,
    "manifest.ocdbt": _ORBAX,
    ".zgroup": _ZARR,
    ".zarray": _ZARR,
}
_BY_SUFFIX = {
    ".distcp": _DCP,
    ".safetensors": _SAFETENSORS,
    ".pt": _TORCH,
    ".pth": _TORCH,
    ".ckpt": _TORCH,
    ".bin": _TORCH,
}


def why_not(store: Store, root: bytes | None) -> StorageError:
    """Return the error for a store without a checkpoint; `root` is the content of its ``zarr.json``, if any.

    Examples
    --------
    >>> from functional_ckpt.store.opening import open_store
    >>> print(why_not(open_store("memory://nothing-at-all"), None))
    no checkpoint here: path memory://nothing-at-all, found nothing. Check the path
    """
    if root is None:
        return _without_root(store)
    if _head(store, MANIFEST, len(BEGINNINGS[MANIFEST])) == BEGINNINGS[MANIFEST]:
        return CorruptionError(
            "zarr.json is damaged, or does not belong to the manifest.json beside it",
            path=f"{store.url}/zarr.json",
            remedy="Restore the file, or load another checkpoint",
        )
    return NotACheckpointError(
        "this Zarr group is not a checkpoint of functional_ckpt", path=store.url, remedy="Open it with zarr"
    )


def _without_root(store: Store) -> NotACheckpointError:
    file = _format_of_file(store)
    if file is not None:
        return NotACheckpointError("a file is not a checkpoint", path=store.url, found=file.name, remedy=file.remedy)
    names = list(islice(store.names(), _MAX_NAMES)) if store.capabilities.lists else []
    # A claim shows that a save was killed here, whatever other files there are.
    begun = any(is_claim_name(name) or name == f"zarr.json{NEW}" for name in names)
    foreign = None if begun else _format_of_directory(store, names)
    if foreign is not None:
        found, remedy = foreign.name, foreign.remedy
    elif not names:
        near = ", ".join(_beside(store))
        found, remedy = "nothing", f"Check the path{near and f': beside it are checkpoints, such as {near}'}"
    elif below := sorted(set(_below(names)))[:3]:
        found, remedy = f"checkpoints in it: {', '.join(below)}", "Pass the path of one of them"
    elif begun or any(name in _OURS or (name.count("/") == 1 and _is_of_node(name)) for name in names):
        found = "no root: the save did not finish, or the checkpoint was partly deleted"
        remedy = "Load another checkpoint; functional_ckpt.sweep removes leftovers"
    else:
        found, remedy = f"other files: {', '.join(sorted(names)[:3])}", "Check the path"
    return NotACheckpointError("no checkpoint here", path=store.url, found=found, remedy=remedy)


def _beside(store: Store) -> list[str]:
    """Return a few directories beside the path that look like checkpoints, the most similar names first."""
    if not isinstance(store, FileStore):
        return []
    above = store.root.parent
    try:
        with os.scandir(above) as found:
            names = [entry.name for entry in islice(found, _MAX_BESIDE) if not entry.name.startswith(".")]
        near = get_close_matches(store.root.name, names, _MAX_BESIDE, 0)
        ours = (name for name in near if all((above / name / file).is_file() for file in (ROOT, MANIFEST)))
        return list(islice(ours, 3))
    except OSError:
        return []


def _below(names: list[str]) -> Iterator[str]:
    """Yield the directories that look like checkpoints of functional_ckpt."""
    there = set(names)
    for name in names:
        directory, _, leaf = name.rpartition("/")
        if leaf == MANIFEST and directory and directory[0] != "." and f"{directory}/{ROOT}" in there:
            yield directory


def _is_of_node(name: str) -> bool:
    return name.endswith("/zarr.json") or name.rpartition("/")[2].startswith("c.")


def _format_of_directory(store: Store, names: list[str]) -> _Format | None:
    backend = _megatron_backend(store)
    if backend is not None:
        return None if backend == FORMAT else _MEGATRON
    for name, kind in _BY_NAME.items():
        if name in names:
            return kind
    for suffix, kind in _BY_SUFFIX.items():
        if any(name.endswith(suffix) and "/" not in name for name in names):
            return kind
    return None


def _megatron_backend(store: Store) -> str | None:
    """Return the name of the format of a checkpoint's sharded half, from Megatron's ``metadata.json``."""
    try:
        found = json.loads(store.read("metadata.json", 2**20) or b"")
        return str(found["sharded_backend"])
    except (ValueError, KeyError, TypeError, RecursionError, StorageError):
        return None


def _format_of_file(store: Store) -> _Format | None:
    """Return the format of a file at the path itself; None if the path is not a file."""
    if not isinstance(store, FileStore):
        return None
    name, beside = store.root.name, FileStore(store.root.parent)
    try:
        size = beside.nbytes_of(name)
    except StorageError:  # most likely a directory
        return None
    if size is None:
        return None
    head = _head(beside, name, min(size, 512))
    if head.startswith(b"PK") and b".npy" in head:
        return _NUMPY
    if head.startswith((b"PK", b"\x80\x02")):
        return _TORCH
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < size:
        return _SAFETENSORS
    return _NUMPY if head.startswith(b"\x93NUMPY") else _Format("a file of another kind", "Check the path")


def _head(store: Store, name: str, nbytes: int) -> bytes:
    """Return the first `nbytes` bytes of an object; no bytes if it has fewer, or cannot be read."""
    head = bytearray(nbytes)
    try:
        if store.nbytes_of(name) is None:
            return b""
        store.read_into(name, memoryview(head))
    except StorageError:
        return b""
    return bytes(head)
