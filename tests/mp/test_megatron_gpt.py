"""A real, tiny GPT of megatron-core on two ranks: trained under TP=2, saved, and loaded under TP=1 and PP=2.

Its random states live on a GPU; where there is none they are left alone, which changes nothing without dropout.
"""

import contextlib
import warnings

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Transformer Engine and Apex are not there
    pytest.importorskip("megatron.core.models.gpt", reason="megatron-core is not installed")

from tests.mp.test_megatron import run  # noqa: E402, F401 - a fixture

pytestmark = pytest.mark.mp

VOCABULARY, LENGTH = 64, 8


def gpt(tp, pp):
    """Return this rank's part of the model, and an Adam with moments."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not torch.cuda.is_available():
        CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp)
    torch.manual_seed(tp)
    config = TransformerConfig(
        num_layers=4, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True, gated_linear_unit=True,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32,
        attention_dropout=0.0, hidden_dropout=0.0, bias_dropout_fusion=False, bias_activation_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adam.step()
    return model, adam


def train(model, adam, steps):
    """Return the losses of some steps on tokens that are always the same."""
    losses = []
    tokens = torch.arange(2 * (LENGTH + 1)).reshape(2, -1) * 7 % VOCABULARY
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    for _ in range(steps):
        adam.zero_grad()
        loss = model(tokens[:, :-1], torch.arange(LENGTH)[None], mask, labels=tokens[:, 1:]).mean()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


def state_of(model, adam):
    """Return model and optimizer as Megatron's sharded state dict."""
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )

    sharded = model.sharded_state_dict()
    moments = adam.state_dict()
    step = float(next(iter(moments["state"].values()))["step"])
    numbers = get_param_id_to_sharded_param_map(sharded, model.parameters())
    optim_state_to_sharding_state(moments, numbers, exclude_keys=("step",))
    return {"model": sharded, "optimizer": moments, "adam_step": step}


def restore(model, adam, path):
    from megatron.core import dist_checkpointing as mcore

    found = mcore.load(state_of(model, adam), str(path))
    model.load_state_dict(found["model"])
    for values in found["optimizer"]["state"].values():
        values["step"] = torch.tensor(found["adam_step"])
    adam.load_state_dict(found["optimizer"])


def trained(rank, path):
    from megatron.core import dist_checkpointing as mcore

    from functional_ckpt.torch.megatron.plugin import ZarrSaveStrategy

    def save(model, adam, name):
        (path / name).mkdir(exist_ok=True)
        dist.barrier()
        mcore.save(state_of(model, adam), str(path / name), ZarrSaveStrategy())

    model, adam = gpt(2, 1)
    losses = train(model, adam, 3)
    save(model, adam, "tp2")
    expected = train(model, adam, 2)
    assert expected[-1] < losses[0]
    for name, sizes in {"tp1": (1, 1), "pp2": (1, 2), "tp2again": (2, 1)}.items():
        model, adam = gpt(*sizes)
        restore(model, adam, path / "tp2")
        save(model, adam, name)
        if sizes[1] == 1:
            found = train(model, adam, 2)
            assert found == pytest.approx(expected, rel=0 if sizes == (2, 1) else 1e-5), name


def test_a_gpt_trains_on_under_another_layout(run):  # noqa: F811
    import functional_ckpt

    path = run(trained)
    stored = {name: functional_ckpt.open_checkpoint(path / name) for name in ("tp2", "tp1", "pp2", "tp2again")}
    keys = [key for key in stored["tp2"] if "_extra_state" not in key]
    assert any("exp_avg_sq.decoder" in key for key in keys)
    for name in ("tp1", "pp2", "tp2again"):
        assert [key for key in stored[name] if "_extra_state" not in key] == keys
        for key in keys:
            assert (stored[name][key][...] == stored["tp2"][key][...]).all(), (name, key)
