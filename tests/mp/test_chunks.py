"""Chunks that several ranks write: nothing is lost, digests are right, other tools read them."""

import numpy as np
import pytest
import tensorstore as ts
import zarr

import functional_ckpt as fc
from tests.mp import launch

pytestmark = pytest.mark.mp

ROUNDS = 6


def policy(**layout):
    return fc.SavePolicy(layout=fc.LayoutPolicy(**layout), timeout_s=30)


def rounds(path, count, chosen, group):
    """Save `count` times rows and columns that end within chunks of the neighbours'."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from functional_ckpt.torch.group.link import torch_gather

    for n in range(count):
        state = {
            f"{name}{size}": distribute_tensor(
                launch.values(size, 37, seed=n), launch.mesh(4), [Shard(axis)], src_data_rank=None
            )
            for axis, name in enumerate(("rows", "columns"))
            for size in (5, 101, 1024)
        }
        manifest = fc.save(state, path / str(n), policy=chosen, process_group=group(torch_gather(None, 30.0, "sync")))
    return {entry.spec.key: entry.layout.ownership for entry in manifest.arrays}


SMALL = {"shared_chunk_nbytes": 4000, "target_chunk_nbytes": 4000}
SHARED = {
    "one chunk": policy(),
    "small chunks": policy(shared_chunk_nbytes=1000, target_chunk_nbytes=1000, min_chunk_nbytes=2**20),
    "codecs": policy(codecs=(("", ("zstd", "crc32c")),), **SMALL),
}


def as_it_is(gather):
    return gather


@pytest.mark.parametrize("ownership", ["shared", "owned"])
@pytest.mark.parametrize("chosen", SHARED.values(), ids=SHARED)
def test_chunks_of_several_ranks_lose_nothing(four, tmp_path, chosen, ownership, gather_only):
    ownerships = four.run(rounds, tmp_path, ROUNDS, chosen, gather_only if ownership == "shared" else as_it_is)[0]
    assert set(ownerships.values()) == {ownership}
    for n in range(ROUNDS):
        report = fc.verify(tmp_path / str(n))
        assert report.ok, report.problems
        group = zarr.open_group(tmp_path / str(n), mode="r")
        for key in ownerships:
            np.testing.assert_array_equal(group[key][:], launch.values(*group[key].shape, seed=n).numpy(), key)
    assert not list(tmp_path.rglob("*lock*"))


def irregular(path):
    """Faces at 3, 5 and 8 of 10 rows, at 4, 7 and 11 of 13 columns: no regular grid but single cells fits."""
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = launch.values(10, 13)
    state = {
        "rows": distribute_tensor(whole, launch.mesh(2, 2), [Shard(0), Shard(0)], src_data_rank=None),
        "both": distribute_tensor(whole, launch.mesh(2, 2), [Shard(0), Shard(1)], src_data_rank=None),
    }
    found = {}
    joined = policy(min_chunk_nbytes=0, few_files=0, target_chunk_nbytes=4 * 13 * 4)
    for name, chosen in (("owned", policy()), ("cells", policy(min_chunk_nbytes=0)), ("joined", joined)):
        manifest = fc.save(state, path / name, policy=chosen)
        found[name] = {entry.spec.key: (entry.layout.ownership, entry.layout.chunk) for entry in manifest.arrays}
    return found


def test_irregular_faces(four, tmp_path):
    layouts = four.run(irregular, tmp_path)[0]
    assert layouts["owned"] == {"rows": ("owned", (10, 13)), "both": ("owned", (10, 13))}
    assert {ownership for ownership, _ in layouts["cells"].values()} == {"exclusive"}
    assert layouts["cells"]["rows"] == ("exclusive", (1, 13))
    # The smallest come first, and then files are few enough.
    assert layouts["joined"] == {"rows": ("owned", (4, 13)), "both": ("exclusive", (5, 7))}
    for name in layouts:
        assert fc.verify(tmp_path / name).ok
        for key in ("rows", "both"):
            array = ts.open({"driver": "zarr3", "kvstore": f"file://{tmp_path}/{name}/{key}/"}).result()
            np.testing.assert_array_equal(array.read().result(), launch.values(10, 13).numpy())


def boxes(path):
    """Load a box of its own on each rank, across the faces that were saved, and a flat range."""
    from functional_ckpt.spec.box import Box

    rank = launch.rank()
    spec, rows = (fc.ArraySpec(key, (10, 13), "float32") for key in ("both", "rows"))
    box = Box((rank, 2 * rank), (rank + 6, 13))
    flat = fc.ShardSpec(rows, rows.box, flat=(30 * rank, 30 * rank + 40))
    found = fc.load({"both": fc.ShardSpec(spec, box), "rows": flat}, path)
    whole = launch.values(10, 13).numpy()
    np.testing.assert_array_equal(found["both"], whole[box.slices])
    np.testing.assert_array_equal(found["rows"], whole.reshape(-1)[30 * rank : 30 * rank + 40])


def test_ranks_load_boxes_of_their_own(four, tmp_path):
    four.run(irregular, tmp_path)
    four.run(boxes, tmp_path / "owned")
    four.run(boxes, tmp_path / "cells")


def in_marker_mode(path):
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = distribute_tensor(launch.values(9, 4), launch.mesh(4), [Shard(0)], src_data_rank=None)
    chosen = fc.SavePolicy(commit="marker", timeout_s=30)
    fc.save({"w": whole}, path, policy=chosen)
    if launch.rank() == 0:
        (path / "notes.txt").write_text("someone else's")


def test_ranks_write_in_place(four, tmp_path):
    four.run(in_marker_mode, tmp_path / "a")
    assert fc.verify(tmp_path / "a").ok
    np.testing.assert_array_equal(fc.open_checkpoint(tmp_path / "a")["w"][...], launch.values(9, 4).numpy())
    assert not list((tmp_path / "a").glob(".*"))
    for outcome in four.outcomes(in_marker_mode, tmp_path / "a"):
        assert isinstance(outcome.error, fc.errors.AlreadyExistsError)
        assert "rank 0" in str(outcome.error)
    assert fc.verify(tmp_path / "a").ok


def overwrite(path):
    for n in range(3):
        fc.save({"w": np.full(4, n)}, path, policy=policy(), overwrite=True)


def test_ranks_overwrite(four, tmp_path):
    four.run(overwrite, tmp_path / "a")
    assert fc.open_checkpoint(tmp_path / "a")["w"][0] == 2
    assert [item.name for item in tmp_path.iterdir()] == ["a"]


def in_memory():
    fc.save({"w": np.ones(2)}, "memory://ranks", policy=policy())


def test_memory_is_not_shared(four):
    for outcome in four.outcomes(in_memory):
        assert isinstance(outcome.error, fc.errors.CheckpointError)
        assert "memory://" in str(outcome.error)
