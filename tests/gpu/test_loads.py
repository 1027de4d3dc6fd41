"""Loads into CUDA tensors: every kind, in the order of the caller's stream, from little memory of the device."""

import numpy as np
import pytest
import torch

import functional_ckpt as fc
from functional_ckpt.errors import CorruptionError
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.shard import ShardSpec
from functional_ckpt.torch.local import LocalTensors
from tests.gpu.states import (
    CUDA,
    FAST,
    MIB,
    STATES,
    bits,
    blank,
    busy,
    check_bits,
    device_memory,
    late,
    leaves_of,
    on_host,
)


@pytest.mark.parametrize("which", STATES)
def test_every_tensor_is_filled_in_place(which, stream, tmp_path):
    state = STATES[which](1)
    expected = bits(state)
    fc.save(state, tmp_path / "a", policy=FAST)
    blank(state)
    found = fc.load(state, tmp_path / "a")
    assert all(one is other for one, other in zip(leaves_of(found).values(), leaves_of(state).values(), strict=True))
    check_bits(bits(state), expected)


@pytest.mark.parametrize("which", STATES)
def test_host_and_device_load_each_others_checkpoints(which, tmp_path):
    state = STATES[which](1)
    expected = bits(state)
    fc.save(state, tmp_path / "a", policy=FAST)
    host = fc.load(on_host(state), tmp_path / "a")
    fc.save(host, tmp_path / "b", policy=FAST)
    blank(state)
    if which == "kinds":  # what was saved as separate tensors is loaded as such
        state = {key: leaf for key, leaf in state.items() if "tied" not in key}
        policy = fc.LoadPolicy(keys=tuple(state))
        expected = {key: expected[key] for key in state}
    else:
        policy = fc.LoadPolicy()
    fc.load(state, tmp_path / "b", policy=policy)
    check_bits(bits(state), expected)


def test_what_the_stream_does_next_sees_the_loaded_values(stream, tmp_path):
    """Of strided tensors too, which the device itself puts in their places."""
    shapes = {"w": (2048, 512), "s": ()}
    source = {key: torch.full(shape, 3.0) for key, shape in shapes.items()}
    source |= {"t": torch.full((1100, 700), 3.0), "f": torch.full((64, 512), 3.0, dtype=torch.float64)}
    fc.save(source, tmp_path / "a", policy=FAST)
    like = {key: torch.zeros(shape, device=CUDA) for key, shape in shapes.items()}
    like |= {
        "t": torch.zeros(700, 1100, device=CUDA).t(),
        "f": torch.zeros(64, 2048, dtype=torch.float64, device=CUDA)[:, ::4],
    }
    torch.cuda.synchronize()
    for _ in range(3):
        with busy(torch.cuda.default_stream()):
            fc.load(like, tmp_path / "a")
            seen = {key: leaf.clone() for key, leaf in like.items()}
            for leaf in like.values():
                leaf.fill_(-1)
            torch.cuda.current_stream().synchronize()
        assert {key: set(each.reshape(-1).tolist()) for key, each in seen.items()} == {key: {3.0} for key in source}
        torch.cuda.synchronize()
        assert all(set(leaf.reshape(-1).tolist()) == {-1.0} for leaf in like.values())


def test_what_the_stream_did_before_does_not_undo_the_load(stream, tmp_path):
    fc.save({"w": torch.full((2048, 512), 3.0)}, tmp_path / "a", policy=FAST)
    w = torch.zeros(2048, 512, device=CUDA)
    copy = torch.empty_like(w)
    torch.cuda.synchronize()
    late()
    copy.copy_(w)
    w.fill_(7)
    fc.load({"w": w}, tmp_path / "a")
    assert set(copy.reshape(-1).tolist()) == {0.0}
    assert set(w.reshape(-1).tolist()) == {3.0}


def test_memory_that_the_stream_has_just_freed_is_filled_after_that(stream, tmp_path):
    """The allocator gives it out again while work that was queued on that stream still writes to it."""
    fc.save({"w": torch.full((2048, 512), 3.0)}, tmp_path / "a", policy=FAST)
    like = {"w": torch.empty(2048, 512, device="meta")}
    torch.cuda.synchronize()
    freed = torch.zeros(2048, 512, device=CUDA)
    address = freed.data_ptr()
    late()
    freed.fill_(9)
    del freed
    found = fc.load(like, tmp_path / "a", policy=fc.LoadPolicy(device="cuda"))["w"]
    assert found.data_ptr() == address
    assert set(found.reshape(-1).tolist()) == {3.0}


@pytest.mark.parametrize("transposed", [False, True])
def test_a_load_in_place_takes_little_memory_of_the_device(transposed, tmp_path):
    leaf = torch.arange(64 * MIB, dtype=torch.int32, device=CUDA).reshape(8192, 8192)
    leaf = leaf.t() if transposed else leaf
    policy = fc.LoadPolicy(budget_nbytes=128 * MIB)
    fc.save({"w": leaf}, tmp_path / "a", policy=fc.SavePolicy(durability="none"))
    with device_memory(at_most=128 * MIB if transposed else 0):
        fc.load({"w": leaf}, tmp_path / "a", policy=policy)


def test_a_load_that_allocates_takes_the_memory_of_the_state(tmp_path):
    fc.save({"w": np.zeros((64, MIB), "u1")}, tmp_path / "a", policy=FAST)
    found = []
    with device_memory(at_most=64 * MIB, held=64 * MIB):
        like = {"w": torch.empty(64, MIB, dtype=torch.uint8, device="meta")}
        found.append(fc.load(like, tmp_path / "a", policy=fc.LoadPolicy(device="cuda:0")))
    assert found[0]["w"].device == torch.device("cuda:0")


def test_parts_are_loaded_from_other_cuts(tmp_path):
    """Two local shards of an array that was saved whole, one of them a parameter, and one not contiguous."""
    whole = torch.randn(1000, 600)
    fc.save({"w": whole}, tmp_path / "a", policy=FAST)
    spec = ArraySpec("w", (1000, 600), "float32")
    shards = tuple(ShardSpec(spec, box) for box in (Box((0, 0), (501, 600)), Box((501, 0), (1000, 600))))
    data = torch.zeros(501, 600, device=CUDA, requires_grad=True), torch.zeros(600, 499, device=CUDA).t()
    local = {"w": LocalTensors(shards, data)}
    fc.load(local, tmp_path / "a")
    assert torch.equal(torch.cat([part.detach().cpu() for part in data]), whole)
    for how in (fc.save, lambda *arguments, **options: fc.async_save(*arguments, **options).result()):
        how(local, tmp_path / "b", policy=FAST, overwrite=True)
        assert torch.equal(fc.load({"w": torch.zeros(1000, 600)}, tmp_path / "b")["w"], whole)


def test_data_types_are_converted_as_on_the_host(tmp_path):
    source = {"w": torch.randn(300, 200), "t": torch.randn(200, 300).t()}
    fc.save(source, tmp_path / "a", policy=FAST)
    policy = fc.LoadPolicy(cast="any")
    like = {"w": torch.zeros(300, 200, dtype=torch.bfloat16, device=CUDA)}
    like["t"] = torch.zeros(200, 300, dtype=torch.float8_e4m3fn, device=CUDA).t()
    host = on_host(like)
    fc.load(like, tmp_path / "a", policy=policy)
    fc.load(host, tmp_path / "a", policy=policy)
    check_bits(bits(like), bits(host))


def test_memory_that_the_device_lacks_is_an_error_that_leaves_it_usable(tmp_path):
    fc.save({"v": np.ones(5, "f4"), "w": np.zeros((64, MIB), "u1")}, tmp_path / "a", policy=FAST)
    like = {"v": torch.empty(5, device="meta"), "w": torch.empty(64, MIB, dtype=torch.uint8, device="meta")}
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 16 * MIB) / total)
    try:
        with device_memory(at_most=64 * MIB), pytest.raises(torch.OutOfMemoryError):
            fc.load(like, tmp_path / "a", policy=fc.LoadPolicy(device="cuda"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    found = fc.load(like, tmp_path / "a", policy=fc.LoadPolicy(device="cuda"))
    assert float(found["v"].sum()) == 5


def test_a_load_that_fails_leaves_the_device_usable(stream, tmp_path):
    fc.save({"w": torch.ones(1024, 1024)}, tmp_path / "a", policy=FAST)
    chunk = max((path for path in (tmp_path / "a").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"\7")
    like = {"w": torch.zeros(1024, 1024, device=CUDA)}
    with pytest.raises(CorruptionError):
        fc.load(like, tmp_path / "a")
    like["w"].fill_(2)
    assert float(like["w"].sum()) == 2**21
