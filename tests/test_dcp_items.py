"""Plans that DCP would not make itself: what a planner of the user's own may hand to our writer."""

import os
from dataclasses import replace
from functools import wraps
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402 - it needs torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner  # noqa: E402 - it needs torch
from torch.distributed.checkpoint.metadata import (  # noqa: E402 - it needs torch
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import find_state_dict_object  # noqa: E402 - it needs torch
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402 - it needs torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402 - it needs torch

from functional_ckpt.plan.layout import Layout  # noqa: E402 - torch is looked for first
from functional_ckpt.plan.manifest import ArrayEntry, Manifest  # noqa: E402 - torch is looked for first
from functional_ckpt.spec.array import ArraySpec  # noqa: E402 - torch is looked for first
from functional_ckpt.torch.dcp import items  # noqa: E402 - it needs torch
from functional_ckpt.torch.dcp.bridge import stored_metadata  # noqa: E402 - it needs torch
from functional_ckpt.torch.dcp.resolving import is_stock, local_tensor  # noqa: E402 - it needs torch
from functional_ckpt.torch.dcp.storage_writer import ZarrStorageReader, ZarrStorageWriter  # noqa: E402 - it needs torch

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_planner_that_changes_its_mind_is_told(tmp_path):
    class Fickle(DefaultSavePlanner):
        asked = 0

        def transform_object(self, write_item, object):
            self.asked += 1
            return object.to(torch.float64 if self.asked > 3 else torch.float32)

    state = {name: torch.ones(4) for name in "abc"}
    with pytest.raises(BaseException, match="another tensor than before"):
        dcp.save(state, storage_writer=ZarrStorageWriter(tmp_path / "c"), planner=Fickle())
    assert os.listdir(tmp_path) == []


def test_a_planner_that_gives_another_shape_than_it_planned_is_told(tmp_path):
    class Shorter(DefaultSavePlanner):
        def resolve_data(self, write_item):
            return super().resolve_data(write_item)[:2]

    writer = ZarrStorageWriter(tmp_path / "c")
    with pytest.raises(BaseException, match=r"ShapeError.*expected \(4,\), found \(2,\)"):
        dcp.save({"w": torch.ones(4)}, storage_writer=writer, planner=Shorter())


def test_a_planner_that_plans_a_tensor_twice_is_told(tmp_path):
    class Doubled(DefaultSavePlanner):
        def finish_plan(self, new_plan):
            plan = super().finish_plan(new_plan)
            return replace(plan, items=[plan.items[0], *plan.items])

    writer = ZarrStorageWriter(tmp_path / "c")
    with pytest.raises(BaseException, match="writes a whole tensor twice: key 'a'"):
        dcp.save({"a": torch.ones(4), "b": torch.zeros(4)}, storage_writer=writer, planner=Doubled())
    assert os.listdir(tmp_path) == []


def test_a_load_planner_that_gives_a_tensor_without_memory_is_told(tmp_path):
    class Nowhere(DefaultLoadPlanner):
        def resolve_tensor(self, read_item):
            return super().resolve_tensor(read_item).to("meta")

    dcp.save({"w": torch.ones(4)}, storage_writer=ZarrStorageWriter(tmp_path / "c"))
    with pytest.raises(BaseException, match="only a plain tensor can be filled: key 'w'"):
        dcp.load({"w": torch.zeros(4)}, storage_reader=ZarrStorageReader(tmp_path / "c"), planner=Nowhere())


def test_only_methods_that_dcp_wrote_are_stock(monkeypatch):
    names = ["resolve_data", "lookup_object"]

    class Own(DefaultSavePlanner):
        def lookup_object(self, index):
            return super().lookup_object(index)

    assert is_stock(DefaultSavePlanner(), DefaultSavePlanner, names)
    assert is_stock(Own(), DefaultSavePlanner, names[:1])
    assert not is_stock(Own(), DefaultSavePlanner, names)
    assert not is_stock(object(), DefaultSavePlanner, names)
    kept = DefaultSavePlanner.resolve_data
    monkeypatch.setattr(DefaultSavePlanner, "resolve_data", wraps(kept)(lambda *arguments: kept(*arguments)))
    assert not is_stock(DefaultSavePlanner(), DefaultSavePlanner, names)


@pytest.mark.parametrize("name", ["resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor"])
def test_a_load_planner_that_changes_a_step_is_asked(tmp_path, name):
    """The reader takes a short way with DCP's own planner only."""
    asked = []

    def own(self, *arguments):
        asked.append(name)
        return getattr(super(planner, self), name)(*arguments)

    planner = type("Planner", (DefaultLoadPlanner,), {name: own})
    dcp.save({"w": torch.arange(4.0)}, storage_writer=ZarrStorageWriter(tmp_path / "c"))
    state = {"w": torch.zeros(4, requires_grad=True)}
    dcp.load(state, storage_reader=ZarrStorageReader(tmp_path / "c"), planner=planner())
    assert asked
    assert torch.equal(state["w"], torch.arange(4.0))


steps = st.sampled_from(["a", "b", 0, 1])


@settings(deadline=None)
@given(
    st.lists(st.dictionaries(st.sampled_from("xyz"), st.lists(steps, min_size=1, max_size=3).map(tuple)), max_size=3)
)
def test_the_paths_of_a_state_that_is_saved_again_are_those_of_a_new_one(mappings):
    items._has_gaps.cache_clear()
    for mapped in mappings + mappings:
        assert items._has_gaps(tuple(mapped.values())) == items._has_gaps.__wrapped__(tuple(mapped.values()))
        found = items._tidy_paths(["x", "own"], mapped)
        with patch.object(items, "_has_gaps", items._has_gaps.__wrapped__):
            assert items._tidy_paths(["x", "own"], mapped) == found
        assert found["own"] == ("own",)


def test_the_local_part_of_a_dtensor_is_the_memory_that_dcp_finds():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        state = {
            "rows": DTensor.from_local(torch.ones(2, requires_grad=True), mesh, [Shard(0)]),
            "copies": DTensor.from_local(torch.ones(2), mesh, [Replicate()]),
            "sums": DTensor.from_local(torch.ones(2), mesh, [Partial()]),
            "plain": torch.ones(2),
        }
        found = {key: local_tensor(state, key) for key in (*state, "none")}
        for key in ("rows", "copies"):
            assert found[key].data_ptr() == find_state_dict_object(state, MetadataIndex(key)).data_ptr()
        assert found["sums"] is found["plain"] is found["none"] is None  # of sums DCP has an error
    finally:
        torch.distributed.destroy_process_group()


def test_metadata_that_were_read_share_nothing_that_can_be_changed():
    specs = [ArraySpec(key, (4,), "int8") for key in "ab"]
    layout = Layout("exclusive", (4,), (), "int8")
    manifest = Manifest(tuple(ArrayEntry(spec, layout, bytes(16)) for spec in specs))
    plain = TensorStorageMetadata(
        TensorProperties(torch.int8), torch.Size([4]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))]
    )
    for _ in range(2):
        found = stored_metadata(manifest, None).state_dict_metadata
        assert found == {"a": plain, "b": plain}
        found["a"].chunks[0].sizes = found["a"].properties.dtype = None
        assert found["b"] == plain
