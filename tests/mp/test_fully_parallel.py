"""Work spread over ranks that hold copies: each writes a part, each stored byte is read once."""

import pytest

from tests.mp import launch

pytestmark = pytest.mark.mp

LAYERS = 8


def replicated(data):
    from functional_ckpt.torch.megatron.mapping import ShardedTensor

    return {f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", data(i), replica_id=launch.rank()) for i in range(LAYERS)}


def spread(path, cached):
    """Return the bytes that each rank wrote and read of replicated state."""
    import json

    import torch

    from functional_ckpt.store.files import FileStore
    from functional_ckpt.torch.megatron.mapping import ShardedObject
    from functional_ckpt.torch.megatron.serialization import load, save
    from functional_ckpt.torch.megatron.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
        FullyParallelSaveStrategyWrapper,
    )
    from functional_ckpt.torch.megatron.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy

    saver = FullyParallelSaveStrategyWrapper(ZarrSaveShardedStrategy(), None, cached)
    for number in range(2):
        state = replicated(lambda i: launch.values(100, 10 * (i + 1), seed=i))
        state["o"] = ShardedObject("o", [5], (1,), (0,), replica_id=launch.rank())
        ids = [leaf.replica_id for leaf in state.values()]
        save(state, path / str(number), saver)
        assert [leaf.replica_id for leaf in state.values()] == ids
    ranks = json.loads((path / "1" / "provenance.json").read_text())["ranks"]

    read = []
    for name in ("read", "scan", "read_into", "read_ranges"):
        real = getattr(FileStore, name)
        setattr(FileStore, name, lambda self, n, *a, real=real: (read.append(n), real(self, n, *a))[1])
    loader = FullyParallelLoadStrategyWrapper(ZarrLoadShardedStrategy())
    wanted = replicated(lambda i: torch.zeros(100, 10 * (i + 1)))
    wanted["o"] = ShardedObject("o", None, (1,), (0,))
    found = load(wanted, path / "1", loader, validate_access_integrity=False)
    for i in range(LAYERS):
        launch.same(found[f"w{i}"], launch.values(100, 10 * (i + 1), seed=i))
    assert found["o"] == [5]
    return [rank["nbytes"] for rank in ranks], [name for name in read if "/c" in name]


@pytest.mark.parametrize("cached", [False, True])
def test_each_rank_writes_a_fair_part_and_each_chunk_is_read_once(four, tmp_path, cached):
    found = four.run(spread, tmp_path, cached)
    written = found[0][0]
    total = sum(100 * 10 * (i + 1) * 4 for i in range(LAYERS))
    assert sum(written) >= total
    assert max(written) < 1.3 * total / 4
    read = sorted(name for _, names in found for name in names if name.startswith("w"))
    assert read == sorted(str(p.relative_to(tmp_path / "1")) for p in (tmp_path / "1").glob("w*/c*"))


def foreign(path):
    import torch

    from functional_ckpt.torch.megatron.mapping import ShardedTensor
    from functional_ckpt.torch.megatron.serialization import load, save
    from functional_ckpt.torch.megatron.strategies.base import LoadShardedStrategy
    from functional_ckpt.torch.megatron.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    class Loader(LoadShardedStrategy):
        """Reads in a way of its own: what each rank asks for is its rank."""

        can_handle_sharded_objects = True

        def load(self, sharded_state_dict, checkpoint_dir):
            return {key: torch.full_like(leaf.data, launch.rank()) for key, leaf in sharded_state_dict.items()}

        def check_backend_compatibility(self, loaded_backend):
            pass

        check_version_compatibility = load_tensors_metadata = check_backend_compatibility

    def state():
        return {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3), replica_id=launch.rank())}

    save(state(), path)
    return load(state(), path, FullyParallelLoadStrategyWrapper(Loader()))["w"].tolist()


def test_ranks_with_a_strategy_of_others_read_for_themselves(two, tmp_path):
    assert two.run(foreign, tmp_path / "a") == [[0.0] * 3, [1.0] * 3]


def gathers(path, cached):
    """Return how often specs were gathered in each of three saves."""
    import pickle

    from functional_ckpt.torch.group.link import TorchGather
    from functional_ckpt.torch.megatron.mapping import ShardedTensor
    from functional_ckpt.torch.megatron.serialization import load, save
    from functional_ckpt.torch.megatron.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from functional_ckpt.torch.megatron.strategies.zarr import ZarrSaveShardedStrategy

    counts = [0]
    real = TorchGather.all_gather

    def counting(self, value):
        text = pickle.dumps(value)
        counts[-1] += b"ShardRows" in text or b"ShardSpec" in text
        return real(self, value)

    def state():
        cut = ShardedTensor(
            "cut", launch.values(3, 4), launch.values(1).dtype, (3, 4), (6, 4), (3 * launch.rank(), 0), None
        )
        return {**replicated(lambda i: launch.values(10 + cached, i + 1, seed=i)), "cut": cut}

    saver = FullyParallelSaveStrategyWrapper(ZarrSaveShardedStrategy(), None, cached)
    TorchGather.all_gather = counting
    try:
        for number in range(3):
            save(state(), path / str(number), saver)
            counts.append(0)
    finally:
        TorchGather.all_gather = real
    found = load(state(), path / "2", validate_access_integrity=False)
    launch.same(found["cut"], launch.values(3, 4))
    return counts[:3]


@pytest.mark.parametrize("cached", [False, True])
def test_specs_are_gathered_to_check_them_and_to_plan_and_never_again(two, tmp_path, cached):
    """What checks them hands them to what deals them; the checks and plans of equal saves are remembered."""
    assert two.run(gathers, tmp_path, cached) == [[2, 0, 0]] * 2
