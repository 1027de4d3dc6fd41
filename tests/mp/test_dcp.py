"""``dcp.save`` and ``dcp.load`` over our storage, on two and four ranks of stock torch."""

import os

import numpy as np
import pytest

import functional_ckpt as fc
from tests.mp import launch

pytestmark = [pytest.mark.mp, pytest.mark.filterwarnings("ignore")]

SAVE = fc.SavePolicy(object_codec="torch", timeout_s=30)
EXCLUSIVE = fc.SavePolicy(object_codec="torch", timeout_s=30, layout=fc.LayoutPolicy(min_chunk_nbytes=0))
AWKWARD = ("w", "w.weight", "w/weight", "..", "ß∂", "k" * 300, "zarr.json", "Case", "case", "a b")
DTYPES = (
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8", "uint16", "uint32", "uint64",
    "int8", "int16", "int32", "int64", "bool", "complex64", "complex128",
)  # fmt: skip


def dcp():
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


def writer(path, **options):
    from functional_ckpt.torch.dcp.storage_writer import ZarrStorageWriter

    return ZarrStorageWriter(path, **{"policy": SAVE, **options})


def reader(path, **options):
    from functional_ckpt.torch.dcp.storage_writer import ZarrStorageReader

    return ZarrStorageReader(path, **options)


def size():
    import torch.distributed as dist

    return dist.get_world_size()


def placed(whole, *placements):
    """Return a tensor on the mesh of all ranks, with as many axes as placements."""
    from torch.distributed.tensor import Replicate, Shard

    shape = (size(),) if len(placements) == 1 else (2, size() // 2)
    found = [Replicate() if p == "R" else Shard(int(p[1:])) for p in placements]
    return launch.distributed(whole, launch.mesh(*shape), found)


def whole_tensors():
    """Return what the tensors of `tensors` hold, whole."""
    return {
        "rows": launch.values(8, 6, seed=1),
        "columns": launch.values(6, 8, dtype="bfloat16", seed=2),
        "copies": launch.values(5, 3, dtype="float64", seed=3),
        "tiles": launch.values(10, 14, seed=4),
        "uneven": launch.values(7, 5, dtype="float16", seed=5),
        "some empty": launch.values(3, 2, seed=6),
        "no cells": launch.values(0, 4, seed=7),
        "big": launch.values(1030, 257, seed=8),
    }


def tensors(layout):
    placements = {
        "1d": ("S0", "S1", "R", "S1", "S0", "S0", "S0", "S0"),
        "other": ("S1", "S0", "S0", "S0", "S1", "R", "R", "S1"),
    }
    if layout == "2d":
        rows = (
            ("S0", "S1"),
            ("R", "S1"),
            ("R", "R"),
            ("S0", "S1"),
            ("S1", "S0"),
            ("S0", "R"),
            ("S0", "R"),
            ("S0", "S1"),
        )
    else:
        rows = tuple((each,) for each in placements[layout])
    return {key: placed(whole, *where) for (key, whole), where in zip(whole_tensors().items(), rows, strict=True)}


def plain():
    import torch

    bits = launch.values(16, seed=9)
    return {
        "nested": {"list": [torch.ones(2), {"deep": torch.tensor(3)}], "n": 3},
        "types": {name: (bits * 10).to(getattr(torch, name)) for name in DTYPES},
        "special": torch.tensor([float("nan"), -0.0, float("inf")]),
        "strided": launch.values(6, 4).t(),
        "tuple": (1, "a", None),
        "bytes": b"\x00\xff",
        "object": (1, torch.arange(3)),
        "empty": [],
        **{key: torch.full((2,), number) for number, key in enumerate(AWKWARD)},
    }


def blank(tree):
    """Return the same structure with nothing in it."""
    import torch
    from torch.utils._pytree import tree_map

    return tree_map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else 0, tree)


def check_same(found, expected, what=""):
    import torch

    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), what
        for key, value in expected.items():
            check_same(found[key], value, f"{what}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), what
        for number, value in enumerate(expected):
            check_same(found[number], value, f"{what}/{number}")
    elif isinstance(expected, torch.Tensor):
        launch.same(found, expected, what)
    else:
        assert found == expected, what


def state(layout="1d"):
    return {"model": tensors(layout), "rest": plain()}


def save(path, layout="1d", **options):
    metadata = dcp().save(state(layout), storage_writer=writer(path, **options))
    assert getattr(metadata, "version", "1.0.0") == "1.0.0"
    return sorted(metadata.state_dict_metadata)


def load(path, layout="1d"):
    expected = state(layout)
    found = blank(expected)
    found["rest"]["tuple"] = found["rest"]["object"] = 0  # leaves to DCP
    dcp().load(found, storage_reader=reader(path))
    check_same(found, expected)


@pytest.mark.parametrize("policy", [SAVE, EXCLUSIVE], ids=["owned", "exclusive"])
def test_every_kind_of_state_comes_back_on_four_ranks(four, tmp_path, policy):
    path = str(tmp_path / "c")
    four.run(save, path, "1d")
    four.run(load, path, "1d")
    assert fc.verify(path).ok
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize(("before", "after"), [("1d", "2d"), ("2d", "other"), ("other", "1d")])
def test_what_was_saved_in_one_layout_loads_in_another(four, two, tmp_path, before, after):
    path = str(tmp_path / "c")
    four.run(save, path, before)
    four.run(load, path, after)
    two.run(load, path, "other")
    two.run(save, path, "1d")
    four.run(load, path, after)


def fc_load(path):
    expected = state("other")
    found = blank(expected)
    found["rest"]["tuple"] = found["rest"]["object"] = 0
    # Tuples with tensors are objects to DCP.
    found = fc.load(found, path, policy=fc.LoadPolicy(timeout_s=30))
    check_same(found, expected)


def test_our_own_load_reads_what_dcp_has_saved(four, two, tmp_path):
    path = str(tmp_path / "c")
    four.run(save, path)
    four.run(fc_load, path)
    two.run(fc_load, path)
    tree = fc.open_checkpoint(path).tree()
    assert tree["rest"]["nested"]["n"] == 3
    assert np.array_equal(tree["model"]["rows"][...], whole_tensors()["rows"].numpy())
    assert tree["rest"]["w.weight"][:].tolist() == [1.0, 1.0]


def fc_save(path):
    fc.save(state("2d"), path, policy=fc.SavePolicy(object_codec="torch", timeout_s=30))


def test_dcp_loads_what_our_own_save_has_saved(four, two, tmp_path):
    path = str(tmp_path / "c")
    four.run(fc_save, path)
    four.run(load, path, "other")
    two.run(load, path, "1d")


def test_metadata_has_one_chunk_per_tensor(four, tmp_path):
    path = str(tmp_path / "c")
    four.run(save, path)
    metadata = reader(path).read_metadata()
    tensor = metadata.state_dict_metadata["model.rows"]
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in tensor.chunks] == [((0, 0), (8, 6))]
    assert metadata.planner_data["model.rows"] == ("model", "rows")


def save_in_groups(path):
    """Ranks 0 and 2, and 1 and 3, save to two paths at once; numbers in a group differ from those in the world."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    which = dist.get_rank() % 2
    mesh = DeviceMesh.from_group(groups[which], "cpu")
    tensor = launch.distributed(launch.values(6, 3, seed=which), mesh, [Shard(0)])
    dcp().save({"w": tensor}, storage_writer=writer(f"{path}{which}"), process_group=groups[which])
    found = {"w": torch.zeros_like(tensor)}
    dcp().load(found, storage_reader=reader(f"{path}{which}"), process_group=groups[which])
    launch.same(found["w"], tensor)


def test_a_process_group_saves_by_itself(four, tmp_path):
    path = str(tmp_path / "c")
    four.run(save_in_groups, path)
    for which in range(2):
        whole = fc.open_checkpoint(f"{path}{which}")["w"][...]
        assert np.array_equal(whole, launch.values(6, 3, seed=which).numpy())


def save_alone(path):
    import torch.distributed as dist

    if dist.get_rank() == 1:
        dcp().save({"w": launch.values(4), "rank": dist.get_rank()}, storage_writer=writer(path), no_dist=True)


def test_one_rank_saves_without_the_others(four, tmp_path):
    path = str(tmp_path / "c")
    four.run(save_alone, path)
    assert fc.open_checkpoint(path).tree()["rank"] == 1


def save_anew(path):
    """Save other values under the same path, with one writer used twice."""
    one = writer(path)
    for seed in (1, 2):
        dcp().save({"w": placed(launch.values(9, 5, seed=seed), "S0")}, storage_writer=one)
    dcp().save({"w": placed(launch.values(9, 5, seed=3), "S0")}, checkpoint_id=f"{path}-3", storage_writer=one)


def test_a_writer_serves_many_saves_and_replaces_whole_checkpoints(four, tmp_path):
    path = str(tmp_path / "c")
    four.run(save_anew, path)
    for name, seed in ((path, 2), (f"{path}-3", 3)):
        assert np.array_equal(fc.open_checkpoint(name)["w"][...], launch.values(9, 5, seed=seed).numpy())
    assert sorted(os.listdir(tmp_path)) == ["c", "c-3"]


def save_twice_cached(path):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    for number, dtype in enumerate(("float64", "float64", "float32")):
        tensor = placed(launch.values(16, 4, dtype=dtype, seed=number), "S0")
        state = {"w": tensor, "step": number}
        dcp().save(
            state, storage_writer=writer(f"{path}{number}"), planner=DefaultSavePlanner(enable_plan_caching=True)
        )


def test_cached_plans_save_what_the_tensors_are_now(four, tmp_path):
    path = str(tmp_path / "c")
    four.run(save_twice_cached, path)
    for number, dtype in enumerate(("float64", "float64", "float32")):
        found = fc.open_checkpoint(f"{path}{number}")
        assert np.array_equal(found["w"][...], launch.values(16, 4, dtype=dtype, seed=number).numpy())
        assert found.tree()["step"] == number


def save_stages(path):
    """Ranks hold other keys whose values and copies happen to be equal, as pipeline stages do."""
    import torch

    mine = {f"stage{launch.rank()}.step": 1, f"stage{launch.rank()}.mean": torch.ones(3)}
    for number in range(3):
        dcp().save({"w": placed(launch.values(16, 4), "S0"), **mine}, storage_writer=writer(f"{path}{number}"))


def test_equal_values_under_other_keys_are_all_saved_every_time(two, tmp_path):
    two.run(save_stages, str(tmp_path / "c"))
    for number in range(3):
        found = fc.open_checkpoint(tmp_path / f"c{number}")
        assert sorted(found) == ["stage0.mean", "stage1.mean", "w"]
        assert [found.tree()[f"stage{rank}.step"] for rank in range(2)] == [1, 1]
