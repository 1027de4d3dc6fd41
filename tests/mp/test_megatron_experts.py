"""The flat state of an optimizer of experts, dealt to two ranks, loaded where one rank has them all, and back."""

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


def trained(rank, path):
    from megatron.core.transformer.moe import moe_utils

    from functional_ckpt.torch.megatron.distributed_optimizer import load_optimizer_state, sharded_optimizer_state
    from functional_ckpt.torch.megatron.serialization import load, save

    warnings.simplefilter("ignore")
    pretend()
    moe_utils.te_general_gemm = None  # which it looks for without Transformer Engine too

    def state_of(ddp, optimizer):
        model = ddp.module.sharded_state_dict()
        return {"model": model, "optimizer": sharded_optimizer_state(optimizer, model)}

    for saved, other in ((1, 2), (2, 1)):
        ddp, optimizer = gpt(1, 1, ep=saved, experts=4, num_layers=2)
        losses = train(ddp, optimizer, 2)
        save(state_of(ddp, optimizer), path / str(saved))
        expected = train(ddp, optimizer, 2)
        assert expected[-1] < losses[0]
        for ep in (saved, other):
            ddp, optimizer = gpt(1, 1, ep=ep, experts=4, num_layers=2)
            found = load(state_of(ddp, optimizer), path / str(saved))
            ddp.module.load_state_dict(found["model"])
            load_optimizer_state(optimizer, found["optimizer"])
            assert train(ddp, optimizer, 2) == pytest.approx(expected, rel=1e-6)


def test_the_flat_state_of_experts_loads_at_another_ep(run):  # noqa: F811
    run(trained)
