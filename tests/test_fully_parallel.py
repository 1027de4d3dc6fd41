"""The wrapper that deals out the writing of copies, on ranks of one process."""

import sys

import pytest

torch = pytest.importorskip("torch")

import functional_ckpt  # noqa: E402
from functional_ckpt.errors import PolicyError  # noqa: E402
from functional_ckpt.torch.megatron.mapping import ShardedTensor  # noqa: E402
from functional_ckpt.torch.megatron.serialization import load, save  # noqa: E402
from functional_ckpt.torch.megatron.strategies.base import SaveShardedStrategy  # noqa: E402
from functional_ckpt.torch.megatron.strategies.fully_parallel import (  # noqa: E402
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from functional_ckpt.torch.megatron.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy  # noqa: E402

W = torch.arange(6.0)


def wrapped(cached=False):
    return FullyParallelSaveStrategyWrapper(ZarrSaveShardedStrategy(), do_cache_distribution=cached)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("ids", [(0, 1), (1, 0), (0, 1, 2)])
def test_of_a_shard_that_a_rank_holds_twice_it_writes_the_first(ids, cached, tmp_path):
    """Tied weights come under one key, each with a replica id of its own."""
    saver = wrapped(cached)
    for step in range(2):
        leaves = [ShardedTensor.from_rank_offsets("w", W.clone(), replica_id=number) for number in ids]
        dealt = saver.apply_saving_parallelization({"tied": leaves, "n": ShardedTensor.from_rank_offsets("n", W)})
        assert [leaf.replica_id for leaf in dealt["tied"]] == [0, *(1 for _ in ids[1:])]
        assert [leaf.replica_id for leaf in leaves] == list(ids)
        save({"tied": leaves}, tmp_path / str(step), wrapped(cached))
        found = load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(6))}, tmp_path / str(step))
        assert torch.equal(found["w"], W)
        assert functional_ckpt.verify(tmp_path / str(step)).ok


class Saver(SaveShardedStrategy):
    def save(self, sharded_state_dict, checkpoint_dir):
        return None


def test_what_cannot_be_wrapped_is_refused():
    for nothing in (None, ZarrLoadShardedStrategy, Saver("a", 1)):
        with pytest.raises(PolicyError, match="not a strategy that loads"):
            FullyParallelLoadStrategyWrapper(nothing)
    with pytest.raises(NotImplementedError, match="exchange_algo"):
        FullyParallelLoadStrategyWrapper(ZarrLoadShardedStrategy(), None, False, "carrier pigeon")
    with pytest.raises(PolicyError, match="background"):
        FullyParallelSaveStrategyWrapper(Saver("a", 1)).async_save({}, "")


def test_the_deal_is_kept_if_it_is_to_be():
    leaves = {"w": ShardedTensor.from_rank_offsets("w", W)}
    for cached in (False, True):
        saver = wrapped(cached)
        assert saver.cached_distribution is None
        saver.apply_saving_parallelization(leaves)
        assert (saver.cached_distribution is not None) is cached
    saver.cached_distribution = None  # so that the next save deals anew
    other = {"v": ShardedTensor.from_rank_offsets("v", W)}
    assert saver.apply_saving_parallelization(other)["v"].replica_id == 0


OTHERS = {
    "one more": {"w": W, "v": W},
    "another one": {"v": W},
    "longer": {"w": torch.arange(9.0)},
    "shorter": {"w": torch.arange(4.0)},
    "cut anew": {"w": [W[:2], W[2:]]},
    "other elements": {"w": W.double()},
    "none": {},
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_deal_that_is_kept_is_for_the_same_shards_only(other, tmp_path):
    """What it does not name would have no writer, and would be missing."""
    saver, steps = wrapped(cached=True), [{"w": W}, OTHERS[other], {"w": W}, OTHERS[other]]
    for step, tensors in enumerate(steps):
        state = {key: sharded(key, parts) for key, parts in tensors.items()}
        save({"state": state, "step": step}, tmp_path / str(step), saver)
        found = functional_ckpt.open_checkpoint(tmp_path / str(step))
        expected = {key: torch.cat(parts) if isinstance(parts, list) else parts for key, parts in tensors.items()}
        assert {*found} == {*expected}
        assert all(torch.equal(found[key].torch(), whole) for key, whole in expected.items())


def sharded(key, parts):
    """A tensor, whole or in pieces."""
    if not isinstance(parts, list):
        return ShardedTensor.from_rank_offsets(key, parts)
    size = sum(map(len, parts))
    starts = [sum(map(len, parts[:number])) for number in range(len(parts))]
    return [
        ShardedTensor(key, part, part.dtype, (len(part),), (size,), (start,), None)
        for part, start in zip(parts, starts, strict=True)
    ]


def test_a_save_walks_over_its_leaves_four_times(tmp_path, monkeypatch):
    """To sort, to check, to deal, and to save them: a state has a million."""
    seen = []
    modules = [module for name, module in sys.modules.items() if name.startswith("functional_ckpt.torch")]
    for module in modules:
        for name in ("leaves_of", "map_leaves", "picked"):
            real = getattr(module, name, None)
            if real is None or module.__name__.endswith("state_tree"):
                continue

            def counted(*arguments, real=real, name=name):
                tree = arguments[-1] if name == "leaves_of" else arguments[1]
                seen.append(name) if isinstance(tree, dict) and "w3" in tree else None
                return real(*arguments)

            monkeypatch.setattr(module, name, counted)
    save({f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", W) for i in range(5)}, tmp_path / "a", wrapped())
    assert sorted(seen) == ["leaves_of", "leaves_of", "map_leaves"]  # sorting them is a walk of its own
