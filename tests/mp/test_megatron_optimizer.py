"""Megatron's own DistributedOptimizer, saved as flat shards at TP2/DP2, loaded under any other layout, trained on.

What was saved and loaded is also compared, bit for bit, with the buffers that Megatron itself gathers.
"""

import warnings

import pytest

torch = pytest.importorskip("torch")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Transformer Engine and Apex are not there
    pytest.importorskip("megatron.core.models.gpt", reason="megatron-core is not installed")

from tests.mp.cpu_as_cuda import pretend  # noqa: E402
from tests.mp.megatron_training import gpt, train  # noqa: E402
from tests.mp.test_megatron import run  # noqa: E402, F401 - a fixture

pytestmark = pytest.mark.mp

LAYOUTS = {"tp1-dp4": (1, 1), "pp2-dp2": (1, 2), "tp2-pp2-dp1": (2, 2), "tp2-dp2": (2, 1)}
STATES = {"fp32_param": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def state_of(ddp, optimizer):
    from functional_ckpt.torch.distributed_optimizer import sharded_optimizer_state

    model = ddp.module.sharded_state_dict()
    return {"model": model, "optimizer": sharded_optimizer_state(optimizer, model)}


def restore(ddp, optimizer, path):
    from functional_ckpt.torch.distributed_optimizer import load_optimizer_state
    from functional_ckpt.torch.serialization import load

    found = load(state_of(ddp, optimizer), path)
    ddp.module.load_state_dict(found["model"])
    load_optimizer_state(optimizer, found["optimizer"])


def save_gathered(ddp, optimizer, path):
    """Save every state of every parameter whole, from what Megatron gathers on every data parallel rank.

    It gathers buffers with the padding between buckets left out.
    """
    from megatron.core import dist_checkpointing as mcore
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

    from functional_ckpt.torch.megatron import ZarrSaveStrategy

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
    path.mkdir(exist_ok=True)
    torch.distributed.barrier()
    mcore.save({"whole": whole}, str(path), ZarrSaveStrategy())


def trained(rank, path, dtype, tolerance):
    from functional_ckpt.torch.serialization import save

    warnings.simplefilter("ignore")
    pretend()
    ddp, optimizer = gpt(2, 1, dtype)
    losses = train(ddp, optimizer, 3)
    save(state_of(ddp, optimizer), path / "saved")
    save_gathered(ddp, optimizer, path / "whole")
    expected = train(ddp, optimizer, 3)
    assert expected[-1] < expected[0] < losses[0]
    for name, sizes in LAYOUTS.items():
        ddp, optimizer = gpt(*sizes, dtype)
        restore(ddp, optimizer, path / "saved")
        save_gathered(ddp, optimizer, path / name)
        found = train(ddp, optimizer, 3)
        assert found == pytest.approx(expected, rel=0 if name == "tp2-dp2" else tolerance), name
    ddp, optimizer = gpt(2, 1, dtype)
    restore(ddp, optimizer, path / "saved")
    for state in optimizer.chained_optimizers[0].optimizer.state.values():
        state["exp_avg"].zero_()
    assert train(ddp, optimizer, 3)[-1] != pytest.approx(expected[-1], rel=tolerance)


# Other layouts add up in another order: a few roundings of the data type, relative to the loss.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-3)], ids=["fp32", "bf16"])
def test_a_gpt_trains_on_under_another_layout(run, dtype, tolerance):  # noqa: F811
    import functional_ckpt

    path = run(trained, dtype, tolerance, size=4)
    saved, whole = functional_ckpt.open_checkpoint(path / "saved"), functional_ckpt.open_checkpoint(path / "whole")
    keys = {key.removeprefix("param.") for key in whole if key.startswith("param.")}
    assert len(keys) == 16
    for ours, theirs in STATES.items():
        for key in keys:
            expected = whole[f"{theirs}.{key}"][...]
            assert (saved[f"optimizer.state.{ours}.{key}"][...] == expected).all(), (ours, key)
            for name in LAYOUTS:
                found = functional_ckpt.open_checkpoint(path / name)[f"{theirs}.{key}"][...]
                assert (found == expected).all(), (name, ours, key)
