"""`ShardedTensor.narrow`: which parts of a shard it returns, and what it refuses."""

import pytest

torch = pytest.importorskip("torch")

from functional_ckpt.torch.megatron.mapping import CheckpointingException, ShardedTensor  # noqa: E402
from tests.test_mapping import flat, plain  # noqa: E402


def test_narrow_returns_a_view():
    shard = ShardedTensor.from_rank_offsets("w", torch.arange(8).reshape(2, 4), (0, 1, 3), replica_id=2)
    (part,) = shard.narrow(1, 1, 2)
    assert (part.local_shape, part.global_shape, part.global_offset) == ((2, 2), (6, 2), (2, 0))
    assert (part.axis_fragmentations, part.replica_id) == ((3, 1), 2)
    part.data.zero_()
    assert shard.data.tolist() == [[0, 0, 0, 3], [4, 0, 0, 7]]


def test_narrow_does_not_count_prepended_axes():
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2, 4), (0, 3, 8), (2, 1, 5), prepend_axis_num=1)
    for dim in (1, -1):
        (part,) = shard.narrow(dim, 2, 2)
        assert (part.global_shape, part.global_offset) == ((8, 2, 10), (3, 0, 2))
    for dim in (2, -3):
        with pytest.raises(IndexError, match="key 'w'"):
            shard.narrow(dim, 0, 1)


def test_narrow_needs_no_data():
    (part,) = plain().narrow(0, 0, 1)
    assert part.data is None
    assert part.global_shape == (3, 4)


@pytest.mark.parametrize(("dim", "start", "length"), [(0, 1, 2), (1, -1, 2), (0, 0, -1), (0, 3, 0)])
def test_narrow_refuses_ranges_outside(dim, start, length):
    for shard in (plain(), plain(flattened_range=slice(1, 7))):
        with pytest.raises(RuntimeError, match="leaves the shard: key 'w'") as caught:
            shard.narrow(dim, start, length)
        assert isinstance(caught.value, CheckpointingException)


def test_narrow_takes_everything_or_nothing():
    assert plain().narrow(0, 0, 2)[0].global_shape == (6, 4)
    assert plain().narrow(0, 2, 0)[0].global_shape == (0, 4)


def test_narrow_refuses_what_does_not_divide():
    for extent, offset in ((7, 2), (6, 3)):
        with pytest.raises(AssertionError, match="regular grid along the axis: key 'w'") as caught:
            plain(axis_fragmentations=None, global_shape=(extent, 4), global_offset=(offset, 0)).narrow(0, 0, 1)
        assert isinstance(caught.value, CheckpointingException)


def test_a_flat_shard_narrowed_along_its_first_axis_is_one_or_none():
    shard = flat(3, 7)
    assert [(p.flattened_range, p.data.tolist()) for p in shard.narrow(0, 0, 1)] == [(slice(3, 4), [3])]
    assert [(p.flattened_range, p.data.tolist()) for p in shard.narrow(0, 1, 1)] == [(slice(0, 3), [4, 5, 6])]
    assert flat(5, 7).narrow(0, 0, 1) == []


def test_a_flat_shard_narrowed_along_another_axis_is_one_per_unbroken_run():
    shard = flat(1, 7)
    parts = shard.narrow(1, 1, 2)
    assert [p.data.tolist() for p in parts] == [[1, 2], [5, 6]]
    assert [p.flattened_range for p in parts] == [slice(0, 2), slice(2, 4)]
    assert {(p.local_shape, p.global_shape) for p in parts} == {((2, 2), (2, 2))}
    parts[1].data.zero_()
    assert shard.data.tolist() == [1, 2, 3, 4, 0, 0]


def test_flat_shards_with_prepended_axes():
    shard = ShardedTensor.from_rank_offsets_flat(
        "w", torch.arange(5), (2, 4), (0, 3, 8), flattened_range=slice(2, 7), prepend_axis_num=1
    )
    assert (shard.global_shape, shard.spec.flat) == ((8, 2, 4), (2, 7))
    assert [p.data.tolist() for p in shard.narrow(1, 3, 1)] == [[1]]
