"""What a checkpoint holds, as plain JSON values: what ``--json`` prints, and what `tables` lays out."""

import difflib
import json
from collections import Counter
from collections.abc import Callable
from math import isfinite, prod
from typing import Any, NoReturn

import numpy as np

from functional_ckpt.errors import CheckpointError, KeyMismatchError, ProblemError, StorageError
from functional_ckpt.plan.manifest import DIGEST_NBYTES, FORMAT, ArrayEntry, Manifest
from functional_ckpt.run.checkpoint import Checkpoint, StoredArray
from functional_ckpt.store.base import UNSIZED, Store
from functional_ckpt.store.commit import PROVENANCE
from functional_ckpt.store.encoding import chunk_name, node_name
from functional_ckpt.store.opening import open_store
from functional_ckpt.store.reading import verify

__all__ = ["header", "leaf", "listing", "verification"]

Facts = dict[str, Any]

# The corner of the data that `show KEY` prints: first rows and columns, index 0 along all other axes.
_CORNER_ROWS, _CORNER_COLUMNS = 4, 5


def listing(checkpoint: Checkpoint, prefix: str = "") -> Facts:
    """Return arrays, tied keys and values whose keys start with `prefix`, with totals over the arrays."""
    manifest = checkpoint.manifest
    arrays = [_array(entry) for entry in manifest.arrays if entry.spec.key.startswith(prefix)]
    return {
        "path": checkpoint.url,
        "prefix": prefix,
        "arrays": arrays,
        "tied": [{"key": a.key, "target": a.target} for a in manifest.aliases if a.key.startswith(prefix)],
        "values": [{"key": v.key, "value": json.loads(v.text)} for v in manifest.values if v.key.startswith(prefix)],
        "totals": {"nbytes": sum(a["nbytes"] for a in arrays), "chunks": sum(a["chunks"] for a in arrays)},
    }


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
        "provenance": _provenance(checkpoint),
    }


def leaf(checkpoint: Checkpoint, key: str) -> Facts:
    """Return what is stored under one key; an array is read, chunk by chunk, to sum it up.

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
        raise KeyMismatchError("the checkpoint has no such key", key, remedy=_hint(manifest, key))
    array = checkpoint[key]
    return {"kind": "array", **_array(array.entry), **_stored(checkpoint, array), "key": key, **_content(array)}


def verification(checkpoint: Checkpoint, on_bytes: Callable[[int], None] | None = None) -> Facts:
    """Return what reading every chunk has shown."""
    report = verify(checkpoint.url, on_bytes)
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
    sizes = [_nbytes_of(store, f"{node}/{name}", entry) for name in names]
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


def _nbytes_of(store: Store, name: str, entry: ArrayEntry) -> int | None:
    found = store.nbytes_of(name)
    if found != UNSIZED:
        return found
    return len(store.read(name) or b"") if entry.layout.codecs else entry.layout.chunk_nbytes


def _content(array: StoredArray) -> Facts:
    if array.entry.codec is not None:
        return {"summary": None, "corner": None}
    return {"summary": _summary(array), "corner": _corner(array)}


def _summary(array: StoredArray) -> Facts:
    """Return least, largest and mean finite element, and how many are finite; one chunk in memory at a time."""
    parts = [_chunk_summary(array, index) for index in array.entry.grid.touched(array.entry.spec.box)]
    finite = sum(part["finite"] for part in parts)
    lows = [part["min"] for part in parts if part["min"] is not None]
    highs = [part["max"] for part in parts if part["max"] is not None]
    return {
        "finite": finite,
        "not_finite": prod(array.shape) - finite,
        "min": min(lows, default=None),
        "max": max(highs, default=None),
        "mean": _number(sum(part["sum"] for part in parts) / finite) if finite else None,
    }


def _chunk_summary(array: StoredArray, index: tuple[int, ...]) -> Facts:
    values = np.asarray(array[(*array.entry.grid.box(index).slices, ...)])
    exact = array.dtype.startswith(("bool", "int", "uint"))
    ordered = not array.dtype.startswith("complex")
    if not exact:  # no arithmetic in float8
        values = values.astype(np.float64 if ordered else np.complex128)
        values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        total = values.sum(dtype=np.float64 if exact else None)
    known = values.size > 0 and ordered
    number = int if exact else float
    return {
        "finite": values.size,
        "min": number(values.min()) if known else None,
        "max": number(values.max()) if known else None,
        "sum": total.item(),
    }


def _corner(array: StoredArray) -> list[list[str]]:
    """Return the first rows and columns of the last two axes as text."""
    if not prod(array.shape):
        return []
    ends = (slice(_CORNER_ROWS), slice(_CORNER_COLUMNS))[2 - min(2, len(array.shape)) :]
    values = np.asarray(array[(*(0,) * (len(array.shape) - 2), *ends, ...)])
    rows = values.reshape((1,) * (2 - values.ndim) + values.shape)
    return [[_text(x) for x in row] for row in rows]


def _text(value: Any) -> str:
    if isinstance(value, np.bool_ | np.integer):
        return str(value)
    return f"{complex(value):.6g}" if np.iscomplexobj(value) else f"{float(value):.6g}"


def _number(value: Any) -> Any:
    """Return a mean as JSON: None where the sum overflowed, two numbers where it is complex."""
    if not np.isfinite(value):
        return None
    return [value.real, value.imag] if isinstance(value, complex) else value


def _problem(problem: CheckpointError) -> Facts:
    if not isinstance(problem, ProblemError):
        return {"key": None, "chunk": None, "what": str(problem), "expected": None, "found": None}
    expected, found = (None if x is None else str(x) for x in (problem.expected, problem.found))
    place = {"key": problem.key, "chunk": problem.chunk}
    return {**place, "what": problem.what, "expected": expected, "found": found}


def _counts(names: Any) -> dict[str, int]:
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def _provenance(checkpoint: Checkpoint) -> Any:
    """Return provenance.json, which no digest covers: whatever is wrong with it is no error."""
    try:
        data = open_store(checkpoint.url).read(PROVENANCE)
        found = None if data is None else json.loads(data, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError, StorageError):
        return None
    return found if isinstance(found, dict) else None


def _finite(text: str) -> float:
    value = float(text)
    return value if isfinite(value) else _refuse(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _hint(manifest: Manifest, key: str) -> str:
    keys = [*manifest.by_key, *(value.key for value in manifest.values)]
    below = [k for k in keys if k.startswith(key.rstrip(".") + ".")]
    if below:
        return f"{len(below)} keys begin with it: list them with --prefix, such as {below[0]!r}"
    close = difflib.get_close_matches(key, keys, 1)
    return f"Did you mean {close[0]!r}?" if close else "List the keys with functional-ckpt ls"
