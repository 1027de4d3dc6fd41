"""States of training without any data: models in bfloat16 and three copies in float32, as many ranks hold them."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import attrs
import numpy as np

from functional_ckpt.plan.layout import ArrayPlan, LayoutPolicy
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.mesh import Mesh
from functional_ckpt.spec.placement import Placement, Replicate, Shard, StridedShard
from functional_ckpt.spec.sharding import PlacedArray, Sharding
from functional_ckpt.spec.table import ShardRows, ShardTable, padded_shapes

#: The model, and what the optimizer keeps of each parameter.
COPIES = (
    ("model", "bfloat16"),
    ("optim.master", "float32"),
    ("optim.exp_avg", "float32"),
    ("optim.exp_avg_sq", "float32"),
)
#: Ranks of a node, which tensor parallelism joins.
TP = 8

Shape = tuple[int, ...]


@attrs.frozen
class Model:
    """A transformer: `experts` have `expert` columns each and are one tensor per matrix (`grouped`), or one each."""

    name: str
    layers: int
    hidden: int
    mlp: int
    keys: int
    words: int
    experts: int = 1
    grouped: bool = False

    def parameters(self) -> Iterator[tuple[str, Shape, str]]:
        """Yield name, shape and how tensor parallelism cuts it: by rows, by columns, or not at all."""
        yield "embed", (self.words, self.hidden), "rows"
        yield "head", (self.words, self.hidden), "rows"
        yield "norm", (self.hidden,), ""
        for layer in range(self.layers):
            for name, shape, cut in self._layer():
                yield f"layers.{layer}.{name}", shape, cut

    def _layer(self) -> Iterator[tuple[str, Shape, str]]:
        square = (self.hidden, self.hidden)
        yield from (("q", square, "rows"), ("o", square, "columns"))
        yield from ((name, (self.keys, self.hidden), "rows") for name in "kv")
        yield from ((name, (self.hidden,), "") for name in ("norm1", "norm2"))
        matrices = (
            ("gate", (self.mlp, self.hidden), "rows"),
            ("up", (self.mlp, self.hidden), "rows"),
            ("down", (self.hidden, self.mlp), "columns"),
        )
        if self.experts > 1:
            yield "router", (self.experts, self.hidden), ""
        for name, shape, cut in matrices:
            if self.grouped:
                yield f"experts.{name}", (self.experts, *shape), cut
            elif self.experts > 1:
                yield from ((f"experts.{expert}.{name}", shape, cut) for expert in range(self.experts))
            else:
                yield name, shape, cut


MODELS = (
    Model("dense 7B", 32, 4096, 11008, 4096, 32000),
    Model("dense 70B", 80, 8192, 28672, 1024, 128256),
    Model("dense 405B", 126, 16384, 53248, 1024, 128256),
    Model("MoE 47B, 8 experts", 32, 4096, 14336, 1024, 32000, 8),
    Model("MoE 235B, 128 in one", 94, 4096, 1536, 512, 151936, 128, grouped=True),
)
RANKS = (8, 64, 512, 4096, 16384)


@cache
def specs(model: Model) -> tuple[tuple[ArraySpec, str], ...]:
    """All arrays, each with how tensor parallelism cuts it."""
    parameters = list(model.parameters())
    return tuple(
        (ArraySpec(f"{copy}.{name}", shape, dtype), cut) for copy, dtype in COPIES for name, shape, cut in parameters
    )


def fsdp(model: Model, ranks: int) -> list[PlacedArray]:
    """FSDP2: every tensor cut by rows."""
    sharding = Sharding(Mesh.line(ranks), (Shard(0),))
    return [PlacedArray(spec, sharding) for spec, _ in specs(model)]


def tp_fsdp(model: Model, ranks: int) -> list[PlacedArray]:
    """Tensor parallelism within nodes and FSDP2 over them: rows that both cut are strided."""
    mesh = Mesh((ranks // TP, TP), tuple(range(ranks)))
    kinds = {(len(spec.shape), cut) for spec, cut in specs(model)}
    shardings = {kind: Sharding(mesh, _placements(*kind)) for kind in kinds}
    return [PlacedArray(spec, shardings[len(spec.shape), cut]) for spec, cut in specs(model)]


def _placements(ndim: int, cut: str) -> tuple[Placement, Placement]:
    if not cut:
        return Shard(0), Replicate()
    dim = ndim - 2 if cut == "rows" else ndim - 1
    return (StridedShard(0, TP) if dim == 0 else Shard(0)), Shard(dim)


def zero(model: Model, ranks: int) -> ShardTable:
    """ZeRO: each copy of the model is one flat buffer, of which every rank holds an equal range."""
    arrays = tuple(sorted((spec for spec, _ in specs(model)), key=lambda spec: spec.key))
    sizes = np.array([spec.nbytes // spec.itemsize for spec in arrays], np.int64)
    groups = np.array(
        [next(i for i, (copy, _) in enumerate(COPIES) if spec.key.startswith(f"{copy}.")) for spec in arrays]
    )
    parts = [_flat(np.flatnonzero(groups == group), sizes, ranks) for group in range(len(COPIES))]
    array, rank, low, high = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.lexsort((array, rank))
    array, rank, low, high = array[order], rank[order], low[order], high[order]
    shard = np.arange(len(rank)) - np.searchsorted(rank, rank)
    stop = padded_shapes(arrays)[array]
    one = np.ones(len(array), np.int64)
    return ShardTable(
        arrays, ((0,),), ShardRows(array, rank, shard, np.zeros_like(stop), stop, low, high, one - 1, one)
    )


def _flat(numbers: np.ndarray, sizes: np.ndarray, ranks: int) -> tuple[np.ndarray, ...]:
    """Array, rank, and range of each part of one buffer."""
    ends = np.cumsum(sizes[numbers])
    share = -(-int(ends[-1]) // ranks)
    stop = np.unique(np.concatenate([ends, np.minimum(np.arange(1, ranks + 1) * share, ends[-1])]))
    start = np.concatenate([[0], stop[:-1]])
    place = np.searchsorted(ends, start, "right")
    begin = (ends - sizes[numbers])[place]
    return numbers[place], start // share, start - begin, stop - begin


POLICY = LayoutPolicy()
#: So many files are never too many: each shard that reaches the minimum is a chunk.
KEPT = LayoutPolicy(few_files=2**62)
#: Manifest, provenance and root.
OTHER_FILES = 3
PLACED: dict[str, Callable[[Model, int], list[PlacedArray]]] = {"FSDP2": fsdp, "TP8 x FSDP2": tp_fsdp}


def file_count(arrays: Sequence[ArrayPlan]) -> int:
    """Files of a checkpoint: chunks, one of metadata for each array, and those of the checkpoint."""
    return sum(1 + array.grid.size for array in arrays) + OTHER_FILES


def bound_of(model: Model) -> int:
    """The most files that the checkpoint of a model may have."""
    arrays = [spec for spec, _ in specs(model)]
    return 2 * sum(spec.nbytes for spec in arrays) // POLICY.target_chunk_nbytes + 2 * len(arrays)
