"""State dicts with sharded leaves over several ranks: saved under one sharding and loaded under another."""

import pytest

from tests.mp import launch

pytestmark = pytest.mark.mp


def layouts(whole):
    """Return name -> the shards of this rank of two, under the key w."""
    import torch

    from functional_ckpt.torch.megatron.mapping import ShardedTensor

    rank, flat, tensor = launch.rank() % 2, whole.reshape(-1), ShardedTensor.from_rank_offsets

    def ranges(*cuts):
        shape = tuple(whole.shape)
        make = ShardedTensor.from_rank_offsets_flat
        return [make("w", flat[a:b].clone(), shape, flattened_range=slice(a, b)) for a, b in cuts]

    end = flat.numel()
    halves = [torch.chunk(layer, 2, 0)[rank].clone() for layer in whole]
    return {
        "rows": [tensor("w", whole.chunk(2, 0)[rank].clone(), (0, rank, 2))],
        "columns": [tensor("w", whole.chunk(2, 1)[rank].clone(), (1, rank, 2))],
        "layers": [tensor("w", whole[i].clone(), (0, i, 4), prepend_axis_num=1) for i in ((0, 2), (1, 3))[rank]],
        "flat": ranges(*(((0, 7), (31, 40)), ((7, 31), (40, end)))[rank]),
        "nothing": ranges((0, end)) if rank else [],
        "copies": [tensor("w", whole.clone(), replica_id=rank)],
        "experts": [tensor("w", half, (0, i, 4), (1, rank, 2), prepend_axis_num=1) for i, half in enumerate(halves)],
    }


def every_pair(path):
    from functional_ckpt.torch.megatron.serialization import load, save

    whole = launch.values(4, 6, 5)
    for source, shards in layouts(whole).items():
        save({"w": shards, "step": 3}, path / source)
        for target, wanted in layouts(whole).items():
            found = layouts(whole)[target]
            for shard in found:
                shard.data.fill_(-1)
            loaded = load({"w": found}, path / source)
            assert loaded["step"] == 3
            for shard, want in zip(found, wanted, strict=True):
                launch.same(shard.data, want.data, f"{source} to {target}")


def test_any_layout_loads_what_any_other_saved(two, tmp_path):
    two.run(every_pair, tmp_path)


def failing(path):
    """One rank's problem is raised on both, and names it."""
    import torch

    from functional_ckpt.errors import CheckpointError
    from functional_ckpt.torch.megatron.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
    from functional_ckpt.torch.megatron.serialization import load, save
    from functional_ckpt.torch.megatron.strategies.zarr import ZarrSaveShardedStrategy

    rank, tensor = launch.rank(), ShardedTensor.from_rank_offsets
    good = {"w": tensor("w", torch.ones(2), (0, rank, 2))}

    unknown = {"v": tensor("v", torch.ones(2), (0, rank, 2))}

    def fails(*_):
        raise ValueError("no such thing")

    def told(function, *arguments, **options):
        with pytest.raises(CheckpointError) as caught:
            function(*arguments, **options)
        return str(caught.value)

    save(good, path / "good")
    save(good, path / "good")  # over the first
    (path / "other").mkdir(exist_ok=True)
    (path / "other" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return [
        told(save, {"w": tensor("w", torch.ones(2), (0, 0, 2))}, path / "twice"),
        told(save, {"w": tensor("w", torch.ones(2 + rank), (0, rank, 2))}, path / "shapes"),
        told(save, {"f": ShardedTensorFactory("f", torch.ones(1), fails, fails)} if rank else {}, path / "factory"),
        told(save, {"o": ShardedObject("o", fails if rank else lambda: 0, (2,), (rank,))}, path / "object"),
        told(save, good, path / "other"),
        told(ZarrSaveShardedStrategy().save, {"w": 5} if rank else good, path / "leaf"),
        told(load, unknown if rank else good, path / "good", strict="raise_all", validate_access_integrity=False),
        told(load, good, path / "none"),
        told(load, {"w": tensor("w", torch.ones(2), (0, 1, 2))}, path / "good"),
    ]


def test_problems_of_one_rank_are_raised_on_all(two, tmp_path):
    cases = two.run(failing, tmp_path)
    twice, shapes, factory, objects, there, leaf, strict, none, access = cases[0]
    assert cases[0] == cases[1]
    assert "two main replicas" in twice
    assert "'w'" in twice
    assert "rank (0, 1)" in twice
    assert "disagree about the shape" in shapes
    assert "no such thing" in factory
    assert "cannot be pickled" in objects
    assert "holds a checkpoint" in there
    assert "rank 1" in leaf
    assert "'v'" in strict
    assert "does not exist" in none
    assert "two main replicas" in access
    assert not (tmp_path / "twice" / "zarr.json").exists()


def misuse():
    """Return what each rank is told of calls that no other rank takes part in."""
    import torch

    from functional_ckpt.torch.megatron.mapping import ShardedTensor

    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2, 4), (0, launch.rank(), 2))
    calls = (
        lambda: shard.narrow(0, 1, 2),
        lambda: shard.narrow(5, 0, 1),
        lambda: ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, 2), (0, 1, 2)),
        lambda: ShardedTensor.from_rank_offsets("w", torch.ones(2), (3, 0, 2)),
        lambda: ShardedTensor("w", None, torch.float32, (2,), (4,), (3,), None),
        lambda: ShardedTensor("w", None, torch.float32, (2,), (4,), (2,), (2, 1)),
    )
    texts = []
    for call in calls:
        with pytest.raises(ValueError, match="key 'w'") as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_misuse_names_the_rank(two):
    for rank, texts in enumerate(two.run(misuse)):
        assert all(f"rank {rank}" in text for text in texts), texts


def common():
    import torch

    from functional_ckpt.run.comm import LocalGather
    from functional_ckpt.torch.group.link import torch_gather
    from functional_ckpt.torch.megatron.validation import compare_common_state

    rank = launch.rank()
    state = {"same": [1, {"a": torch.ones(2)}], "step": rank, "t": torch.full((2,), rank), "o": {rank: 1}}
    assert compare_common_state(state, LocalGather()) == {}
    return compare_common_state(state, torch_gather(None, 20.0, "sync"))


def test_common_state_is_compared_across_ranks(two):
    assert two.run(common) == [{"o.0": (1,), "o.1": (1,), "step": (1,), "t": (1,)}] * 2


def only_what_is_not_preprocessed(path):
    """The function may return anything, and what it removes from its argument is saved all the same."""
    from functional_ckpt.torch.megatron.serialization import load_common_state_dict, save

    def without(state):
        del state["rank"]
        return state

    save({"rank": launch.rank(), "step": 1}, path, preprocess_common_before_consistancy_check=without)
    return load_common_state_dict(path)


def test_the_preprocessed_state_is_a_copy(two, tmp_path):
    assert two.run(only_what_is_not_preprocessed, tmp_path) == [{"rank": 0, "step": 1}] * 2


def in_background(path):
    from functional_ckpt.torch.megatron.core import check_is_distributed_checkpoint
    from functional_ckpt.torch.megatron.serialization import load, save
    from functional_ckpt.torch.megatron.strategies.async_calls import AsyncCallsQueue

    whole = launch.values(4, 6, 5)
    shards = layouts(whole)["flat"]
    queue = AsyncCallsQueue(timeout_s=20)
    queue.schedule_async_request(save({"w": shards, "step": 3}, path, async_sharded_save=True))
    for shard in shards:
        shard.data.fill_(-1)
    assert not check_is_distributed_checkpoint(path)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    queue.close()
    rows = layouts(whole)["rows"]
    want = rows[0].data.clone()
    rows[0].data.zero_()
    load({"w": rows}, path)
    launch.same(rows[0].data, want)


def test_a_save_in_the_background(two, tmp_path):
    two.run(in_background, tmp_path)


def strictly(path):
    """Missing keys are those that no rank asks for; unexpected ones are each rank's own."""
    import torch

    from functional_ckpt.torch.megatron.mapping import ShardedTensor
    from functional_ckpt.torch.megatron.serialization import load, save

    tensor = ShardedTensor.from_rank_offsets
    rank = launch.rank()
    save({key: tensor(key, torch.ones(2), replica_id=rank) for key in "abc"}, path)
    wanted = {key: tensor(key, torch.zeros(2)) for key in ("ax", "by")[rank]}
    _, missing, unexpected = load(wanted, path, strict="return_all", validate_access_integrity=False)
    return missing, unexpected


def test_missing_keys_are_those_of_no_rank(two, tmp_path):
    assert two.run(strictly, tmp_path) == [({"c"}, {"x"}), ({"c"}, {"y"})]
