"""DTensors on random meshes under random placements: torch's own cut of the whole is the oracle, to save and to load.

By hand, with more of them: ``python -m tests.mp.test_random_layouts SEED CASES``.
"""

import sys
import tempfile
from pathlib import Path
from random import Random

import pytest

import functional_ckpt as fc
from tests.mp import launch

pytestmark = pytest.mark.mp

#: Ranks of a mesh; not all meshes have all ranks, or have them in order.
MESHES = ([0, 1, 2, 3], [3, 1, 0, 2], [[2, 0], [3, 1]], [[[0, 2], [1, 3]]], [3, 1], [[3], [0], [1]])
DTYPES = ("float32", "bfloat16", "int64", "uint8", "bool", "complex64", "float8_e4m3fn")


def mesh_of(ranks):
    """Return a mesh, made once: each makes process groups."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    if repr(ranks) not in launch.meshes:
        launch.meshes[repr(ranks)] = DeviceMesh("cpu", torch.tensor(ranks))
    return launch.meshes[repr(ranks)]


def placed(whole, random):
    """Return `whole` as a DTensor under a random layout, and its layout in words."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = mesh_of(random.choice(MESHES))
    axes = range(whole.dim())
    placements = [Shard(random.choice(axes)) if axes and random.random() < 0.8 else Replicate() for _ in mesh.shape]
    if mesh.ndim > 1 and placements[-2] == placements[-1] != Replicate() and random.random() < 0.6:
        # As FSDP over tensor parallelism makes it.
        placements[-2] = _StridedShard(placements[-1].dim, split_factor=mesh.shape[-1])
    tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return tensor, f"{tuple(whole.shape)} {whole.dtype} {mesh.mesh.tolist()} {placements}"


def wholes(random):
    """Return a few tensors, the same on every rank; some are short or empty, so that some shards are."""
    found = {}
    for number in range(random.randint(1, 6)):
        shape = [random.choice([0, 1, 2, 3, 4, 5, 7, 12, 33]) for _ in range(random.randint(0, 3))]
        found[f"t{number}"] = launch.values(*shape, dtype=random.choice(DTYPES), seed=random.randrange(99))
    return found


def policy_of(random):
    layout = fc.LayoutPolicy(
        target_chunk_nbytes=random.choice([8, 64, 2**20]), min_chunk_nbytes=random.choice([0, 16, 2**20]),
        few_files=random.choice([0, 4096]), codecs=random.choice([(), {"": "zstd"}]),
    )  # fmt: skip
    return fc.SavePolicy(layout=layout, durability="none", commit=random.choice(["rename", "marker"]), timeout_s=50)


def bytes_of(whole):
    import torch

    return whole.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def try_cases(seed, cases, path):
    """Save and load so many random states; all ranks draw the same."""
    import torch

    for case in range(cases):
        random = Random(f"{seed}/{case}")
        state, target = wholes(random), Path(path, f"{case}")
        held = {key: placed(whole, random) for key, whole in state.items()}
        fc.save({key: tensor for key, (tensor, _) in held.items()}, target, policy=policy_of(random))
        found = fc.open_checkpoint(target)
        for key, whole in state.items():
            assert found[key][...].tobytes() == bytes_of(whole), (seed, case, key, held[key][1])
        for _ in range(2):
            expected = {key: placed(whole, random) for key, whole in state.items()}
            into = {key: torch.zeros_like(tensor) for key, (tensor, _) in expected.items()}
            policy = fc.LoadPolicy(read_once=random.choice([True, False, None]), verify=random.choice(["full", "none"]))
            fc.load(into, target, policy=policy)
            for key, (tensor, layout) in expected.items():
                if tensor.device_mesh.get_coordinate() is not None:  # torch's zeros_like makes an element elsewhere
                    launch.same(into[key], tensor, (seed, case, key, held[key][1], layout))


def test_what_a_random_layout_saved_any_other_loads(four, tmp_path):
    four.run(try_cases, "b", 5, tmp_path)


if __name__ == "__main__":
    ranks = launch.Ranks(4)
    with tempfile.TemporaryDirectory() as scratch:
        ranks.run(try_cases, sys.argv[1], int(sys.argv[2]), scratch, limit_s=3600.0)
    ranks.close()
    print("well")
