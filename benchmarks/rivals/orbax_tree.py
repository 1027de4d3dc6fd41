"""Orbax: its synchronous `Checkpointer` with the default layout (OCDBT).

What makes it fair:

* It takes jax or numpy arrays. It gets numpy views of the tensors, made outside of the timing; nothing is copied.
* The synchronous checkpointer is used, not ``save`` and ``wait_until_finished`` of the asynchronous one.
* Compression is off, as it is for everybody: the values are noise to a compressor.
* It restores into new arrays; copying these into the tensors is timed, as with safetensors.
* TensorStore's ``file_io_sync`` is on by default and Orbax offers no switch. It is turned off in Orbax's context
  where nobody syncs, and on where everybody does.
"""

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import torch
from orbax.checkpoint._src.serialization import tensorstore_utils

from benchmarks.competitors import Competitor
from benchmarks.state import State

ORBAX = "Orbax"

# Where jax finds an accelerator it would put nothing there, but look for it during the first save.
jax.config.update("jax_platforms", "cpu")
logging.getLogger("absl").setLevel(logging.ERROR)

_CONTEXTS = (tensorstore_utils._BASE_TS_CONTEXT, tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT)
_CHECKPOINTER = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))

Views = dict[str, dict[str, np.ndarray]]


def _views(state: State) -> Views:
    return {group: {name: tensor.numpy() for name, tensor in tensors.items()} for group, tensors in state.items()}


def _save(views: Views, path: Path, durable: bool) -> None:
    for context in _CONTEXTS:
        context["file_io_sync"] = durable
    _CHECKPOINTER.save(path, views)


def _load(into: Views, path: Path) -> None:
    restored: Any = _CHECKPOINTER.restore(path, item=into)
    for group, views in into.items():
        for name, view in views.items():
            # torch copies with all threads, numpy with one.
            torch.from_numpy(view).copy_(torch.from_numpy(restored[group][name]))


COMPETITORS = (Competitor(ORBAX, _save, _load, _views),)
