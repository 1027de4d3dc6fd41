"""What `train_reshard.py` prints, and the two proofs it gives: bit-equal state, equal losses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import functional_ckpt as fc

LOSS_TOLERANCE = 1e-5
"""Seen: up to 7e-7 with either setting. A schedule one step ahead is already off by 6e-3."""


def is_first_rank() -> bool:
    """Tell whether this process is rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def say(text: str) -> None:
    """Print one line, from rank 0 only."""
    if is_first_rank():
        print(f"      {text}", flush=True)


def say_placement(name: str, weight: torch.Tensor) -> None:
    """Tell how the current layout holds one parameter."""
    how, local = "one plain tensor", weight
    if isinstance(weight, DTensor):
        how, local = f"DTensor {weight.placements}", weight.to_local()
    say(f"{name} {tuple(weight.shape)}: {how}, {tuple(local.shape)} on this rank")


# ---- Bit-equal state ----------------------------------------------------------------------------


def fingerprints(state: dict[str, Any]) -> dict[str, str]:
    """Digest every leaf but the per-rank ones; all ranks must call it, as it gathers tensors."""
    return {key: _fingerprint(x) for key, x in _leaves(state) if not isinstance(x, fc.PerRank)}


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict | list):
        for name, branch in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(branch, f"{key}.{name}" if key else str(name))
    else:
        yield key, tree


def _fingerprint(leaf: Any) -> str:
    """SHA-256 of a whole tensor's type, shape and bytes; the exact text of any other value."""
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    whole = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
    header = f"{whole.dtype} {tuple(whole.shape)} ".encode()
    return hashlib.sha256(header + whole.detach().contiguous().numpy().tobytes()).hexdigest()


def check_bit_equal(saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Fail unless both have the same keys and the same fingerprint under each."""
    wrong = [key for key in {**saved, **now} if saved.get(key) != now.get(key)]
    if wrong:
        raise SystemExit(f"{len(wrong)} leaves differ from what was saved: {wrong[:5]}")
    for part in ("model", "optim", "scheduler"):
        count = sum(key.startswith(f"{part}.") for key in saved)
        say(f"{part}: all {count} leaves bit-equal to what was saved")


# ---- Equal losses -------------------------------------------------------------------------------


def check_losses(straight: list[float], resumed: Mapping[str, list[float]], start: int) -> None:
    """Set resumed losses, by title, beside the uninterrupted ones; fail when they differ."""
    print("\n      step  uninterrupted", *(f"{title:>25}" for title in resumed))
    for i in sorted({*range(0, len(straight), len(straight) // 5), len(straight) - 1}):
        columns = (f"{losses[i]:25.7f}" for losses in resumed.values())
        print(f"      {start + i + 1:4}  {straight[i]:13.7f}", *columns)
    worst = [max(abs(a - b) for a, b in zip(straight, losses, strict=True)) for losses in resumed.values()]
    print("      largest difference ", *(f"{difference:25.1e}" for difference in worst))
    if not all(difference <= LOSS_TOLERANCE for difference in worst):  # a NaN must fail too
        raise SystemExit(f"the losses differ by more than {LOSS_TOLERANCE:.0e}")
    print(f"      every step of every run agrees within {LOSS_TOLERANCE:.0e}")


# ---- The checkpoint, without this library -------------------------------------------------------


def show_checkpoint(path: Path, key: str) -> None:
    """Open a checkpoint with zarr-python: its tree, its attributes, and the array under ``key``."""
    import zarr

    group = zarr.open_group(path, mode="r")
    array: Any = group[key]
    tree = str(group.tree()).splitlines()
    shown = [*tree[:12], f"... and {len(tree) - 12} more arrays", ""]
    shown += [f"{name}: {group.attrs[name]}" for name in ("trained_under", "step")]
    shown += ["", array.name, *str(array.info).splitlines()]
    shown += ["", "its first two rows, four columns:", *str(array[:2, :4]).splitlines()]
    print("\n".join(f"      {line}".rstrip() for line in shown))
