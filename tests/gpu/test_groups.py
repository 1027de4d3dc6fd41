"""Several ranks, and NCCL: FSDP2 and DTensors on a CUDA device, loaded on the host by other numbers of ranks."""

import os

import pytest

import functional_ckpt as fc
from functional_ckpt.errors import CheckpointError
from tests.mp import launch
from tests.mp.test_training import WIDTH, check_equal, model_of, optimizer_of, sharded, state_of

pytestmark = [pytest.mark.mp, pytest.mark.filterwarnings("ignore")]
FAST = fc.SavePolicy(durability="none", timeout_s=30)


@pytest.fixture(scope="module")
def alone():
    """One rank, whose default group is NCCL's and nothing else."""
    ranks = launch.Ranks(1)
    ranks.run(_join_nccl)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def two():
    """Two ranks, of gloo, that share one device."""
    ranks = launch.Ranks(2)
    yield ranks
    ranks.close()


def _join_nccl():
    import torch
    import torch.distributed as dist

    dist.destroy_process_group()
    launch.meshes.clear()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def on_cuda(model):
    """Return the model under FSDP2, on the device."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = launch.meshes.setdefault("cuda", init_device_mesh("cuda", (dist.get_world_size(),)))
    model = model.cuda()
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def on_host(model):
    return sharded(model)


def step(model, optimizer, seed):
    device = next(model.parameters()).device
    model(launch.values(4, WIDTH, seed=seed).to(device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(state):
    """Return all tensors of a state on the host, whole, by key."""
    from torch.distributed.tensor import DTensor

    from functional_ckpt.spec.tree import flatten, key_of

    leaves = ((key_of(path), leaf) for path, leaf in flatten(state))
    tensors = {key: leaf for key, leaf in leaves if hasattr(leaf, "dtype")}
    full = {key: v.full_tensor() if isinstance(v, DTensor) else v for key, v in tensors.items()}
    return {key: tensor.detach().cpu().numpy().copy() for key, tensor in full.items()}


def train_and_save(parallel, path, how, fused=False):
    import torch

    model = parallel(model_of(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) if fused else optimizer_of(model)
    for seed in range(2):
        step(model, optimizer, seed)
    state = state_of(model, optimizer)
    if how == "save":
        fc.save(state, path, policy=FAST)
        return whole(state)
    pending = fc.async_save(state, path, policy=FAST)
    saved = whole(state)
    step(model, optimizer, 2)
    pending.result()
    return saved


def resume(parallel, path, how="load"):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    from functional_ckpt.torch import ZarrStorageReader

    model = parallel(model_of(2))
    optimizer = optimizer_of(model)
    found = state_of(model, optimizer)
    if how == "load":
        found = fc.load(found, path)
    else:
        # DCP takes the lists of the parameter groups for one value each; ours are leaves.
        tensors = {"model": found["model"], "optim": {"state": found["optim"]["state"]}}
        dcp.load(tensors, storage_reader=ZarrStorageReader(path))
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
    after = whole(state_of(model, optimizer))
    step(model, optimizer, 2)
    return after


@pytest.mark.parametrize("how", ["save", "async_save"])
@pytest.mark.parametrize("fused", [False, True])
def test_fsdp_on_the_device_resumes_on_two_ranks_of_the_host_and_back(how, fused, alone, two, tmp_path):
    [saved] = alone.run(train_and_save, on_cuda, tmp_path / "a", how, fused)
    for loaded in two.run(resume, on_host, tmp_path / "a"):
        check_equal(loaded, saved)
    [again] = alone.run(resume, on_cuda, tmp_path / "a")
    check_equal(again, saved)
    saved = two.run(train_and_save, on_host, tmp_path / "b", how)[0]
    [loaded] = alone.run(resume, on_cuda, tmp_path / "b")
    check_equal(loaded, saved)
    [loaded] = alone.run(resume, on_cuda, tmp_path / "b", "dcp")
    check_equal(loaded, saved)


def cut(mesh, whole, axis, transposed=False):
    """Return a DTensor of a tensor that this rank has whole; no collective is needed."""
    from torch.distributed.tensor import DTensor, Shard

    part = whole.tensor_split(mesh.size(), axis)[mesh.get_local_rank()]
    local = part.t().contiguous().t() if transposed else part.contiguous()
    return DTensor.from_local(local, mesh, [Shard(axis)], run_check=False, shape=whole.shape, stride=whole.stride())


def cut_state(device, axis, value):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = launch.meshes.setdefault(device, init_device_mesh(device, (dist.get_world_size(),)))
    wholes = {key: launch.values(*shape, seed=len(shape) + value) for key, shape in SHAPES.items()}
    here = {key: tensor.to(device) for key, tensor in wholes.items()}
    state = {key: cut(mesh, tensor, min(axis, tensor.ndim - 1), key == "t") for key, tensor in here.items()}
    state["copy"] = torch.full((5,), float(value), device=device)
    return state


SHAPES = {"w": (801, 600), "t": (501, 300), "v": (7,), "one": (1,)}


def save_cut(path, device, axis, how):
    import torch

    torch.cuda.set_device(0)
    state = cut_state(device, axis, 1)
    with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(200_000_000)
        for leaf in state.values():
            local = getattr(leaf, "_local_tensor", leaf)
            local.mul_(2)
        if how == "save":
            fc.save(state, path, policy=FAST)
        else:
            pending = fc.async_save(state, path, policy=FAST)
            for leaf in state.values():
                getattr(leaf, "_local_tensor", leaf).zero_()
            pending.result()


def load_cut(path, device, axis):
    state = cut_state(device, axis, 9)
    fc.load(state, path)
    expected = cut_state("cpu", axis, 1)
    for key, leaf in state.items():
        local = getattr(leaf, "_local_tensor", leaf)
        assert local.device.type == device
        launch.same(local.cpu(), getattr(expected[key], "_local_tensor", expected[key]) * 2, key)


@pytest.mark.parametrize("how", ["save", "async_save"])
@pytest.mark.parametrize(("saves_on", "loads_on"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_two_ranks_on_one_device_load_what_was_cut_along_another_axis(how, saves_on, loads_on, two, tmp_path):
    two.run(save_cut, tmp_path / "a", saves_on, 0, how)
    two.run(load_cut, tmp_path / "a", loads_on, 1)


def test_one_rank_of_nccl_loads_what_two_of_gloo_saved(alone, two, tmp_path):
    two.run(save_cut, tmp_path / "a", "cuda", 1, "async_save")
    alone.run(load_cut, tmp_path / "a", "cuda", 0)


def check_copies(path):
    import torch

    here = torch.ones(300, 200, device="cuda")
    torch.cuda._sleep(100_000_000)
    here.add_(1)
    fc.save({"w": here, "t": here.t()}, path, policy=FAST)
    here[3, 4] += int(os.environ["TEST_RANK"])
    with pytest.raises(CheckpointError, match="differ"):
        fc.save({"w": here}, f"{path}-other", policy=FAST)


def test_copies_on_the_device_are_compared(two, tmp_path):
    two.run(check_copies, str(tmp_path / "a"))
    found = fc.open_checkpoint(tmp_path / "a")
    assert set(found["w"][...].reshape(-1).tolist()) == set(found["t"][...].reshape(-1).tolist()) == {2.0}


def megatron(path, device, seed):
    import torch

    from functional_ckpt.torch.megatron.mapping import ShardedObject, ShardedTensor

    rank = launch.rank()
    tensor = ShardedTensor.from_rank_offsets
    local = (launch.values(400, 30, seed=seed + rank)).to(device)
    return {
        "w": tensor("w", local, (0, rank, 2)),
        "t": tensor("t", local.clone().t(), (1, rank, 2)),
        "rng": ShardedObject("rng", torch.cuda.get_rng_state() if seed < 10 else None, (2,), (rank,)),
    }


def megatron_save(path, in_background):
    from functional_ckpt.torch.megatron.serialization import save

    state = megatron(path, "cuda", 1)
    request = save(state, path, async_sharded_save=in_background)
    if in_background:
        state["w"].data.zero_()
        request.execute_sync()


def megatron_load(path, device):
    from functional_ckpt.torch.megatron.serialization import load

    expected, state = megatron(path, "cpu", 1), megatron(path, device, 20)
    data = state["w"].data
    found = load(state, path)
    assert found["w"].data_ptr() == data.data_ptr()
    for key in "wt":
        assert found[key].device.type == device
        launch.same(found[key].cpu(), expected[key].data, key)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_megatrons_calls_on_two_ranks(in_background, device, two, tmp_path):
    (tmp_path / "a").mkdir()
    two.run(megatron_save, tmp_path / "a", in_background)
    two.run(megatron_load, tmp_path / "a", device)
