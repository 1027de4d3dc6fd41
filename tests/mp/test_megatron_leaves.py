"""Leaves of ours in state dicts that Megatron itself saves and loads: sharded, as its own are."""

import warnings

import pytest

torch = pytest.importorskip("torch")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Transformer Engine and Apex are not there
    pytest.importorskip("megatron.core.dist_checkpointing", reason="megatron-core is not installed")

from tests.mp.cpu_as_cuda import pretend  # noqa: E402
from tests.mp.megatron_training import gpt, train  # noqa: E402
from tests.mp.test_megatron import run, until_016  # noqa: E402, F401 - a fixture

pytestmark = pytest.mark.mp

WHOLE = torch.arange(48.0).reshape(12, 4)


def made(rank, fill=True):
    """Return leaves of each of our classes, in the places where Megatron looks for its own."""
    from functional_ckpt.torch.megatron import mapping

    def halves(key, data, replica_id, flattened_range):
        parts = enumerate(data.chunk(2))
        return [mapping.ShardedTensor.from_rank_offsets(key, part, (0, 2 * rank + i, 4)) for i, part in parts]

    flat = WHOLE[6 * rank : 6 * rank + 6].reshape(-1)
    cut = (5, 19)[rank]
    value = (lambda data: data.clone()) if fill else torch.zeros_like
    return {
        "w": mapping.ShardedTensor.from_rank_offsets("w", value(WHOLE.chunk(2)[rank]), (0, rank, 2)),
        "flat": [
            mapping.ShardedTensor.from_rank_offsets_flat(
                "flat", value(flat[part]), (6, 4), (0, rank, 2), flattened_range=part
            )
            for part in (slice(0, cut), slice(cut, 24))
        ],
        "made": mapping.ShardedTensorFactory("made", value(WHOLE.chunk(2)[rank]), halves, torch.cat),
        "object": mapping.ShardedObject("object", {"of": rank} if fill else None, (2,), (rank,)),
        "local": mapping.LocalNonpersistentObject((rank, fill)),
        "step": 3,
    }


def handed_over(rank, path):
    """Save and load by Megatron's own functions, with its default checks."""
    from megatron.core import dist_checkpointing as mcore

    from functional_ckpt.torch.megatron.plugin import ZarrSaveStrategy

    mcore.save(made(rank), str(path), ZarrSaveStrategy())
    wanted = made(rank, fill=False)
    found = mcore.load(wanted, str(path))
    part = WHOLE.chunk(2)[rank]
    assert torch.equal(wanted["w"].data, part)
    assert torch.equal(found["w"], part)
    assert torch.equal(found["made"], part)
    assert torch.equal(torch.cat(found["flat"]), part.reshape(-1))
    assert (found["object"], found["local"], found["step"]) == ({"of": rank}, (rank, False), 3)
    assert {*mcore.load_common_state_dict(str(path))} == {"step"}


@until_016
def test_megatron_takes_our_leaves_for_its_own(run):  # noqa: F811
    import functional_ckpt

    stored = functional_ckpt.open_checkpoint(run(handed_over))
    for key in ("w", "flat", "made"):
        assert torch.equal(torch.from_numpy(stored[key][...]), WHOLE)


def handed_to_its_own_strategy(rank, path):
    """Ranges of flattened tensors, for which torch_dist has no format, are refused on all ranks; the rest loads."""
    from megatron.core import dist_checkpointing as mcore

    state = made(rank)
    del state["flat"]
    mcore.save(state, str(path))
    wanted = made(rank, fill=False)
    del wanted["flat"]
    found = mcore.load(wanted, str(path))
    part = WHOLE.chunk(2)[rank]
    assert torch.equal(found["w"], part)
    assert torch.equal(found["made"], part)
    assert (found["object"], found["local"], found["step"]) == ({"of": rank}, (rank, False), 3)
    (path / "flat").mkdir(exist_ok=True)
    torch.distributed.barrier()
    with pytest.raises(AssertionError):
        mcore.save({"flat": made(rank)["flat"]}, str(path / "flat"))


def test_megatrons_own_strategy_saves_our_leaves_or_refuses(run):  # noqa: F811
    pytest.importorskip("psutil", reason="what Megatron's own strategy needs")
    run(handed_to_its_own_strategy)


def trained(rank, path):
    """Save a trained optimizer by Megatron's function, and go on under another layout."""
    from megatron.core import dist_checkpointing as mcore

    from functional_ckpt.torch.megatron.distributed_optimizer import load_optimizer_state, sharded_optimizer_state
    from functional_ckpt.torch.megatron.plugin import ZarrSaveStrategy

    warnings.simplefilter("ignore")
    pretend()

    def state_of(ddp, optimizer):
        model = ddp.module.sharded_state_dict()
        return {"model": model, "optimizer": sharded_optimizer_state(optimizer, model)}

    ddp, optimizer = gpt(2, 1)
    train(ddp, optimizer, 2)
    mcore.save(state_of(ddp, optimizer), str(path), ZarrSaveStrategy())
    expected = train(ddp, optimizer, 2)
    ddp, optimizer = gpt(1, 1)
    found = mcore.load(state_of(ddp, optimizer), str(path))
    ddp.module.load_state_dict(found["model"])
    load_optimizer_state(optimizer, found["optimizer"])
    assert train(ddp, optimizer, 2) == pytest.approx(expected, rel=1e-6)


@until_016
def test_the_state_of_a_distributed_optimizer_goes_through_megatrons_save(run):  # noqa: F811
    run(trained)
