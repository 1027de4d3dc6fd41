"""`root_metadata`: the root's ``zarr.json``, which is written last, and the `members` that it may have."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from functional_ckpt.plan.layout import ArrayPlan
from functional_ckpt.plan.manifest import FORMAT, ArrayEntry, Manifest
from functional_ckpt.spec.array import BITS
from functional_ckpt.store.encoding import named_metadata, to_json

__all__ = ["CONSOLIDATED", "CONSOLIDATED_END", "members", "root_metadata"]

#: What a root with consolidated metadata begins with, and what follows the metadata of its arrays.
CONSOLIDATED = b'{"consolidated_metadata":{"kind":"inline","metadata":{'
CONSOLIDATED_END = b'},"must_understand":false},'


def members(arrays: Iterable[ArrayEntry | ArrayPlan]) -> tuple[bytes, ...]:
    """Return the metadata of arrays as the members of an object of JSON."""
    return tuple([named_metadata(array.spec, array.layout) for array in arrays])


def root_metadata(manifest: Manifest, digest: str, consolidated: Sequence[bytes] | None) -> bytes:
    """Return the root's ``zarr.json`` for a manifest whose text has `digest`.

    With `consolidated`, the `members` of the manifest's arrays, it has the metadata of all of them.
    """
    attributes = json.loads(manifest.attributes)
    values = {entry.key: json.loads(entry.text) for entry in manifest.values}
    ours = {"format": FORMAT, "version": list(manifest.version), "manifest": digest, "values": values}
    root: dict[str, Any] = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {**attributes, "functional_ckpt": ours},
    }
    # With one array of a type that stock zarr-python does not know, it could not open the group at all.
    if consolidated is None or any(entry.layout.stored in BITS for entry in manifest.arrays):
        return to_json(root)
    listed = b",".join(consolidated)
    return b"".join((CONSOLIDATED, listed, CONSOLIDATED_END, to_json(root)[1:]))  # not +: megabytes, copied each time
