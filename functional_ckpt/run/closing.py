"""The files of a save beside its arrays, written when these are complete: manifest, provenance and root."""

import platform
import time
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from functional_ckpt.plan.manifest import Manifest
from functional_ckpt.plan.record import Frame, frame_of
from functional_ckpt.plan.state import ChunkRows, leaves_of
from functional_ckpt.plan.writers import writers_to
from functional_ckpt.run.planning import Plan
from functional_ckpt.run.policy import SavePolicy
from functional_ckpt.store.encoding import MANIFEST, METADATA_FILE, METADATA_TEXT, PROVENANCE, to_json
from functional_ckpt.store.execute import Receipt
from functional_ckpt.store.root import members, root_metadata
from functional_ckpt.store.target import manifest_digest

__all__ = ["closing_texts"]


def closing_texts(
    manifest: Manifest, plan: Plan, policy: SavePolicy, receipts: Sequence[Receipt], save_id: str, started: float
) -> tuple[list[tuple[str, bytes]], bytes]:
    """Return the files that are written before the root, by name, and the root; `manifest` is that of the plan.

    `receipts` are those of the ranks; the save `save_id` has `started` so many seconds after 1970.
    """
    text = manifest.to_json(plan.derived(_frames))
    # Some programs look for a file of this name, which checkpoints of DCP have.
    files = [(METADATA_FILE, METADATA_TEXT)] if policy.metadata_file else []
    files += [(MANIFEST, text), (PROVENANCE, to_json(_provenance(plan, receipts, save_id, started)))]
    consolidated = plan.derived(_members) if policy.consolidate else None
    return files, root_metadata(manifest, manifest_digest(text), consolidated)


def _frames(plan: Plan) -> tuple[Frame, ...]:
    placed = zip(plan.arrays, leaves_of(plan.structure, plan.arrays), strict=True)
    return tuple([frame_of(array.spec, array.layout, leaf.path, leaf.codec) for array, leaf in placed])


def _members(plan: Plan) -> tuple[bytes, ...]:
    return members(plan.arrays)


def _provenance(plan: Plan, receipts: Sequence[Receipt], save_id: str, started: float) -> dict[str, Any]:
    """Return when, by which programs, and by which ranks a checkpoint is written."""
    names = ("functional_ckpt", "tensorstore", "numpy", "zarr", "torch")
    chunks = ChunkRows.joined([receipt.chunks for receipt in receipts])
    ranks = np.repeat(np.arange(len(receipts)), [len(receipt.chunks) for receipt in receipts])
    return {
        "save_id": save_id,
        "started": started,
        "finished": time.time(),
        "python": platform.python_version(),
        "versions": {name: found for name in names if (found := _version(name)) is not None},
        "ranks": [
            {
                "nbytes": r.nbytes,
                "messages": r.traffic.messages,
                "moved_nbytes": r.traffic.nbytes,
                "arrays": [r.keys[number] for number in np.unique(r.chunks.array).tolist()],
            }
            for r in receipts
        ],
        "writers": writers_to(plan.arrays, chunks.array, chunks.chunk, ranks),
    }


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except (PackageNotFoundError, OSError):  # a save does not fail for that
        return None
