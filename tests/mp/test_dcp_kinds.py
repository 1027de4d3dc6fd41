"""What else DCP is given: legacy and own tensor classes, planners of users, Megatron's API, parts of checkpoints."""

import os

import numpy as np
import pytest

import functional_ckpt as fc
from tests.mp import launch
from tests.mp.test_dcp import blank, check_same, dcp, placed, reader, size, writer
from tests.mp.test_dcp_training import model

torch = pytest.importorskip("torch")

from functional_ckpt.torch.dcp.planner import StrictLoadPlanner  # noqa: E402 - it needs torch

pytestmark = [pytest.mark.mp, pytest.mark.filterwarnings("ignore")]


def fsdp1(seed, mesh):
    """Return a model in FSDP's first form, trained a little: ShardedTensors, or DTensors where it gets a mesh."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(10, 13), torch.nn.ReLU(), torch.nn.Linear(13, 6))
    place = {"device_mesh": launch.mesh(size())} if mesh else {}
    net = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True, **place)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(launch.values(4, 10, seed=3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return net, optimizer


def app_state(net, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    return dict(zip(("model", "optim"), get_state_dict(net, optimizer), strict=True))


def full_state(net, optimizer, **options):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    return get_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True, **options))


def save_and_load_fsdp1(path, mesh):
    from torch.distributed.checkpoint.state_dict import set_state_dict

    one, two = fsdp1(1, mesh), fsdp1(2, mesh)
    dcp().save(app_state(*one), storage_writer=writer(path))
    found = app_state(*two)
    dcp().load(found, storage_reader=reader(path), planner=StrictLoadPlanner())
    set_state_dict(*two, model_state_dict=found["model"], optim_state_dict=found["optim"])
    check_same(full_state(*two), full_state(*one))
    return {key: value.cpu().numpy() for key, value in full_state(*one)[0].items()}


@pytest.mark.parametrize("mesh", [False, True], ids=["sharded tensors", "dtensors"])
def test_fsdp1(two, tmp_path, mesh):
    whole = two.run(save_and_load_fsdp1, str(tmp_path / "c"), mesh)[0]
    found = fc.open_checkpoint(tmp_path / "c")
    assert all(np.array_equal(found[f"model.{key}"][...], value) for key, value in whole.items())
    assert "optim.state.0.weight.exp_avg" in found


def save_from_one_rank(path):
    """Rank 0 alone has the data, as with ``full_state_dict`` and ``cpu_offload``."""
    net = model("fsdp", 1)
    state = dict(zip(("model", "optim"), full_state(*net, cpu_offload=True), strict=True))
    dcp().save(state, storage_writer=writer(path))
    return len(state["model"])


def test_a_state_that_one_rank_has(two, tmp_path):
    assert two.run(save_from_one_rank, str(tmp_path / "c")) == [4, 0]
    assert {"model.0.weight", "model.steps", "optim.state.0.weight.exp_avg"} <= {*fc.open_checkpoint(tmp_path / "c")}


def sharded(whole, *boxes):
    """Return a legacy ShardedTensor of which rank r holds ``boxes[r]``, pairs of offsets and sizes."""
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard

    (row, column), (rows, columns) = boxes[launch.rank()]
    local = whole[row : row + rows, column : column + columns].clone()
    return init_from_local_shards([Shard.from_tensor_and_offsets(local, [row, column], launch.rank())], *whole.shape)


def reshard_sharded_tensors(path):
    whole = launch.values(6, 4)
    rows, columns = (((0, 0), (4, 4)), ((4, 0), (2, 4))), (((0, 0), (6, 1)), ((0, 1), (6, 3)))
    dcp().save({"w": sharded(whole, *rows), "d": placed(whole, "S1")}, storage_writer=writer(path))
    found = {"w": sharded(torch.zeros(6, 4), *columns), "d": sharded(torch.zeros(6, 4), *rows)}
    dcp().load(found, storage_reader=reader(path), planner=StrictLoadPlanner())
    for key, boxes in (("w", columns), ("d", rows)):
        launch.same(found[key].local_shards()[0].tensor, sharded(whole, *boxes).local_shards()[0].tensor)
    found = {"w": placed(torch.zeros(6, 4), "S1"), "d": torch.zeros(6, 4)}
    dcp().load(found, storage_reader=reader(path), planner=StrictLoadPlanner())
    launch.same(found["w"], placed(whole, "S1"))
    launch.same(found["d"], whole)


def test_sharded_tensors_become_others_and_dtensors_and_plain_ones(two, tmp_path):
    two.run(reshard_sharded_tensors, str(tmp_path / "c"))


class Striped(torch.Tensor):
    """A tensor of which a rank holds every so-manieth row: the class of a user who knows DCP's protocol."""

    @staticmethod
    def __new__(cls, whole):
        found = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype)
        found.rows = {row: whole[row : row + 1].clone() for row in range(launch.rank(), len(whole), size())}
        return found

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)

    def __create_write_items__(self, fqn, _):
        from functional_ckpt.spec.box import Box
        from functional_ckpt.torch.dcp.bridge import write_item

        shape = tuple(self.shape)
        return [write_item(fqn, Box((r, 0), (r + 1, shape[1])), shape, self.dtype, n) for n, r in enumerate(self.rows)]

    def __create_chunk_list__(self):
        return [item.tensor_data.chunk for item in self.__create_write_items__("", None)]

    def __get_tensor_shard__(self, index):
        return self.rows[index.offset[0]]


def save_striped(path):
    whole = launch.values(7, 3)
    dcp().save({"w": Striped(whole)}, storage_writer=writer(path))
    found = Striped(torch.zeros(7, 3))
    dcp().load({"w": found}, storage_reader=reader(path), planner=StrictLoadPlanner())
    for row, values in found.rows.items():
        launch.same(values, whole[row : row + 1])


def test_classes_that_know_dcps_protocol(two, tmp_path):
    two.run(save_striped, str(tmp_path / "c"))
    assert np.array_equal(fc.open_checkpoint(tmp_path / "c")["w"][...], launch.values(7, 3).numpy())


def striped_dtensor():
    """Return a DTensor whose local part is in two pieces of the whole, and the whole."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    whole = launch.values(8, 3)
    local = torch.cat([half.chunk(size())[launch.rank()] for half in whole.chunk(2)])
    placement = _StridedShard(0, split_factor=2)
    return DTensor.from_local(local, launch.mesh(size()), [placement], run_check=False), whole


def save_in_pieces(path):
    tensor, whole = striped_dtensor()
    fc.save({"w": tensor}, path, policy=fc.SavePolicy(timeout_s=30))
    found = placed(torch.zeros(8, 3), "S0")
    dcp().load({"w": found}, storage_reader=reader(path))
    launch.same(found, placed(whole, "S0"))
    with pytest.raises(BaseException, match=r"overlap|another shape|validate global plan"):
        dcp().save({"w": tensor}, storage_writer=writer(f"{path}2"))


def test_dcp_refuses_a_strided_shard_in_pieces_that_our_own_save_takes(two, tmp_path):
    two.run(save_in_pieces, str(tmp_path / "c"))
    assert os.listdir(tmp_path) == ["c"]
    assert np.array_equal(fc.open_checkpoint(tmp_path / "c")["w"][...], launch.values(8, 3).numpy())


def megatron_state(fill):
    from functional_ckpt.torch.megatron.mapping import ShardedTensor

    whole = launch.values(6, 4) if fill else torch.zeros(6, 4)
    local = whole.chunk(size())[launch.rank()].clone()
    return {"w": ShardedTensor.from_rank_offsets("w", local, (0, launch.rank(), size())), "step": 3 if fill else 0}


def save_by_megatrons_api(path):
    from functional_ckpt.torch.megatron import serialization

    os.makedirs(path, exist_ok=True)
    serialization.save(megatron_state(True), path)
    found = {"w": placed(torch.zeros(6, 4), "S1")}
    dcp().load(found, storage_reader=reader(path))
    launch.same(found["w"], placed(launch.values(6, 4), "S1"))


def load_by_megatrons_api(path):
    from functional_ckpt.torch.megatron import serialization

    state = {"w": placed(launch.values(6, 4), "S1"), "step": 3}
    dcp().save(state, storage_writer=writer(path))
    fc.save(state, f"{path}2", policy=fc.SavePolicy(timeout_s=30))
    for each in (path, f"{path}2"):
        found = serialization.load({"w": megatron_state(False)["w"]}, each)
        launch.same(found["w"], launch.values(6, 4).chunk(size())[launch.rank()])
        assert found["step"] == 3


def test_megatrons_api_and_dcp_read_each_other(two, tmp_path):
    two.run(save_by_megatrons_api, str(tmp_path / "c"))
    two.run(load_by_megatrons_api, str(tmp_path / "d"))


def save_with_users_planners(path):
    """Save and load with the kinds of planner that DCP's documentation shows."""
    from dataclasses import replace

    from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

    class Renamed(DefaultSavePlanner):
        def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
            super().set_up_planner({f"foo_{k}": v for k, v in state_dict.items()}, storage_meta, is_coordinator)

    class Half(DefaultSavePlanner):
        def resolve_data(self, write_item):
            found = super().resolve_data(write_item)
            return found.half() if isinstance(found, torch.Tensor) else found

    class Extra(DefaultSavePlanner):
        def create_local_plan(self):
            return replace(super().create_local_plan(), planner_data=f"of rank {launch.rank()}")

        def create_global_plan(self, all_plans):
            plans, metadata = super().create_global_plan(all_plans)
            return plans, replace(metadata, planner_data=[plan.planner_data for plan in all_plans])

    class Fresh(DefaultLoadPlanner):
        """Gives a new tensor to fill, and puts it in its place."""

        def resolve_tensor(self, read_item):
            return torch.empty_like(super().resolve_tensor(read_item))

        def commit_tensor(self, read_item, tensor):
            super().resolve_tensor(read_item).copy_(tensor)

    whole = launch.values(6, 4)
    for name, planner in (("a", Renamed()), ("b", Half()), ("c", Extra(flatten_state_dict=False))):
        dcp().save({"w": placed(whole, "S0"), "n": 3}, storage_writer=writer(f"{path}/{name}"), planner=planner)
    found = {"foo_w": placed(torch.zeros(6, 4), "S1")}
    dcp().load(found, storage_reader=reader(f"{path}/a"), planner=Fresh())
    launch.same(found["foo_w"], placed(whole, "S1"))
    found = {"w": placed(torch.zeros(6, 4, dtype=torch.float16), "S1")}
    dcp().load(found, storage_reader=reader(f"{path}/b"))
    launch.same(found["w"], placed(whole.half(), "S1"))
    return reader(f"{path}/c").read_metadata().planner_data


def test_planners_of_users(two, tmp_path):
    assert two.run(save_with_users_planners, str(tmp_path)) == [["of rank 0", "of rank 1"]] * 2


def load_parts(path):
    """Load less than there is, into tensors without memory, without a template, by DCP's older functions."""
    from torch.distributed.checkpoint import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    whole = launch.values(6, 4)
    state = {"a": {"w": placed(whole, "S0"), "b": whole.clone()}, "n": 3}
    dcp().save_state_dict(state, storage_writer=writer(path))
    found = {"a": {"w": placed(torch.zeros(6, 4), "S1"), "new": torch.ones(2)}}
    dcp().load(found, storage_reader=reader(path), planner=DefaultLoadPlanner(allow_partial_load=True))
    launch.same(found["a"]["w"], placed(whole, "S1"))
    assert found["a"]["new"].tolist() == [1, 1]
    found = {"a": {"w": placed(torch.zeros(6, 4), "S1").to("meta"), "b": torch.empty(6, 4, device="meta")}}
    dcp().load(found, storage_reader=reader(path))
    launch.same(found["a"]["w"], placed(whole, "S1"))
    found = blank(state)
    dcp().load_state_dict(found, storage_reader=reader(path))
    check_same(found, state)
    found = _load_state_dict_from_keys({"a.b", "n"}, storage_reader=reader(path))
    check_same(found, {"a": {"b": whole}, "n": 3})


def test_parts_of_a_checkpoint(two, tmp_path):
    two.run(load_parts, str(tmp_path / "c"))


def fail_in_another_process(path):
    import multiprocessing

    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    multiprocessing.current_process()._config["daemon"] = False  # or it may have no children
    state = {"w": placed(launch.values(8, 4), "S0")}
    kind = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    failed = dcp().async_save(state, storage_writer=writer(f"{path}/file/c"), **kind)
    error = getattr(failed, "upload_completion", failed).exception(timeout=100)
    dist.barrier()
    again = dcp().async_save(state, storage_writer=writer(f"{path}/d"), **kind)
    getattr(again, "upload_completion", again).result(timeout=100)
    dist.barrier()
    return type(error).__name__, str(error)


def test_a_save_in_another_process_fails_on_all_ranks_and_the_next_one_does_not(two, tmp_path):
    (tmp_path / "file").write_text("no directory")
    for name, text in two.run(fail_in_another_process, str(tmp_path), limit_s=200.0):
        assert name == "CheckpointException"
        assert "StorageError" in text
    assert fc.verify(tmp_path / "d").ok


def save_cached_in_groups(path):
    """Save with cached plans after another storage, and with those of the world through a smaller group."""
    import torch.distributed as dist
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

    group = dist.new_group([0, 1])
    for number, (members, storage) in enumerate(
        [(None, FileSystemWriter), (None, writer), (group, writer), (None, writer)]
    ):
        state = {"w": launch.values(6, 4, seed=number), "n": number}
        options = {"storage_writer": storage(f"{path}{number}"), "process_group": members}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        if members is None:
            dcp().save(state, planner=planner, **options)
        elif launch.rank() < 2:
            with pytest.raises(BaseException, match="the ranks that save"):
                dcp().save(state, planner=planner, **options)
        dist.barrier()


def test_cached_plans_of_another_storage_are_used_and_of_another_group_refused(four, tmp_path):
    four.run(save_cached_in_groups, str(tmp_path / "c"))
    for number in (1, 3):
        found = fc.open_checkpoint(tmp_path / f"c{number}")
        assert np.array_equal(found["w"][...], launch.values(6, 4, seed=number).numpy())
        assert found.tree()["n"] == number
    assert sorted(os.listdir(tmp_path)) == ["c0", "c1", "c3"]
