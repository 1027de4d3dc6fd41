"""What ranks exchange in DCP's steps, in the short form: it arrives as it was sent."""

import gc
import pickle
from copy import copy, deepcopy
from dataclasses import dataclass, fields, replace
from operator import add, eq

import pytest
from hypothesis import example, given, settings
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

from functional_ckpt.torch.dcp import packed  # noqa: E402 - it needs torch
from functional_ckpt.torch.dcp.packed import (  # noqa: E402 - it needs torch
    WRITES,
    Items,
    pack_metadata,
    packed_load_plan,
    packed_save_plan,
    planned_items,
)
from functional_ckpt.torch.dcp.results import PackedResults, reported, results_of  # noqa: E402 - it needs torch

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


def elsewhere(value):
    """What another process receives: it does not know what this one has sent."""
    data = pickle.dumps(value)
    packed._SENT.clear()
    return pickle.loads(data)


def here(value):
    """What the process receives that has sent it."""
    return pickle.loads(pickle.dumps(value))


ways = pytest.mark.parametrize("travelled", [elsewhere, here])


def hints_of(items):
    """The hints, which indexes do not compare."""
    return [(item.index.index if isinstance(item, WriteItem) else item.dest_index.index) for item in items]


@ways
@settings(deadline=None)
@given(st.lists(writes, max_size=5), st.sampled_from([None, 3, {"a": ("a",)}]), st.booleans())
def test_a_save_plan_arrives_as_it_was_sent(travelled, items, data, usable):
    plan = SavePlan(items, data, {"a": (0, "b")}, usable)
    found = travelled(packed_save_plan(plan))
    assert found == plan
    assert hints_of(found.items) == hints_of(items)
    assert type(found) is SavePlan
    assert replace(found, items=[]) == replace(plan, items=[])


def of_one(name, stored, hint=0):
    none = torch.Size([0])
    return ReadItem(LoadItemType.TENSOR, MetadataIndex(name, none, hint), none, MetadataIndex(stored, none), none, none)


@ways
@settings(deadline=None)
@example([of_one("a", "a"), of_one("b", "a"), of_one("b", "b"), of_one("b", "b", hint=1)], None)
@given(st.lists(reads, max_size=5), st.sampled_from([None, 3]))
def test_a_load_plan_arrives_as_it_was_sent(travelled, items, data):
    plan = LoadPlan(items, data, "mine")
    found = travelled(packed_load_plan(plan))
    assert found == plan
    assert hints_of(found.items) == hints_of(items)
    assert [each.storage_index.index for each in found.items] == [each.storage_index.index for each in items]
    assert type(found) is LoadPlan


@ways
@settings(deadline=None)
@given(st.lists(results, max_size=5))
def test_results_arrive_as_they_were_sent(travelled, items):
    found = travelled(PackedResults(items))
    assert [hint.index.index for hint in found] == [hint.index.index for hint in items]
    assert found == items


@ways
@settings(deadline=None)
@given(st.lists(writes, max_size=5), st.data())
def test_results_are_those_of_the_planned_items(travelled, items, data):
    """Made here or where they arrive, from a plan that was looked into or not; `reported` makes none of them."""
    nbytes = data.draw(st.lists(st.integers(0, 2), min_size=len(items), max_size=len(items)))
    expected = [WriteResult(item.index, each, None) for item, each in zip(items, nbytes, strict=True)]
    places = {(item.index.fqn, item.index.offset) for item in items}
    for plan in (SavePlan(items), travelled(packed_save_plan(SavePlan(items)))):
        for way in (lambda found: found, travelled):
            found = way(results_of(planned_items(plan), nbytes))
            told = reported([found, [WriteResult(MetadataIndex("more"), 3, None)]])
            assert {(key, offset) for offset, keys in told.items() for key in keys} == {*places, ("more", None)}
            assert list.__len__(found) == 0
            assert found == expected
            assert [each.index.index for each in found] == [each.index.index for each in expected]


LOOKS = [
    list, tuple, len, repr, bool, copy, deepcopy, lambda r: [*r], lambda r: [*reversed(r)], lambda r: r[1],
    lambda r: r[:1], lambda r: sorted(r, key=repr), lambda r: add(r, [3]), lambda r: add([3], r), lambda r: r * 2,
    lambda r: add(add([], r), r), lambda r: 3 in r, lambda r: r != [], lambda r: eq([], r), lambda r: r < [3],
    lambda r: r.pop(), lambda r: r.append(3), lambda r: r.extend(r), lambda r: r.index(r[1]), lambda r: r.copy(),
    lambda r: r.__iadd__([3]), lambda r: r.insert(0, 3), lambda r: r.reverse(), lambda r: r.__delitem__(0),
    lambda r: r.__setitem__(0, 3), lambda r: r.clear(), lambda r: r.sort(key=repr, reverse=True),
    lambda r: r.remove(r[0]), lambda r: r.count(r[0]), lambda r: pickle.loads(pickle.dumps(r)),
]  # fmt: skip


@pytest.mark.parametrize("look", LOOKS)
def test_results_that_are_made_late_are_a_list_to_everybody(look):
    plain = [WriteResult(MetadataIndex(name, torch.Size([0])), 8, None) for name in "ab"]
    late = results_of(planned_items(SavePlan([shard("a"), shard("b")])), [8, 8])
    assert isinstance(late, list)
    outcomes = []
    for results in (plain, late):
        try:
            outcomes.append((look(results), list(results)))
        except TypeError as error:
            outcomes.append((str(error), list(results)))
    assert outcomes[0] == outcomes[1]


def test_results_of_a_plan_are_short_and_none_is_made_on_the_way():
    """Made ones are objects that make the cycle collector run."""
    sent = packed_save_plan(SavePlan([shard(f"layer.{number}") for number in range(2000)]))
    plan = elsewhere(sent)
    found = results_of(planned_items(plan), [8] * 2000)
    before = len(gc.get_objects())
    arrived = elsewhere(found)
    assert len(reported([arrived])[torch.Size([0])]) == 2000
    assert len(gc.get_objects()) - before < 100
    assert "items" not in vars(plan)
    made = list(arrived)
    assert max(len(pickle.dumps(short)) for short in (arrived, PackedResults(made))) < len(pickle.dumps(made)) / 2


@ways
@settings(deadline=None)
@given(st.dictionaries(names, stored, max_size=4))
def test_metadata_arrive_as_they_were_sent(travelled, found):
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
    one, other = elsewhere(packed_save_plan(SavePlan([shard("a"), shard("b")]))).items
    one.tensor_data.properties.dtype, one.tensor_data.chunk.sizes = torch.int8, torch.Size([2])
    assert other == shard("b")
    value = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([1]), [])
    metadata = Metadata({"a": value, "b": replace(value, chunks=[])})
    pack_metadata(metadata)
    arrived = elsewhere(metadata).state_dict_metadata
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
@ways
def test_items_of_another_kind_travel_as_dcp_sends_them(travelled, items):
    found = travelled(packed_save_plan(SavePlan(items)))
    assert found == SavePlan(items)
    assert type(found) is SavePlan
    assert pickle.dumps(found.items) == pickle.dumps(here(items))


@dataclass(frozen=True)
class NamedResult(WriteResult):
    more: str = "of mine"


@pytest.mark.parametrize(
    "other",
    [
        NamedResult(MetadataIndex("b"), 8, None),
        WriteResult(NamedIndex("b"), 8, None),
        WriteResult(MetadataIndex("b"), 8, ["a list has no hash"]),
    ],
)
@ways
def test_results_of_another_kind_travel_as_dcp_sends_them(travelled, other):
    results = [WriteResult(MetadataIndex("a"), 8, None), other]
    assert travelled(PackedResults(results)) == results


def test_items_of_another_kind_have_results_too():
    plan = SavePlan([shard("a"), NamedItem(NamedIndex("b"), WriteItemType.BYTE_IO)])
    found = results_of(planned_items(plan), [4, 8])
    assert reported([found]) == {torch.Size([0]): {"a"}, None: {"b"}}
    assert found == [WriteResult(item.index, each, None) for item, each in zip(plan.items, [4, 8], strict=True)]


@pytest.mark.parametrize("kind", packed._COUNTS, ids=lambda kind: kind.__name__)
def test_a_dcp_whose_classes_have_more_fields_sends_them_itself(monkeypatch, kind):
    assert Items.of(WRITES, (shard("a"),)) is not None
    monkeypatch.setitem(packed._COUNTS, kind, len(fields(kind)) - 1)
    assert Items.of(WRITES, (shard("a"),)) is None
    assert elsewhere(packed_save_plan(SavePlan([shard("a")]))) == SavePlan([shard("a")])


def test_plans_of_other_classes_are_left_alone():
    plan = NamedPlan([shard("a")])
    assert packed_save_plan(plan) is plan


def test_a_plan_that_nobody_looks_into_is_passed_on_as_it_came():
    item = ReadItem(
        LoadItemType.BYTE_IO, MetadataIndex("a"), *([torch.Size([0]), MetadataIndex("a")] + [torch.Size([0])] * 2)
    )
    passing = elsewhere(packed_load_plan(LoadPlan([item])))
    assert "items" not in vars(passing)
    assert isinstance(passing, LoadPlan)
    assert packed_load_plan(passing) is passing
    arrived = elsewhere(passing)
    assert "items" not in vars(passing)
    assert arrived.items == [item]
    assert vars(arrived) == vars(LoadPlan([item]))
    assert type(arrived) is LoadPlan
    arrived.items.append(item)
    assert elsewhere(packed_load_plan(arrived)).items == [item, item]
    with pytest.raises(AttributeError):
        passing.more  # noqa: B018 - the access is the test


def test_a_plan_that_comes_back_has_the_items_that_were_sent():
    items = [shard("a"), shard("b")]
    sent = packed_save_plan(SavePlan(items))
    data = pickle.dumps(sent)
    items.append(shard("c"))
    back = pickle.loads(data)
    assert list(map(id, back.items)) == list(map(id, items[:2]))
    back.items.append(shard("d"))
    assert pickle.loads(data).items == items[:2]
    del sent, back
    assert pickle.loads(data).items == items[:2]  # nobody holds them: they are made again


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


def metadata_of(names):
    metadata = Metadata({name: BytesStorageMetadata() for name in names})
    pack_metadata(metadata)
    return metadata


@pytest.mark.parametrize(
    ("made", "plain"),
    [
        (packed_save_plan(SavePlan([shard("a")], usable=False)), SavePlan([shard("a")], usable=False)),
        (packed_load_plan(LoadPlan([of_one("a", "b")], 3)), LoadPlan([of_one("a", "b")], 3)),
        (metadata_of("ab"), Metadata({"a": BytesStorageMetadata(), "b": BytesStorageMetadata()})),
    ],
)
def test_what_travels_passes_for_dcps_own(made, plain):
    """On its way, as it arrives and when it is open: equal both ways, the same text, and copies that are DCP's own."""
    for way in (lambda: made, lambda: elsewhere(copy(made)), lambda: elsewhere(made)):
        assert way() == plain
        assert plain == way()
        assert way() == way()
        assert repr(way()) == repr(plain)
        assert way() != replace(plain, storage_data="other")
        assert type(copy(way())) is type(deepcopy(way())) is type(plain)
        assert copy(way()) == deepcopy(way()) == plain
        assert replace(way(), storage_data="other") == replace(plain, storage_data="other")


def test_a_deep_copy_shares_nothing_with_what_was_sent():
    sent = packed_save_plan(SavePlan([shard("a")]))
    for plan in (sent, here(sent)):
        deepcopy(plan).items[0].tensor_data.properties.dtype = torch.int8
        copy(plan).items.append(shard("b"))
        assert plan.items[0] == shard("a")


def test_items_are_replaced_in_a_plan_that_nobody_has_opened():
    """As a planner of a user does it in `create_global_plan`."""
    arrived = elsewhere(packed_save_plan(SavePlan([shard("a")], "data")))
    found = replace(arrived, items=[shard("b")])
    assert found == SavePlan([shard("b")], "data")
    assert type(found) is SavePlan
    assert arrived == SavePlan([shard("a")], "data")


def test_a_copy_of_metadata_leaves_the_short_form_to_dcp():
    metadata = metadata_of("ab")
    short = pickle.dumps(metadata_of("ab"))
    assert copy(metadata) == deepcopy(metadata) == metadata
    assert len(pickle.dumps(metadata)) == len(short) != len(pickle.dumps(metadata))
