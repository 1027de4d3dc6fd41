"""Sharded tensors under stock ``torch.distributed.checkpoint``, its own files, on two ranks."""

import pytest

from tests.mp import launch

pytestmark = pytest.mark.mp


def layouts(whole):
    """Return name -> the shards of this rank."""
    import torch

    from functional_ckpt.torch.megatron.mapping import ShardedTensor

    rank, flat = launch.rank(), whole.reshape(-1)

    def ranges(*cuts):
        return [
            ShardedTensor.from_rank_offsets_flat(
                "w", flat[low:high].clone(), tuple(whole.shape), flattened_range=slice(low, high)
            )
            for low, high in cuts
        ]

    def layers(*numbers):
        return [
            ShardedTensor.from_rank_offsets("w", whole[i].clone(), (0, i, len(whole)), prepend_axis_num=1)
            for i in numbers
        ]

    rows, columns = whole.chunk(2, 0), whole.chunk(2, 1)
    end = flat.numel()
    return {
        "rows": [ShardedTensor.from_rank_offsets("w", rows[rank].clone(), (0, rank, 2))],
        "columns": [ShardedTensor.from_rank_offsets("w", columns[rank].clone(), (1, rank, 2))],
        "layers": layers(*((0, 2), (1, 3))[rank]),
        "flat": ranges(*(((0, 7), (31, 40)), ((7, 31), (40, end)))[rank]),
        "empty range": ranges((0, end) if rank else (0, 0)),
        "empty shard": [
            ShardedTensor("w", part, part.dtype, part.shape, whole.shape, (0, 0, 0), None)
            for part in [whole[: len(whole) * rank].clone()]
        ],
        "copies": [ShardedTensor.from_rank_offsets("w", whole.clone(), replica_id=rank)],
        "experts": [
            ShardedTensor.from_rank_offsets("w", part.clone(), (0, i, 4), (1, rank, 2), prepend_axis_num=1)
            for i, layer in enumerate(whole)
            for part in [torch.chunk(layer, 2, 0)[rank]]
        ],
    }


def wrapped(shards):
    from functional_ckpt.torch.megatron.strategies.checkpointable import (
        CheckpointableShardedTensor,
        LocalShardsContainer,
    )

    values = [CheckpointableShardedTensor.from_sh_ten(shard) for shard in shards]
    return values[0] if len(values) == 1 else LocalShardsContainer(values)


def every_pair(path):
    """Save under each layout, load under each other, and as a plain tensor."""
    import torch.distributed.checkpoint as dcp

    whole = launch.values(4, 6, 5)
    for source, shards in layouts(whole).items():
        place = path / source.replace(" ", "-")
        dcp.save({"w": wrapped(shards)}, storage_writer=dcp.FileSystemWriter(place))
        plain = {"w": whole.clone().zero_()}
        dcp.load(plain, storage_reader=dcp.FileSystemReader(place))
        launch.same(plain["w"], whole, source)
        for target, wanted in layouts(whole).items():
            found = layouts(whole)[target]
            for shard in found:
                shard.data.fill_(-1)
            dcp.load({"w": wrapped(found)}, storage_reader=dcp.FileSystemReader(place))
            for shard, want in zip(found, wanted, strict=True):
                launch.same(shard.data, want.data, f"{source} to {target}")


def test_any_layout_loads_what_any_other_saved(two, tmp_path):
    two.run(every_pair, tmp_path)
