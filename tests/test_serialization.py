"""Whole state dicts with sharded leaves, saved and loaded by one rank."""

import itertools
import json
from argparse import Namespace
from collections import OrderedDict

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import functional_ckpt  # noqa: E402
from functional_ckpt.errors import (  # noqa: E402
    CastError,
    DuplicateKeyError,
    NotACheckpointError,
    ObjectCodecError,
    PolicyError,
    ShapeError,
    SpecError,
    UnsupportedLeafError,
)
from functional_ckpt.torch.megatron.core import check_is_distributed_checkpoint  # noqa: E402
from functional_ckpt.torch.megatron.mapping import (  # noqa: E402
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from functional_ckpt.torch.megatron.serialization import (  # noqa: E402
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    save,
)
from functional_ckpt.torch.megatron.strategies.base import (  # noqa: E402
    SaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
)
from functional_ckpt.torch.megatron.strategies.fully_parallel import FullyParallelLoadStrategyWrapper  # noqa: E402
from functional_ckpt.torch.megatron.strategies.zarr import (  # noqa: E402
    BACKEND,
    ZarrLoadCommonStrategy,
    ZarrLoadShardedStrategy,
    ZarrSaveCommonStrategy,
    ZarrSaveShardedStrategy,
)

W = torch.arange(24.0).reshape(6, 4)
tensor = ShardedTensor.from_rank_offsets


def halves(key, data, replica_id, flattened_range):
    return {"up": tensor(f"{key}.up", data[:3]), "down": tensor(f"{key}.down", data[3:])}


def merge_halves(parts):
    return torch.cat([parts["up"], parts["down"]])


def factory(data):
    return ShardedTensorFactory("w1", data, halves, merge_halves)


def state(fill=True):
    def made(data):
        return data.clone() if fill else torch.zeros_like(data)

    return {
        "model": {"w": tensor("m/w", made(W)), "b": tensor("b", made(W.bfloat16()[0])), "made": factory(made(W))},
        "layers": [tensor("layers", made(W[i]), (0, i, 6), prepend_axis_num=1) for i in range(6)],
        "rng": ShardedObject("a/rng", {"state": (1, [2, np.arange(3)])}, (1,), (0,)),
        "optimizer": {"groups": [{"lr": 0.1, "params": LocalNonpersistentObject([0, fill])}]},
        "step": 3,
        "args": Namespace(lr=0.5),
        "seen": np.arange(3),
        "mean": torch.ones(2),
        "mixed": [tensor("mixed.w", made(W[0])), 5, (1, 2)],
        "empty": {},
    }


def test_a_state_dict_comes_back(tmp_path, same):
    source = state()
    before = list(source)
    assert save(source, tmp_path / "a") is None
    assert list(source) == before
    assert isinstance(source["model"]["made"], ShardedTensorFactory)
    wanted = state(fill=False)
    found = load(wanted, tmp_path / "a")
    assert found["model"]["w"].data_ptr() == wanted["model"]["w"].data.data_ptr()
    same(
        found,
        {
            "model": {"w": W, "b": W.bfloat16()[0], "made": W},
            "layers": list(W),
            "rng": {"state": (1, [2, np.arange(3)])},
            "optimizer": {"groups": [{"lr": 0.1, "params": [0, False]}]},
            "step": 3,
            "args": Namespace(lr=0.5),
            "seen": np.arange(3),
            "mean": torch.ones(2),
            "mixed": [W[0], 5, (1, 2)],
            "empty": {},
        },
    )


def test_what_lies_where(tmp_path):
    save(state(), tmp_path)
    assert json.loads((tmp_path / "metadata.json").read_text())["sharded_backend"] == BACKEND
    assert check_is_distributed_checkpoint(tmp_path)
    stored = functional_ckpt.open_checkpoint(tmp_path)
    assert sorted(stored) == ["a/rng/shard_0_1", "b", "layers", "m/w", "mixed.w", "w1.down", "w1.up"]
    assert functional_ckpt.verify(tmp_path).ok
    assert functional_ckpt.open_checkpoint(tmp_path / ".common").state("torch")["step"] == 3


def test_all_entry_points(tmp_path):
    save(state(), str(tmp_path), content_metadata={"format": 2})
    assert load_common_state_dict(str(tmp_path))["mixed"] == {1: 5, 2: (1, 2)}
    assert load_content_metadata(tmp_path) == {"format": 2}
    assert load_content_metadata(preloaded_state_dict={}) is None
    tensors = load_tensors_metadata(tmp_path)
    assert (tensors["layers"].global_shape, tensors["b"].dtype, tensors["b"].data) == ((6, 4), torch.bfloat16, None)
    both = load_sharded_metadata(tmp_path)
    assert {*both} - {*tensors} == {"a/rng/shard_0_1"}
    assert {*load(both, tmp_path, validate_access_integrity=False)} > {*both}
    plain = load_plain_tensors(tmp_path)
    assert {*plain} == {*tensors}
    assert torch.equal(plain["layers"], W)
    with pytest.raises(ValueError, match="neither a checkpoint nor a loaded"):
        load_content_metadata()


def test_content_metadata_is_not_put_into_the_callers_dict(tmp_path):
    source = {"step": 1}
    save(source, tmp_path, content_metadata={"a": 1})
    assert source == {"step": 1}


def cuts(*at):
    """Flat shards of W between these elements."""
    return [
        ShardedTensor.from_rank_offsets_flat("w", W.reshape(-1)[a:b].clone(), (6, 4), flattened_range=slice(a, b))
        for a, b in itertools.pairwise(at)
    ]


def columns():
    return [tensor("w", part.clone(), (1, i, 2)) for i, part in enumerate(W.chunk(2, 1))]


@pytest.mark.parametrize("source", [cuts(0, 24), cuts(0, 0, 5, 6, 17, 24), columns()], ids=["whole", "odd", "columns"])
@pytest.mark.parametrize("target", [cuts(0, 24), cuts(0, 7, 7, 9, 24), columns()], ids=["whole", "odd", "columns"])
def test_flat_shards_reshard(tmp_path, source, target):
    save({"w": source}, tmp_path)
    wanted = [part.data.clone() for part in target]
    for part in target:
        part.data.fill_(-1)
    found = load({"w": target}, tmp_path)["w"]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_flat_data_need_not_be_contiguous_nor_start_at_the_box(tmp_path):
    data = torch.stack([W.reshape(-1)] * 2, 1)[:, 0]
    assert not data.is_contiguous()
    flat = ShardedTensor.from_rank_offsets_flat("w", data, (6, 4), flattened_range=slice(0, 24))
    save([flat][0:1] and {"w": flat}, tmp_path)
    target = torch.zeros(24, 2)[:, 1]
    part = ShardedTensor.from_rank_offsets_flat("w", target[3:20], (6, 4), flattened_range=slice(3, 20))
    load({"w": part}, tmp_path, validate_access_integrity=False)
    assert torch.equal(target[3:20], W.reshape(-1)[3:20])
    assert not target[:3].any()


@pytest.mark.parametrize("flat", [None, (0, 30), (2, 27), (8, 10)])
def test_another_shape_is_aligned_and_filled_with_zeros(tmp_path, flat):
    save({"w": tensor("w", W.clone())}, tmp_path)
    large = ShardedTensor("w", torch.full((5, 6), 7.0), torch.float32, (5, 6), (10, 6), (3, 0), None)
    part = slice(*(flat or (0, 30)))
    if flat:
        large = ShardedTensor("w", torch.full((30,), 7.0)[part], torch.float32, (5, 6), (10, 6), (3, 0), None,
                              flattened_range=part)  # fmt: skip
    with pytest.raises(ShapeError, match="another shape"):
        load({"w": large}, tmp_path, validate_access_integrity=False)
    assert (large.data == 7).all()
    large.allow_shape_mismatch = True
    found = load({"w": large}, tmp_path, validate_access_integrity=False)["w"]
    whole = torch.zeros(5, 6)
    whole[:3, :4] = W[3:]
    assert torch.equal(found.reshape(-1), whole.reshape(-1)[part])


def test_the_destination_decides_on_prepended_axes(tmp_path):
    save({"w": tensor("w", torch.stack([W, W + 1]))}, tmp_path)
    wanted = {"w": tensor("w", torch.zeros(6, 4), (0, 1, 2), prepend_axis_num=1)}
    assert torch.equal(load(wanted, tmp_path, validate_access_integrity=False)["w"], W + 1)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_change_of_data_type_is_an_error_unless_it_is_asked_for(tmp_path, wrapped):
    """1000.7 as int8 is -24."""
    save({"w": tensor("w", torch.tensor([1000.7, -3.0]))}, tmp_path)

    def loaded(dtype, **policy):
        strategy = ZarrLoadShardedStrategy(policy=functional_ckpt.LoadPolicy(**policy)) if policy else None
        chosen = FullyParallelLoadStrategyWrapper(strategy or ZarrLoadShardedStrategy()) if wrapped else strategy
        return load({"w": tensor("w", torch.zeros(2, dtype=dtype))}, tmp_path, chosen)["w"]

    for dtype, words in ((torch.int8, "cast='any'"), (torch.bfloat16, "cast='same_kind'")):
        target = torch.zeros(2, dtype=dtype)
        with pytest.raises(CastError, match=words):
            load({"w": tensor("w", target)}, tmp_path)
        assert not target.any()
        with pytest.raises(CastError, match=words):
            loaded(dtype)
    assert loaded(torch.float64, cast="same_kind").tolist() == torch.tensor([1000.7, -3.0]).double().tolist()
    assert loaded(torch.bfloat16, cast="same_kind").tolist() == [1000.0, -3.0]
    assert loaded(torch.int64, cast="any").tolist() == [1000, -3]


def test_a_parameter_is_filled(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(6, 4))
    save({"w": tensor("w", torch.nn.Parameter(W.clone()))}, tmp_path)
    found = load({"w": tensor("w", parameter)}, tmp_path)["w"]
    assert torch.equal(parameter, W)
    assert not found.requires_grad


@pytest.mark.parametrize("least", [0, 1 << 20], ids=["exclusive", "owned"])
def test_several_shards_of_a_grid_are_told_apart(tmp_path, least):
    wholes = {key: W + 100 * number for number, key in enumerate("abc")}
    held = {key: [tensor(key, row, (0, i, 6)) for i, row in enumerate(w.split(1))] for key, w in wholes.items()}
    policy = functional_ckpt.SavePolicy(layout=functional_ckpt.LayoutPolicy(min_chunk_nbytes=least))
    save(held, tmp_path, ZarrSaveShardedStrategy(policy=policy))
    stored = functional_ckpt.open_checkpoint(tmp_path)
    for key, whole in wholes.items():
        assert torch.equal(torch.from_numpy(stored[key][...]), whole)


def request(*keys):
    return {key: tensor(key, torch.zeros(2)) for key in keys}


def saved(tmp_path):
    save({key: tensor(key, torch.ones(2)) for key in ("a", "b")}, tmp_path)
    return tmp_path


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(NotACheckpointError, match="does not exist"):
        load({}, tmp_path / "none")
    with pytest.raises(NotACheckpointError, match="not a distributed checkpoint"):
        load({}, tmp_path)
    (tmp_path / "metadata.json").write_text("{")
    with pytest.raises(functional_ckpt.errors.CorruptionError, match=r"metadata\.json is damaged"):
        load({}, tmp_path)


def test_a_checkpoint_is_saved_over(tmp_path):
    path = saved(tmp_path / "a")
    save({"c": tensor("c", torch.ones(2)), "step": 1}, path)
    assert load(request("c"), path)["step"] == 1
    assert list(load_tensors_metadata(path)) == ["c"]


def test_a_save_that_failed_leaves_a_place_for_the_next(tmp_path):
    bad = {"w": tensor("w", W), "x": ShardedTensor("x", None, torch.float32, (2,), (2,), (0,), None), "step": 1}
    with pytest.raises(SpecError, match="no data to save"):
        save(bad, tmp_path)
    assert not check_is_distributed_checkpoint(tmp_path)
    save({"w": tensor("w", W), "step": 2}, tmp_path)
    assert load_common_state_dict(tmp_path) == {"step": 2}


@pytest.mark.parametrize("leaf", [(tensor("w", W), 1), (1, ((tensor("w", W),),))])
def test_a_sharded_leaf_in_a_tuple_is_refused_when_it_is_saved(tmp_path, leaf):
    with pytest.raises(UnsupportedLeafError, match="a tuple holds sharded leaves"):
        save({"a": [leaf]}, tmp_path)


def test_places_may_look_alike(tmp_path, same):
    dots = {"a.b": tensor("one", W.clone()), "a": {"b": tensor("two", W + 1)}, 0: [{1: 5}]}
    save(dots, tmp_path)
    wanted = {"a": {"b": tensor("two", torch.zeros(6, 4))}, "a.b": tensor("one", torch.zeros(6, 4))}
    same(load(wanted, tmp_path), {"a": {"b": W + 1}, "a.b": W, 0: [{1: 5}]})
    with pytest.raises(DuplicateKeyError, match=r"'a\.b'"):
        save({"a.b": 1, "a": {"b": 2}}, tmp_path / "common")


def test_parts_that_do_not_fit_are_told(tmp_path):
    save({"a": [tensor("a", W), 1], "b": 2}, tmp_path)
    with pytest.raises(ValueError, match=r"hole.*'a'"):
        load({"a": [tensor("a", W), 1, 1, LocalNonpersistentObject(3)], "c": 1}, tmp_path)
    with pytest.raises(ValueError, match=r"same place.*'b'"):
        load({"b": tensor("a", W)}, tmp_path)


@pytest.mark.filterwarnings("ignore:objects that are not plain values")
def test_objects_of_classes_that_are_not_allowed_are_not_built(tmp_path):
    save({"o": ShardedObject("o", OrderedDict(a=SomeClass()), (1,), (0,))}, tmp_path)
    wanted = {"o": ShardedObject("o", None, (1,), (0,))}
    with pytest.raises(ObjectCodecError, match="not allowed"):
        load(wanted, tmp_path)
    trusting = ZarrLoadShardedStrategy(policy=functional_ckpt.LoadPolicy(safe_globals=[SomeClass]))
    assert load(wanted, tmp_path, trusting)["o"]["a"].value == 1


class SomeClass:
    def __init__(self):
        self.value = 1


def test_random_states_are_allowed(tmp_path, same):
    states = {"numpy": np.random.RandomState(3).get_state(), "torch": torch.get_rng_state()}
    save({"rng": ShardedObject("rng", [states], (1,), (0,))}, tmp_path)
    same(load({"rng": ShardedObject("rng", None, (1,), (0,))}, tmp_path)["rng"], [states])


def test_a_save_in_the_background_goes_where_its_path_led_when_it_began(tmp_path, monkeypatch):
    for name in ("one", "other"):
        (tmp_path / name / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "one")
    pending = save({"w": tensor("w", W), "step": 1}, "a", async_sharded_save=True)
    monkeypatch.chdir(tmp_path / "other")
    pending.execute_sync()
    assert check_is_distributed_checkpoint(tmp_path / "one" / "a")
    assert [*(tmp_path / "other" / "a").iterdir()] == []


def test_a_save_in_the_background_is_there_once_it_is_finalised(tmp_path):
    data = W.clone()
    pending = save({"w": tensor("w", data), "step": 1}, tmp_path, async_sharded_save=True)
    data.fill_(-1)
    assert not check_is_distributed_checkpoint(tmp_path)
    pending.execute_sync()
    assert torch.equal(load({"w": tensor("w", data)}, tmp_path)["w"], W)


def test_strategies_are_found_by_name(tmp_path):
    save(request("a"), tmp_path, (BACKEND, 1), (BACKEND, 1))
    load(request("a"), tmp_path, (BACKEND, 1), (BACKEND, 1))
    kinds = (ZarrSaveShardedStrategy, ZarrLoadShardedStrategy, ZarrSaveCommonStrategy, ZarrLoadCommonStrategy)
    actions = (StrategyAction.SAVE_SHARDED, StrategyAction.LOAD_SHARDED, StrategyAction.SAVE_COMMON,
               StrategyAction.LOAD_COMMON)  # fmt: skip
    assert all(type(get_default_strategy(a, BACKEND, 1)) is k for a, k in zip(actions, kinds, strict=True))
    with pytest.raises(PolicyError, match="papyrus"):
        save(request("a"), tmp_path / "b", ("papyrus", 1))
    with pytest.raises(PolicyError, match="not a strategy"):
        save(request("a"), tmp_path / "b", 5)


class TensorsOnly(SaveShardedStrategy):
    """A user's strategy, which leaves objects to the common one."""

    def save(self, sharded_state_dict, checkpoint_dir):
        self.seen = sharded_state_dict
        ZarrSaveShardedStrategy().save(sharded_state_dict, checkpoint_dir)


def test_objects_go_to_the_common_strategy_if_the_sharded_one_cannot(tmp_path):
    class Loader(ZarrLoadShardedStrategy):
        can_handle_sharded_objects = False

    strategy = TensorsOnly(BACKEND, 1)
    with pytest.raises(PolicyError, match="background"):
        save(request("a"), tmp_path, strategy, async_sharded_save=True)
    save({**request("a"), "o": ShardedObject("o", [5], (1,), (0,))}, tmp_path, strategy)
    assert list(strategy.seen) == ["a"]
    wanted = {**request("a"), "o": ShardedObject("o", None, (1,), (0,))}
    assert load(wanted, tmp_path, Loader())["o"] == [5]
    assert {*load_sharded_metadata(tmp_path, Loader())} == {"a", "o/shard_0_1"}


def test_other_leaves_are_refused_by_the_sharded_strategy(tmp_path):
    with pytest.raises(UnsupportedLeafError):
        ZarrSaveShardedStrategy().save({"a": 5}, tmp_path)
