"""What each name of `functional_ckpt.torch.mapping` does, and what it refuses; the key stands in every refusal."""

import abc
import dataclasses
import pickle
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from functional_ckpt.errors import CheckpointError, DTypeError, ShapeError, SpecError  # noqa: E402
from functional_ckpt.torch.megatron import exceptions, mapping, sharded_base  # noqa: E402
from functional_ckpt.torch.megatron.mapping import (  # noqa: E402
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensor,
    is_main_replica,
)


def plain(**changes):
    """Rows 2 and 3 of 6, four columns; `changes` are made to its fields."""
    fields = {
        "key": "w",
        "data": None,
        "dtype": torch.float32,
        "local_shape": (2, 4),
        "global_shape": (6, 4),
        "global_offset": (2, 0),
        "axis_fragmentations": (3, 1),
    }
    return ShardedTensor(**{**fields, **changes})


def flat(start, stop, shape=(2, 4), *offsets, **more):
    return ShardedTensor.from_rank_offsets_flat(
        "w", torch.arange(start, stop), shape, *offsets, flattened_range=slice(start, stop), **more
    )


# --- ShardedTensor: what it accepts ---


def test_positional_fields():
    shard = ShardedTensor("w", None, torch.int8, (3,), (1, 6), (0, 3), (1, 2), (0, 1), 1, True, slice(1, 2))
    assert shard.spec.array.shape == (1, 6)
    assert (shard.replica_id, shard.prepend_axis_num, shard.allow_shape_mismatch) == ((0, 1), 1, True)
    assert shard.spec.flat == (1, 2)


def test_the_exception_is_ours():
    assert CheckpointingException is CheckpointError
    with pytest.raises(CheckpointingException):
        plain(global_offset=(2,))


def test_spec_is_what_is_held():
    spec = plain(replica_id=(0, 1)).spec
    assert (spec.key, spec.array.dtype, spec.array.shape) == ("w", "float32", (6, 4))
    assert (spec.box.start, spec.box.stop) == ((2, 0), (4, 4))
    assert (spec.replica_id, spec.flat, spec.grid) == ((0, 1), None, (3, 1))


def test_spec_follows_assignments():
    shard = plain()
    shard.key, shard.replica_id = "v", 3
    assert (shard.spec.key, shard.spec.replica_id) == ("v", (3,))
    shard.global_offset = (5, 0)
    with pytest.raises(ShapeError, match="leaves its array: key 'v'"):
        shard.validate_metadata_integrity()


def test_a_grid_that_does_not_describe_the_shards_is_none():
    assert plain(axis_fragmentations=(2, 1)).spec.grid is None
    assert plain(axis_fragmentations=None).spec.grid is None


def test_torch_sizes_do():
    shard = plain(local_shape=torch.Size((2, 4)), global_shape=torch.Size((6, 4)), data=torch.ones(2, 4))
    assert shard.spec == plain().spec


def test_shards_of_no_dimension_and_of_no_extent():
    assert ShardedTensor.from_rank_offsets("w", torch.tensor(3)).spec.size == 1
    empty = ShardedTensor.from_rank_offsets("w", torch.ones(0, 3), (0, 1, 2))
    assert empty.global_shape == (0, 3)
    assert empty.local_chunk_offset_in_global() == (0, 0)


def test_data_types_of_others_are_refused_by_spec_only():
    shard = plain(dtype=torch.complex32)
    with pytest.raises(DTypeError, match=r"key 'w'.*complex32"):
        _ = shard.spec


def test_it_travels():
    shard = flat(3, 7, (2, 4), (0, 1, 3))
    again = pickle.loads(pickle.dumps(shard))
    assert again.spec == shard.spec
    assert torch.equal(again.data, shard.data)


def test_subclasses_stay_what_they_are():
    class Mine(ShardedTensor):
        pass

    shard = Mine.from_rank_offsets("w", torch.arange(4))
    assert type(shard) is type(shard.narrow(0, 1, 2)[0]) is type(shard.without_data()) is Mine
    assert isinstance(shard, ShardedBase)


# --- ShardedTensor: what it refuses ---


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"data": torch.ones(2, 4, dtype=torch.int32)}, DTypeError, "another data type"),
        ({"data": torch.ones(4, 2)}, ShapeError, "another shape than its shard"),
        ({"global_offset": (2,)}, ShapeError, "differ in length"),
        ({"global_shape": (6,)}, ShapeError, "differ in length"),
        ({"prepend_axis_num": 1}, ShapeError, "differ in length"),
        ({"prepend_axis_num": -1}, ShapeError, "differ in length"),
        ({"global_offset": (1, 0)}, ShapeError, "regular grid"),
        ({"global_offset": (6, 0)}, ShapeError, "leaves its array"),
        ({"global_offset": (2, 1)}, ShapeError, "leaves its array"),
        ({"global_offset": (-2, 0)}, ShapeError, "0 <= start"),
        ({"local_shape": (2, -4)}, ShapeError, "0 <= start"),
        ({"global_shape": (6, -1)}, ShapeError, "out of bounds"),
        ({"axis_fragmentations": (3,)}, ShapeError, "one positive number of fragments per axis"),
        ({"axis_fragmentations": (3, 1, 1)}, ShapeError, "one positive number of fragments per axis"),
        ({"axis_fragmentations": (0, 1)}, ShapeError, "one positive number of fragments per axis"),
        ({"flattened_range": slice(2, 9)}, ShapeError, "flattened range leaves"),
        ({"flattened_range": slice(3, 2)}, ShapeError, "flattened range leaves"),
        ({"flattened_range": slice(-1, 2)}, ShapeError, "flattened range leaves"),
        ({"flattened_range": slice(0, 4, 2)}, ShapeError, "has a step"),
        ({"flattened_range": slice(2, 5), "data": torch.ones(4)}, ShapeError, "another shape than its shard"),
        ({"flattened_range": slice(2, 5), "data": torch.ones(1, 3)}, ShapeError, "another shape than its shard"),
        ({"local_shape": (2, 4.0)}, SpecError, "wrong type"),
        ({"local_shape": 2}, SpecError, "wrong type"),
        ({"global_offset": None}, SpecError, "wrong type"),
        ({"axis_fragmentations": 3}, SpecError, "wrong type"),
        ({"axis_fragmentations": (3.0, 1)}, SpecError, "wrong type"),
        ({"replica_id": "main"}, SpecError, "wrong type"),
        ({"flattened_range": slice("a", 3)}, SpecError, "wrong type"),
    ],
)
def test_contradicting_fields_are_refused(changes, error, text):
    with pytest.raises(error, match=text) as caught:
        plain(**changes)
    assert caught.value.key == "w"


def test_a_key_is_text():
    with pytest.raises(SpecError, match="key must be text"):
        plain(key=7)


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        ([(0, 0, 2), (0, 1, 2)], "rank offset is invalid"),
        ([(0, 2, 2)], "rank offset is invalid"),
        ([(0, -1, 2)], "rank offset is invalid"),
        ([(0, 0, 0)], "rank offset is invalid"),
        ([(-1, 0, 2)], "rank offset is invalid"),
        ([(0, 0)], "wrong type"),
    ],
)
def test_bad_rank_offsets_are_refused(offsets, text):
    with pytest.raises(CheckpointingException, match=text) as caught:
        ShardedTensor.from_rank_offsets("w", torch.ones(2, 4), *offsets)
    assert caught.value.key == "w"


def test_an_axis_that_does_not_exist_is_an_index_error_too():
    with pytest.raises(IndexError, match="key 'w'") as caught:
        ShardedTensor.from_rank_offsets("w", torch.ones(2, 4), (2, 0, 2))
    assert isinstance(caught.value, CheckpointingException)
    assert type(pickle.loads(pickle.dumps(caught.value))) is mapping.AxisError


# --- ShardedTensor: methods ---


def test_from_rank_offsets_places_prepended_axes_first():
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2, 4), (0, 3, 8), (2, 1, 5), prepend_axis_num=1)
    assert shard.global_shape == (8, 2, 20)
    assert shard.global_offset == (3, 0, 4)
    assert shard.axis_fragmentations == (8, 1, 5)
    assert shard.local_shape == (2, 4)


def test_from_rank_offsets_passes_fields_on():
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2), replica_id=(0, 2), allow_shape_mismatch=True)
    assert (shard.replica_id, shard.allow_shape_mismatch, shard.dtype) == ((0, 2), True, torch.float32)


def test_each_constructor_of_a_grid_has_its_kind_of_range():
    with pytest.raises(ValueError, match="from_rank_offsets_flat"):
        ShardedTensor.from_rank_offsets("w", torch.ones(2), flattened_range=slice(0, 2))
    with pytest.raises(CheckpointingException, match="needs a flattened range"):
        ShardedTensor.from_rank_offsets_flat("w", torch.ones(2), (2,))


def test_global_slice_indexes_the_local_tensor():
    whole = torch.arange(8 * 6 * 4).reshape(8, 6, 4)
    shard = ShardedTensor.from_rank_offsets("w", whole[3, 2:4], (0, 3, 8), (1, 1, 3), prepend_axis_num=1)
    assert shard.global_slice() == (3, slice(2, 4), slice(0, 4))
    assert torch.equal(whole[shard.global_slice()], shard.data)


def test_grid_helpers():
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2, 4), (0, 3, 8), (2, 1, 5), prepend_axis_num=1)
    assert shard.has_regular_grid
    assert shard.local_chunk_offset_in_global() == (3, 0, 1)
    assert shard.max_allowed_chunks() == (1, 2, 4)


def test_grid_helpers_of_irregular_shards():
    shard = plain(axis_fragmentations=None, global_offset=(3, 0))
    assert not shard.has_regular_grid
    for method, also in ((shard.local_chunk_offset_in_global, AssertionError), (shard.max_allowed_chunks, ValueError)):
        with pytest.raises(also, match="key 'w'") as caught:
            method()
        assert isinstance(caught.value, CheckpointingException)


def test_fragments_that_do_not_divide_need_allow_shape_mismatch():
    shard = plain(axis_fragmentations=(4, 1))
    with pytest.raises(CheckpointingException, match=r"does not divide.*key 'w'"):
        shard.max_allowed_chunks()
    assert dataclasses.replace(shard, allow_shape_mismatch=True).max_allowed_chunks() == (1, 4)


def test_without_data_is_a_copy():
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2))
    assert shard.without_data().data is None
    assert shard.data is not None
    assert shard.without_data().spec == shard.spec


def test_init_data():
    shard = plain()
    shard.init_data("cpu", torch.zeros)
    assert (shard.data.shape, shard.data.dtype, shard.data.sum()) == ((2, 4), torch.float32, 0)
    before = shard.data
    shard.init_data("cpu")
    assert shard.data is before
    meta = plain(flattened_range=slice(3, 8))
    meta.init_data(torch.device("meta"))
    assert (meta.data.shape, meta.data.device.type) == ((5,), "meta")
    meta.validate_metadata_integrity()


def test_an_open_flattened_range_goes_to_the_end():
    assert plain(flattened_range=slice(None, 3)).spec.flat == (0, 3)
    assert plain(flattened_range=slice(3, None)).spec.flat == (3, 8)


@pytest.mark.parametrize("name", exceptions.__all__)
def test_errors_that_are_two_travel(name):
    kind = getattr(exceptions, name)
    if isinstance(kind, type):
        error = pickle.loads(pickle.dumps(kind("what", "w", rank=3)))
        assert (type(error), error.key, error.rank) == (kind, "w", 3)


def test_what_has_no_second_type_stays():
    error = CheckpointError("other")
    assert exceptions.asserted(error) is error


def test_fields_that_do_not_exist_are_a_type_error():
    with pytest.raises(TypeError, match="fragments"):
        ShardedTensor.from_rank_offsets("w", torch.ones(2), fragments=3)


# --- is_main_replica, LocalNonpersistentObject ---


@pytest.mark.parametrize(
    ("replica_id", "main"),
    [(0, True), (1, False), (False, True), ((0, 0), True), ((0, 1), False), ((), True), ([0], True), ([0, 2], False)],
)
def test_is_main_replica(replica_id, main):
    assert is_main_replica(replica_id) is main
    assert plain(replica_id=replica_id).spec.is_main is main


def test_local_objects():
    thing = object()
    assert LocalNonpersistentObject(thing).unwrap() is thing
    assert not isinstance(LocalNonpersistentObject(thing), ShardedBase)


def test_leaves_are_of_megatrons_classes_where_it_is_there(monkeypatch):
    """It sorts leaves by `isinstance`, and would take ours for common ones: what rank 0 holds would be pickled."""
    names = ["ShardedBase", "ShardedTensor", "ShardedObject", "ShardedTensorFactory"]
    theirs = SimpleNamespace(
        **{name: abc.ABCMeta(name, (), {}) for name in names}, LocalNonpersistentObject=type("Local", (), {})
    )
    monkeypatch.delitem(sys.modules, "megatron.core.dist_checkpointing.mapping", raising=False)
    local = LocalNonpersistentObject(3)
    assert local.__class__ is LocalNonpersistentObject
    monkeypatch.setattr(sharded_base, "_introduced", set())
    monkeypatch.setitem(sys.modules, "megatron.core.dist_checkpointing.mapping", theirs)
    leaves = [plain(), mapping.ShardedObject("o", 1, (1,), (0,)), mapping.ShardedTensorFactory("f", None, None, None)]
    for name, leaf in zip(names[1:], leaves, strict=True):
        assert isinstance(leaf, theirs.ShardedBase)
        assert [isinstance(leaf, getattr(theirs, other)) for other in names[1:]] == [
            other == name for other in names[1:]
        ]
    assert isinstance(local, theirs.LocalNonpersistentObject)
    assert isinstance(local, LocalNonpersistentObject)
    assert not isinstance(plain(), theirs.LocalNonpersistentObject)


def test_ranges_of_flattened_shards_are_no_grid():
    """Megatron counts the shards of a grid, each of which holds a whole cell of it."""
    assert not flat(0, 3).has_regular_grid
