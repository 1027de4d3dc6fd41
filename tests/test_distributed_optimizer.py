"""The state of what looks like a DistributedOptimizer: refusals, chains, and checkpoints of other optimizers."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from functional_ckpt.errors import ShapeError, SpecError, UnsupportedLeafError  # noqa: E402
from functional_ckpt.torch.megatron.distributed_optimizer import load_optimizer_state, sharded_optimizer_state  # noqa: E402
from functional_ckpt.torch.megatron.mapping import CheckpointingException, ShardedTensor  # noqa: E402
from functional_ckpt.torch.megatron.optimizer import (  # noqa: E402
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from functional_ckpt.torch.megatron.serialization import load, save  # noqa: E402


def model(replica_id=(0, 0, 0)):
    weight = torch.nn.Parameter(torch.arange(12.0).reshape(4, 3))
    return weight, {"w": ShardedTensor.from_rank_offsets("w", weight, replica_id=replica_id)}


def optimizer(weight, start=2, stop=9, **more):
    """Return one that holds a range of a parameter, with a real Adam inside that has not stepped."""
    master = weight.detach().reshape(-1)[start:stop].clone().requires_grad_()
    inner = torch.optim.Adam([master])
    ranges = {"param_map": {weight: {"param": SimpleNamespace(start=start, end=stop)}}}

    def moments(adam, config):
        for state in (adam.state[master],) if not adam.state else ():
            state.update(exp_avg=torch.zeros_like(master), exp_avg_sq=torch.zeros_like(master))

    fields = {
        "optimizer": inner, "gbuf_ranges": [{"dtypes": [ranges]}], "model_param_group_index_map": {weight: (0, 0)},
        "config": SimpleNamespace(), "distributed_optimizer_instance_id": 0, "init_state_fn": moments,
        "state_dict": lambda: {"step": 1}, "load_state_dict": lambda state: None,
    }  # fmt: skip
    return SimpleNamespace(**{name: value for name, value in {**fields, **more}.items() if value is not None})


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ({"gbuf_ranges": None}, "SimpleNamespace"),
        ({"config": SimpleNamespace(use_precision_aware_optimizer=True)}, "use_precision_aware_optimizer"),
        ({"optimizer": SimpleNamespace(sub_optimizers=[])}, "optimizer_cpu_offload"),
    ],
    ids=["fsdp", "precision aware", "cpu offload"],
)
def test_other_ways_to_keep_a_state_are_refused(kind, what):
    weight, described = model()
    with pytest.raises(UnsupportedLeafError, match=what):
        sharded_optimizer_state(optimizer(weight, **kind), described)


@pytest.mark.parametrize("replica_id", [0, (0, 1)])
def test_a_replica_id_without_a_data_parallel_rank_is_refused(replica_id):
    weight, described = model(replica_id)
    with pytest.raises(SpecError, match=r"'w'.*data parallel"):
        sharded_optimizer_state(optimizer(weight), described)


def test_a_state_of_another_length_is_refused():
    weight, described = model()
    held = optimizer(weight)
    (master,) = held.optimizer.param_groups[0]["params"]
    held.optimizer.state[master]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ShapeError, match=r"'optimizer.state.exp_avg.w'"):
        sharded_optimizer_state(held, described)


def test_a_chain_is_all_its_parts_but_those_without_parameters():
    weight, described = model()
    parts = [optimizer(weight, 0, 2), SimpleNamespace(is_stub_optimizer=True), optimizer(weight, 2, 12)]
    chain = SimpleNamespace(chained_optimizers=parts, state_dict=lambda: ["both"])
    state = sharded_optimizer_state(chain, described)
    assert [shard.flattened_range for shard in state["shards"]] == [slice(0, 2)] * 3 + [slice(2, 12)] * 3
    assert state["common"] == ["both"]


def group(of_experts, **more):
    return {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": of_experts, "is_decoupled_lr": False, **more}


def chained(*groups):
    """Return a chain of an optimizer for each list of groups, and what was loaded into it."""
    found = []
    parts = [SimpleNamespace(optimizer=SimpleNamespace(param_groups=each, state={})) for each in groups]
    return SimpleNamespace(chained_optimizers=parts, load_state_dict=found.append), found


def state_of(*groups):
    return {"optimizer": {"param_groups": list(groups)}}


def test_a_chain_that_is_cut_in_another_way_loads():
    """Megatron has an optimizer for experts only where they are dealt to several ranks: a list of states, or one."""
    dealt = [state_of(group(False, step=3)), state_of(group(True, step=3, lr=0.5))]
    chain, found = chained([group(False)])
    load_optimizer_state(chain, {"common": dealt})
    assert found == [state_of(group(False, step=3))]
    chain, found = chained([group(False)], [group(True)])
    load_optimizer_state(chain, {"common": state_of(group(False, step=4))})
    assert found == [[state_of(group(False, step=4)), state_of(group(True, step=4))]]
    load_optimizer_state(chain, {"common": dealt})
    assert found[1] == dealt
    with pytest.raises(SpecError, match=r"no parameter group of the checkpoint.*'wd_mult': 0\.0"):
        load_optimizer_state(chained([group(False), group(False, wd_mult=0.0)])[0], {"common": dealt})


def test_the_common_half_may_be_of_another_shape_than_the_one_that_asks(tmp_path):
    save({"optimizer": {"common": state_of(group(False))}}, tmp_path / "one")
    assert load({"optimizer": {"common": [1, 2]}}, tmp_path / "one") == {
        "optimizer": {"common": state_of(group(False))}
    }
    save({"optimizer": {"common": [1, 2]}}, tmp_path / "list")
    assert load({"optimizer": {"common": {"a": 1}}}, tmp_path / "list") == {"optimizer": {"common": [1, 2]}}


def test_the_moments_of_a_plain_adam_load(tmp_path):
    weight, described = model()
    adam = torch.optim.Adam([weight])
    weight.grad = torch.arange(12.0).reshape(4, 3) + 1
    adam.step()
    plain = adam.state_dict()
    optim_state_to_sharding_state(plain, get_param_id_to_sharded_param_map(described, [weight]), ("step",))
    save({"optimizer": plain}, tmp_path / "plain")
    state = sharded_optimizer_state(optimizer(weight), described)
    moments = [shard for shard in state["shards"] if "exp_avg" in shard.key]
    load({"moments": moments}, tmp_path / "plain", validate_access_integrity=False)
    for shard, name in zip(moments, ("exp_avg", "exp_avg_sq"), strict=True):
        assert torch.equal(shard.data, adam.state[weight][name].reshape(-1)[2:9])


def test_a_state_of_another_shape_than_its_parameter_is_refused():
    w = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 1, 3))
    with pytest.raises(AssertionError, match=r"optimizer\.state\.exp_avg\.w") as caught:
        make_sharded_optimizer_tensor(w, torch.zeros(3), "optimizer.state.exp_avg")
    assert isinstance(caught.value, CheckpointingException)
