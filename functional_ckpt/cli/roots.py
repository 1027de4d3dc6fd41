"""A directory of checkpoints, whoever made it: what is in it, told from small files only."""

import os
import time
from math import isfinite
from pathlib import Path
from typing import Any

from functional_ckpt.cli.facts import number_of, provenance_of
from functional_ckpt.cli.screen import Screen, columns
from functional_ckpt.errors import CheckpointError
from functional_ckpt.plan.retention import metrics_of
from functional_ckpt.show.outline import natural
from functional_ckpt.show.text import count, size
from functional_ckpt.store.encoding import BEGINNINGS, MANIFEST, ROOT
from functional_ckpt.store.opening import directory_of, open_store
from functional_ckpt.store.reading import root_attributes
from functional_ckpt.store.steps import PIN

__all__ = ["checkpoints_in", "root_lines", "root_listing"]

Facts = dict[str, Any]

_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (0.0, "s"))


def checkpoints_in(path: str) -> list[Path]:
    """Return the committed checkpoints one level below a directory, in natural order; none if it is no directory."""
    root = directory_of(path)
    if root is None:
        return []
    try:
        found = [entry.name for entry in os.scandir(root) if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:
        return []
    return [root / name for name in sorted(found, key=natural) if _is_checkpoint(root / name)]


def _is_checkpoint(path: Path) -> bool:
    try:
        with open(path / MANIFEST, "rb") as file:
            return file.read(len(BEGINNINGS[MANIFEST])) == BEGINNINGS[MANIFEST] and (path / ROOT).is_file()
    except OSError:
        return False


def root_listing(path: str, found: list[Path]) -> Facts:
    """Return name, time and size of each checkpoint in a directory, with totals; None for what is unknown."""
    steps = [_step(each) for each in found]
    sizes = [step["nbytes"] for step in steps if step["nbytes"] is not None]
    return {"path": str(directory_of(path)), "checkpoints": steps, "totals": {"nbytes": sum(sizes)}}


def _step(path: Path) -> Facts:
    store = open_store(path)
    saved = provenance_of(store) or {}
    ranks = saved.get("ranks")
    ranks = [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
    sizes = [number_of(rank.get("nbytes")) for rank in ranks]
    finished = number_of(saved.get("finished"))
    try:
        finished = os.stat(path / ROOT).st_mtime if finished is None else finished
        attributes = root_attributes(store, store.read(ROOT))
    except (OSError, CheckpointError):
        attributes = {}
    return {
        "name": path.name,
        "path": str(path),
        "saved": finished,
        "age_s": None if finished is None else time.time() - finished,
        "nbytes": int(sum(n for n in sizes if n is not None)) if sizes and None not in sizes else None,
        "ranks": len(ranks) or None,
        "metrics": {name: value if isfinite(value) else str(value) for name, value in metrics_of(attributes).items()},
        "pinned": os.path.lexists(f"{path}{PIN}"),
    }


def root_lines(screen: Screen, found: Facts) -> list[str]:
    """Return what ``ls`` prints for a directory of checkpoints."""
    rows = [
        (c["name"], _age(c["age_s"]), "" if c["nbytes"] is None else size(c["nbytes"]), str(c["ranks"] or ""),
         "pinned" if c["pinned"] else "", _metrics(c["metrics"]))
        for c in found["checkpoints"]
    ]  # fmt: skip
    names = ("checkpoint", "age", "bytes", "ranks", "pinned", "metrics")
    used = [i for i in range(len(names)) if i < 4 or any(row[i] for row in rows)]
    total = f"{count(len(rows), 'checkpoint')}, {size(found['totals']['nbytes'])}"
    sides = "".join("<>>><<"[i] for i in used)
    lines = columns(screen, [names[i] for i in used], sides, [[row[i] for i in used] for row in rows]) if rows else []
    return [*lines, *([""] if rows else []), total]


def _metrics(metrics: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value if isinstance(value, str) else f'{value:.6g}'}" for name, value in metrics.items())


def _age(seconds: float | None) -> str:
    if seconds is None:
        return ""
    unit, name = next((unit, name) for unit, name in _UNITS if seconds >= unit or not unit)
    return f"{max(0.0, seconds) / (unit or 1):.0f} {name}"
