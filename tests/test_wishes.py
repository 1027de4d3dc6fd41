"""What a caller asks for is done or refused, by words that say what to write instead."""

import itertools
import os
import re
from pathlib import Path

import attrs
import numpy as np
import pytest

from functional_ckpt import (
    LayoutPolicy,
    LoadPolicy,
    SavePolicy,
    async_save,
    load,
    open_checkpoint,
    save,
    verify,
)
from functional_ckpt.errors import KeyMismatchError, NotImplementedYet, PolicyError
from functional_ckpt.store.opening import local_path
from functional_ckpt.store.sweep import sweep
from functional_ckpt.testing.simulate import run_ranks

STATE = {"w": np.ones(2), "step": 3}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, in which a refused call leaves nothing."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


PATHS = {
    # no path: words of the message
    "None": (None, "expected a path or URL, found None"),
    "an int": (7, "found 7"),
    "bytes": (b"a", "found b'a'"),
    "a bytes path": (type("P", (), {"__fspath__": lambda self: b"a"})(), "found b'a'"),
    "a list": (["a"], "found ['a']"),
    "no text": ("", "found ''"),
    "a URL in a Path": (Path("s3://b/x"), "Pass text: 's3://b/x'"),
    "memory in a Path": (Path("memory://b/x"), "Pass text: 'memory://b/x'"),
    "a file URL in a Path": (Path("file:///b/x"), "Pass text: 'file:///b/x'"),
    "one slash": ("s3:/b/x", "Pass text: 's3://b/x'"),
    "a host": ("file://b/x", "Pass 'file:///b/x'"),
    "a fragment": ("file:///b/x#1", "%23"),
    "a query": ("file:///b/x?1", "%3F"),
}


@pytest.mark.parametrize("name", PATHS)
def test_what_is_no_path(name, here, problems_of):
    path, words = PATHS[name]
    for call in (lambda: save(STATE, path), lambda: async_save(STATE, path), lambda: load(STATE, path),
                 lambda: open_checkpoint(path), lambda: verify(path), lambda: sweep(path),
                 lambda: local_path(path)):  # fmt: skip
        (problem,) = problems_of(call)
        assert isinstance(problem, PolicyError)
        assert words in str(problem)


def test_a_scheme_without_a_store(here, problems_of):
    for path in ("hdfs://b/x", "HDFS://b/x"):
        (problem,) = problems_of(save, STATE, path)
        assert isinstance(problem, NotImplementedYet)


@pytest.mark.parametrize("call", [save, async_save, load])
def test_arguments_that_are_swapped(call, here, problems_of):
    order = f"{call.__name__}({'like' if call is load else 'state'}, path)"
    for path in ("step-1", Path("step-1")):
        (problem,) = problems_of(call, path, STATE)
        assert isinstance(problem, PolicyError)
        assert order in str(problem)


class Named:
    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return os.fspath(self.path)


def test_paths_of_every_kind(tmp_path, fast, same, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a path that is misread is seen among the names
    kinds = [
        tmp_path / "a", str(tmp_path / "b"), Named(tmp_path / "c"), f"file://{tmp_path}/d", f"FILE://{tmp_path}/e",
        f"file://localhost{tmp_path}/f", tmp_path / "s3:" / "g",
    ]  # fmt: skip
    for path in kinds:
        save(STATE, path, policy=fast)
        same(open_checkpoint(path).state(), STATE)
        assert verify(path).ok
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c", "d", "e", "f", "s3:"]


ARGUMENTS = {
    "policy": (None, "a SavePolicy", save), "policy of a load": (None, "a LoadPolicy", load),
    "overwrite": ("no", "True or False", save), "progress": (3, "a function", save),
    "progress of a load": ("bar", "a function", load), "attributes": (["a"], "a dict", save),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_another_type(name, here, problems_of):
    value, expected, call = ARGUMENTS[name]
    field = name.partition(" ")[0]
    (problem,) = problems_of(call, STATE, "a", **{field: value})
    assert isinstance(problem, PolicyError)
    assert f"does not accept this {field}: expected {expected}" in str(problem)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_is_wrong_on_one_rank_fails_on_all(name, here, problems_of):
    value, _, call = ARGUMENTS[name]
    field = name.partition(" ")[0]

    def calling(gather):
        options = {field: value} if gather.rank == 1 else {}
        return problems_of(call, STATE, "a", process_group=gather, **options)

    for problems in run_ranks(2, calling):
        assert [(type(p), p.rank) for p in problems if "does not accept" in str(p)] == [(PolicyError, 1)]


# Prefixes: one that no key of any rank has is refused


@pytest.fixture
def saved(tmp_path, fast):
    """The path of a saved model and its step."""
    save({"model": {"a": np.ones(2), "b": np.ones(2)}, "step": 3}, tmp_path / "a", policy=fast)
    return tmp_path / "a"


def like(model="model"):
    return {model: {"a": np.zeros(2), "b": np.zeros(2)}, "step": 0}


NO_KEY = "has a prefix that matches no key: key"
PREFIXES = {
    # policy: the problem's words, None for none
    "misspelt": (LoadPolicy(keys="modle"), f"LoadPolicy.keys {NO_KEY} 'modle'. Did you mean 'model'?"),
    "one of two": (LoadPolicy(keys=["step", "model.c"]), f"{NO_KEY} 'model.c'. Did you mean 'model."),
    "a pattern": (LoadPolicy(keys="model.a*"), f"{NO_KEY} 'model.a*'. A prefix is not a pattern: pass 'model' for all"),
    "a pattern of all": (LoadPolicy(keys="*"), "A prefix is not a pattern: pass '' for all keys"),
    "the end of a key": (LoadPolicy(keys="b"), "Did you mean 'model.b'?"),
    "none": (LoadPolicy(keys=lambda key: key == "c"), "LoadPolicy.keys selects nothing. `like` has 'model.a', "),
    "none at all": (LoadPolicy(keys=()), "LoadPolicy.keys selects nothing"),
    "a renaming": (LoadPolicy(rename={"modle": "model"}), f"LoadPolicy.rename {NO_KEY} 'modle'. Did you mean 'model'?"),
    "found": (LoadPolicy(keys=["model.", "step"], rename={"model.a": "model.a", "": ""}), None),
    "a function that selects": (LoadPolicy(keys=lambda key: key == "step"), None),
}  # fmt: skip


@pytest.mark.parametrize("name", PREFIXES)
@pytest.mark.parametrize("strict", ["raise", "ignore"])
def test_prefixes_of_a_load(name, strict, saved, problems_of):
    policy, words = PREFIXES[name]
    policy = attrs.evolve(policy, strict=strict)
    target = like()
    if words is None:
        assert load(target, saved, policy=policy)["step"] == 3
        return
    (problem,) = problems_of(load, target, saved, policy=policy)
    assert isinstance(problem, PolicyError)
    assert words in str(problem)
    assert not target["model"]["a"].any()


def test_prefixes_in_the_names_of_the_other_side(saved, problems_of):
    for policy in (LoadPolicy(rename={"net": "model"}, keys="model"), LoadPolicy(rename={"model": "net"})):
        problems = problems_of(load, like("net"), saved, policy=policy)
        assert "'model'. Stored keys have it" in str(problems[0])


def test_a_prefix_of_a_load_may_hold_keys_of_another_rank_only(saved, problems_of):
    wanted = [{"model": {"a": np.zeros(2)}}, {"step": 0}, {}]

    def loading(gather, keys):
        policy = LoadPolicy(keys=keys, rename={"step": "step"}, strict="ignore")
        return load(wanted[gather.rank], saved, policy=policy, process_group=gather)

    for keys in (["step", "model.a"], lambda key: key == "step"):
        assert [found.get("step") for found in run_ranks(3, lambda gather: loading(gather, keys))] == [None, 3, None]  # noqa: B023
    for keys in (["step", "modle"], lambda key: key == "modle"):
        for problems in run_ranks(3, lambda gather: problems_of(loading, gather, keys)):  # noqa: B023
            assert [type(p) for p in problems] == [PolicyError]


def test_a_prefix_of_codecs_holds_keys_of_any_rank(tmp_path, problems_of):
    states = [{"model": np.ones(2)}, {"optim": {"m": np.ones(2)}, "step": 1}]

    def saving(gather, codecs):
        policy = SavePolicy(layout=LayoutPolicy(codecs=codecs), durability="none")
        return save(states[gather.rank], tmp_path / "a", policy=policy, process_group=gather, overwrite=True)

    codecs = {"optim": "zstd", "step": "zstd", "": "crc32c"}
    manifest = run_ranks(2, lambda gather: saving(gather, codecs))[0]
    assert manifest.by_key["optim.m"].layout.codecs == ("zstd",)
    for problems in run_ranks(2, lambda gather: problems_of(saving, gather, {"optm": "zstd"})):
        (problem,) = problems
        assert "LayoutPolicy.codecs has a prefix that matches no key: key 'optm'. Did you mean 'optim'?" in str(problem)


# The first hour: what a newcomer tries, and what it says


class Model:
    def state_dict(self):
        return {}


LEAVES = {
    "a module": (Model(), "Save its state_dict()"),
    "a tuple of arrays": ((np.ones(2), np.array([None])), "Make the tuple a list"),
    "a generator": ((array for array in [np.ones(2)]), "Make it a list"),
    "an iterator without an end": (itertools.count(), "Save what it holds as plain values"),
    "an array of text": (np.array(["a"]), "found <U1. Save its tolist(), or view it as a data type of the same width"),
    "a mapping": (type("Settings", (dict,), {})(a=1), "Make it a dict"),
    "a function": (len, "SavePolicy(object_codec='torch')"),
}


@pytest.mark.parametrize("name", LEAVES)
def test_leaves_that_cannot_be_saved(name, here, problems_of):
    leaf, remedy = LEAVES[name]
    (problem,) = problems_of(save, {"a": leaf}, "a")
    assert remedy in str(problem)


def test_a_path_that_holds_nothing_names_the_checkpoints_beside_it(tmp_path, fast, problems_of):
    for name in ("step-00000003", "step-00000012", "step-00000020", "step-00000030", "old"):
        save({"a": 1}, tmp_path / "run" / name, policy=fast)
    (tmp_path / "run" / "step-00000011").mkdir()
    (problem,) = problems_of(load, {"a": 0}, tmp_path / "run" / "step-00000002")
    near = "step-00000030, step-00000020, step-00000012"
    assert str(problem).endswith(f"found nothing. Check the path: beside it are checkpoints, such as {near}")
    (problem,) = problems_of(load, {"a": 0}, tmp_path / "rum" / "old")
    assert str(problem).endswith("found nothing. Check the path")


def test_two_keys_that_look_alike_are_told_as_they_are_written(here, problems_of):
    for state, words in (
        ({"a": {1: 3, "1": 4}}, "key 'a.1', expected state['a'][1], found state['a']['1']. Rename one"),
        ({"a": {"b": 3}, "a.b": np.ones(1)}, "key 'a.b', expected state['a']['b'], found state['a.b']. Rename one"),
    ):
        (problem,) = problems_of(save, state, "a")
        assert words in str(problem)


def test_an_object_that_cannot_be_pickled_is_told_the_way_out(here, problems_of):
    pytest.importorskip("torch")
    (problem,) = problems_of(save, {"a": lambda: 0}, "a", policy=SavePolicy(object_codec="torch"))
    assert str(problem).endswith("Save what it holds as plain values, or leave it out of the state")


def test_arrays_that_a_checkpoint_does_not_have(saved):
    opened = open_checkpoint(saved)
    asked = {"model.c": "Did you mean 'model.", "model": "Below it are 'model.a', 'model.b'", "step": "look at state()"}
    for key, words in asked.items():
        with pytest.raises(KeyMismatchError, match=re.escape(words)):
            opened[key]


def test_an_index_out_of_range(saved):
    array = open_checkpoint(saved)["model.a"]
    with pytest.raises(IndexError, match=r"index 2 is out of range for axis 0 of 'model.a' with shape \(2,\)"):
        array[2]
    with pytest.raises(IndexError, match="index -3"):
        array[-3]


def test_a_device_that_is_not_there(saved, problems_of):
    torch = pytest.importorskip("torch")
    like = {"model": {name: torch.empty(2, dtype=torch.float64, device="meta") for name in "ab"}}
    for device in ("cudaa", "meta:x", f"cuda:{torch.cuda.device_count()}"):
        problems = problems_of(load, like, saved, policy=LoadPolicy(keys="model", device=device))
        assert all(isinstance(problem, PolicyError) for problem in problems)
        assert f"LoadPolicy does not accept this device: expected a device of this machine, found {device!r}" in str(
            problems[0]
        )


# The same through DCP and the Megatron-shaped API


@pytest.mark.parametrize("path", [None, 7, b"a", "", Path("s3://b/x")])
def test_what_is_no_path_for_a_distributed_checkpoint(path, here, problems_of):
    torch = pytest.importorskip("torch")
    from functional_ckpt.torch.megatron.mapping import ShardedTensor
    from functional_ckpt.torch.megatron.serialization import save

    (problem,) = problems_of(save, {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, path)
    assert isinstance(problem, PolicyError)
    assert "path" in str(problem)


def test_a_distributed_checkpoint_under_a_file_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch = pytest.importorskip("torch")
    from functional_ckpt.torch.megatron import mapping, serialization

    state = {"w": mapping.ShardedTensor.from_rank_offsets("w", torch.ones(2)), "n": 3}
    (tmp_path / "a b").mkdir()
    serialization.save(state, f"file://{tmp_path}/a%20b")
    for path in (tmp_path / "a b", f"file://{tmp_path}/a%20b", Named(tmp_path / "a b")):
        assert serialization.load({"w": state["w"]}, path)["n"] == 3
    assert [each.name for each in tmp_path.iterdir()] == ["a b"]


def test_policies_of_the_other_kind_for_dcp_and_strategies():
    pytest.importorskip("torch")
    from functional_ckpt.torch.dcp.planner import StrictLoadPlanner
    from functional_ckpt.torch.dcp.storage_writer import ZarrStorageReader, ZarrStorageWriter
    from functional_ckpt.torch.megatron.strategies import zarr

    saving = [lambda **kw: ZarrStorageWriter("a", **kw), zarr.ZarrSaveShardedStrategy, zarr.ZarrSaveCommonStrategy]
    loading = [lambda **kw: ZarrStorageReader("a", **kw), StrictLoadPlanner, zarr.ZarrLoadShardedStrategy]
    for makers, wrong, kind in ((saving, LoadPolicy(), "SavePolicy"), (loading, SavePolicy(), "LoadPolicy")):
        for make in makers:
            for policy in (wrong, None):
                with pytest.raises(PolicyError, match=f"does not accept this policy: expected a {kind}, found"):
                    make(policy=policy)
    with pytest.raises(PolicyError, match="does not accept this overwrite"):
        ZarrStorageWriter("a", overwrite="no")


@pytest.mark.parametrize("field", ["keys", "rename", "per_rank", "allow_shape_mismatch", "device", "read_once"])
def test_fields_that_dcp_does_not_heed_are_refused(field):
    pytest.importorskip("torch")
    from functional_ckpt.torch.dcp.planner import StrictLoadPlanner
    from functional_ckpt.torch.dcp.storage_writer import ZarrStorageReader

    values = {"keys": "model", "rename": {"a": "b"}, "per_rank": "first", "device": "cuda"}
    policy = LoadPolicy(**{field: values.get(field, True)})
    for make in (lambda **kw: ZarrStorageReader("a", **kw), StrictLoadPlanner):
        with pytest.raises(PolicyError, match=f"does not accept this {field}: expected the default"):
            make(policy=policy)
