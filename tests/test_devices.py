"""Copies from devices, by a stand-in for ``torch.cuda``: a device that does nothing before somebody waits for it."""

import contextlib
import gc
import os
from unittest.mock import patch

import numpy as np
import pytest
import torch

from functional_ckpt import async_save, open_checkpoint, release_staging
from functional_ckpt.store.buffer import WHOLE, HostBuffer
from functional_ckpt.store.pool import StagingPool
from functional_ckpt.store.staging import staged
from functional_ckpt.torch import devices, memory, tensors
from functional_ckpt.torch.devices import DeviceCopier
from functional_ckpt.torch.memory import DeviceBuffer
from tests.test_staging import CHUNK, FAST, is_mapped


class Stream:
    """A stream of a device that does nothing before somebody waits for it."""

    def __init__(self, device=None):
        self.todo = []

    def wait_stream(self, other):
        self.todo.append(other.synchronize)

    def synchronize(self):
        while self.todo:
            self.todo.pop(0)()


class Api:
    """What ``torch.cuda`` offers to a copier, for a device whose memory is the host's."""

    def __init__(self, refuses=False):
        self.main, self.active, self.pinned, self.streams = Stream(), None, {}, []
        self.refuses, self.device_now, self.unpinned_on = refuses, None, []

    def Stream(self, device=None):  # noqa: N802
        self.streams.append(Stream())
        return self.streams[-1]

    def current_stream(self, device):
        return self.main

    @contextlib.contextmanager
    def stream(self, stream):
        self.active = stream
        try:
            yield
        finally:
            self.active = None

    @contextlib.contextmanager
    def device(self, device):
        self.device_now = device
        try:
            yield
        finally:
            self.device_now = None

    def cudart(self):
        return self

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
        if self.refuses:
            return 2
        assert address not in self.pinned
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        assert is_mapped(address)
        self.unpinned_on.append(self.device_now)
        del self.pinned[address]
        return 0


class Far(torch.Tensor):
    """A tensor of that device: a copy from it goes to the active stream."""

    api = None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if function is torch.Tensor.copy_ and isinstance(args[1], Far):
                if cls.api.active is None:
                    return function(*args)
                cls.api.active.todo.append(lambda: function(*args))
                return args[0]
            return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _empty_pool():
    release_staging()


@contextlib.contextmanager
def far(copier):
    """Let tensors be in memory that only `copier` reaches."""

    def buffer_of(key, tensor):
        return DeviceBuffer(tensor.as_subclass(Far))

    with contextlib.ExitStack() as patches:
        for module in (memory, tensors):
            patches.enter_context(patch.object(module, "buffer_of", buffer_of))
            patches.enter_context(patch.object(module, "host_memory", lambda key, tensor: None))
        patches.enter_context(patch.object(memory, "copier_of", lambda device: copier))
        yield


@pytest.fixture
def device():
    """Let tensors be on such a device; return what is called for it, and the copier."""
    api = Far.api = Api()
    copier = DeviceCopier(torch.device("cpu"), api)
    with far(copier):
        yield api


def far_state(value):
    leaves = {"w": torch.full((4, CHUNK), value, dtype=torch.uint8), "b": torch.full((3, 5), value).t()}
    return {**leaves, "h": torch.full((7,), value, dtype=torch.bfloat16), "n": np.full(3, value)}


def test_a_devices_copies_are_waited_for(device, tmp_path):
    for step in range(3):
        state = far_state(step)
        pending = async_save(state, tmp_path / str(step), policy=FAST)
        for leaf in state.values():
            leaf += 50
        pending.result()
    for step in range(3):
        found = open_checkpoint(tmp_path / str(step))
        assert [np.unique(found[key][...].astype(int)).tolist() for key in "wbhn"] == [[step]] * 4
    assert len(device.streams) == 1
    assert list(device.pinned.values()) == [4 * CHUNK + 192]
    release_staging()
    assert not device.pinned
    # A thread that has not chosen a device would open the first one of the machine for that.
    assert device.unpinned_on == [torch.device("cpu")]


def test_a_forked_child_has_no_device(device, tmp_path):
    async_save(far_state(3), tmp_path / "a", policy=FAST).result()
    child = os.fork()
    if not child:
        code = 1
        try:
            release_staging()
            gc.collect()
            code = 2 if device.unpinned_on else 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    release_staging()
    assert not device.pinned


def test_what_the_device_computes_comes_first(device):
    tensor = torch.zeros(4)
    device.main.todo.append(lambda: tensor.fill_(3))
    [copy] = staged([memory.buffer_of("w", tensor)], [4], StagingPool())
    assert copy.get((4,), 0, WHOLE).tolist() == [3] * 4


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_copy_that_fails_does_not_let_others_go_on(where, device):
    """Else a device would write to memory that somebody else has by then."""
    pool = StagingPool()
    broken = HostBuffer(np.zeros(3)) if where == "host" else DeviceBuffer(torch.zeros(3).as_subclass(Far))
    name = "view" if where == "host" else "copy_to"

    def fail(buffer, *arguments):
        if buffer is broken:
            raise KeyboardInterrupt
        return before(buffer, *arguments)

    before = getattr(type(broken), name)
    good = memory.buffer_of("w", torch.ones(4))
    with patch.object(type(broken), name, fail), pytest.raises(KeyboardInterrupt):
        staged([good, broken], [4, 3], pool)
    assert not device.streams[0].todo
    gc.collect()  # an error and the frames that it went through refer to each other
    assert pool.used_nbytes == 0


def test_memory_that_cannot_be_pinned_does_too(tmp_path):
    api = Far.api = Api(refuses=True)
    copier = DeviceCopier(torch.device("cpu"), api)
    with far(copier):
        async_save(far_state(3), tmp_path / "a", policy=FAST).result()
    assert set(np.unique(open_checkpoint(tmp_path / "a")["w"][...])) == {3}
    assert not api.pinned


def test_a_device_without_streams_is_copied_by_the_host(device):
    with patch.object(memory, "copier_of", lambda device: None):
        [copy] = staged([memory.buffer_of("w", torch.arange(4))], [4], StagingPool())
    assert copy.get((4,), 0, WHOLE).tolist() == [0, 1, 2, 3]
    assert not device.streams


class Late(torch.Tensor):
    """A tensor that gets what is copied to it when somebody waits for the device."""

    api = None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if function is torch.Tensor.copy_:
                into, values = args[0].as_subclass(torch.Tensor), args[1].clone()
                cls.api.main.todo.append(lambda: into.copy_(values))
                return args[0]
            found = function(*args, **(kwargs or {}))
            return found.as_subclass(cls) if isinstance(found, torch.Tensor) else found


def test_what_is_loaded_is_there_when_the_load_returns():
    """The device itself puts elements in the places of a strided tensor, and torch does not wait for that."""
    Late.api, plain = Api(), torch.zeros(2, 6)
    with patch.object(torch, "cpu", Late.api):
        DeviceBuffer(plain.as_subclass(Late)[:, ::2]).put((2, 3), 0, WHOLE, np.ones((2, 3), "f4"))
    assert plain.tolist() == [[1, 0, 1, 0, 1, 0]] * 2


def test_a_tensor_that_needs_gradients_is_saved_and_filled():
    tensor = torch.nn.Parameter(torch.zeros(3, 2))
    with patch.object(torch, "cpu", Api()):
        DeviceBuffer(tensor).put((3, 2), 0, (slice(1, 3), slice(0, 2)), np.ones((2, 2), "f4"))
    assert tensor.tolist() == [[0, 0], [1, 1], [1, 1]]
    into = np.zeros((3, 2), "f4")
    DeviceBuffer(tensor).copy_to(into)
    assert into.tolist() == tensor.tolist()


@pytest.mark.parametrize("shape", [(5, 7), (1, 35), (35, 1), (1, 1, 5, 7), ()])
def test_a_strided_tensor_is_copied_part_by_part(shape):
    """The device needs memory for each part: it puts the elements in order before it sends them."""
    whole = torch.arange(35.0).reshape(shape) if shape else torch.tensor(4.0)
    strided = torch.zeros((*shape, 2))[..., 0].copy_(whole)
    sizes = []

    class Noting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch.Tensor.copy_:
                sizes.append(args[1].numel())
            return super().__torch_function__(function, types, args, kwargs)

    into = np.zeros(shape, "f4")
    with patch.object(devices, "_PART_NBYTES", 32):
        DeviceBuffer(strided.as_subclass(Noting)).copy_to(into)
    assert np.array_equal(into, whole.numpy())
    assert sum(sizes) == whole.numel()
    assert max(sizes) <= 8
