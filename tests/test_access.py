"""Shards of one rank that do not cover what they describe, once, are refused: holes, overlaps, doubled mains."""

import pytest

torch = pytest.importorskip("torch")

from functional_ckpt.errors import DuplicateKeyError, GapError, OverlapError, ReplicaError  # noqa: E402
from functional_ckpt.torch.megatron.exceptions import DTypeAssertionError, ShapeAssertionError  # noqa: E402
from functional_ckpt.torch.megatron.mapping import ShardedObject, ShardedTensor  # noqa: E402
from functional_ckpt.torch.megatron.serialization import load, load_plain_tensors, save  # noqa: E402
from functional_ckpt.torch.megatron.sharded_state import leaves_to_save  # noqa: E402

W = torch.arange(24.0).reshape(6, 4)
tensor = ShardedTensor.from_rank_offsets


def test_access_is_validated(tmp_path, problems_of):
    third = tensor("w", torch.ones(2), (0, 0, 3))
    irregular = [
        ShardedTensor("w", torch.ones(n), torch.float32, (n,), (5,), (at,), None) for n, at in ((3, 0), (3, 2))
    ]
    flat = [ShardedTensor.from_rank_offsets_flat("w", torch.ones(9), (6, 4), flattened_range=slice(0, 9))]
    objects = [ShardedObject("o", 1, (2,), (0,)), ShardedObject("o", 1, (2,), (0,))]
    for leaves, kinds in (
        ([third], {GapError}),
        ([tensor("w", W), tensor("w", W)], {ReplicaError}),
        (irregular, {OverlapError}),
        (irregular[:1], {GapError}),
        ([tensor("w", W, replica_id=1)], {GapError}),
        (objects, {ReplicaError, GapError}),
        ([tensor("w", W), tensor("w", W.double())], {DTypeAssertionError}),
        ([tensor("w", W), tensor("w", W[:3])], {ShapeAssertionError}),
        (flat, {GapError}),
    ):
        problems = problems_of(save, {"x": leaves}, tmp_path / "a")
        assert {type(p) for p in problems} == kinds, problems
        assert all(p.key for p in problems)
    assert not (tmp_path / "a" / "zarr.json").exists()


def test_copies_are_not_counted(tmp_path):
    assert leaves_to_save([tensor("w", W, replica_id=(0, 1)), ShardedObject("o", 5, (1,), (0,), 1)]) == {}
    copies = [[ShardedObject("o", i, (1,), (0,), i), tensor("w", W + i, replica_id=i)] for i in (0, 1, 2)]
    save({"x": copies}, tmp_path)
    found = load({"o": ShardedObject("o", None, (1,), (0,)), "w": tensor("w", torch.zeros(6, 4))}, tmp_path)
    assert (found["o"], found["w"].tolist()) == (0, W.tolist())


def test_shards_of_one_tensor_need_not_be_of_one_grid(tmp_path):
    rows = ShardedTensor("w", W[4:].clone(), W.dtype, (2, 4), (6, 4), (4, 0), None)
    save({"w": [tensor("w", W[i : i + 2].clone(), (0, i // 2, 3)) for i in (0, 2)] + [rows]}, tmp_path)
    assert torch.equal(load_plain_tensors(tmp_path)["w"], W)


def test_holes_are_refused_without_validation_too(tmp_path):
    with pytest.raises(GapError, match="'w'"):
        save({"w": tensor("w", torch.ones(2), (0, 0, 3))}, tmp_path, validate_access_integrity=False)


def test_a_tensor_and_an_object_may_share_a_key_but_not_a_name(tmp_path):
    save({"a": tensor("k", W.clone()), "b": ShardedObject("k", 5, (1,), (0,))}, tmp_path / "a")
    assert load({"b": ShardedObject("k", None, (1,), (0,))}, tmp_path / "a")["b"] == 5
    with pytest.raises(DuplicateKeyError):
        save({"a": tensor("k/shard_0_1", W), "b": ShardedObject("k", 5, (1,), (0,))}, tmp_path / "b")
