"""What ranks exchange in DCP's steps, in the short form: it arrives as it was sent."""

import pickle
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.metadata import (  # noqa: E402 - it needs torch
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (  # noqa: E402 - it needs torch
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult  # noqa: E402 - it needs torch

from functional_ckpt.torch.dcp.packed import (  # noqa: E402 - it needs torch
    PackedResults,
    pack_metadata,
    packed_load_plan,
    packed_save_plan,
)

# Few values of each, so that items often differ in one field only.
names = st.sampled_from(["a", "b", "a.b", ""])
sizes = st.lists(st.integers(0, 2), max_size=2).map(torch.Size)
hints = st.sampled_from([None, 0, 1])
indexes = st.builds(MetadataIndex, names, st.none() | sizes, hints)
chunks = st.builds(ChunkStorageMetadata, sizes, sizes)
properties = st.builds(
    TensorProperties,
    dtype=st.sampled_from([torch.float32, torch.int8]),
    requires_grad=st.booleans(),
    memory_format=st.sampled_from([torch.contiguous_format, torch.channels_last]),
)
tensors = st.builds(TensorWriteData, chunks, properties, sizes)
writes = st.builds(
    WriteItem,
    indexes,
    st.sampled_from(WriteItemType),
    st.none() | st.builds(BytesIOWriteData, st.integers(0, 1)),
    st.none() | tensors,
)
reads = st.builds(ReadItem, st.sampled_from(LoadItemType), indexes, sizes, indexes, sizes, sizes)
results = st.builds(WriteResult, indexes, st.integers(0, 2), st.sampled_from([None, "file", ("a", 1)]))
stored = st.builds(BytesStorageMetadata) | st.builds(
    TensorStorageMetadata, properties, sizes, st.lists(chunks, max_size=2)
)


def travelled(value):
    return pickle.loads(pickle.dumps(value))


def hints_of(items):
    """The hints, which indexes do not compare."""
    return [(item.index.index if isinstance(item, WriteItem) else item.dest_index.index) for item in items]


@given(st.lists(writes, max_size=5), st.sampled_from([None, 3, {"a": ("a",)}]), st.booleans())
def test_a_save_plan_arrives_as_it_was_sent(items, data, usable):
    plan = SavePlan(items, data, {"a": (0, "b")}, usable)
    found = travelled(packed_save_plan(plan))
    assert found == plan
    assert hints_of(found.items) == hints_of(items)
    assert type(found) is SavePlan
    assert replace(found, items=[]) == replace(plan, items=[])


@given(st.lists(reads, max_size=5), st.sampled_from([None, 3]))
def test_a_load_plan_arrives_as_it_was_sent(items, data):
    plan = LoadPlan(items, data, "mine")
    found = travelled(packed_load_plan(plan))
    assert found == plan
    assert hints_of(found.items) == hints_of(items)
    assert [each.storage_index.index for each in found.items] == [each.storage_index.index for each in items]
    assert type(found) is LoadPlan


@given(st.lists(results, max_size=5))
def test_results_arrive_as_they_were_sent(items):
    found = travelled(PackedResults(items))
    assert found == items
    assert type(found) is list


@given(st.dictionaries(names, stored, max_size=4))
def test_metadata_arrive_as_they_were_sent(found):
    metadata = Metadata(found, {"a": ("a",)}, {}, StorageMeta("here"), "1.0.0")
    kept = pickle.loads(pickle.dumps(metadata))
    pack_metadata(metadata)
    arrived = travelled(metadata)
    assert arrived == kept == metadata
    assert type(arrived) is Metadata
    assert list(arrived.state_dict_metadata) == list(found)
    assert type(arrived.state_dict_metadata) is dict


def shard(name, row=0):
    chunk = ChunkStorageMetadata(torch.Size([row]), torch.Size([1]))
    data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([2]))
    return WriteItem(MetadataIndex(name, torch.Size([row])), WriteItemType.SHARD, None, data)


def test_items_that_have_arrived_share_nothing_that_can_be_changed():
    one, other = travelled(packed_save_plan(SavePlan([shard("a"), shard("b")]))).items
    one.tensor_data.properties.dtype, one.tensor_data.chunk.sizes = torch.int8, torch.Size([2])
    assert other == shard("b")
    value = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([1]), [])
    metadata = Metadata({"a": value, "b": replace(value, chunks=[])})
    pack_metadata(metadata)
    arrived = travelled(metadata).state_dict_metadata
    arrived["a"].properties.dtype = torch.int8
    arrived["a"].chunks.append(3)
    assert arrived["b"] == TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([1]), [])


@dataclass(frozen=True)
class NamedItem(WriteItem):
    more: str = "of mine"


@dataclass
class NamedProperties(TensorProperties):
    more: str = "of mine"


@dataclass(frozen=True)
class NamedPlan(SavePlan):
    more: str = "of mine"


class NamedIndex(MetadataIndex):
    pass


def of_a_class(item, **parts):
    return replace(item, tensor_data=replace(item.tensor_data, **parts))


@pytest.mark.parametrize(
    "items",
    [
        [shard("a"), NamedItem(MetadataIndex("b"), WriteItemType.BYTE_IO)],
        [of_a_class(shard("a"), properties=NamedProperties(torch.float32))],
        [replace(shard("a"), index=NamedIndex("a"))],
        [of_a_class(shard("a"), size=[2])],  # a list cannot be compared by its hash
        ["no item"],
    ],
)
def test_items_of_another_kind_travel_as_dcp_sends_them(items):
    found = travelled(packed_save_plan(SavePlan(items)))
    assert found == SavePlan(items)
    assert type(found) is SavePlan
    assert pickle.dumps(found.items) == pickle.dumps(travelled(items))


def test_plans_of_other_classes_are_left_alone():
    plan = NamedPlan([shard("a")])
    assert packed_save_plan(plan) is plan


def test_a_plan_that_nobody_looks_into_is_passed_on_as_it_came():
    item = ReadItem(
        LoadItemType.BYTE_IO, MetadataIndex("a"), *([torch.Size([0]), MetadataIndex("a")] + [torch.Size([0])] * 2)
    )
    here = travelled(packed_load_plan(LoadPlan([item])))
    assert "items" not in vars(here)
    assert isinstance(here, LoadPlan)
    there = travelled(here)
    assert "items" not in vars(here)
    assert packed_load_plan(there) is there
    assert there.items == [item]
    assert vars(there) == vars(LoadPlan([item]))
    assert type(there) is LoadPlan
    there.items.append(item)
    assert travelled(packed_load_plan(there)).items == [item, item]
    with pytest.raises(AttributeError):
        here.more  # noqa: B018 - the access is the test


def test_a_plan_of_thousands_of_tensors_that_differ_by_name_is_short():
    plan = SavePlan([shard(f"layer.{number}") for number in range(2000)])
    assert len(pickle.dumps(packed_save_plan(plan))) < len(pickle.dumps(plan)) / 5


def test_metadata_travel_in_the_short_form_once():
    """Somebody who keeps them by pickling them gets what DCP would write, which needs no class of ours."""
    metadata = Metadata({"a": BytesStorageMetadata()})
    as_always = pickle.dumps(metadata)
    pack_metadata(metadata)
    assert pickle.dumps(metadata) != as_always
    assert pickle.dumps(metadata) == as_always
    assert type(metadata) is Metadata
