"""CUDA tensors through DCP and through Megatron's API, by one process."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import functional_ckpt as fc
from functional_ckpt.torch import ZarrStorageReader, ZarrStorageWriter
from functional_ckpt.torch.megatron.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from functional_ckpt.torch.megatron.serialization import load, save
from tests.gpu.states import (
    CUDA,
    STATES,
    bits,
    blank,
    busy,
    check_bits,
    device_memory,
    late,
    on_host,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def group(tmp_path):
    """A group of this process alone, for what asks for one."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stager(pinned):
    """Return DCP's own stager, if this version of torch has one."""
    staging = pytest.importorskip("torch.distributed.checkpoint.staging")
    if not hasattr(staging, "DefaultStager"):
        pytest.skip("this version of torch has no DefaultStager")
    return staging.DefaultStager(staging.StagingOptions(pinned, False, True, pinned))


@pytest.mark.parametrize("which", STATES)
def test_dcp_saves_and_loads_in_place(which, stream, tmp_path):
    state = STATES[which](3)
    if which == "kinds":
        state = {key: leaf for key, leaf in state.items() if key != "empty"}
    expected = bits(state)
    dcp.save(state, storage_writer=ZarrStorageWriter(tmp_path / "a"))
    blank(state)
    dcp.load(state, storage_reader=ZarrStorageReader(tmp_path / "a"))
    check_bits(bits(state), expected)
    host = on_host(state)
    dcp.load(host, storage_reader=ZarrStorageReader(tmp_path / "a"))
    check_bits(bits(host), expected)


def test_dcp_saves_what_the_stream_still_computes(stream, tmp_path):
    state = {"w": torch.zeros(2048, 512, device=CUDA), "t": torch.zeros(300, 200, device=CUDA).t()}
    dcp.save(state, storage_writer=ZarrStorageWriter(tmp_path / "warm"))
    late()
    for leaf in state.values():
        leaf.add_(1)
    dcp.save(state, storage_writer=ZarrStorageWriter(tmp_path / "a"))
    for leaf in state.values():
        leaf.add_(1)
    found = fc.open_checkpoint(tmp_path / "a")
    assert {key: set(found[key][...].reshape(-1).tolist()) for key in "wt"} == {key: {1} for key in "wt"}


def test_dcp_loads_before_the_stream_goes_on(stream, tmp_path):
    like = {"w": torch.zeros(2048, 512, device=CUDA), "t": torch.zeros(300, 200, device=CUDA).t()}
    dcp.save({key: torch.full_like(leaf, 3, device="cpu") for key, leaf in like.items()},
             storage_writer=ZarrStorageWriter(tmp_path / "a"))  # fmt: skip
    with busy(torch.cuda.default_stream()):
        dcp.load(like, storage_reader=ZarrStorageReader(tmp_path / "a"))
        seen = {key: leaf.clone() for key, leaf in like.items()}
        torch.cuda.current_stream().synchronize()
    assert {key: set(each.reshape(-1).tolist()) for key, each in seen.items()} == {key: {3.0} for key in "wt"}


@pytest.mark.parametrize("staged", ["by default", "pageable", "pinned"])
def test_dcp_saves_in_the_background(staged, group, tmp_path):
    state = {"w": torch.zeros(2048, 512, device=CUDA), "t": torch.zeros(300, 200, device=CUDA).t()}
    for step in range(3):
        # A new one each time: some versions of torch close it.
        options = {} if staged == "by default" else {"async_stager": stager(staged == "pinned")}
        writer = ZarrStorageWriter(tmp_path / str(step))
        found = dcp.async_save(state, storage_writer=writer, **options)
        if hasattr(found, "staging_completion"):
            found.staging_completion.result()
            found = found.upload_completion
        for leaf in state.values():
            leaf.add_(1)
        found.result()
    for step in range(3):
        found = fc.open_checkpoint(tmp_path / str(step))
        assert {key: set(found[key][...].reshape(-1).tolist()) for key in "wt"} == {key: {step} for key in "wt"}


def test_dcp_loads_from_little_memory_of_the_device(tmp_path):
    state = {str(number): torch.ones(4096, 4096, device=CUDA) for number in range(4)}
    dcp.save(state, storage_writer=ZarrStorageWriter(tmp_path / "a"))
    with device_memory(at_most=2**20):
        dcp.save(state, storage_writer=ZarrStorageWriter(tmp_path / "b"))
    with device_memory(at_most=2**20):
        dcp.load(state, storage_reader=ZarrStorageReader(tmp_path / "a"))


def of_megatron(seed):
    """Return a sharded state dict with tensors of the device, flat shards, parameters and objects."""
    tensor = ShardedTensor.from_rank_offsets
    w = torch.nn.Parameter(torch.randn(300, 200, device=CUDA) + seed)
    flat, rest = torch.randn(70, device=CUDA) + seed, torch.randn(30, device=CUDA) + seed
    return {
        "w": tensor("w", w),
        "t": tensor("t", (torch.randn(120, 500, device=CUDA) + seed).t()),
        "h": tensor("h", (torch.randn(64, 33, device=CUDA) + seed).bfloat16()),
        "flat": ShardedTensor.from_rank_offsets_flat("flat", flat, (10, 10), flattened_range=slice(30, 100)),
        "rest": ShardedTensor.from_rank_offsets_flat("flat", rest, (10, 10), flattened_range=slice(0, 30)),
        "rng": ShardedObject("rng", torch.cuda.get_rng_state(), (1,), (0,)),
        "on_device": ShardedObject("on_device", torch.arange(5, device=CUDA), (1,), (0,)),
        "own": LocalNonpersistentObject("own"),
        "common": {"scale": torch.tensor(3.5, device=CUDA), "step": seed},
    }


def tensors_of(state):
    return {key: state[key].data for key in ("w", "t", "h", "flat", "rest")}


@pytest.mark.parametrize("in_background", [False, True])
def test_megatrons_calls_fill_tensors_of_the_device(in_background, stream, tmp_path):
    (tmp_path / "a").mkdir()
    source = of_megatron(1)
    expected = bits(tensors_of(source))
    if in_background:
        request = save(source, tmp_path / "a", async_sharded_save=True)
        with torch.no_grad():
            blank(tensors_of(source))
        request.execute_sync()
    else:
        save(source, tmp_path / "a")
    target = of_megatron(2)
    data = tensors_of(target)
    found = load(target, tmp_path / "a")
    for key in expected:
        assert found[key].data_ptr() == data[key].data_ptr(), key
    check_bits(bits({key: found[key] for key in expected}), expected)
    assert torch.equal(found["rng"], source["rng"].data)
    assert found["on_device"].tolist() == [0, 1, 2, 3, 4]
    assert float(found["common"]["scale"]) == 3.5
    assert (found["common"]["step"], found["own"]) == (1, "own")


def test_megatrons_load_is_over_before_the_stream_goes_on(stream, tmp_path):
    (tmp_path / "a").mkdir()
    tensor = ShardedTensor.from_rank_offsets
    save({"w": tensor("w", torch.full((700, 300), 3.0, device=CUDA).t())}, tmp_path / "a")
    with busy(torch.cuda.default_stream()):
        found = load({"w": tensor("w", torch.zeros(700, 300, device=CUDA).t())}, tmp_path / "a")["w"]
        seen = found.clone()
        torch.cuda.current_stream().synchronize()
    assert set(seen.reshape(-1).tolist()) == {3.0}
