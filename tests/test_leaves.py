"""Every kind of leaf that a training state holds comes back as it was."""

import random
from collections import Counter, OrderedDict, defaultdict

import ml_dtypes
import numpy as np
import pytest
import torch

import functional_ckpt
from functional_ckpt import (
    ArraySpec,
    LoadPolicy,
    PerRank,
    SavePolicy,
    ShardSpec,
    load,
    open_checkpoint,
    read_manifest,
    save,
)
from functional_ckpt.spec.array import BITS, DTYPES
from functional_ckpt.spec.box import Box
from functional_ckpt.torch.host_view import TORCH_DTYPES

URL = "memory://leaves"
counter = iter(range(10**6))


@pytest.fixture
def url():
    """A fresh place in memory."""
    return f"memory://leaves-{next(counter)}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extended", ["native", "bits"])
def test_numpy_arrays_of_every_dtype(dtype, extended, url, same, specials):
    state = {"w": specials(dtype), "scalar": specials(dtype, ()), "empty": specials(dtype, (2, 0, 3))}
    policy = SavePolicy(layout=functional_ckpt.LayoutPolicy(extended_dtypes=extended))
    save(state, url, policy=policy)
    same(load({k: np.zeros_like(v) for k, v in state.items()}, url), state)
    same(open_checkpoint(url).state(), state)
    assert functional_ckpt.verify(url).ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype(dtype, url, same, specials):
    words = specials(dtype).view(BITS.get(dtype, dtype))
    tensor = torch.from_numpy(words.copy()).view(TORCH_DTYPES[dtype])
    state = {"w": tensor, "t": tensor.t(), "scalar": tensor[1, 2].clone(), "empty": tensor[:, :0]}
    save(state, url)
    same(load({k: torch.empty_like(v, memory_format=torch.contiguous_format) for k, v in state.items()}, url), state)
    meta = {k: torch.empty(v.shape, dtype=v.dtype, device="meta") for k, v in state.items()}
    same(load(meta, url), state)
    same(open_checkpoint(url).state("torch"), state)


def test_parameters_keep_class_and_grad_flag(url):
    linear = torch.nn.Linear(3, 2)
    linear.bias.requires_grad_(False)
    state = dict(linear.named_parameters())
    save(state, url)
    with torch.device("meta"):
        fresh = torch.nn.Linear(3, 2)
        fresh.bias.requires_grad_(False)
    loaded = load(dict(fresh.named_parameters()), url)
    assert all(isinstance(p, torch.nn.Parameter) for p in loaded.values())
    assert [p.requires_grad for p in loaded.values()] == [True, False]
    assert torch.equal(loaded["weight"], linear.weight)


def test_tied_weights_are_stored_once_and_restored_tied(url):
    weight = torch.randn(5, 4)
    state = {"emb": weight, "head": weight, "other": weight.clone()}
    manifest = save(state, url)
    assert [e.spec.key for e in manifest.arrays] == ["emb", "other"]
    assert [(a.key, a.target) for a in manifest.aliases] == [("head", "emb")]
    meta = load({k: torch.empty(5, 4, device="meta") for k in state}, url)
    assert meta["emb"] is meta["head"]
    assert meta["other"] is not meta["emb"]
    specs = load({k: ArraySpec("any", (5, 4), "float32") for k in state}, url)
    assert specs["emb"] is specs["head"]
    tied = torch.zeros(5, 4)
    in_place = load({"emb": tied, "head": tied, "other": torch.zeros(5, 4)}, url)
    assert in_place["emb"] is in_place["head"] is tied
    assert torch.equal(tied, weight)
    untied = load({k: torch.zeros(5, 4) for k in state}, url)
    assert untied["emb"] is not untied["head"]
    assert torch.equal(untied["head"], weight)
    opened = open_checkpoint(url).state("torch")
    assert opened["emb"] is opened["head"]


def test_same_memory_seen_differently_is_not_tied(url, same):
    weight = torch.randn(4, 4)
    state = {"w": weight, "t": weight.t(), "half": weight[:2], "bits": weight.view(torch.int32)}
    assert save(state, url).aliases == ()
    same(load({k: torch.empty(v.shape, dtype=v.dtype) for k, v in state.items()}, url), state)


def test_empty_arrays_are_not_tied_by_their_address(url):
    state = {name: np.empty((0, n)) for n, name in enumerate("abcd")}
    assert save(state, url).aliases == ()
    assert [a.shape for a in load({k: np.empty_like(v) for k, v in state.items()}, url).values()] == [
        (0, n) for n in range(4)
    ]


def test_tied_meta_leaves_that_want_other_dtypes_are_not_tied(url):
    weight = torch.randn(3)
    save({"a": weight, "b": weight}, url)
    like = {"a": torch.empty(3, device="meta"), "b": torch.empty(3, dtype=torch.float64, device="meta")}
    loaded = load(like, url, policy=LoadPolicy(cast="same_kind"))
    assert [t.dtype for t in loaded.values()] == [torch.float32, torch.float64]


def test_untied_state_into_tied_memory_is_refused(url, problems_of):
    save({"a": torch.zeros(3), "b": torch.ones(3)}, url)
    shared = torch.full((3,), 7.0)
    (problem,) = problems_of(load, {"a": shared, "b": shared}, url)
    assert (problem.key, problem.expected, problem.found) == ("b", "a", "b")
    assert shared.eq(7).all()


PLAIN = [
    None, True, False, 0, -1, 2**100, -(10**4000), 0.1, -0.0, 1e-320, float("inf"), float("-inf"), float("nan"),
    "", "text",
    "~tuple", "\x00\n\u2028\U0001f600", "\ud800", b"", bytes(range(256)), 1 + 2j, complex("nan-infj"), complex(0.0,
    -0.0),
    (), (1, (2.5, None, [b"x", {"a": (1,)}])), ({"~tuple": [1]},), ({1: 2, "1": 3, None: 4, (1, 2): 5},), {1, 2, "a"},
    frozenset({1.5}), range(3, 90, -7), Counter({3: 1, 5: 2}), OrderedDict(), {}, [], ([],), (OrderedDict(b=1, a=2),),
    torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:1"), (torch.Size([]), torch.device("cpu"),
    torch.float8_e4m3fn),
    random.Random(3).getstate(),
]  # fmt: skip


# By type only: the text of a set varies from process to process, and xdist wants the same names in all.
@pytest.mark.parametrize("value", PLAIN, ids=lambda v: type(v).__name__)
def test_plain_values(value, url, same):
    save({"v": value}, url)
    same(load({"v": 0}, url)["v"], value)
    same(open_checkpoint(url).state()["v"], value)


def test_nan_payloads_of_plain_floats(url):
    import struct

    odd = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    save({"v": odd}, url)
    assert struct.pack(">d", load({"v": 0}, url)["v"]).hex() == "fff8000000000123"


TREES = {
    "nested empties": {"a": {}, "b": [], "c": [{}, [[]]], "d": {"e": OrderedDict()}},
    "int keys": {0: {"step": np.float32(1)}, 1: {"step": np.float32(2)}, -7: "x", 9: "y", None: "z", 2.5: "f"},
    "ordered": OrderedDict([("z", np.ones(1)), ("a", OrderedDict([("y", 1), ("b", 2)]))]),
    "unicode": {"größe": np.arange(2), "日本": {"\U0001f600": np.arange(3)}, "e\u0301": np.arange(4),
                "\xe9": np.arange(5)},
    "case": {"W": np.arange(1), "w": np.arange(2), "ab": np.arange(3), "Ab": np.arange(4), "AB": np.arange(5)},
    "separators": {"a/b": np.arange(1), "a\\b": np.arange(2), "a~1b": np.arange(3), ".": np.arange(4),
                   "..": np.arange(5),
                   "...": np.arange(6), "": np.arange(7), " ": np.arange(8), "a:b*c?": np.arange(9),
                   "\x00\x1f\x7f": np.arange(10)},
    "reserved": {"zarr.json": np.arange(1), "manifest.json": np.arange(2), "provenance.json": np.arange(3),
                 "__x": np.arange(4),
                 "c": {"0": np.arange(5)}, ".x": np.arange(6), "~d.x": np.arange(7), "con": np.arange(8),
                 "_": np.arange(9)},
    "huge keys": {"k" * 300: np.arange(2), "k" * 300 + "2": np.arange(3), "ü" * 150: np.arange(4), "K" * 5000: 1},
    "dotted": {"a.b": np.arange(2), "a": {"c": np.arange(3)}, "x.y": 1},
    "lists": [np.arange(2), [np.arange(3), (1, 2)], {"a": [None]}],
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_trees_and_keys(name, tmp_path, same, fast):
    tree = TREES[name]
    save(tree, tmp_path / "a", policy=fast)
    same(load(tree, tmp_path / "a"), tree)
    loaded = open_checkpoint(tmp_path / "a").state()
    assert functional_ckpt.verify(tmp_path / "a").ok
    flat = dict(functional_ckpt.spec.tree.flatten(tree))
    found = dict(functional_ckpt.spec.tree.flatten(loaded))
    assert found.keys() == flat.keys()
    for path, leaf in flat.items():
        np.testing.assert_array_equal(found[path], leaf)


@pytest.mark.parametrize("leaf", [np.arange(3), 7, {}, [], (1, 2)], ids=repr)
def test_state_that_is_one_leaf(leaf, url, same):
    save(leaf, url)
    same(load(leaf.copy() * 0 if isinstance(leaf, np.ndarray) else leaf, url), leaf)
    same(open_checkpoint(url).state(), leaf)


def test_a_per_rank_state_as_the_whole(url, same):
    state = PerRank({"rng": np.arange(3), "n": 4})
    save(state, url)
    same(load(PerRank({"rng": np.zeros(3, int), "n": 0}), url), state)


def test_defaultdict_nests(url, same):
    state = defaultdict(dict)
    state[0]["x"] = np.arange(3)
    save({"state": state}, url)
    same(load({"state": {0: {"x": np.zeros(3, int)}}}, url)["state"], {0: {"x": np.arange(3)}})


def test_numpy_scalars_come_back_as_scalars(url, same):
    state = {"f": np.float32(2.5), "b": np.bool_(True), "i": np.uint64(2**64 - 1), "c": np.complex64(1j)}
    save(state, url)
    same(load({k: type(v)(0) for k, v in state.items()}, url), state)


def test_specs_allocate(url):
    save({"w": np.arange(12.0).reshape(4, 3)}, url)
    whole = load({"w": ArraySpec("x", (4, 3), "float64")}, url)["w"]
    np.testing.assert_array_equal(whole, np.arange(12.0).reshape(4, 3))
    spec = ArraySpec("x", (4, 3), "float64")
    part = load({"w": ShardSpec(spec, Box((1, 1), (3, 3)))}, url)["w"]
    np.testing.assert_array_equal(part, whole[1:3, 1:3])
    flat = load({"w": ShardSpec(spec, Box((1, 0), (4, 3)), flat=(2, 8))}, url)["w"]
    np.testing.assert_array_equal(flat, whole[1:4].ravel()[2:8])


def test_manifest_paths_of_plain_names_are_left_out(url):
    save({"a": {"b": np.ones(1)}}, url)
    assert b"path" not in read_manifest(url).to_json()


def test_views_of_another_data_type_are_not_tied(tmp_path, fast, same):
    bits = np.arange(6, dtype="u1")
    state = {name: bits.view(getattr(ml_dtypes, name)) for name in ("float8_e4m3fnuz", "float8_e5m2fnuz")}
    assert save(state, tmp_path / "a", policy=fast).aliases == ()
    same(load({key: np.zeros_like(x) for key, x in state.items()}, tmp_path / "a"), state)


def test_one_memory_is_not_filled_from_two_kinds_of_arrays(tmp_path, fast):
    """The bytes are the same, what they mean is not."""
    save({"a": np.ones((2, 8), "f4"), "b": np.ones((2, 8), "f4").view("i4")}, tmp_path / "a", policy=fast)
    target = np.zeros((2, 8), "f4")
    with pytest.raises(functional_ckpt.errors.SpecError, match="share one memory"):
        load({"a": target, "b": target}, tmp_path / "a")


def test_a_plain_number_takes_an_array_of_rank_0(tmp_path, fast):
    save({"lr": np.float64(0.25), "n": np.int32(7)}, tmp_path / "a", policy=fast)
    assert repr(load({"lr": 0.0, "n": 0}, tmp_path / "a")) == "{'lr': 0.25, 'n': 7}"


def test_an_empty_defaultdict_is_a_dict(tmp_path, fast):
    save({"state": defaultdict(dict)}, tmp_path / "a", policy=fast)
    assert load({"state": {}}, tmp_path / "a") == {"state": {}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_array_and_a_tensor_of_one_memory_are_tied(dtype, url, same, specials):
    """One is stored; both are filled, whether they still share their memory or not. Other bits of it are no tie."""
    words = specials(dtype).view(BITS.get(dtype, dtype))
    array, tensor = words.view(specials(dtype).dtype), torch.from_numpy(words).view(TORCH_DTYPES[dtype])
    state = {"a": array, "b": tensor, "c": tensor.clone(), "d": tensor[:1]}
    manifest = save(state, url)
    assert [(alias.key, alias.target) for alias in manifest.aliases] == [("b", "a")]
    apart = {"a": np.zeros_like(array), **{key: torch.zeros_like(state[key]) for key in "bcd"}}
    same(load(apart, url), state)
    kept = {key: value.copy() if key == "a" else value.clone() for key, value in state.items()}
    words[...] = 0
    same(load({"a": array, "b": tensor, "c": tensor.clone(), "d": tensor[:1].clone()}, url), kept)
