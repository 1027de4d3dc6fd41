"""The states that are saved: a few large tensors, or many small ones."""

import math
from collections.abc import Iterator

import torch

State = dict[str, dict[str, torch.Tensor]]

MIB = 1 << 20
COLUMNS = 4096


def large_tensors(nbytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of 16 float32 matrices, `nbytes` together, one at a time."""
    shape = (nbytes // (16 * 4 * COLUMNS), COLUMNS)
    return ((f"weight_{i:02d}", _tensor(i, shape)) for i in range(16))


def large_state(nbytes: int) -> State:
    """16 float32 matrices, `nbytes` together."""
    return {"model": dict(large_tensors(nbytes))}


def small_tensors(count: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of `count` float32 vectors of 4 KiB, one at a time."""
    return ((f"weight_{i:05d}", _tensor(i, (1024,))) for i in range(count))


def small_state(count: int) -> State:
    """`count` float32 vectors of 4 KiB."""
    return {"model": dict(small_tensors(count))}


def blank_like(state: State) -> State:
    """The same tensors, allocated and touched, with values that no state has."""
    return {
        group: {name: torch.zeros_like(tensor).fill_(-1.0) for name, tensor in tensors.items()}
        for group, tensors in state.items()
    }


def tensors_of(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor; the names are unique and fit for a file."""
    for group, tensors in state.items():
        for name, tensor in tensors.items():
            yield f"{group}.{name}", tensor


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two float32 tensors hold the same bits, NaNs included."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def require_equal(found: State, expected: State, who: str) -> None:
    """Refuse to time a library that does not give the values back.

    Raises
    ------
    RuntimeError
        If a tensor differs in a bit.
    """
    got = dict(tensors_of(found))
    wrong = [name for name, wanted in tensors_of(expected) if not same_bits(got[name], wanted)]
    if wrong:
        raise RuntimeError(f"{who} did not load what was saved: {', '.join(wrong[:5])}")


def _tensor(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Bits that differ between elements and tensors; drawing random numbers takes longer."""
    count = math.prod(shape)
    bits = torch.arange(seed * count, (seed + 1) * count, dtype=torch.int64) * 2654435761
    return bits.to(torch.int32).view(torch.float32).reshape(shape)
