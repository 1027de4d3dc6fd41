"""Chunks that one rank reads for all, over gloo."""

import pytest

import functional_ckpt as fc
from tests.mp import launch

pytestmark = pytest.mark.mp

LAYOUT = fc.LayoutPolicy(target_chunk_nbytes=4000)


def placed(axis, seed):
    from torch.distributed.tensor import Shard, distribute_tensor

    sizes = {"tall": (101, 37), "wide": (5, 300), "row": (64,)}
    mesh = launch.mesh(4)
    state = {
        key: distribute_tensor(launch.values(*size, seed=seed), mesh, [Shard(min(axis, len(size) - 1))],
                               src_data_rank=None)
        for key, size in sizes.items()
    }  # fmt: skip
    return state | {"copy": launch.values(11, 3, seed=seed)}


def reshard(path, budget):
    """Save rows, load columns and a copy of everything; return the bytes of chunks that this rank read."""
    from functional_ckpt.store.files import FileStore

    fc.save(placed(0, 1), path, policy=fc.SavePolicy(layout=LAYOUT, timeout_s=30))
    read = []
    for name in ("read", "scan", "read_into", "read_ranges"):
        real = getattr(FileStore, name)
        setattr(FileStore, name, lambda self, n, *a, real=real: (read.append(n), real(self, n, *a))[1])
    found = fc.load(placed(1, 2), path, policy=fc.LoadPolicy(read_once=True, budget_nbytes=budget, timeout_s=30))
    expected = placed(1, 1)
    for key, tensor in found.items():
        launch.same(tensor, expected[key])
    return [name for name in read if "/c." in name]


@pytest.mark.parametrize("budget", [2**30, 3 * 4000], ids=["one wave", "many waves"])
def test_ranks_read_each_chunk_once(four, tmp_path, budget):
    read = [name for names in four.run(reshard, tmp_path / "a", budget) for name in names]
    chunks = [str(p.relative_to(tmp_path / "a")) for p in (tmp_path / "a").rglob("c*") if p.is_file()]
    assert sorted(read) == sorted(chunks)
