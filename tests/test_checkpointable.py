"""Sharded tensors as values that stock ``torch.distributed.checkpoint`` saves and loads, in one process."""

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: E402
from torch.distributed.checkpoint.planner import WriteItemType  # noqa: E402

from functional_ckpt.errors import CheckpointError, ShapeError, SpecError  # noqa: E402
from functional_ckpt.torch.megatron.mapping import ShardedTensor  # noqa: E402
from functional_ckpt.torch.megatron.strategies.checkpointable import (  # noqa: E402
    CheckpointableShardedTensor,
    LocalShardsContainer,
)

# DCP's own, in a process without a group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def wrap(*shards):
    values = [CheckpointableShardedTensor.from_sh_ten(shard) for shard in shards]
    return values[0] if len(values) == 1 else LocalShardsContainer(values)


def grid(whole, axis, count, **more):
    """Return the shards of a regular grid that cuts `whole` along one axis; the data are copies."""
    return [
        ShardedTensor.from_rank_offsets("w", part.clone(), (axis, i, count), **more)
        for i, part in enumerate(whole.chunk(count, axis))
    ]


def stacked(whole):
    """Return the layers of a stack, each without the first axis."""
    return [
        ShardedTensor.from_rank_offsets("w", layer.clone(), (0, i, len(whole)), prepend_axis_num=1)
        for i, layer in enumerate(whole)
    ]


def cut(whole, *cuts):
    """Return the ranges between the cuts of the flattened tensor."""
    buffer, ends = whole.reshape(-1), [0, *cuts, whole.numel()]
    return [
        ShardedTensor.from_rank_offsets_flat(
            "w", buffer[low:high].clone(), tuple(whole.shape), flattened_range=slice(low, high)
        )
        for low, high in pairwise(ends)
    ]


def emptied(shards):
    for shard in shards:
        shard.data.fill_(-1)
    return shards


def saved(state, path):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path))


def loaded(state, path):
    dcp.load(state, storage_reader=dcp.FileSystemReader(path))


WHOLE = torch.arange(4 * 6 * 5, dtype=torch.float32).reshape(4, 6, 5)
LAYOUTS = {
    "one": lambda: [ShardedTensor.from_rank_offsets("w", WHOLE.clone())],
    "rows": lambda: grid(WHOLE, 0, 2),
    "columns": lambda: grid(WHOLE, 1, 3),
    "layers": lambda: stacked(WHOLE),
    "flat": lambda: cut(WHOLE, 7, 31, 64),
    "irregular": lambda: [
        ShardedTensor("w", part.clone(), part.dtype, tuple(part.shape), (4, 6, 5), (0, start, 0), None)
        for start, part in zip((0, 1, 5), WHOLE.split([1, 4, 1], 1), strict=True)
    ],
    "strided": lambda: [ShardedTensor.from_rank_offsets("w", WHOLE.permute(2, 0, 1).clone().permute(1, 2, 0))],
}


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_any_layout_loads_what_any_other_saved(source, target, tmp_path):
    saved({"w": wrap(*LAYOUTS[source]())}, tmp_path)
    expected, found = LAYOUTS[target](), emptied(LAYOUTS[target]())
    loaded({"w": wrap(*found)}, tmp_path)
    for shard, want in zip(found, expected, strict=True):
        assert torch.equal(shard.data, want.data)


@pytest.mark.parametrize("source", LAYOUTS)
def test_a_plain_tensor_loads_it(source, tmp_path):
    saved({"w": wrap(*LAYOUTS[source]())}, tmp_path)
    plain = {"w": torch.zeros(4, 6, 5)}
    loaded(plain, tmp_path)
    assert torch.equal(plain["w"], WHOLE)


@pytest.mark.parametrize("target", LAYOUTS)
def test_it_loads_a_plain_tensor(target, tmp_path):
    saved({"w": WHOLE.clone()}, tmp_path)
    expected, found = LAYOUTS[target](), emptied(LAYOUTS[target]())
    loaded({"w": wrap(*found)}, tmp_path)
    assert all(torch.equal(a.data, b.data) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_data_types_are_kept(dtype, tmp_path):
    shard = ShardedTensor.from_rank_offsets("w", torch.arange(4).to(dtype))
    value = wrap(shard)
    assert (value.dtype, value.device) == (dtype, shard.data.device)
    saved({"w": value}, tmp_path)
    assert dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["w"].properties.dtype is dtype
    found = ShardedTensor.from_rank_offsets("w", torch.zeros(4).to(dtype))
    loaded({"w": wrap(found)}, tmp_path)
    assert torch.equal(found.data.to(torch.complex64), shard.data.to(torch.complex64))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_no_dimension_and_no_extent(shape, tmp_path):
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(shape))
    saved({"w": wrap(shard), "more": torch.ones(1)}, tmp_path)
    found = ShardedTensor.from_rank_offsets("w", torch.zeros(shape))
    loaded({"w": wrap(found)}, tmp_path)
    assert torch.equal(found.data, shard.data)


def test_an_empty_range_does_not_displace_its_neighbour(tmp_path):
    whole = torch.arange(6.0).reshape(2, 3)
    saved({"w": wrap(*cut(whole, 0, 0, 4, 4))}, tmp_path)
    found = emptied(cut(whole, 1))
    loaded({"w": wrap(*found)}, tmp_path)
    assert [shard.data.tolist() for shard in found] == [[0], [1, 2, 3, 4, 5]]


def test_an_empty_shard_does_not_displace_its_neighbour(tmp_path):
    empty = ShardedTensor("w", torch.ones(0), torch.float32, (0,), (3,), (0,), None)
    full = ShardedTensor("w", torch.arange(3.0), torch.float32, (3,), (3,), (0,), None)
    saved({"w": wrap(empty, full)}, tmp_path)
    plain = {"w": torch.zeros(3)}
    loaded(plain, tmp_path)
    assert plain["w"].tolist() == [0, 1, 2]


def test_parameters_are_filled(tmp_path):
    saved({"w": WHOLE.clone()}, tmp_path)
    parameter, row = torch.nn.Parameter(torch.zeros(6, 5)), torch.nn.Parameter(torch.zeros(1, 6, 5))
    state = {
        "layer": ShardedTensor.from_rank_offsets("w", parameter, (0, 2, 4), prepend_axis_num=1),
        "row": ShardedTensor.from_rank_offsets("w", row, (0, 1, 4)),
    }
    for shard in state.values():
        loaded({"w": wrap(shard)}, tmp_path)
    assert torch.equal(parameter.data, WHOLE[2])
    assert torch.equal(row.data, WHOLE[1:2])


# --- the protocol itself ---


def test_one_write_item_per_shard():
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2, 5), (0, 3, 4), (1, 1, 3), prepend_axis_num=1)
    value = wrap(shard)
    (item,) = value.__create_write_items__("model.w", value, 7)
    assert (item.type, item.index.fqn, item.index.index) == (WriteItemType.SHARD, "model.w", 7)
    assert tuple(item.index.offset) == tuple(item.tensor_data.chunk.offsets) == (3, 2, 0)
    assert tuple(item.tensor_data.chunk.sizes) == (1, 2, 5)
    assert tuple(item.tensor_data.size) == tuple(value.size()) == (4, 6, 5)
    assert value.__create_chunk_list__() == [item.tensor_data.chunk]


def test_a_single_shard_is_returned_whatever_is_asked():
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2))
    value = wrap(shard)
    assert value.__get_tensor_shard__(MetadataIndex("w")) is shard.data
    assert value.__get_tensor_shard__(None) is shard.data
    assert value.__get_tensor_shard__(MetadataIndex("w", [9])) is shard.data


def test_a_container_looks_shards_up_by_offset():
    shards = grid(torch.arange(6), 0, 3)
    value = wrap(*shards)
    for hint in (None, 0, 1, 2, 9, -1):
        assert value.__get_tensor_shard__(MetadataIndex("w", (2,), hint)) is shards[1].data
    for index in (MetadataIndex("w"), MetadataIndex("w", (1,))):
        with pytest.raises(ValueError, match="key 'w'") as caught:
            value.__get_tensor_shard__(index)
        assert isinstance(caught.value, CheckpointError)


def test_of_two_shards_at_one_offset_the_first_or_the_hinted_one_is_found():
    shards = [ShardedTensor.from_rank_offsets("w", torch.ones(2), replica_id=i) for i in range(2)]
    value = wrap(*shards)
    assert value.__get_tensor_shard__(MetadataIndex("w", (0,))) is shards[0].data
    assert value.__get_tensor_shard__(MetadataIndex("w", (0,), 1)) is shards[1].data


def test_hints_count_all_pieces():
    value = wrap(*cut(torch.arange(12).reshape(3, 4), 2, 9))
    items = value.__create_write_items__("w", value)
    assert [item.index.index for item in items] == list(range(len(items))) == [0, 1, 2, 3, 4]
    for item in items:
        found = value.__get_tensor_shard__(item.index)
        assert found is value._pieces[item.index.index][1]


def test_what_newer_torch_looks_for():
    value = wrap(*stacked(WHOLE))
    assert value.global_shape == (4, 6, 5)
    assert value.global_offsets == value.local_offsets == ((0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0))
    assert value.local_sizes == ((1, 6, 5),) * 4


def test_nothing_can_be_computed():
    for value in (wrap(*grid(WHOLE, 0, 1)), wrap(*grid(WHOLE, 0, 2))):
        with pytest.raises(NotImplementedError, match=type(value).__name__):
            value + 1


def test_they_show_what_they_hold():
    assert repr(wrap(*grid(WHOLE, 0, 1))).startswith("CheckpointableShardedTensor(ShardedTensor(key='w', ")
    assert repr(wrap(*grid(WHOLE, 0, 2))).startswith("LocalShardsContainer([CheckpointableShardedTensor(")


def test_bad_shards_are_refused():
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2))
    with pytest.raises(SpecError, match=r"no data: key 'w'"):
        CheckpointableShardedTensor.from_sh_ten(shard.without_data())
    with pytest.raises(ShapeError, match="another shape than its shard: key 'w'"):
        CheckpointableShardedTensor(torch.ones(3), shard)
    with pytest.raises(AssertionError, match="not a sharded tensor") as caught:
        CheckpointableShardedTensor.from_sh_ten(torch.ones(2))
    assert isinstance(caught.value, CheckpointError)


def test_bad_containers_are_refused():
    one = wrap(ShardedTensor.from_rank_offsets("w", torch.ones(2)))
    for shards, text in (([], "at least one"), ([one, torch.ones(2)], "shards only")):
        with pytest.raises(AssertionError, match=text) as caught:
            LocalShardsContainer(shards)
        assert isinstance(caught.value, CheckpointError)
    for other in (
        ShardedTensor.from_rank_offsets("v", torch.ones(2)),
        ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, 2)),
        ShardedTensor.from_rank_offsets("w", torch.ones(2, dtype=torch.int32)),
    ):
        with pytest.raises(CheckpointError, match="different tensors: key 'w'"):
            LocalShardsContainer([one, wrap(other)])
