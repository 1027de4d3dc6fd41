"""What an error of the Megatron-shaped functions advises can be passed to the function that was called, and helps."""

import re
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402

import functional_ckpt  # noqa: E402
from functional_ckpt import LayoutPolicy, LoadPolicy, SavePolicy  # noqa: E402
from functional_ckpt.errors import CheckpointError, CheckpointWarning, raise_problems  # noqa: E402
from functional_ckpt.plan.mismatch import missing_problems  # noqa: E402
from functional_ckpt.torch import ZarrStorageReader  # noqa: E402
from functional_ckpt.torch.megatron.advice import COMMON_HALF, advised  # noqa: E402
from functional_ckpt.torch.megatron.mapping import ShardedObject, ShardedTensor  # noqa: E402
from functional_ckpt.torch.megatron.serialization import load, load_common_state_dict, load_plain_tensors, save  # noqa: E402
from functional_ckpt.torch.megatron.strategies.checkpointable import CheckpointableShardedTensor  # noqa: E402
from functional_ckpt.torch.megatron.strategies.fully_parallel import FullyParallelLoadStrategyWrapper  # noqa: E402
from functional_ckpt.torch.megatron.strategies.zarr import (  # noqa: E402
    ZarrLoadCommonStrategy,
    ZarrLoadShardedStrategy,
    ZarrSaveCommonStrategy,
    ZarrSaveShardedStrategy,
)

W = torch.tensor([1000.7, -3.0])
tensor = ShardedTensor.from_rank_offsets
NAMES = {
    kind.__name__: kind
    for kind in (
        LoadPolicy, SavePolicy, LayoutPolicy, ZarrLoadShardedStrategy, ZarrLoadCommonStrategy, ZarrSaveShardedStrategy,
        ZarrSaveCommonStrategy,
    )
}  # fmt: skip


class Unknown:
    value = 1


def wanted(**changes):
    state = {"w": tensor("w", torch.zeros(2)), "o": ShardedObject("o", None, (1,), (0,))}
    return {**state, **changes}


@pytest.fixture
def path(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        save({"w": tensor("w", W), "o": ShardedObject("o", Unknown(), (1,), (0,)), "c": Unknown()}, tmp_path / "a")
    return tmp_path / "a"


def advice(error):
    """Return the arguments that an error's text says to pass, as values."""
    text = str(error).replace(f"{Unknown.__module__}.{Unknown.__qualname__}", "Unknown")
    found = re.findall(r"(?:[Pp]ass|with) (\w+)=(.*?)(?:, (?:which|to)\b| to (?:load|save)\b|$)", text, re.MULTILINE)
    return {name: eval(value, {**NAMES, "Unknown": Unknown}) for name, value in found}


def told(state, path, **options):
    with pytest.raises(CheckpointError) as caught:
        load(state, path, **options)
    assert "`like`" not in str(caught.value)
    return advice(caught.value)


TRUSTING = {"common_strategy": ZarrLoadCommonStrategy(safe_globals=[Unknown])}


def test_a_class_to_trust_is_passed_to_the_strategy_of_its_half(path):
    common = told(wanted(), path)
    assert {*common} == {"common_strategy"}
    sharded = told(wanted(), path, **common)
    assert {*sharded} == {"sharded_strategy"}
    found = load(wanted(), path, **common, **sharded)
    assert (found["o"].value, found["c"].value, found["w"].tolist()) == (1, 1, W.tolist())


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_a_cast_is_passed_to_the_strategy(path, dtype):
    state = {"w": tensor("w", torch.zeros(2, dtype=dtype))}
    found = load(state, path, **told(state, path, **TRUSTING), **TRUSTING)
    assert found["w"].dtype == dtype


def test_another_shape_is_allowed_by_the_leaf(path):
    state = {"w": tensor("w", torch.ones(3))}
    with pytest.raises(CheckpointError, match="allow_shape_mismatch=True"):
        load(state, path, **TRUSTING)
    allowed = told(state, path, **TRUSTING)
    found = load({"w": tensor("w", torch.ones(3), **allowed)}, path, **TRUSTING)
    assert found["w"].tolist() == [*W.tolist(), 0.0]


@pytest.mark.parametrize("count", [1, 9])
def test_what_the_checkpoint_lacks_is_left_out_by_strict(path, count):
    state = {f"x{i}": tensor(f"quite.another.{i}", torch.ones(1)) for i in range(count)}
    strict = told(state, path, **TRUSTING)
    assert {*strict} == {"strict"}
    assert {*load(state, path, **strict, **TRUSTING)} == {"c"}


def test_a_rename_is_passed_to_the_strategy(path):
    state = {"w": tensor("module.w", torch.zeros(2))}
    found = load(state, path, **told(state, path, **TRUSTING), **TRUSTING)
    assert found["w"].tolist() == W.tolist()


def test_no_advice_speaks_of_the_policy_of_another_function():
    """Every remedy that names a strictness, of what `load` can raise."""
    for problem in missing_problems([f"a.{i}" for i in range(9)], ["b"], ["b"], [], False):
        assert "LoadPolicy" not in str(advised(problem))
    with pytest.raises(CheckpointError) as caught:
        raise_problems([functional_ckpt.errors.PolicyError("small", remedy="Pass LayoutPolicy(min_chunk_nbytes=0)")])
    policy = advice(advised(caught.value))["sharded_strategy"].policy
    assert policy.layout.min_chunk_nbytes == 0
    assert isinstance(advice(advised(caught.value, COMMON_HALF))["common_strategy"], ZarrSaveCommonStrategy)


def test_classes_to_trust_are_named_when_they_are_saved(tmp_path):
    with pytest.warns(CheckpointWarning, match=r"Unknown in 'o/shard_0_1'.*safe_globals=\[.*Unknown\]"):
        save({"o": ShardedObject("o", [Unknown()], (1,), (0,)), "known": ShardedObject("k", {1}, (1,), (0,))}, tmp_path)


def dcp_load(state, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        dcp.load(state, storage_reader=ZarrStorageReader(path), no_dist=True)


WAYS = {
    "serialization.load": lambda path, into: load({"w": tensor("w", into)}, path, **TRUSTING),
    "a policy that says nothing": lambda path, into: load(
        {"w": tensor("w", into)}, path, ZarrLoadShardedStrategy(policy=LoadPolicy(verify="full")), **TRUSTING
    ),
    "the wrapper": lambda path, into: load(
        {"w": tensor("w", into)}, path, FullyParallelLoadStrategyWrapper(ZarrLoadShardedStrategy()), **TRUSTING
    ),
    "the strategy itself": lambda path, into: ZarrLoadShardedStrategy().load({"w": tensor("w", into)}, path),
    "functional_ckpt.load": lambda path, into: functional_ckpt.load(
        {"w": into}, path, policy=LoadPolicy(strict="ignore")
    ),
    "DCP": lambda path, into: dcp_load({"w": into}, path),
    "DCP, with a sharded leaf": lambda path, into: dcp_load(
        {"w": CheckpointableShardedTensor.from_sh_ten(tensor("w", into))}, path
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_no_way_in_changes_a_data_type_unasked(path, way, dtype):
    """1000.7 as int8 is -24."""
    into = torch.zeros(2, dtype=dtype)
    # DCP has an error of its own for all others, which is no Exception.
    with pytest.raises((CheckpointError, dcp.api.CheckpointException), match=r"cast='(any|same_kind)'"):
        WAYS[way](path, into)
    assert not into.any()


def test_whole_tensors_keep_their_type(path):
    assert load_plain_tensors(path)["w"].dtype == torch.float32
    assert np.isclose(load_plain_tensors(path)["w"][0], 1000.7)


def test_the_common_half_alone_says_what_to_pass(path):
    with pytest.raises(CheckpointError, match="ZarrLoadCommonStrategy"):
        load_common_state_dict(path)
