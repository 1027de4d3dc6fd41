"""Memory of copies from a CUDA device: pinned, kept for the next save, and let go."""

import gc
import os
import threading

import numpy as np
import pytest
import torch

import functional_ckpt as fc
from functional_ckpt.run.pending import wait_for_all
from functional_ckpt.store.files import FileStore
from functional_ckpt.store.pool import host_memory, the_pool
from functional_ckpt.torch import devices
from tests.gpu.states import CUDA, FAST, MIB


class Runtime:
    """The CUDA runtime, with a list of what was registered and not yet taken back."""

    def __init__(self, real):
        self.real, self.registered, self.codes, self.calls = real, {}, [], 0

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
        code = self.real.cudaHostRegister(address, nbytes, flags)
        self.calls += 1
        if not int(code):
            self.registered[address] = nbytes
        return code

    def cudaHostUnregister(self, address):  # noqa: N802
        code = self.real.cudaHostUnregister(address)
        self.codes.append(int(code))
        del self.registered[address]
        return code


@pytest.fixture
def runtime(monkeypatch):
    """Watch the calls of the runtime."""
    if not torch.cuda.is_available():
        return None
    torch.zeros(1, device=CUDA)
    watched = Runtime(torch.cuda.cudart())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: watched)
    return watched


def state_of(value, mebibytes=24):
    return {
        str(number): torch.full((mebibytes // 4, MIB), value, dtype=torch.uint8, device=CUDA) for number in range(4)
    }


def is_pinned(memory):
    return torch.from_numpy(memory).is_pinned()


def test_copies_go_to_pinned_memory(runtime, tmp_path):
    fc.async_save(state_of(1), tmp_path / "a", policy=FAST).result()
    slabs = [slab.memory for slab in the_pool()._slabs]
    assert [slab.nbytes for slab in slabs] == [24 * MIB]
    assert all(map(is_pinned, slabs))
    assert not is_pinned(host_memory(MIB))


def test_twenty_saves_pin_once_and_let_go_once(runtime, tmp_path):
    for step in range(20):
        fc.async_save(state_of(step), tmp_path / str(step), policy=FAST).result()
    assert runtime.calls == 1
    assert list(runtime.registered.values()) == [24 * MIB]
    assert fc.release_staging() == 24 * MIB
    gc.collect()
    assert not runtime.registered
    assert runtime.codes == [0]
    for step in range(20):
        assert fc.open_checkpoint(tmp_path / str(step))["2"][3, 4] == step


def test_a_save_keeps_its_pinned_memory_after_a_release(runtime, tmp_path, monkeypatch):
    """It goes back when the save has written it, on the thread of that save."""
    go_on, create = threading.Event(), FileStore.create

    def held(*arguments, **options):
        assert go_on.wait(60)
        return create(*arguments, **options)

    monkeypatch.setattr(FileStore, "create", held)
    state = state_of(7)
    pending = fc.async_save(state, tmp_path / "a", policy=FAST)
    fc.release_staging()
    gc.collect()
    assert runtime.registered
    go_on.set()
    for leaf in state.values():
        leaf.zero_()
    pending.result()
    wait_for_all()
    gc.collect()
    assert not runtime.registered
    assert runtime.codes == [0]
    assert set(np.unique(fc.open_checkpoint(tmp_path / "a")["1"][...])) == {7}


def test_memory_that_cannot_be_pinned_is_used_as_it_is(runtime, tmp_path, monkeypatch):
    """The error that the runtime remembers is not reported at the next kernel."""
    taken = []

    def taken_before(nbytes):
        memory = host_memory(nbytes)
        address = memory.__array_interface__["data"][0]
        assert not int(runtime.real.cudaHostRegister(address, nbytes, 1))  # twice is an error
        taken.append(memory)
        return memory

    monkeypatch.setattr(devices, "host_memory", taken_before)
    state = state_of(5)
    fc.async_save(state, tmp_path / "a", policy=FAST).result()
    assert taken
    assert not runtime.registered
    assert int((state["0"] + 1).sum()) == 6 * state["0"].numel()
    torch.cuda.synchronize()
    assert set(np.unique(fc.open_checkpoint(tmp_path / "a")["3"][...])) == {5}
    fc.release_staging()
    for memory in taken:
        runtime.real.cudaHostUnregister(memory.__array_interface__["data"][0])


def test_ordinary_memory_does_too(tmp_path, monkeypatch):
    """A copy to memory that is not pinned is not asynchronous, and right."""
    monkeypatch.setattr(devices.DeviceCopier, "allocate", lambda self, nbytes: host_memory(nbytes))
    state = state_of(0)
    for step in range(3):
        for leaf in state.values():
            leaf.fill_(step)
        pending = fc.async_save(state, tmp_path / str(step), policy=FAST)
        for leaf in state.values():
            leaf.fill_(99)
        pending.result()
        assert set(np.unique(fc.open_checkpoint(tmp_path / str(step))["1"][...])) == {step}


@pytest.mark.parametrize("busy", [False, True])
def test_a_forked_child_leaves_the_device_alone(busy, runtime, tmp_path, monkeypatch):
    """Its parent goes on saving, and the child ends in order."""
    go_on, create = threading.Event(), FileStore.create

    def held(*arguments, **options):
        assert go_on.wait(60)
        return create(*arguments, **options)

    fc.async_save(state_of(1), tmp_path / "warm", policy=FAST).result()
    if busy:
        monkeypatch.setattr(FileStore, "create", held)
    pending = fc.async_save(state_of(2), tmp_path / "a", policy=FAST)
    child = os.fork()
    if not child:
        code = 1
        try:
            fc.release_staging()
            gc.collect()
            code = 0 if not runtime.codes else 2
        finally:
            os._exit(code)
    go_on.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pending.result()
    fc.async_save(state_of(3), tmp_path / "b", policy=FAST).result()
    for name, value in (("a", 2), ("b", 3)):
        assert set(np.unique(fc.open_checkpoint(tmp_path / name)["0"][...])) == {value}


def test_the_limit_of_a_policy_holds_for_pinned_memory(runtime, tmp_path):
    policy = fc.SavePolicy(durability="none", staging_nbytes=0)
    for step in range(3):
        fc.async_save(state_of(step), tmp_path / str(step), policy=policy).result()
        wait_for_all()
        gc.collect()
        assert not runtime.registered
    assert set(runtime.codes) == {0}


def test_states_of_the_host_and_of_the_device_share_no_memory(runtime, tmp_path):
    host = {"h": np.ones(2 * MIB, "u1"), "d": torch.ones(2 * MIB, dtype=torch.uint8, device=CUDA)}
    for step in range(3):
        fc.async_save(host, tmp_path / str(step), policy=FAST).result()
    pinned = sorted(is_pinned(slab.memory) for slab in the_pool()._slabs)
    assert pinned == [False, True]
    assert runtime.calls == 1
