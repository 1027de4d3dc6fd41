"""Sharded tensors saved and loaded by one rank: cuts of all kinds, other shapes, and what does not cover a tensor."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import functional_ckpt  # noqa: E402
from functional_ckpt.errors import GapError, OverlapError, ReplicaError, ShapeError  # noqa: E402
from functional_ckpt.torch.exceptions import DTypeAssertionError, ShapeAssertionError  # noqa: E402
from functional_ckpt.torch.mapping import ShardedObject, ShardedTensor  # noqa: E402
from functional_ckpt.torch.serialization import load, load_plain_tensors, save  # noqa: E402
from functional_ckpt.torch.sharded_state import leaves_to_save  # noqa: E402
from functional_ckpt.torch.strategies.zarr import ZarrSaveShardedStrategy  # noqa: E402

W = torch.arange(24.0).reshape(6, 4)
tensor = ShardedTensor.from_rank_offsets


def cuts(*at):
    """Flat shards of W between these elements."""
    return [
        ShardedTensor.from_rank_offsets_flat("w", W.reshape(-1)[a:b].clone(), (6, 4), flattened_range=slice(a, b))
        for a, b in itertools.pairwise(at)
    ]


def columns():
    return [tensor("w", part.clone(), (1, i, 2)) for i, part in enumerate(W.chunk(2, 1))]


@pytest.mark.parametrize("source", [cuts(0, 24), cuts(0, 0, 5, 6, 17, 24), columns()], ids=["whole", "odd", "columns"])
@pytest.mark.parametrize("target", [cuts(0, 24), cuts(0, 7, 7, 9, 24), columns()], ids=["whole", "odd", "columns"])
def test_flat_shards_reshard(tmp_path, source, target):
    save({"w": source}, tmp_path)
    wanted = [part.data.clone() for part in target]
    for part in target:
        part.data.fill_(-1)
    found = load({"w": target}, tmp_path)["w"]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_flat_data_need_not_be_contiguous_nor_start_at_the_box(tmp_path):
    data = torch.stack([W.reshape(-1)] * 2, 1)[:, 0]
    assert not data.is_contiguous()
    flat = ShardedTensor.from_rank_offsets_flat("w", data, (6, 4), flattened_range=slice(0, 24))
    save([flat][0:1] and {"w": flat}, tmp_path)
    target = torch.zeros(24, 2)[:, 1]
    part = ShardedTensor.from_rank_offsets_flat("w", target[3:20], (6, 4), flattened_range=slice(3, 20))
    load({"w": part}, tmp_path, validate_access_integrity=False)
    assert torch.equal(target[3:20], W.reshape(-1)[3:20])
    assert not target[:3].any()


@pytest.mark.parametrize("flat", [None, (0, 30), (2, 27), (8, 10)])
def test_another_shape_is_aligned_and_filled_with_zeros(tmp_path, flat):
    save({"w": tensor("w", W.clone())}, tmp_path)
    large = ShardedTensor("w", torch.full((5, 6), 7.0), torch.float32, (5, 6), (10, 6), (3, 0), None)
    part = slice(*(flat or (0, 30)))
    if flat:
        large = ShardedTensor("w", torch.full((30,), 7.0)[part], torch.float32, (5, 6), (10, 6), (3, 0), None,
                              flattened_range=part)  # fmt: skip
    with pytest.raises(ShapeError, match="another shape"):
        load({"w": large}, tmp_path, validate_access_integrity=False)
    assert (large.data == 7).all()
    large.allow_shape_mismatch = True
    found = load({"w": large}, tmp_path, validate_access_integrity=False)["w"]
    whole = torch.zeros(5, 6)
    whole[:3, :4] = W[3:]
    assert torch.equal(found.reshape(-1), whole.reshape(-1)[part])


def test_the_destination_decides_on_data_type_and_prepended_axes(tmp_path):
    save({"w": tensor("w", torch.stack([W, W + 1]))}, tmp_path)
    found = load(
        {"w": tensor("w", torch.zeros(6, 4, dtype=torch.float64), (0, 1, 2), prepend_axis_num=1)},
        tmp_path,
        validate_access_integrity=False,
    )
    assert torch.equal(found["w"], W.double() + 1)


def test_a_parameter_is_filled(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(6, 4))
    save({"w": tensor("w", torch.nn.Parameter(W.clone()))}, tmp_path)
    found = load({"w": tensor("w", parameter)}, tmp_path)["w"]
    assert torch.equal(parameter, W)
    assert not found.requires_grad


@pytest.mark.parametrize("least", [0, 1 << 20], ids=["exclusive", "owned"])
def test_several_shards_of_a_grid_are_told_apart(tmp_path, least):
    wholes = {key: W + 100 * number for number, key in enumerate("abc")}
    held = {key: [tensor(key, row, (0, i, 6)) for i, row in enumerate(w.split(1))] for key, w in wholes.items()}
    policy = functional_ckpt.SavePolicy(layout=functional_ckpt.LayoutPolicy(min_chunk_nbytes=least))
    save(held, tmp_path, ZarrSaveShardedStrategy(policy=policy))
    stored = functional_ckpt.open_checkpoint(tmp_path)
    for key, whole in wholes.items():
        assert torch.equal(torch.from_numpy(stored[key][...]), whole)


def test_access_is_validated(tmp_path, problems_of):
    third = tensor("w", torch.ones(2), (0, 0, 3))
    irregular = [
        ShardedTensor("w", torch.ones(n), torch.float32, (n,), (5,), (at,), None) for n, at in ((3, 0), (3, 2))
    ]
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
        (cuts(0, 5, 9), {GapError}),
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


def test_twenty_thousand_tensors_are_planned_in_time():
    import time

    data = torch.ones(4)
    tensors = [tensor(f"layer.{i}.weight", data, (0, 1, 8)) for i in range(20_000)]
    began = time.process_time()
    assert len(leaves_to_save({"model": tensors})) == 20_000
    assert time.process_time() - began < 3
