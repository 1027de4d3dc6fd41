"""Keys that only one side of a load has: few words, what would help, and leaves of another kind than what is stored."""

import warnings

import numpy as np
import pytest

from functional_ckpt import LoadPolicy, PerRank, load, open_checkpoint, save
from functional_ckpt.errors import CheckpointWarning, KeyMismatchError


def many(prefix="", count=2000):
    return {f"{prefix}layers.{n}.weight": np.zeros(1) for n in range(count)}


@pytest.fixture
def large(tmp_path, fast):
    """The path of a checkpoint of 2,000 arrays."""
    save({"model": many(), "step": 3}, tmp_path / "large", policy=fast)
    return tmp_path / "large"


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_many_missing_keys_are_one_problem_that_names_the_renaming(prefix, large, problems_of):
    like = {"model": many(prefix), "step": 0}
    missing, unexpected = problems_of(load, like, large)
    policy = f"LoadPolicy(rename={{{f'model.{prefix}'[:-1]!r}: 'model'}})"
    assert f"lacks 2000 keys of `like`: expected 'model.{prefix}layers.0.weight', " in str(missing)
    assert str(missing).endswith(f"and 1997 more. Pass {policy}, which finds every key")
    assert "has 2000 keys that `like` does not" in str(unexpected)
    assert len(str(missing)) + len(str(unexpected)) < 1000
    policy = eval(policy, {"LoadPolicy": LoadPolicy})
    assert load(like, large, policy=policy)["step"] == 3


def test_strict_false_loads_what_fits_and_warns_once_a_side(large):
    like = {"model": {**many(count=1000), **{f"new.{n}": np.full(1, 7.0) for n in range(50)}}, "step": 0}
    with pytest.warns(CheckpointWarning) as caught:
        loaded = load(like, large, policy=LoadPolicy(strict=False))
    assert (loaded["step"], loaded["model"]["new.0"]) == (3, 7.0)
    missing, unexpected = (str(warning.message) for warning in caught)
    assert "lacks 50 keys of `like`: expected 'model.new.0'" in missing
    assert "has 1000 keys that `like` does not" in unexpected
    assert {warning.filename for warning in caught} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(like, large, policy=LoadPolicy(strict="ignore"))


def test_a_new_key_is_told_how_to_stay_and_takes_no_key_of_another(tmp_path, fast, problems_of):
    save({"model": {"2.bias": np.ones(4), "wieght": np.ones(4)}}, tmp_path / "a", policy=fast)
    like = {"model": {"2.bias": np.ones(4), "lora.a": np.ones(4), "weight": np.ones(4)}}
    new, misspelt, _ = problems_of(load, like, tmp_path / "a")
    keep = "Pass LoadPolicy(strict=Strict(missing='ignore')) to keep what `like` holds"
    assert str(new) == f"the checkpoint has no such key: key 'model.lora.a'. {keep}"
    assert str(misspelt).endswith(f"key 'model.weight'. Did you mean 'model.wieght'? {keep}")


def optimizer(*names):
    """Return what optimizers call their state, of parameters with these names."""
    return {
        "state": {name: {"step": np.zeros(()), "exp_avg": np.zeros(2)} for name in names},
        "param_groups": [{"lr": 1}],
    }


EMPTY = "`like` is empty where the checkpoint is not: key 'optim.state'"
OPTIMIZERS = {
    # saved, wanted: words that help
    "fresh, numbered": (optimizer(0, 1), optimizer(),
        EMPTY, "open_checkpoint(path).state('torch')['optim']"),
    "fresh, named": (optimizer("0.weight", "0.bias"), optimizer(),
        EMPTY, "get_state_dict(model, optimizer)"),
    "saved fresh": (optimizer(), optimizer(0),
        "the checkpoint is empty where `like` is not: key 'optim.state'", "Strict(missing='ignore')"),
    "numbers for names": (optimizer(0, 1), optimizer("0.weight", "0.bias"),
        "The checkpoint numbers an optimizer's parameters, `like` names them", "['optim'] to optimizer."),
    "names for numbers": (optimizer("0.weight", "0.bias"), optimizer(0, 1),
        "The checkpoint names an optimizer's parameters, `like` numbers them", "get_state_dict(model, optimizer)"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_optimizers_that_do_not_fit(name, tmp_path, fast, problems_of):
    saved, wanted, what, remedy = OPTIMIZERS[name]
    save({"optim": saved}, tmp_path / "a", policy=fast)
    first = problems_of(load, {"optim": wanted}, tmp_path / "a")[0]
    assert isinstance(first, KeyMismatchError)
    assert what in str(first)
    assert remedy in str(first)


def test_the_remedies_for_optimizers_work(tmp_path, fast):
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def built():
        model = torch.nn.Linear(2, 3)
        return model, torch.optim.AdamW(model.parameters())

    model, stepped = built()
    model(torch.ones(2)).sum().backward()
    stepped.step()
    expected = stepped.state_dict()["state"][0]["exp_avg"]
    save({"optim": stepped.state_dict()}, tmp_path / "numbers", policy=fast)
    fresh = built()[1]
    fresh.load_state_dict(open_checkpoint(tmp_path / "numbers").state("torch")["optim"])
    assert torch.equal(fresh.state_dict()["state"][0]["exp_avg"], expected)
    save({"optim": get_state_dict(model, stepped)[1]}, tmp_path / "names", policy=fast)
    state = get_state_dict(*built())[1]
    load({"optim": state}, tmp_path / "names")
    assert torch.equal(state["state"]["weight"]["exp_avg"], expected)


# A leaf of `like` of another kind than what is stored


class Model:
    def state_dict(self):
        return {}


ONE, DIFFER = (
    "the checkpoint has several leaves, `like` one: key",
    "the checkpoint has values that differ by rank, `like` one value: key",
)
ALIKE, LACKED = (
    "the checkpoint has one value, `like` values that differ by rank: key",
    "the checkpoint has a PerRank value that `like` does not: key",
)
KINDS = {
    # stored, wanted: words
    "a model": ({"m": {"w": np.ones(2), "v": 1}}, {"m": Model()}, f"{ONE} 'm', found Model", "its state_dict()"),
    "nothing": ({"m": {"w": np.ones(2)}}, {"m": None}, f"{ONE} 'm', found NoneType", "a dict or list"),
    "all at once": ({"w": np.ones(2), "v": 1}, Model(), f"{ONE} '', found Model", "its state_dict()"),
    "an array": ({"m": [np.ones(2)]}, {"m": np.ones(2)}, f"{ONE} 'm', found ndarray", "a dict or list"),
    "no PerRank": ({"r": PerRank(np.ones(2))}, {"r": np.ones(2)}, f"{DIFFER} 'r'", "PerRank(...)"),
    "no PerRank of a tree": ({"r": PerRank({"a": 1})}, {"r": 1}, f"{DIFFER} 'r'", "PerRank(...)"),
    "a PerRank": ({"r": np.ones(2)}, {"r": PerRank(np.ones(2))}, f"{ALIKE} 'r'", "itself"),
    "a PerRank of a tree": ({"r": {"a": 1}}, {"r": PerRank({"a": 1})}, f"{ALIKE} 'r'", "itself"),
    "no PerRank at all": ({"r": PerRank([1, 2]), "n": 1}, {"n": 1}, f"{LACKED} 'r'", "PerRank(...)"),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_leaves_of_another_kind(name, tmp_path, fast, problems_of):
    stored, wanted, what, remedy = KINDS[name]
    save(stored, tmp_path / "a", policy=fast)
    (problem,) = problems_of(load, wanted, tmp_path / "a")
    assert what in str(problem)
    assert remedy in str(problem)


@pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled")
def test_the_strict_planner_of_dcp_reports_in_one_warning_a_side(tmp_path):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    from functional_ckpt.torch.dcp.planner import StrictLoadPlanner
    from functional_ckpt.torch.dcp.storage_writer import ZarrStorageReader

    save({f"s{n}": torch.ones(1) for n in range(50)}, tmp_path / "c")
    wanted = {"s0": torch.zeros(1)} | {f"w{n}": torch.zeros(1) for n in range(50)}
    planner = StrictLoadPlanner(LoadPolicy(strict=False))
    with pytest.warns(CheckpointWarning) as caught:
        dcp.load(wanted, storage_reader=ZarrStorageReader(tmp_path / "c"), planner=planner)
    ours = [warning for warning in caught if warning.category is CheckpointWarning]  # torch has its own
    missing, unexpected = (str(warning.message) for warning in ours)
    assert missing == "the checkpoint has no such key: 'w0', 'w1', 'w10' and 47 more"
    assert unexpected == "the checkpoint has a key that no rank wants: 's1', 's10', 's11' and 46 more"
    assert wanted["s0"].tolist() == [1.0]
