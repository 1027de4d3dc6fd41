"""Sharded objects and factories: what they do, and what they refuse; the key stands in every refusal."""

import dataclasses
import logging
from collections import OrderedDict, defaultdict

import pytest

torch = pytest.importorskip("torch")

from functional_ckpt.errors import ShapeError  # noqa: E402
from functional_ckpt.spec.array import ObjectSpec  # noqa: E402
from functional_ckpt.torch.megatron import mapping  # noqa: E402
from functional_ckpt.torch.megatron.factory import built, merged  # noqa: E402
from functional_ckpt.torch.megatron.mapping import (  # noqa: E402
    CheckpointingException,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)
from functional_ckpt.torch.megatron.state_tree import assign_in_place, joined, with_lists  # noqa: E402


def halves(key, tensor, replica_id, flattened_range):
    parts = tensor.chunk(2)
    return {
        "a": ShardedTensor.from_rank_offsets(f"{key}.a", parts[0], replica_id=replica_id),
        "b": ShardedTensor.from_rank_offsets(f"{key}.b", parts[1], replica_id=replica_id),
    }


def factory(data=None, merge=lambda loaded: torch.cat([loaded["a"], loaded["b"]]), key="w"):
    return ShardedTensorFactory(key, torch.arange(4) if data is None else data, halves, merge)


# --- ShardedObject ---


def test_names_of_objects():
    thing = ShardedObject("rng", {"seed": 1}, (2, 3), (1, 0), (0, 1))
    assert thing.unique_key == "rng/shard_1.0_2.3"
    assert thing.spec == ObjectSpec("rng/shard_1.0_2.3")
    assert str(thing) == "ShardedObject(key='rng')"


@pytest.mark.parametrize("key", ["rng", "a/b", "a_b/c_d", "", "/", "a/shard_1_2", "shard_0_1", "ü\n"])
@pytest.mark.parametrize("place", [((1,), (0,)), ((2, 3), (1, 2)), ((), ()), ((10,), (12,))])
def test_unique_keys_are_read_back(key, place):
    thing = ShardedObject(key, "data", *place, 4)
    again = ShardedObject.empty_from_unique_key(thing.unique_key, replica_id=4)
    assert again == thing.without_data()
    assert again.data is None


def test_a_legacy_name_lacks_the_last_extent(caplog):
    mapping._logged_deprecations.clear()
    with caplog.at_level(logging.WARNING, mapping.logger.name):
        for _ in range(3):
            thing = ShardedObject.empty_from_unique_key("rng/shard_1.4_2")
    assert (thing.global_shape, thing.global_offset) == ((2, -1), (1, 4))
    assert len(caplog.records) == len(mapping._logged_deprecations) == 1


@pytest.mark.parametrize(
    "name",
    ["rng", "", "rng/shard", "rng/shard_1", "rng/shard_1_2_3", "rng/part_0_1", "rng/shard_a_1", "rng/shard_1_2.3"],
)
def test_what_is_no_name_of_an_object(name):
    with pytest.raises(CheckpointingException) as caught:
        ShardedObject.empty_from_unique_key(name)
    assert caught.value.key in (name, "rng")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AssertionError) is ("this is not the name" in str(caught.value))


def test_bad_objects():
    with pytest.raises(CheckpointingException, match="differ in length: key 'rng'"):
        ShardedObject("rng", None, (2,), (0, 1))
    with pytest.raises(CheckpointingException, match="wrong type: key 'rng'"):
        ShardedObject("rng", None, 2, (0,))
    thing = ShardedObject("rng", None, (2,), (0,))
    thing.global_offset = (0, 0)
    with pytest.raises(CheckpointingException, match="key 'rng'"):
        thing.validate_metadata_integrity()


# --- factories ---


def test_a_factory_passes_its_fields_to_build_fn():
    seen = []
    thing = ShardedTensorFactory("w", torch.ones(2), lambda *a: seen.append(a) or {}, torch.cat, (0, 1), slice(0, 2))
    assert thing.build() == {}
    assert seen == [("w", thing.data, (0, 1), slice(0, 2))]
    assert thing.validate_metadata_integrity() is None
    assert thing.without_data().data is None
    assert isinstance(thing, ShardedBase)


def test_a_factory_may_be_replaced_as_optimizers_do():
    other = dataclasses.replace(factory(), key="exp_avg.w", data=torch.zeros(4))
    assert [shard.key for shard in other.build().values()] == ["exp_avg.w.a", "exp_avg.w.b"]


def test_factories_are_applied_in_place():
    inner, leaf = [factory(), 3], object()
    state = defaultdict(dict, {"list": inner, "ordered": OrderedDict(x=factory()), "leaf": leaf, 0: {}})
    kept = state["ordered"]
    assert apply_factories(state) is None
    assert state["list"] is inner
    assert state["ordered"] is kept
    assert state["leaf"] is leaf
    assert inner[0]["a"].data.tolist() == [0, 1]
    assert kept["x"]["b"].data.tolist() == [2, 3]


def test_applied_once_and_not_within_tuples():
    nested = ShardedTensorFactory("w", torch.ones(1), lambda *_: {"again": factory()}, torch.cat)
    state = {"tuple": (factory(),), "nested": nested}
    apply_factories(state)
    assert isinstance(state["tuple"][0], ShardedTensorFactory)
    assert isinstance(state["nested"]["again"], ShardedTensorFactory)


def test_nothing_changes_if_one_factory_fails():
    bad = ShardedTensorFactory("v", torch.ones(1), lambda *_: 1 / 0, torch.cat)
    state = {"a": factory(), "b": bad}
    with pytest.raises(ZeroDivisionError):
        apply_factories(state)
    assert isinstance(state["a"], ShardedTensorFactory)


def test_merges_are_applied_in_place():
    parts = {"a": torch.tensor([0, 1]), "b": torch.tensor([2, 3])}
    inner = [dict(parts), "keep", dict(parts)]
    loaded = {"list": inner, "other": {"x": dict(parts), "y": 5}, "rest": 7}
    skeleton = {"list": {0: factory(), 2: factory()}, "other": {"x": factory()}}
    assert apply_factory_merges(loaded, skeleton) is loaded
    assert loaded["list"] is inner
    assert inner[1] == "keep"
    assert [inner[i].tolist() for i in (0, 2)] == [[0, 1, 2, 3]] * 2
    assert (loaded["other"]["x"].tolist(), loaded["other"]["y"], loaded["rest"]) == ([0, 1, 2, 3], 5, 7)


def test_a_merge_of_everything_and_a_merge_of_lists():
    parts = {"a": torch.tensor([0, 1]), "b": torch.tensor([2, 3])}
    assert apply_factory_merges(parts, factory()).tolist() == [0, 1, 2, 3]
    assert apply_factory_merges([parts], [factory()])[0].tolist() == [0, 1, 2, 3]
    assert merged({"x": 1}, {}) == {"x": 1}


@pytest.mark.parametrize(
    ("loaded", "skeleton", "text"),
    [
        ({"x": {}}, {"y": factory()}, "nothing was loaded for a factory: key 'top'"),
        ({"x": {}}, {"x": {"y": factory()}}, "nothing was loaded for a factory: key 'top.x'"),
        ({"x": [1, 2]}, {"x": [factory()]}, "differ in length: key 'top.x'"),
        ({"x": [1]}, {"x": {1: factory()}}, "nothing was loaded for a factory: key 'top.x'"),
        ({"x": [1]}, {"x": {-1: factory()}}, "nothing was loaded for a factory: key 'top.x'"),
        ({"x": [1]}, {"x": {"0": factory()}}, "nothing was loaded for a factory: key 'top.x'"),
        ({"x": 1}, {"x": 2}, "only a factory.*key 'top.x'"),
        ({"x": 1}, {"x": {"y": factory()}}, "only a factory.*key 'top.x'"),
        ({"x": {}}, {"x": [factory()]}, "only a factory.*key 'top.x'"),
    ],
)
def test_merges_that_do_not_fit(loaded, skeleton, text):
    before = repr(loaded)
    with pytest.raises(ValueError, match=text) as caught:
        apply_factory_merges(loaded, skeleton, ("top",))
    assert isinstance(caught.value, CheckpointingException)
    assert repr(loaded) == before


def test_a_merge_that_returns_another_shape_is_refused():
    parts = {"a": torch.tensor([0, 1]), "b": torch.tensor([2, 3])}
    thing = factory(merge=lambda loaded: loaded["a"])
    with pytest.raises(ShapeError, match=r"at 'x.y' returned another shape: key 'w'.*\(4,\).*\(2,\)"):
        apply_factory_merges({"x": {"y": parts}}, {"x": {"y": thing}})
    assert apply_factory_merges({"x": parts}, {"x": thing.without_data()})["x"].tolist() == [0, 1]
    square = factory(merge=lambda loaded: torch.stack([loaded["a"], loaded["b"]]))
    with pytest.raises(ShapeError, match="another shape"):
        apply_factory_merges({"x": parts}, {"x": square})


def test_pure_variants_change_nothing():
    state = {"a": [factory()]}
    assert set(built(state)["a"][0]) == {"a", "b"}
    assert isinstance(state["a"][0], ShardedTensorFactory)


def test_parts_of_lists_are_joined():
    assert joined({"a": []}, {"a": [1, 2]}) == joined({"a": [1, 2]}, {"a": {}}) == {"a": [1, 2]}
    assert joined([], {}) == {}
    with pytest.raises(ValueError, match="differ in length: key 'a'"):
        joined({"a": [1]}, {"a": [1, 2]})


def test_lists_without_a_hole_come_back():
    assert with_lists({1: 2, 0: 1}, [None, None]) == [1, 2]
    with pytest.raises(ValueError, match="hole"):
        with_lists({0: 1, 2: 3}, [None, None])
    assert with_lists({0: 1, 2: 3}, [None, None], holes=True) == {0: 1, 2: 3}


def test_assigning_in_place_keeps_containers_of_the_same_kind():
    lists, dicts = [1, 2, 3], {"x": 1, "y": 2}
    state = OrderedDict(lists=lists, dicts=dicts, changes={"k": 1}, gone=4)
    assign_in_place(state, {"lists": [1], "dicts": {"y": 3, "z": [5]}, "changes": [1], "new": {}})
    assert state == {"lists": [1], "dicts": {"y": 3, "z": [5]}, "changes": [1], "new": {}}
    assert (state["lists"] is lists, state["dicts"] is dicts) == (True, True)
