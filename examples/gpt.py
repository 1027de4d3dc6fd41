"""A byte-level GPT, the text it learns from, and the layouts it can be trained under.

Nothing here knows about checkpoints. `build(layout, ...)` gives one model in one of three forms:

* ``"fsdp"``: every parameter cut into row blocks over all ranks (FSDP2), batch split over ranks
* ``"tensor"``: linear and embedding layers cut over all ranks by rows or by columns (tensor
  parallelism), layer norms whole on every rank, every rank sees the whole batch
* ``"plain"``: one process, ordinary tensors
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

END_OF_FILE = 256
"""The one token that is not a byte."""
VOCABULARY = 257
"""A prime, so that no number of ranks cuts the embedding evenly."""


class Attention(nn.Module):
    """Causal self-attention over the heads that are here: a rank may hold only some of them."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._heads(f(x)) for f in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """One transformer block: attention, then a perceptron, each behind a layer norm."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, head_width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """Tokens ``(batch, time)`` to logits ``(batch, time, 257)``; both ends share one weight."""

    def __init__(self, blocks: int, width: int, head_width: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, head_width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.1)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.tie()

    def tie(self) -> None:
        """Let the output layer share the token embedding's parameter."""
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(layout: str, seed: int, **sizes: int) -> GPT:
    """Make the model from ``seed`` and bring it into ``layout``; every rank must call it."""
    torch.manual_seed(seed)
    model = GPT(**sizes)
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "tensor":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
        parallelize_module(model, mesh, dict(_tensor_plan(len(model.blocks))))
        model.tie()  # parallelize_module gave each layer its own DTensor
    return model


def _tensor_plan(blocks: int) -> Iterator[tuple[str, ParallelStyle]]:
    """Each layer's cut: "colwise" splits what a layer puts out, "rowwise" what it takes in."""
    yield "tokens", RowwiseParallel(input_layouts=Replicate())
    yield "positions", ColwiseParallel(output_layouts=Replicate())
    for i in range(blocks):
        for name in ("attention.query", "attention.key", "attention.value", "up"):
            yield f"blocks.{i}.{name}", ColwiseParallel()
        for name in ("attention.out", "down"):
            yield f"blocks.{i}.{name}", RowwiseParallel()
    yield "head", ColwiseParallel(output_layouts=Replicate())


def read_corpus(root: Path) -> tuple[list[Path], list[int]]:
    """Find the Python and Markdown files under ``root``; give their paths and all their tokens."""
    paths = sorted(_texts(root), key=lambda path: path.relative_to(root).as_posix())
    tokens: list[int] = []
    for path in paths:
        tokens += [*path.read_bytes(), END_OF_FILE]
    return paths, tokens


def _texts(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_symlink():
            continue
        if path.is_dir():
            skipped = path.name.startswith(".") or path.name in ("build", "dist", "site")
            if not skipped and not (path / "pyvenv.cfg").exists():
                yield from _texts(path)
        elif path.suffix in (".py", ".md"):
            yield path


def batch(tokens: Tensor, step: int, size: int, context: int) -> tuple[Tensor, Tensor]:
    """Draw the global batch of ``step``: inputs and targets, each ``(size, context)``.

    It depends on the step only, never on ranks, so that every layout learns from the same text.
    """
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(tokens) - context, (size, 1), generator=draw)
    window = tokens[starts + torch.arange(context + 1)]
    return window[:, :-1], window[:, 1:]
