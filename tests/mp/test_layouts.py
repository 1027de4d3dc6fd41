"""DTensors on any mesh: saved under one layout, loaded under another by as many or fewer ranks, bit-equal."""

import numpy as np
import pytest
import zarr

import functional_ckpt as fc
from tests.mp import launch

pytestmark = pytest.mark.mp

#: key -> (shape, dtype, placements on the 1-D mesh, placements on the 2-D mesh); "S0" is Shard(0), "R" Replicate.
TENSORS = {
    "rows": ((8, 6), "float32", "S0", "S0 R"),
    "columns": ((6, 8), "bfloat16", "S1", "R S1"),
    "copies": ((5, 3), "float64", "R", "R R"),
    "tiles": ((10, 14), "float32", "S0", "S0 S1"),
    "twice": ((16, 3), "int64", "S0", "S0 S0"),
    "uneven": ((7, 5), "float16", "S0", "S1 S0"),
    "uneven twice": ((9, 4), "float32", "S0", "S0 S0"),
    "some empty": ((3, 2), "float32", "S0", "S0 S0"),
    "mostly empty": ((1,), "uint8", "S0", "S0 R"),
    "more empty": ((1,), "int16", "S0", "R S0"),
    "last axis": ((2, 3, 5), "complex64", "S2", "S2 S1"),
    "no cells": ((0, 4), "float32", "S0", "S0 S1"),
    "no cells either": ((4, 0), "int8", "S0", "S0 S1"),
    "float8": ((12, 4), "float8_e4m3fn", "S0", "S1 S0"),
    "big": ((1030, 1025), "float32", "S0", "S1 S0"),
}
EXCLUSIVE = fc.SavePolicy(layout=fc.LayoutPolicy(min_chunk_nbytes=0), timeout_s=30)
SHARED = fc.SavePolicy(timeout_s=30)


def full(key):
    shape, dtype, _, _ = TENSORS[key]
    return launch.values(*shape, dtype=dtype, seed=sum(map(ord, key)))


def layout(mesh, index):
    """Return the tensors placed as column `index` of the table says."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    found = {}
    for key, row in TENSORS.items():
        placements = [Replicate() if p == "R" else Shard(int(p[1:])) for p in row[index].split()]
        found[key] = distribute_tensor(full(key), mesh, placements, src_data_rank=None)
    return found


def zeros_like(tree):
    import torch

    return {key: torch.zeros_like(value) for key, value in tree.items()}


def save_1d(path, policy):
    manifest = fc.save(layout(launch.mesh(4), 2), path, policy=policy)
    return [entry.layout.ownership for entry in manifest.arrays]


def save_2d(path, policy):
    fc.save(layout(launch.mesh(2, 2), 3), path, policy=policy)


def load_all(path, shape, index):
    expected = layout(launch.mesh(*shape), index)
    like = zeros_like(expected)
    found = fc.load(like, path, policy=fc.LoadPolicy(timeout_s=30))
    for key, tensor in expected.items():
        assert found[key] is like[key], key
        launch.same(found[key], tensor, key)


def check_alone(path):
    import torch

    found = fc.load({key: torch.zeros_like(full(key)) for key in TENSORS}, path)
    for key in TENSORS:
        launch.same(found[key], full(key), key)
    assert fc.verify(path).ok


@pytest.mark.parametrize("policy", [EXCLUSIVE, SHARED], ids=["exclusive", "shared"])
@pytest.mark.parametrize("save", [save_1d, save_2d])
def test_every_layout_loads_under_every_other(four, two, tmp_path, save, policy):
    four.run(save, tmp_path / "a", policy)
    four.run(load_all, tmp_path / "a", (4,), 2)
    four.run(load_all, tmp_path / "a", (2, 2), 3)
    two.run(load_all, tmp_path / "a", (2,), 2)
    check_alone(tmp_path / "a")


def test_zarr_reads_what_ranks_wrote(four, tmp_path):
    import functional_ckpt.store.zarr_dtypes  # noqa: F401 - registers bfloat16 and float8

    four.run(save_2d, tmp_path / "a", SHARED)
    group = zarr.open_group(tmp_path / "a", mode="r")
    for key in ("rows", "tiles", "uneven", "big", "last axis", "twice"):
        np.testing.assert_array_equal(group[key][:], full(key).numpy(), key)


def test_small_shards_end_in_owned_chunks_by_default(four, tmp_path):
    ownerships = dict(zip(sorted(TENSORS), four.run(save_1d, tmp_path / "a", SHARED)[0], strict=True))
    assert ownerships["rows"] == ownerships["uneven"] == "owned"
    assert ownerships["copies"] == "exclusive"


def submesh():
    """Return a mesh of ranks 1 and 3."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    if "sub" not in launch.meshes:
        launch.meshes["sub"] = DeviceMesh("cpu", torch.tensor([1, 3]))
    return launch.meshes["sub"]


def on_submesh():
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    everywhere = distribute_tensor(launch.values(6, 2, seed=1), launch.mesh(4), [Shard(0)], src_data_rank=None)
    placed = {}
    for key, placement in (("half", Shard(0)), ("copy", Replicate())):
        whole = launch.values(5, 4, seed=len(key))
        placed[key] = distribute_tensor(whole, submesh(), [placement], src_data_rank=None)
    return {**placed, "everywhere": everywhere, "plain": torch.arange(3)}


def save_submesh(path):
    fc.save(on_submesh(), path, policy=SHARED)


def load_submesh(path):
    expected = on_submesh()
    found = fc.load(zeros_like(expected), path)
    for key, tensor in expected.items():
        launch.same(found[key], tensor, key)


def test_ranks_outside_a_submesh_hold_nothing_of_it(four, tmp_path):
    four.run(save_submesh, tmp_path / "a")
    four.run(load_submesh, tmp_path / "a")
    found = fc.open_checkpoint(tmp_path / "a")
    np.testing.assert_array_equal(found["half"][...], launch.values(5, 4, seed=4).numpy())
    assert fc.verify(tmp_path / "a").ok


def strided(mesh):
    """Return tensors that FSDP cuts after tensor parallelism has: rows of a rank lie apart in the whole."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    shapes = {"even": (16, 3), "uneven": (11, 2), "few": (3, 2)}
    return {
        key: distribute_tensor(launch.values(*shape, seed=7), mesh, placements, src_data_rank=None)
        for key, shape in shapes.items()
    }


def save_strided(path):
    tensors = strided(launch.mesh(2, 2))
    fc.save(tensors, path, policy=SHARED)
    found = fc.load(zeros_like(tensors), path)
    for key, tensor in tensors.items():
        launch.same(found[key], tensor, key)


def test_strided_shards_lie_where_they_belong(four, tmp_path):
    four.run(save_strided, tmp_path / "a")
    found = fc.open_checkpoint(tmp_path / "a")
    for key in ("even", "uneven", "few"):
        np.testing.assert_array_equal(found[key][...], launch.values(*found[key].shape, seed=7).numpy(), key)


def partial_sum(path):
    import torch
    from torch.distributed.tensor import DTensor, Partial

    fc.save({"sum": DTensor.from_local(torch.ones(2), launch.mesh(4), [Partial()])}, path, policy=SHARED)


def test_partial_sums_are_refused(four, tmp_path):
    for outcome in four.outcomes(partial_sum, tmp_path / "a"):
        assert isinstance(outcome.error, fc.errors.UnsupportedLeafError), outcome
        assert "redistribute" in str(outcome.error)
    assert not (tmp_path / "a").exists()


def just_gathered(path):
    """The local part of a tensor that was just redistributed is still being received."""
    from torch.distributed.tensor import Replicate

    tensor = layout(launch.mesh(4), 2)["big"].redistribute(placements=[Replicate()])
    fc.save({"w": tensor}, path, policy=SHARED)
    launch.same(fc.load({"w": tensor.clone().zero_()}, path)["w"], tensor)


def test_a_tensor_that_was_just_redistributed(four, tmp_path):
    four.run(just_gathered, tmp_path / "a")
    np.testing.assert_array_equal(fc.open_checkpoint(tmp_path / "a")["w"][...], full("big").numpy())


def meta_load(path):
    import torch

    expected = layout(launch.mesh(2, 2), 3)
    with torch.device("meta"):
        like = {key: torch.empty_like(tensor, device="meta") for key, tensor in expected.items()}
    found = fc.load(like, path)
    for key, tensor in expected.items():
        assert found[key].placements == tensor.placements
        launch.same(found[key], tensor, key)


def test_meta_dtensors_are_allocated(four, tmp_path):
    four.run(save_1d, tmp_path / "a", SHARED)
    four.run(meta_load, tmp_path / "a")


def empty_ties(path):
    """Ranks 1 to 3 hold nothing of `a`, `b` and `c`; only `a` and `c` are tied."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    place = {"device_mesh": launch.mesh(4), "placements": [Shard(0)], "src_data_rank": None}
    a = distribute_tensor(launch.values(1, 3, seed=1), **place)
    state = {"a": a, "b": distribute_tensor(launch.values(1, 3, seed=2), **place), "c": a.detach()}
    state |= {f"z{n}": distribute_tensor(torch.ones(0, n), **place) for n in range(8)}
    manifest = fc.save(state, path, policy=SHARED)
    like = zeros_like({key: state[key] for key in state if key != "c"})
    found = fc.load({**like, "c": like["a"].detach()}, path)
    for key, tensor in state.items():
        launch.same(found[key], tensor, key)
    return [(alias.key, alias.target) for alias in manifest.aliases], len(manifest.arrays)


def test_empty_shards_are_tied_only_if_they_are(four, tmp_path):
    assert four.run(empty_ties, tmp_path / "a")[0] == ([("c", "a")], 10)


def one_memory(path):
    """Ranks hold one memory as parts of two tensors, which lie on their meshes in opposite order."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    if "back" not in launch.meshes:
        launch.meshes["back"] = DeviceMesh("cpu", torch.tensor([3, 2, 1, 0]))
    local = torch.full((1, 2), launch.rank() + 1.0)
    state = {
        key: DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        for key, mesh in (("back", launch.meshes["back"]), ("forth", launch.mesh(4)), ("tied", launch.mesh(4)))
    }
    manifest = fc.save(state, path, policy=SHARED)
    local.zero_()
    fc.load(state, path)
    assert (local == launch.rank() + 1.0).all()
    return [(alias.key, alias.target) for alias in manifest.aliases]


def test_one_memory_on_two_meshes_is_not_tied(four, tmp_path):
    assert four.run(one_memory, tmp_path / "a")[0] == [("tied", "forth")]
    found = fc.open_checkpoint(tmp_path / "a")
    assert found["forth"][:, 0].tolist() == [1, 2, 3, 4]
    assert found["back"][:, 0].tolist() == [4, 3, 2, 1]
