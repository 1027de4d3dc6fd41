"""What each rank does for `benchmarks.mapping`: flat shards against rows, and a load of replicated state."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from benchmarks.group import gathered, timed_by_all
from benchmarks.measure import Sample, Samples, rotated
from benchmarks.place import Place
from benchmarks.state import MIB, large_tensors, same_bits
from functional_ckpt import LayoutPolicy
from functional_ckpt.store.files import FileStore
from functional_ckpt.torch.megatron.mapping import ShardedTensor
from functional_ckpt.torch.megatron.serialization import load, save
from functional_ckpt.torch.megatron.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from functional_ckpt.torch.megatron.strategies.zarr import (
    SAVE_POLICY,
    ZarrLoadShardedStrategy,
    ZarrSaveCommonStrategy,
    ZarrSaveShardedStrategy,
)

FLAT, FLAT_8_MIB, ROWS = "flat shards", "flat shards, chunks of 8 MiB", "rows of a grid"
#: Shards of each tensor; rank r has the r-th part of them, in order.
SHARDS = 16
_POLICY = attrs.evolve(SAVE_POLICY, durability="none")
_POLICY_8_MIB = attrs.evolve(_POLICY, layout=LayoutPolicy(target_chunk_nbytes=8 * MIB))


@attrs.frozen
class Times:
    """Samples by kind of shards."""

    saves: Samples
    loads: Samples


@attrs.frozen
class Fetched:
    """Bytes of chunks that all ranks read together, and bytes of chunks that are stored."""

    read_nbytes: int
    stored_nbytes: int


def measure_times(place: Place, tensors: int, nbytes: int, rounds: int) -> Times:
    """Save and load `tensors` float32 matrices of `nbytes` each under all kinds of shards, in turn."""
    kinds = {FLAT: (_flat, _POLICY), FLAT_8_MIB: (_flat, _POLICY_8_MIB), ROWS: (_rows, _POLICY)}
    state = dict(islice(large_tensors(16 * nbytes), tensors))  # which makes 16 of them
    saves: dict[str, list[Sample]] = {kind: [] for kind in kinds}
    loads: dict[str, list[Sample]] = {kind: [] for kind in kinds}
    # The first round connects the ranks, and is not counted.
    for number in range(rounds + 1):
        for kind in rotated(list(kinds), number):
            path = _fresh_path(place)
            cut, policy = kinds[kind]
            held = {name: cut(name, tensor) for name, tensor in state.items()}
            strategy = ZarrSaveShardedStrategy(policy=policy)
            saved = timed_by_all(partial(_save, held, path, strategy))
            into = {name: [_blank(shard) for shard in shards] for name, shards in held.items()}
            loaded = timed_by_all(partial(load, into, path))
            _prove(into, held)
            if number:
                saves[kind].append(saved)
                loads[kind].append(loaded)
            dist.barrier()
            if dist.get_rank() == 0:
                place.discard(path, files=0)
    return Times(saves, loads)


def measure_fetched(place: Place, nbytes: int) -> Fetched:
    """Load `nbytes` that every rank has a copy of, by Megatron's fully parallel way, and count what is read."""
    path = _fresh_path(place)
    held = {
        name: [ShardedTensor.from_rank_offsets(name, tensor, replica_id=dist.get_rank())]
        for name, tensor in large_tensors(nbytes)
    }
    _save(held, path, FullyParallelSaveStrategyWrapper(ZarrSaveShardedStrategy(policy=_POLICY)))
    into = {name: [_blank(shard) for shard in shards] for name, shards in held.items()}
    read = _counting()
    load(into, path, FullyParallelLoadStrategyWrapper(ZarrLoadShardedStrategy()))
    _prove(into, held)
    stored = sum(file.stat().st_size for file in path.rglob("*") if _is_chunk(str(file.relative_to(path))))
    return Fetched(sum(gathered(sum(read))), stored)


def _flat(name: str, whole: torch.Tensor) -> list[ShardedTensor]:
    """This rank's shards of arbitrary cuts, like those of a distributed optimizer's buckets."""
    buffer, cut = whole.reshape(-1), random.Random(name)
    ends = sorted(cut.sample(range(1, buffer.numel()), SHARDS - 1))
    ranges = _own([*pairwise([0, *ends, buffer.numel()])])
    return [
        ShardedTensor.from_rank_offsets_flat(
            name, buffer[low:high].clone(), tuple(whole.shape), flattened_range=slice(low, high)
        )
        for low, high in ranges
    ]


def _rows(name: str, whole: torch.Tensor) -> list[ShardedTensor]:
    """This rank's shards of as many blocks of rows."""
    blocks = _own([*enumerate(whole.chunk(SHARDS))])
    return [ShardedTensor.from_rank_offsets(name, block.clone(), (0, i, SHARDS)) for i, block in blocks]


def _own(every: list[Any]) -> list[Any]:
    """The part of all shards that this rank has."""
    count = len(every) // dist.get_world_size()
    return every[dist.get_rank() * count :][:count]


def _save(held: dict[str, Any], path: Path, strategy: Any) -> None:
    save(held, path, strategy, ZarrSaveCommonStrategy(policy=_POLICY))


def _blank(shard: ShardedTensor) -> ShardedTensor:
    return replace(shard, data=torch.full_like(shard.data, -1.0))


def _prove(into: dict[str, Any], held: dict[str, Any]) -> None:
    for name, shards in held.items():
        if not all(same_bits(a.data, b.data) for a, b in zip(into[name], shards, strict=True)):
            raise RuntimeError(f"{name} is not what was saved")


def _counting() -> list[int]:
    """Return a list to which every read of a chunk by this process adds its bytes from now on."""
    read: list[int] = []

    def counted(method: str, nbytes: Callable[..., int]) -> None:
        real = getattr(FileStore, method)

        def call(self: FileStore, name: str, *rest: Any) -> Any:
            found = real(self, name, *rest)
            if _is_chunk(name):
                read.append(nbytes(found, *rest))
            return found

        setattr(FileStore, method, call)

    counted("read", lambda found, *_: len(found or b""))
    counted("read_into", lambda found, into, *_: len(into))
    counted("read_ranges", lambda found, starts, nbytes, into: len(into))
    return read


def _is_chunk(name: str) -> bool:
    return name.rpartition("/")[2].split(".")[0] == "c"


def _fresh_path(place: Place) -> Path:
    return Path(gathered(str(place.fresh_path()) if dist.get_rank() == 0 else None)[0])
