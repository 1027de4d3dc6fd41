"""The contract that DCP has with a storage, as far as one process shows it, and plans from specs."""

import inspect
import os
import pickle
import weakref
from unittest.mock import patch

import numpy as np
import pytest

import functional_ckpt as fc
import functional_ckpt.torch
from functional_ckpt.errors import CastError, GapError, KeyMismatchError
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.sharding import ShardSpec

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from functional_ckpt.torch.dcp import (  # noqa: E402 - they need torch
    bridge,
    planner,
)
from functional_ckpt.torch.dcp import storage_writer as storage  # noqa: E402
from functional_ckpt.torch.host_view import TORCH_DTYPES  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def saved(path, state, **options):
    dcp.save(state, storage_writer=storage.ZarrStorageWriter(path, **options))
    return fc.open_checkpoint(path)


def test_the_interface_is_torchs_own():
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

    assert (storage.StorageReader, storage.StorageWriter, storage.WriteResult) == (
        StorageReader, StorageWriter, WriteResult,
    )  # fmt: skip
    assert functional_ckpt.torch.ZarrStorageWriter is storage.ZarrStorageWriter
    assert issubclass(storage.ZarrStorageWriter, StorageWriter)
    assert issubclass(storage.ZarrStorageReader, StorageReader)


@pytest.mark.parametrize(
    "function",
    [
        storage.ZarrStorageWriter.set_up_storage_writer,
        storage.ZarrStorageReader.set_up_storage_reader,
        storage.ZarrStorageReader.read_metadata,
    ],
)
def test_dcp_finds_the_names_that_it_looks_for(function):
    assert {"args", "kwargs"} <= inspect.signature(function).parameters.keys()


def test_writers_and_readers_are_true_and_travel_before_and_after_use(tmp_path):
    path = str(tmp_path / "c")
    writer, reader = storage.ZarrStorageWriter(path), storage.ZarrStorageReader(path)
    for _ in range(2):
        assert bool(writer)
        assert bool(reader)
        writer, reader = pickle.loads(pickle.dumps((writer, reader)))
        dcp.save({"w": torch.ones(2)}, storage_writer=writer)
        reader.read_metadata()
    assert (writer.checkpoint_id, reader.checkpoint_id) == (path, path)


def test_a_bare_reset_keeps_the_path_and_one_with_an_id_does_not(tmp_path):
    for each in (storage.ZarrStorageWriter("a"), storage.ZarrStorageReader("a")):
        each.reset()
        assert each.checkpoint_id == "a"
        each.reset(tmp_path / "b")
        assert each.checkpoint_id == str(tmp_path / "b")


@pytest.mark.parametrize(
    ("url", "ours"), [("/a", True), ("memory://a", True), ("file:///a", True), ("hdfs://a", False)]
)
def test_ids_that_have_a_store(url, ours):
    assert storage.ZarrStorageWriter.validate_checkpoint_id(url) is ours
    assert storage.ZarrStorageReader.validate_checkpoint_id(url) is ours


def test_older_torch_passes_no_keywords(tmp_path):
    writer = storage.ZarrStorageWriter(tmp_path / "c")
    writer.set_up_storage_writer(True)
    reader = storage.ZarrStorageReader("memory://none")
    with pytest.raises(fc.errors.NotACheckpointError):
        reader.read_metadata()
    with pytest.raises(fc.errors.NotACheckpointError):
        reader.read_metadata(rank=0)


def test_a_save_that_is_never_finished_is_removed_by_the_next_reset(tmp_path):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    plans, writer = DefaultSavePlanner(), storage.ZarrStorageWriter(tmp_path / "c")
    plans.set_up_planner({"w": torch.ones(2)}, None, True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(plans.create_local_plan())
    writer.write_data(writer.prepare_global_plan([plan])[0], plans).wait()
    assert len(os.listdir(tmp_path)) == 2
    writer.reset()
    assert os.listdir(tmp_path) == []


def test_finish_publishes_nothing_if_a_result_is_missing(tmp_path):
    write = storage.ZarrStorageWriter.write_data

    def forgetful(self, plan, planner):
        return bridge.done(write(self, plan, planner).value()[1:])

    with patch.object(storage.ZarrStorageWriter, "write_data", forgetful), pytest.raises(BaseException, match="Gap"):
        saved(tmp_path / "c", {"a": torch.ones(2), "b": torch.ones(2)})
    assert os.listdir(tmp_path) == []


def test_a_relative_path_is_where_the_writer_was_made_whatever_the_directory_is_later(tmp_path, monkeypatch):
    """A save in the background begins later."""
    (tmp_path / "later").mkdir()
    monkeypatch.chdir(tmp_path)
    writer, other = storage.ZarrStorageWriter("a"), storage.ZarrStorageWriter("none")
    other.path = "b"
    monkeypatch.chdir(tmp_path / "later")
    for each in (writer, pickle.loads(pickle.dumps(other))):
        dcp.save({"w": torch.ones(2)}, storage_writer=each)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "later"]
    assert os.listdir(tmp_path / "later") == []


def test_overwrite_false_refuses_and_true_replaces(tmp_path):
    path = tmp_path / "c"
    saved(path, {"w": torch.ones(2)})
    with pytest.raises(BaseException, match="AlreadyExistsError"):
        saved(path, {"w": torch.zeros(3)}, overwrite=False)
    assert saved(path, {"v": torch.zeros(3)}).keys() == {"v"}


def test_a_failed_overwrite_leaves_the_old_checkpoint(tmp_path):
    path = tmp_path / "c"
    saved(path, {"w": torch.ones(2)})
    with patch("functional_ckpt.store.files.FileStore.create", side_effect=OSError(28, "full")), \
            pytest.raises(BaseException, match="full"):  # fmt: skip
        saved(path, {"w": torch.zeros(2)})
    assert fc.open_checkpoint(path)["w"][:].tolist() == [1.0, 1.0]
    assert os.listdir(tmp_path) == ["c"]


def test_no_byte_of_a_checkpoint_is_a_pickle_of_plain_values(tmp_path):
    found = saved(tmp_path / "c", {"step": 3, "betas": (0.9, 0.95), "name": "a", "w": torch.ones(2)})
    assert list(found) == ["w"]
    assert found.tree()["betas"] == (0.9, 0.95)


def test_lists_that_lose_empty_dicts_are_saved(tmp_path):
    found = saved(tmp_path / "c", {"layers": [{}, {"w": torch.ones(2)}]})
    assert list(found) == ["layers.1.w"]


def test_every_data_type_and_shape_comes_back_bit_by_bit(tmp_path):
    bits = torch.arange(-64, 192).to(torch.uint8)
    state = {}
    for name, dtype in TORCH_DTYPES.items():
        of_bytes = bits % 2 == 1 if name == "bool" else bits.view(dtype)
        state[name] = {"many": of_bytes, "none": of_bytes[:0].reshape(3, 0), "one": of_bytes[5].clone()}
    assert len(state) >= 17
    saved(tmp_path / "c", state)
    found = {name: {key: torch.zeros_like(each) for key, each in each.items()} for name, each in state.items()}
    dcp.load(found, storage_reader=storage.ZarrStorageReader(tmp_path / "c"))
    for name, tensors in state.items():
        for key, tensor in tensors.items():
            assert found[name][key].dtype == tensor.dtype
            assert found[name][key].shape == tensor.shape
            assert torch.equal(words(found[name][key]), words(tensor))


def words(tensor):
    return tensor.reshape(-1).view(torch.uint8)


AWKWARD = ["", ".", "..", "w", "w.weight", "w/weight", "ß∂", "k" * 300, "zarr.json", "manifest.json", "Case", "case",
           "a b", "%41", "A", "c", "c/0", "__0_0.distcp", ".metadata", "\n", "~"]  # fmt: skip


@pytest.mark.parametrize("flatten", [True, False])
def test_keys_that_are_hard_to_name_files_after(tmp_path, flatten):
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

    state = {key: torch.full((2,), number) for number, key in enumerate(AWKWARD)}
    writer = storage.ZarrStorageWriter(tmp_path / "c")
    dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=flatten))
    found = {key: torch.zeros(2, dtype=torch.int64) for key in AWKWARD}
    reader = storage.ZarrStorageReader(tmp_path / "c")
    dcp.load(found, storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=flatten))
    assert [value.tolist() for value in found.values()] == [[number] * 2 for number in range(len(AWKWARD))]


class Growing:
    """A planner that makes its tensors when it is asked for them, and counts those that are alive."""

    alive = most = 0

    @classmethod
    def of(cls, default):
        class Planner(default):
            def transform_object(self, write_item, object):
                found = super().transform_object(write_item, object)
                return cls.made(found * 2) if isinstance(found, torch.Tensor) else found

        return Planner()

    @classmethod
    def made(cls, tensor):
        cls.alive += 1
        cls.most = max(cls.most, cls.alive)
        weakref.finalize(tensor.untyped_storage(), cls.gone)
        return tensor

    @classmethod
    def gone(cls):
        cls.alive -= 1


@pytest.mark.parametrize("chunked", [False, True])
def test_tensors_that_a_planner_makes_are_held_one_after_the_other(tmp_path, chunked):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    Growing.alive = Growing.most = 0
    layout = fc.LayoutPolicy(target_chunk_nbytes=2**18, min_chunk_nbytes=0) if chunked else fc.LayoutPolicy()
    writer = storage.ZarrStorageWriter(tmp_path / "c", policy=fc.SavePolicy(layout=layout))
    state = {f"w{number}": torch.full((2**18,), float(number)) for number in range(24)}
    dcp.save(state, storage_writer=writer, planner=Growing.of(DefaultSavePlanner))
    found = fc.open_checkpoint(tmp_path / "c")
    assert all(found[f"w{number}"][-1] == 2 * number for number in range(24))
    # What is kept, and what each thread is writing; threads are no more than 8.
    assert Growing.most <= 2 + 9
    assert Growing.alive == 0


def test_every_shard_needs_a_result(tmp_path):
    w = ArraySpec("w", (4,), "float32")
    shards = [ShardSpec(w, Box((0,), (2,))), ShardSpec(w, Box((2,), (4,)))]
    plan, writer = planner.local_save_plan(shards), storage.ZarrStorageWriter(tmp_path / "c")
    metadata = planner.global_save_plan([plan])[1]
    metadata.state_dict_metadata["w"].chunks = [bridge.chunk_of(shard.box) for shard in shards]

    class Ones:
        def resolve_data(self, item):
            return torch.ones(2)

    writer.set_up_storage_writer(True)
    results = writer.write_data(writer.prepare_global_plan([plan])[0], Ones()).value()
    with pytest.raises(GapError, match=r"'w'.*offset \(2,\)"):
        writer.finish(metadata, [results[:1]])
    assert os.listdir(tmp_path) == []


def test_data_of_a_planner_comes_back_if_it_is_plain(tmp_path):
    plans, writer = planner.local_save_plan([], ["n"]), storage.ZarrStorageWriter(tmp_path / "c")

    class Three:
        def resolve_data(self, item):
            return bridge.Streamed(3)

    for data, kept in (({"mine": (1, "a", None)}, {"mine": (1, "a", None)}), (None, {"n": ("n",)}), (object(), None)):
        metadata = planner.global_save_plan([plans])[1]
        metadata.planner_data = data
        writer.set_up_storage_writer(True)
        results = writer.write_data(writer.prepare_global_plan([plans])[0], Three()).value()
        if kept is None:
            with pytest.raises(fc.errors.UnsupportedLeafError, match="not plain"):
                writer.finish(metadata, [results])
            continue
        writer.finish(metadata, [results])
        found = storage.ZarrStorageReader(tmp_path / "c").read_metadata()
        assert found.planner_data == kept


def test_loading_into_strided_memory(tmp_path):
    saved(tmp_path / "c", {"w": torch.arange(12.0).reshape(3, 4)})
    found = {"w": torch.zeros(4, 3).t()}
    dcp.load(found, storage_reader=storage.ZarrStorageReader(tmp_path / "c"))
    assert torch.equal(found["w"], torch.arange(12.0).reshape(3, 4))


def test_the_checkpoint_opens_without_a_template(tmp_path):
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state = {"a": {"w": torch.ones(2)}, "l": [torch.zeros(1), 3]}
    saved(tmp_path / "c", state)
    found = {}
    _load_state_dict(
        found, storage.ZarrStorageReader(tmp_path / "c"), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    assert torch.equal(found["a"]["w"], state["a"]["w"])
    assert found["l"][1] == 3


W = ArraySpec("w", (8, 4), "float32")


def test_global_plans_write_every_region_once_and_spread_the_bytes():
    shards = [ShardSpec(W, Box((row, 0), (row + 2, 4))) for row in range(0, 8, 2)]
    mine = planner.local_save_plan(shards, ["step"])
    plans, metadata = planner.global_save_plan([mine, mine])
    written = [item.index for plan in plans for item in plan.items]
    assert len(written) == len(set(written)) == 5
    assert [sum(not bridge.is_bytes(item) for item in plan.items) for plan in plans] == [2, 2]
    assert len(metadata.state_dict_metadata["w"].chunks) == 1


def test_regions_with_one_offset_but_other_sizes_are_two():
    one, other = (planner.local_save_plan([ShardSpec(W, Box((0, 0), stop))]) for stop in ((2, 4), (4, 4)))
    plans, _ = planner.global_save_plan([one, other])
    assert [len(plan.items) for plan in plans] == [1, 1]


def test_flat_shards_become_boxes():
    plan = planner.local_save_plan([ShardSpec(W, W.box, flat=(2, 14))])
    assert sum(bridge.written_box(item)[1].size for item in plan.items) == 12


def test_load_plans_name_places_in_the_whole_array(tmp_path):
    entries = saved(tmp_path / "c", {"w": torch.zeros(8, 4)}).manifest.by_key
    plan = planner.load_plan([ShardSpec(W, Box((2, 0), (5, 4)))], entries)
    assert [bridge.read_box(item) for item in plan.items] == [Box((2, 0), (5, 4))]
    with pytest.raises(KeyMismatchError):
        planner.load_plan([ShardSpec(ArraySpec("v", (1,), "int8"), Box((0,), (1,)))], entries)


def strictly(path, found, **policy):
    chosen = fc.LoadPolicy(**policy)
    reader = storage.ZarrStorageReader(path, policy=chosen)
    dcp.load(found, storage_reader=reader, planner=planner.StrictLoadPlanner(chosen))
    return found


def test_the_strict_planner_and_its_opt_outs(tmp_path):
    path = tmp_path / "c"
    saved(path, {"w": torch.ones(2), "n": 1, "empty": {}, "none": []})
    fc.save({"w": torch.ones(2), "n": 1, "empty": {}, "none": []}, tmp_path / "d")
    for each in (path, tmp_path / "d"):
        assert strictly(each, {"w": torch.zeros(2), "n": 0, "none": 0})["n"] == 1
        for wanted, error in (
            ({"w": torch.zeros(2)}, KeyMismatchError),
            ({"w": torch.zeros(2), "n": 0, "none": 0, "x": torch.zeros(1)}, KeyMismatchError),
            ({"w": torch.zeros(2, dtype=torch.int8), "n": 0, "none": 0}, CastError),
            ({"w": torch.zeros(2), "n": torch.zeros(3), "none": 0}, GapError),
        ):
            with pytest.raises(BaseException, match=error.__name__):
                strictly(each, wanted)
        half = {"w": torch.zeros(2, dtype=torch.float64), "x": torch.zeros(1)}
        strictly(each, half, strict="ignore", cast="same_kind")
        assert half["w"].tolist() == [1.0, 1.0]


def test_numbers_of_chunks_published_do_not_grow(tmp_path):
    policy = fc.SavePolicy(layout=fc.LayoutPolicy(target_chunk_nbytes=64, min_chunk_nbytes=0))
    found = saved(tmp_path / "c", {"w": torch.arange(1024.0)}, policy=policy)
    assert found["w"].entry.grid.size > 10
    metadata = storage.ZarrStorageReader(tmp_path / "c").read_metadata()
    assert len(metadata.state_dict_metadata["w"].chunks) == 1
    assert np.array_equal(found["w"][:], np.arange(1024.0))
