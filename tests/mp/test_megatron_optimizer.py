"""Megatron's own DistributedOptimizer, saved as flat shards at TP2/DP2, loaded under any other layout, trained on.

What was saved and loaded is also compared, bit for bit, with the buffers that Megatron itself gathers. How it is saved
and loaded is what the documentation shows.
"""

import warnings
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Transformer Engine and Apex are not there
    pytest.importorskip("megatron.core.models.gpt", reason="megatron-core is not installed")

from tests import pages  # noqa: E402
from tests.mp.cpu_as_cuda import pretend  # noqa: E402
from tests.mp.megatron_training import gpt, train  # noqa: E402
from tests.mp.test_megatron import run  # noqa: E402, F401 - a fixture

pytestmark = pytest.mark.mp

# Other layouts add up in another order: losses may differ by a few roundings.
DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2e-4}
LAYOUTS = {"tp1-dp4": (1, 1), "pp2-dp2": (1, 2), "tp2-pp2-dp1": (2, 2), "tp2-dp2": (2, 1)}
STATES = {"fp32_param": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def save_gathered(ddp, optimizer, path):
    """Save every state of every parameter whole, from what Megatron gathers on every data parallel rank.

    It gathers buffers with the padding between buckets left out.
    """
    from megatron.core import dist_checkpointing as mcore
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

    from functional_ckpt.torch.megatron.plugin import ZarrSaveStrategy

    leaves = {leaf.data: leaf for leaf in nested_values(ddp.module.sharded_state_dict())}
    (part,) = optimizer.chained_optimizers
    gathered = part.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
    whole = []
    for number, buffer in enumerate(part.buffers):
        (states,) = gathered[number].values()
        padding = [0]
        for bucket in buffer.buckets:
            padding.append(padding[-1] + bucket.grad_data.numel() - bucket.numel_unpadded)
        assert padding[-1] > 0
        for parameter, (start, stop, bucket) in buffer.param_index_map.items():
            for name in STATES.values():
                flat = states[name][start - padding[bucket] : stop - padding[bucket]]
                whole.append(make_sharded_optimizer_tensor(leaves[parameter], flat.reshape(parameter.shape), name))
    path.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    mcore.save({"whole": whole}, str(path), ZarrSaveStrategy())


def trained(rank, path):
    warnings.simplefilter("ignore")
    pretend()
    shown = SimpleNamespace(**pages.shown("megatron.md", "distributed_optimizer.py"))
    for dtype, tolerance in DTYPES.items():
        train_on_under_every_layout(shown, path / str(dtype), dtype, tolerance)


def train_on_under_every_layout(shown, path, dtype, tolerance):
    ddp, optimizer = gpt(2, 1, dtype)
    losses = train(ddp, optimizer, 3)
    shown.save_training(ddp, optimizer, 3, path / "saved")
    save_gathered(ddp, optimizer, path / "saved-gathered")
    expected = train(ddp, optimizer, 3)
    assert expected[-1] < expected[0] < losses[0]
    for name, sizes in LAYOUTS.items():
        ddp, optimizer = gpt(*sizes, dtype)
        step = shown.load_training(ddp, optimizer, path / "saved")
        shown.save_training(ddp, optimizer, step, path / name)
        save_gathered(ddp, optimizer, path / f"{name}-gathered")
        found = train(ddp, optimizer, 3)
        assert found == pytest.approx(expected, rel=0 if name == "tp2-dp2" else tolerance), name
    # What the losses can tell: one moment lost is seen.
    ddp, optimizer = gpt(2, 1, dtype)
    shown.load_training(ddp, optimizer, path / "saved")
    for state in optimizer.chained_optimizers[0].optimizer.state.values():
        state["exp_avg"].zero_()
    assert train(ddp, optimizer, 3)[-1] != pytest.approx(expected[-1], rel=50 * tolerance)


def test_a_gpt_trains_on_under_another_layout(run):  # noqa: F811
    path = run(trained, size=4)
    for dtype in DTYPES:
        compare_what_is_stored(path / str(dtype))


def compare_what_is_stored(path):
    import functional_ckpt

    stored = {one.name: functional_ckpt.open_checkpoint(one) for one in path.iterdir()}
    saved, gathered = stored["saved"], stored["saved-gathered"]
    arrays = [key for key in saved if "_extra_state" not in key]
    keys = [key.removeprefix("optimizer.state.exp_avg.") for key in arrays if "exp_avg." in key]
    assert len(keys) == 16
    for key in keys:
        for ours, theirs in STATES.items():
            assert same(saved[f"optimizer.state.{ours}.{key}"], gathered[f"{theirs}.{key}"])
    for name in LAYOUTS:
        assert all(same(stored[name][key], saved[key]) for key in arrays)
        assert all(same(stored[f"{name}-gathered"][key], gathered[key]) for key in gathered)


def same(one, other):
    """Tell whether two stored arrays have the same bytes."""
    return one[...].tobytes() == other[...].tobytes()


def held(rank, path):
    """What a rank holds of an optimizer that has not stepped, and two things that Megatron does otherwise."""
    from functional_ckpt.errors import CheckpointErrors, UnsupportedLeafError
    from functional_ckpt.torch.megatron.distributed_optimizer import load_optimizer_state, sharded_optimizer_state

    warnings.simplefilter("ignore")
    pretend()
    ddp, optimizer = gpt(1, 1)
    (part,) = optimizer.chained_optimizers
    model = ddp.module.sharded_state_dict()
    state = sharded_optimizer_state(optimizer, model)
    # Its own tensors, and none of the padding.
    memory = {t.untyped_storage()._cdata for m, s in part.optimizer.state.items() for t in (m, *s.values())}
    assert {shard.data.untyped_storage()._cdata for shard in state["shards"]} <= memory
    count = torch.tensor(sum(shard.data.numel() for shard in state["shards"]))
    torch.distributed.all_reduce(count)
    parameters = [parameter for buffer in part.buffers for parameter in buffer.param_index_map]
    assert count == 3 * sum(parameter.numel() for parameter in parameters)
    assert all(not shard.data.any() for shard in state["shards"] if "exp_avg" in shard.key)
    assert state["common"]["optimizer"]["param_groups"][0]["step"] == 0

    # Megatron gives one step to all parameters, and displaces what stands behind padding.
    part.load_state_dict(state["common"])
    assert len({id(s["step"]) for s in part.optimizer.state.values()}) == 1
    load_optimizer_state(optimizer, state)
    assert len({id(s["step"]) for s in part.optimizer.state.values()}) == len(part.optimizer.state)
    train(ddp, optimizer, 1)
    assert {s["step"].item() for s in part.optimizer.state.values()} == {1.0}
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    whole = part.sharded_state_dict(model, metadata=metadata)["param_state"].values()
    displaced = [not torch.equal(one["param"].data, p) for one, p in zip(whole, parameters, strict=True)]
    assert any(displaced)

    with pytest.raises(CheckpointErrors) as caught:
        sharded_optimizer_state(optimizer, {})
    assert "module.decoder.layers.0.mlp.linear_fc1.weight" in {problem.key for problem in caught.value.exceptions}
    part.config.use_precision_aware_optimizer = True
    with pytest.raises(UnsupportedLeafError, match="use_precision_aware_optimizer"):
        sharded_optimizer_state(optimizer, model)


def test_what_a_rank_holds(run):  # noqa: F811
    run(held, size=2)
