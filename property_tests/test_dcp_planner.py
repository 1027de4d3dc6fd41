"""What DCP plans from specs, from what it reads of a checkpoint, and what our storage makes of any plan."""

import pickle
import uuid

import attrs
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from functional_ckpt.run.policy import SavePolicy
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.sharding import ShardSpec, World, fragments
from functional_ckpt.testing import laws, model
from functional_ckpt.testing import strategies as fst

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.checkpoint")

from functional_ckpt.torch.dcp import (  # noqa: E402
    bridge,
    planner,
)
from functional_ckpt.torch.dcp.items import captured_plan  # noqa: E402
from functional_ckpt.torch.dcp.storage_writer import ZarrStorageReader, ZarrStorageWriter  # noqa: E402
from functional_ckpt.torch.host_view import TORCH_DTYPES, host_view, to_torch  # noqa: E402

W = ArraySpec("w", (4, 3), "int16")
EMPTY = World([[], [ShardSpec(ArraySpec("w", (0, 3), "int8"), Box((0, 0), (0, 3)))]])
COPIES = World([[ShardSpec(W, W.box)], [ShardSpec(W, W.box, 1)]])
# Each example writes and reads.
FEWER = settings(max_examples=settings.default.max_examples // 3)


def local_plans(world):
    return [planner.local_save_plan(shards) for shards in world.ranks]


def boxes_of(plans, key):
    items = [item for plan in plans for item in plan.items if item.index.fqn == key]
    return [bridge.written_box(item)[1] for item in items]


def specs_of(world):
    return {shard.key: shard.array for shards in world.ranks for shard in shards}


@given(fst.worlds())
@example(EMPTY)
@example(COPIES)
def test_local_plans_say_what_the_ranks_hold(world):
    """Items are the fragments of the shards, in their order; an array without elements is not forgotten."""
    for shards, plan in zip(world.ranks, local_plans(world), strict=True):
        expected = [(shard.array, f.box) for shard in shards for f in fragments(shard)]
        found = []
        for item in plan.items:
            shape, box = bridge.written_box(item)
            assert tuple(item.index.offset) == box.start
            spec = ArraySpec(item.index.fqn, shape, str(item.tensor_data.properties.dtype).removeprefix("torch."))
            if box.size:
                found.append((spec, box))
            else:
                assert spec.nbytes == 0
        assert found == expected
        assert {item.index.fqn for item in plan.items} >= {s.key for s in shards if not s.array.nbytes}
        hints = [(item.index.fqn, item.index.index) for item in plan.items]
        assert len(hints) == len(set(hints))


@given(fst.worlds())
@example(EMPTY)
@example(COPIES)
def test_global_plans_write_every_element_once_from_a_rank_that_has_it(world):
    local = local_plans(world)
    plans, metadata = planner.global_save_plan(local)
    for mine, kept in zip(local, plans, strict=True):
        assert all(item in mine.items for item in kept.items)
    specs = specs_of(world)
    assert metadata.state_dict_metadata.keys() == specs.keys()
    for key, spec in specs.items():
        written = [box for box in boxes_of(plans, key) if box.size]
        laws.check_tiles({0: [ShardSpec(spec, box, number) for number, box in enumerate(written)]})
        assert model.counts(spec.shape, written).max(initial=1) == 1
        stored = metadata.state_dict_metadata[key]
        assert stored.properties.dtype == TORCH_DTYPES[spec.dtype]
        assert tuple(stored.size) == spec.shape
        assert stored.chunks == [bridge.chunk_of(spec.box)]


@given(fst.worlds(), st.integers(1, 3))
def test_metadata_does_not_depend_on_who_saves(world, spare):
    together = planner.local_save_plan([shard for shards in world.ranks for shard in shards])
    of_one = planner.global_save_plan([together])[1]
    of_many = planner.global_save_plan([*local_plans(world), *(bridge.SavePlan([]) for _ in range(spare))])[1]
    assert of_one.state_dict_metadata == of_many.state_dict_metadata


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 4))
def test_copies_are_shared_out_by_their_bytes(extents, ranks):
    """No rank writes more than the average and the largest copy, whatever their order."""
    shards = [ShardSpec(spec, spec.box) for spec in (ArraySpec(f"{n}", (e,), "int8") for n, e in enumerate(extents))]
    plans, _ = planner.global_save_plan([planner.local_save_plan(shards)] * ranks)
    loads = [sum(bridge.written_box(item)[1].size for item in plan.items) for plan in plans]
    assert sum(loads) == sum(extents)
    assert max(loads) <= sum(extents) / ranks + max(extents, default=0)


@st.composite
def resharded(draw):
    """An array with data, a world that saves it and one that loads it."""
    spec = draw(fst.array_specs())
    return draw(fst.arrays(spec)), spec, draw(fst.shardings(spec)), draw(fst.shardings(spec))


def written(array, spec, world, policy):
    """Save `world` from one process through the writer; return the path."""
    path = f"memory://{uuid.uuid4()}"
    writer = ZarrStorageWriter(path, policy=policy)
    writer.set_up_storage_writer(True)
    local = [writer.prepare_local_plan(plan) for plan in local_plans(world)]
    plans, metadata = planner.global_save_plan(local)
    merged = bridge.SavePlan([item for plan in plans for item in plan.items])
    (merged,) = writer.prepare_global_plan([merged])
    results = writer.write_data(merged, Given(array)).value()
    assert sum(result.size_in_bytes for result in results) == spec.nbytes
    writer.finish(metadata, [results])
    return path


class Given:
    """A planner that knows one array."""

    def __init__(self, array):
        self.array = array

    def resolve_data(self, item):
        return tensor_of(self.array[(*bridge.written_box(item)[1].slices, ...)])


def tensor_of(part):
    return to_torch(np.array(part), part.dtype.name)


class Wanted:
    """A planner that fills boxes of an array."""

    def __init__(self, array, targets):
        self.targets = [tensor_of(np.zeros_like(array[(*box.slices, ...)])) for box in targets]
        self.boxes = targets
        self.committed = []

    def lookup_tensor(self, index):
        return self.targets[index.index]

    def resolve_tensor(self, item):
        target = self.targets[item.dest_index.index]
        for axis, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(axis, start, length)
        return target

    def commit_tensor(self, item, tensor):
        self.committed.append(item)


FLAT = World([[ShardSpec(W, W.box, flat=(0, 5))], [ShardSpec(W, W.box, flat=(5, 12))]])


@FEWER
@given(resharded(), fst.policies())
@example((model.positions(W), W, COPIES, FLAT), SavePolicy())
def test_what_any_plan_writes_any_plan_reads(case, policy):
    array, spec, source, target = case
    path = written(array, spec, source, attrs.evolve(policy, object_codec="torch", commit="auto"))
    reader = ZarrStorageReader(path)
    metadata = reader.read_metadata()
    stored = metadata.state_dict_metadata[spec.key]
    assert stored.chunks == [bridge.chunk_of(spec.box)]
    assert stored.properties.dtype == TORCH_DTYPES[spec.dtype]
    entries = reader._opened.manifest.by_key
    for shards in target.ranks:
        plan = planner.load_plan(shards, entries)
        check_covers(plan, shards)
        for shard in shards:
            places = [f.box for f in fragments(shard)]
            items = planner.load_plan([shard], entries).items
            assert [item.dest_index.index for item in items] == list(range(len(places)))
            wanted = Wanted(array, places)
            reader.read_metadata()
            reader.read_data(bridge.LoadPlan(items), wanted).wait()
            found = [host_view(tensor, spec.dtype).reshape(-1) for tensor in wanted.targets]
            joined = np.concatenate([np.empty(0, array.dtype), *found])
            assert model.bits(joined) == model.bits(model.view(shard, array))
            assert wanted.committed == items


def check_covers(plan, shards):
    """Check that the items fill every element of every shard once, each from its own place."""
    assert len(plan.items) == sum(len(fragments(shard)) for shard in shards)
    expected = sorted((f.box.start, f.box.shape) for shard in shards for f in fragments(shard))
    found = []
    for item in plan.items:
        box = bridge.read_box(item)
        target = Box.from_shape(item.lengths, item.dest_index.offset).shift(item.dest_offsets)
        assert target == box
        found.append((box.start, box.shape))
    assert sorted(found) == expected


@given(resharded())
def test_dcps_own_planner_reads_one_box_for_each_that_it_wants(case):
    """However many ranks have saved: what we publish has one chunk per tensor."""
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    _, spec, source, target = case
    stored = planner.global_save_plan(local_plans(source))[1].state_dict_metadata[spec.key]
    for shard in (shard for shards in target.ranks for shard in shards):
        for fragment in fragments(shard):
            (item,) = create_read_items_for_chunk_list(spec.key, stored, [bridge.chunk_of(fragment.box)])
            assert bridge.read_box(item) == fragment.box
            assert item == bridge.read_item(spec.key, fragment.box, fragment.box, spec.box)


@given(resharded())
def test_what_is_captured_is_what_was_planned(case):
    array, _, source, _ = case
    for number, shards in enumerate(source.ranks):
        plan = planner.local_save_plan(shards)
        plan = pickle.loads(pickle.dumps(plan))
        held, results = captured_plan(plan, Given(array), number, SavePolicy(), "", False)
        assert {leaf.spec for leaf in held.common.arrays} == {shard.array for shard in shards if len(plan.items)}
        assert [shard.box for shard in held.common.shards] == [bridge.written_box(item)[1] for item in plan.items]
        sizes = [bridge.written_box(item)[1].size * array.itemsize for item in plan.items]
        assert results == list(map(bridge.write_result, plan.items, sizes))
        for shard, buffer in zip(held.common.shards, held.buffers, strict=True):
            values = buffer.get(shard.box.shape, 0, (...,))
            assert model.bits(values) == model.bits(array[(*shard.box.slices, ...)])


@given(fst.array_specs(), st.data())
def test_items_say_what_they_were_made_of(spec, data):
    whole = spec.box
    target = data.draw(fst.boxes(spec.shape))
    inner = data.draw(fst.boxes(target.shape)).shift(target.start)
    item = bridge.write_item(spec.key, target, spec.shape, TORCH_DTYPES[spec.dtype], None)
    assert bridge.written_box(pickle.loads(pickle.dumps(item))) == (spec.shape, target)
    read = bridge.read_item(spec.key, inner, target, whole)
    assert bridge.read_box(pickle.loads(pickle.dumps(read))) == inner
    assert tuple(read.dest_offsets) == inner.relative_to(target).start
