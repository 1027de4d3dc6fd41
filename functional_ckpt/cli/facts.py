"""What a checkpoint holds, as plain JSON values: what ``--json`` prints, and what `tables` lays out."""

import difflib
import json
from collections import Counter
from collections.abc import Sequence
from math import isfinite
from typing import Any, NoReturn

import numpy as np

from functional_ckpt.cli.content import Index, corner, histogram, moments, picked
from functional_ckpt.errors import CheckpointError, KeyMismatchError, ProblemError, StorageError, raise_problems
from functional_ckpt.plan.manifest import DIGEST_NBYTES, FORMAT, ArrayEntry, Manifest
from functional_ckpt.plan.prefixes import prefixes_of
from functional_ckpt.run.checkpoint import Checkpoint, StoredArray
from functional_ckpt.show.bar import Count, displayed
from functional_ckpt.show.outline import Branch, is_selected, outline_of
from functional_ckpt.store.base import Store
from functional_ckpt.store.chunk import stored_nbytes
from functional_ckpt.store.encoding import PROVENANCE, chunk_name, node_name
from functional_ckpt.store.opening import open_store
from functional_ckpt.store.reading import verify

__all__ = [
    "branches", "check_prefixes", "header", "key_problem", "leaf", "listing", "number_of", "provenance_of", "tree",
    "verification",
]  # fmt: skip

Facts = dict[str, Any]

_NO_PREFIX = "Prefixes end at dots: 'model' is model and model.*; functional-ckpt tree shows them"


def listing(checkpoint: Checkpoint, prefixes: Sequence[str] = ()) -> Facts:
    """Return arrays, tied keys and values under one of `prefixes`, or all, with totals over the arrays.

    Raises
    ------
    KeyMismatchError
        For each prefix that no key has.
    """
    manifest = checkpoint.manifest
    check_prefixes(manifest, prefixes)

    arrays = [_array(entry) for entry in manifest.arrays if is_selected(entry.spec.key, prefixes)]
    return {
        "path": checkpoint.url,
        "prefixes": list(prefixes),
        "arrays": arrays,
        "tied": [{"key": a.key, "target": a.target} for a in manifest.aliases if is_selected(a.key, prefixes)],
        "values": [
            {"key": v.key, "value": json.loads(v.text)} for v in manifest.values if is_selected(v.key, prefixes)
        ],
        "totals": {"nbytes": sum(a["nbytes"] for a in arrays), "chunks": sum(a["chunks"] for a in arrays)},
    }


def tree(checkpoint: Checkpoint, prefixes: Sequence[str] = ()) -> Branch:
    """Return the tree of all keys under one of `prefixes`, or of all.

    Raises
    ------
    KeyMismatchError
        For each prefix that no key has.
    """
    manifest = checkpoint.manifest
    check_prefixes(manifest, prefixes)
    return outline_of(manifest, prefixes)


def branches(branch: Branch, depth: int | None = None) -> Facts:
    """Return a tree down to a depth as JSON."""
    found = {name: getattr(branch, name) for name in ("name", "key", "arrays", "parameters", "nbytes", "chunks")}
    found |= {"values": branch.values, "dtypes": list(branch.dtypes), "what": branch.what, "children": []}
    if depth != 0:
        below = None if depth is None else depth - 1
        found["children"] = [branches(child, below) for child in branch.children]
    return found


def check_prefixes(manifest: Manifest, prefixes: Sequence[str]) -> None:
    """Raise `KeyMismatchError` for each prefix that no key has; prefixes end at dots, as those of `LoadPolicy.keys`."""
    keys = _keys(manifest)
    found = prefixes_of("--prefix", prefixes, keys)
    raise_problems(
        KeyMismatchError("no key has this prefix", prefix.text, remedy=prefix.hint or _NO_PREFIX)
        for prefix in found
        if not prefix.holds
    )


def header(checkpoint: Checkpoint) -> Facts:
    """Return what the checkpoint is as a whole, and who wrote it (None where provenance.json is lost)."""
    manifest = checkpoint.manifest
    return {
        "path": checkpoint.url,
        "format": FORMAT,
        "version": list(manifest.version),
        "arrays": len(manifest.arrays),
        "chunks": sum(entry.grid.size for entry in manifest.arrays),
        "nbytes": manifest.nbytes,
        "dtypes": _counts(entry.spec.dtype for entry in manifest.arrays),
        "ownerships": _counts(entry.layout.ownership for entry in manifest.arrays),
        "codecs": _counts(codec for entry in manifest.arrays for codec in entry.layout.codecs),
        "objects": [entry.spec.key for entry in manifest.arrays if entry.codec is not None],
        "values": len(manifest.values),
        "tied": [{"key": alias.key, "target": alias.target} for alias in manifest.aliases],
        "per_rank": [{"key": entry.key, "world_size": entry.world_size} for entry in manifest.per_rank],
        "attributes": dict(checkpoint.attributes),
        "provenance": provenance_of(open_store(checkpoint.url)),
    }


def leaf(checkpoint: Checkpoint, key: str, index: Index | None = None) -> Facts:
    """Return what is stored under one key; an array is read, chunk by chunk, to sum it up.

    With an `index` the elements there take the place of the corner.

    Raises
    ------
    KeyMismatchError
        If nothing has this key.
    CorruptionError
        If the array cannot be read as it was saved.
    """
    manifest = checkpoint.manifest
    for value in manifest.values:
        if value.key == key:
            return {"key": key, "kind": "value", "value": json.loads(value.text)}
    if key not in checkpoint:
        raise key_problem(manifest, key)
    array = checkpoint[key]
    return {"kind": "array", **_array(array.entry), **_stored(checkpoint, array), "key": key, **_content(array, index)}


def _content(array: StoredArray, index: Index | None) -> Facts:
    if array.entry.codec is not None:
        text = array.entry.codec == "json"  # of a plain value that is too long for the manifest
        return {"summary": None, "corner": None, "value": json.loads(np.asarray(array).tobytes()) if text else None}
    if index is not None:  # first: it may be refused
        chosen = picked(array, index)
    done: list[int] = []
    twice = 2 * array.nbytes  # the ends of a histogram are known when all has been read
    with displayed(f"reading {array.key!r}", lambda: Count("read", sum(done), twice)):
        summary = moments(array, done.append)
        found = {"summary": summary, "histogram": histogram(array, summary["min"], summary["max"], done.append)}
    return found | ({"corner": corner(array)} if index is None else {"slice": chosen})


def verification(checkpoint: Checkpoint) -> Facts:
    """Read every chunk, and return the problems."""
    report = verify(checkpoint.url)
    return {
        "path": checkpoint.url,
        "ok": report.ok,
        "arrays": len(checkpoint.manifest.arrays),
        "chunks": report.chunks,
        "nbytes": report.nbytes,
        "problems": [_problem(problem) for problem in report.problems],
    }


def _array(entry: ArrayEntry) -> Facts:
    return {
        "key": entry.spec.key,
        "dtype": entry.spec.dtype,
        "shape": list(entry.spec.shape),
        "chunk": list(entry.layout.chunk),
        "chunks": entry.grid.size,
        "nbytes": entry.spec.nbytes,
        "ownership": entry.layout.ownership,
        "codecs": list(entry.layout.codecs),
        "object_codec": entry.codec,
    }


def _stored(checkpoint: Checkpoint, array: StoredArray) -> Facts:
    entry = array.entry
    node = node_name(entry.spec.key)
    store = open_store(checkpoint.url)
    names = [chunk_name(index) for index in entry.grid.touched(entry.spec.box)]
    sizes = [stored_nbytes(store, f"{node}/{name}", entry.layout) for name in names]
    hexes = [entry.digests[i : i + DIGEST_NBYTES].hex() for i in range(0, len(entry.digests), DIGEST_NBYTES)]
    return {
        "stored_as": entry.spec.key,
        "tied": sorted(a.key for a in checkpoint.manifest.aliases if a.target == entry.spec.key),
        "node": node,
        "grid": list(entry.grid.counts),
        "stored_dtype": entry.layout.stored,
        "stored_nbytes": sum(size or 0 for size in sizes),
        "digests": dict(zip(names, hexes, strict=True)),
    }


def _problem(problem: CheckpointError) -> Facts:
    if not isinstance(problem, ProblemError):
        return {"key": None, "chunk": None, "what": str(problem), "expected": None, "found": None}
    expected, found = (None if x is None else str(x) for x in (problem.expected, problem.found))
    place = {"key": problem.key, "chunk": problem.chunk}
    return {**place, "what": problem.what, "expected": expected, "found": found}


def _counts(names: Any) -> dict[str, int]:
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def provenance_of(store: Store) -> Any:
    """Return provenance.json, or None: no digest covers it, so damage is not an error."""
    try:
        data = store.read(PROVENANCE)
        found = None if data is None else json.loads(data, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError, StorageError):
        return None
    return found if isinstance(found, dict) else None


def number_of(value: Any) -> float | None:
    """Return a number of reasonable size, None for anything else."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**80 else None


def _finite(text: str) -> float:
    value = float(text)
    return value if isfinite(value) else _refuse(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def key_problem(manifest: Manifest, key: str) -> KeyMismatchError:
    """Return the problem of a key that does not exist, or is not an array's."""
    if any(value.key == key for value in manifest.values):
        return KeyMismatchError(
            "this is a plain value, not an array", key, remedy="Look at it with functional-ckpt show"
        )
    return KeyMismatchError("the checkpoint has no such key", key, remedy=_hint(manifest, key))


def _keys(manifest: Manifest) -> list[str]:
    return [*manifest.by_key, *(value.key for value in manifest.values)]


def _hint(manifest: Manifest, key: str) -> str:
    keys = _keys(manifest)
    below = [k for k in keys if k.startswith(key.rstrip(".") + ".")]
    if below:
        return f"{len(below)} keys begin with it: list them with --prefix, such as {below[0]!r}"
    close = difflib.get_close_matches(key, keys, 1)
    return f"Did you mean {close[0]!r}?" if close else "List the keys with functional-ckpt ls"
