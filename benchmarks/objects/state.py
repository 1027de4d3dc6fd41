"""The large state: tensors of 64 MiB, each two chunks of 32 MiB."""

import torch

from benchmarks.state import MIB

_ROWS, _COLUMNS = 4096, 4096


def chunked_state(nbytes):
    """Return float32 matrices of 64 MiB, `nbytes` together, with bits that differ between them."""
    numbers = torch.arange(_ROWS * _COLUMNS, dtype=torch.int32).reshape(_ROWS, _COLUMNS)
    count = nbytes // (64 * MIB)
    return {"model": {f"weight_{i:02d}": (numbers * (2 * i + 3)).view(torch.float32) for i in range(count)}}
