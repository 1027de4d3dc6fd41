"""safetensors: one file, without a digest. It loads into new tensors, so those are copied into the model's."""

from pathlib import Path

import safetensors.torch

from benchmarks.competitors import Competitor
from benchmarks.place import fsync_all
from benchmarks.state import State

SAFETENSORS = "safetensors"


def _save(state: State, path: Path, durable: bool) -> None:
    safetensors.torch.save_file(state["model"], path)
    if durable:
        fsync_all(path)


def _load(into: State, path: Path) -> None:
    """Copy from the memory map that `load_file` returns, as a loader into a live model does."""
    loaded = safetensors.torch.load_file(path)
    for name, tensor in into["model"].items():
        tensor.copy_(loaded[name])


COMPETITORS = (Competitor(SAFETENSORS, _save, _load),)
