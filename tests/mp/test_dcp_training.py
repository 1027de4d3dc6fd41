"""What people train with - FSDP2, tensor parallelism, FSDP1, optimizers - over our storage, saved in every DCP way."""

import contextlib
import os

import numpy as np
import pytest

import functional_ckpt as fc
from tests.mp import launch
from tests.mp.test_dcp import EXCLUSIVE, blank, check_same, dcp, placed, reader, size, writer

pytestmark = [pytest.mark.mp, pytest.mark.filterwarnings("ignore")]


def model(kind, seed):
    """Return a trained model and its optimizer."""
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(10, 14), torch.nn.ReLU(), torch.nn.Linear(14, 6, bias=False))
    net.register_buffer("steps", torch.tensor(seed))
    if kind == "fsdp":
        fully_shard(net, mesh=launch.mesh(size()))
    if kind == "fsdp x tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = launch.mesh(2, size() // 2, names=("data", "model"))
        parallelize_module(net, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(net, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 / (seed + 1))
    for _ in range(2):
        net(launch.values(4, 10, seed=3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


class App:
    """Model and optimizer as one Stateful."""

    def __init__(self, kind, seed):
        self.model, self.optimizer = model(kind, seed)

    def state_dict(self):
        from torch.distributed.checkpoint.state_dict import get_state_dict

        return dict(zip(("model", "optim"), get_state_dict(self.model, self.optimizer), strict=True))

    def load_state_dict(self, found):
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(self.model, self.optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])

    def full(self):
        """Return everything, whole."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        return get_state_dict(self.model, self.optimizer, options=StateDictOptions(full_state_dict=True))


def save_app(path, kind):
    dcp().save({"app": App(kind, 1), "epoch": 7}, storage_writer=writer(path))


def load_app(path, saved, kind):
    other = App(kind, 2)
    found = {"app": other, "epoch": 0}
    dcp().load(found, storage_reader=reader(path))
    assert found["epoch"] == 7
    check_same(other.full(), App(saved, 1).full())


@pytest.mark.parametrize("kind", ["plain", "fsdp", "fsdp x tp"])
def test_model_and_optimizer_come_back(four, tmp_path, kind):
    path = str(tmp_path / "c")
    four.run(save_app, path, kind)
    four.run(load_app, path, kind, kind)


def test_fsdp_state_loads_on_fewer_ranks(four, two, tmp_path):
    path = str(tmp_path / "c")
    four.run(save_app, path, "fsdp")
    whole = {key: array[...] for key, array in fc.open_checkpoint(path).items()}
    two.run(resave_app, path)
    again = fc.open_checkpoint(path)
    assert again.keys() == whole.keys()
    assert all(np.array_equal(again[key][...], value) for key, value in whole.items())


def resave_app(path):
    app = App("fsdp", 2)
    dcp().load({"app": app}, storage_reader=reader(path))
    dcp().save({"app": app, "epoch": 7}, storage_writer=writer(path))


def save_legacy(path):
    """Save a legacy ShardedTensor, as FSDP1 makes them, and a tensor with several shards per rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard

    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = launch.values(4 * ranks, 3)

    def sharded(fill):
        local = whole[4 * rank : 4 * rank + 4].clone() if fill else torch.zeros(4, 3)
        found = init_from_local_shards([Shard.from_tensor_and_offsets(local, [4 * rank, 0], rank)], 4 * ranks, 3)
        assert isinstance(found, ShardedTensor)
        return found, local

    dcp().save({"w": sharded(True)[0]}, storage_writer=writer(path))
    blank_one, local = sharded(False)
    dcp().load({"w": blank_one}, storage_reader=reader(path))
    launch.same(local, whole[4 * rank : 4 * rank + 4])


def test_legacy_sharded_tensors(four, tmp_path):
    four.run(save_legacy, str(tmp_path / "c"))
    assert np.array_equal(fc.open_checkpoint(tmp_path / "c")["w"][...], launch.values(16, 3).numpy())


def save_wrapper(path):
    """Save a tensor of which every rank holds two shards."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    rank = dist.get_rank()
    whole = launch.values(16, 3)

    def wrapped(fill):
        offsets = [(4 * rank, 0), (4 * rank + 2, 0)]
        parts = [whole[row : row + 2].clone() if fill else torch.zeros(2, 3) for row, _ in offsets]
        local = LocalShardsWrapper(local_shards=parts, local_offsets=offsets)
        tensor = DTensor.from_local(
            local, launch.mesh(4), [Shard(0)], run_check=False, shape=torch.Size([16, 3]), stride=(3, 1)
        )
        return tensor, parts

    dcp().save({"w": wrapped(True)[0]}, storage_writer=writer(path))
    tensor, parts = wrapped(False)
    dcp().load({"w": tensor}, storage_reader=reader(path))
    launch.same(torch.cat(parts), whole[4 * rank : 4 * rank + 4])


def test_several_shards_per_rank(four, tmp_path):
    four.run(save_wrapper, str(tmp_path / "c"))


def save_sub_mesh(path):
    """Save a tensor of ranks 1 and 2 only, and keys that only some ranks have."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", [1, 2])
    whole = launch.values(5, 2)
    local = {1: whole[:3], 2: whole[3:]}.get(rank, torch.empty(0, 2))
    tensor = DTensor.from_local(local.clone(), mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(2, 1))
    dcp().save({"w": tensor, f"only {rank}": torch.full((2,), rank)}, storage_writer=writer(path))
    found = DTensor.from_local(
        torch.zeros_like(local), mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(2, 1)
    )
    dcp().load({"w": found} if rank in (1, 2) else {}, storage_reader=reader(path))
    launch.same(found.to_local(), tensor.to_local())


def test_a_tensor_of_some_ranks(four, tmp_path):
    four.run(save_sub_mesh, str(tmp_path / "c"))
    found = fc.open_checkpoint(tmp_path / "c")
    assert found["only 3"][:].tolist() == [3, 3]
    assert np.array_equal(found["w"][...], launch.values(5, 2).numpy())


def save_in_background(path, how):
    import multiprocessing

    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    from functional_ckpt.torch import install

    state = {"w": placed(launch.values(512, 64), "S0"), "n": 5, "plain": torch.ones(3)}
    kind = AsyncCheckpointerType.PROCESS if how == "process" else AsyncCheckpointerType.THREAD
    one = writer(path)
    multiprocessing.current_process()._config["daemon"] = False  # or it may have no children
    for number in range(3):
        with install() if number == 2 else contextlib.nullcontext():  # the program names no storage then
            pending = dcp().async_save(
                state, checkpoint_id=f"{path}{number}", storage_writer=None if number == 2 else one,
                async_checkpointer_type=kind,
            )  # fmt: skip
            pending = getattr(pending, "upload_completion", pending)
            pending.result(timeout=100)
        dist.barrier()
    found = blank(state)
    dcp().load(found, storage_reader=reader(f"{path}1"))
    check_same(found, state)


@pytest.mark.parametrize("how", ["thread", "process"])
def test_async_save(two, tmp_path, how):
    path = str(tmp_path / "c")
    two.run(save_in_background, path, how, limit_s=200.0)
    assert sorted(os.listdir(tmp_path)) == ["c0", "c1", "c2"]
    assert all(fc.verify(f"{path}{number}").ok for number in range(3))


def save_in_background_and_change(path):
    import torch.distributed as dist

    tensor = placed(launch.values(512, 64), "S0")
    pending = dcp().async_save({"w": tensor}, storage_writer=writer(path))
    tensor.to_local().zero_()
    pending.result(timeout=60)
    dist.barrier()


def test_async_save_saves_what_was_there_when_it_was_called(two, tmp_path):
    two.run(save_in_background_and_change, str(tmp_path / "c"))
    assert np.array_equal(fc.open_checkpoint(tmp_path / "c")["w"][...], launch.values(512, 64).numpy())


def fail_in_background(path):
    from unittest.mock import patch

    import torch.distributed as dist

    from functional_ckpt.store.files import FileStore

    def create(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    state = {"w": placed(launch.values(4096, 64), "S0")}
    one = writer(path, policy=EXCLUSIVE)
    if launch.rank() == 1:
        with patch.object(FileStore, "create", create):
            error = dcp().async_save(state, storage_writer=one).exception(timeout=60)
    else:
        error = dcp().async_save(state, storage_writer=one).exception(timeout=60)
    dist.barrier()
    return type(error).__name__


def test_async_save_fails_on_all_ranks(two, tmp_path):
    found = two.run(fail_in_background, str(tmp_path / "c"))
    assert found == ["CheckpointException"] * 2
    assert os.listdir(tmp_path) == []


def save_without_collectives(path, state="equal"):
    import torch

    value = launch.rank() if state == "different" else 1
    found = {"w": placed(launch.values(10, 4), "S0"), "copy": torch.full((2,), value), "n": 3}
    dcp().save(found, storage_writer=writer(path), use_collectives=False)


def load_rows(path):
    import torch

    found = {"w": placed(torch.zeros(10, 4), "S1"), "copy": torch.zeros(2, dtype=torch.int64), "n": 0}
    dcp().load(found, storage_reader=reader(path))
    launch.same(found["w"], placed(launch.values(10, 4), "S1"))
    assert found["n"] == 3


def test_a_save_without_dcps_collectives_stays_reshardable(four, two, tmp_path):
    path = str(tmp_path / "c")
    four.run(save_without_collectives, path)
    two.run(load_rows, path)
    assert fc.verify(path).ok
    two.run(save_without_collectives, f"{path}2")
    assert grids(path) == grids(f"{path}2")
    outcomes = four.outcomes(save_without_collectives, path, "different")
    assert all("ReplicaError" in outcome.text for outcome in outcomes)
    four.run(load_rows, path)
    assert sorted(os.listdir(tmp_path)) == ["c", "c2"]


def grids(path):
    return {key: array.chunks for key, array in fc.open_checkpoint(path).items()}
