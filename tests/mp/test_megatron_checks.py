"""Inside an unmodified megatron-core: what its own check of the shards stops, and what ours refuses, on all ranks."""

import warnings

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Transformer Engine and Apex are not there
    pytest.importorskip("megatron.core.dist_checkpointing", reason="megatron-core is not installed")

from tests.mp.test_megatron import check, run, saver, state  # noqa: E402, F401 - a fixture

pytestmark = pytest.mark.mp


def with_a_hole(rank, path):
    """Save and load what leaves a hole, by Megatron's own check, which rank 0 makes alone; then save what is whole."""
    from megatron.core import dist_checkpointing as mcore
    from megatron.core.dist_checkpointing.core import CheckpointingException

    from functional_ckpt.torch.megatron import arrival
    from functional_ckpt.torch.megatron.plugin import ZarrLoadStrategy

    arrival.PATIENCE_S = 1.0
    half = mcore.ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, 3))
    problem = "Invalid access pattern" if rank == 0 else "rank 0 did not reach this call"
    for number, more in enumerate(({}, {"async_sharded_save": True})):
        place = path / str(number)
        place.mkdir(exist_ok=True)
        dist.barrier()
        with pytest.raises(CheckpointingException, match=problem):
            mcore.save({"w": half}, str(place), saver(), **more)
    mcore.save(state(rank)[0], str(place), saver())
    copy = mcore.ShardedTensor.from_rank_offsets("copy", torch.ones(6, 4), replica_id=1)
    with pytest.raises(CheckpointingException, match=problem):
        mcore.load({"copy": copy}, str(place), ZarrLoadStrategy())
    wanted, want = state(rank, 1, fill=False)
    check(mcore.load(wanted, str(place), ZarrLoadStrategy()), want, rank)


def test_no_rank_waits_for_one_that_megatrons_own_check_has_stopped(run):  # noqa: F811
    run(with_a_hole)


def casting(rank, path):
    """1000.7 as int8 is -24."""
    from megatron.core import dist_checkpointing as mcore
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    from functional_ckpt import LoadPolicy
    from functional_ckpt.torch.megatron.plugin import ZarrLoadStrategy

    def leaf(data):
        return {"w": mcore.ShardedTensor.from_rank_offsets("w", data, (0, rank, 2))}

    mcore.save(leaf(torch.tensor([1000.7])), str(path), saver())
    for strategy in (ZarrLoadStrategy(), FullyParallelLoadStrategyWrapper(ZarrLoadStrategy())):
        into = torch.zeros(1, dtype=torch.int8)
        remedy = r"sharded_strategy=ZarrLoadStrategy\(policy=LoadPolicy\(cast='any'\)\)"
        with pytest.raises(CheckpointingException, match=remedy):
            mcore.load(leaf(into), str(path), strategy)
        assert not into.any()
    found = mcore.load(leaf(into.int()), str(path), ZarrLoadStrategy(policy=LoadPolicy(cast="any")))
    assert found["w"].tolist() == [1000]
    with pytest.raises(CheckpointingException, match="Pass strict='log_unexpected' to load"):
        mcore.load({"x": mcore.ShardedTensor.from_rank_offsets("x", torch.ones(2), (0, rank, 2))}, str(path),
                   ZarrLoadStrategy())  # fmt: skip


def test_a_cast_is_an_error_that_says_what_to_pass(run):  # noqa: F811
    run(casting)
