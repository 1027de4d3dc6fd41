"""A pool of processes joined by gloo on 127.0.0.1, to which tests send functions.

Processes are spawned, never forked (TensorStore aborts in a forked child), and kept: a start costs seconds. Each call
has a hard limit; a rank that does not answer within it is shown with the stacks of its threads, then killed.
"""

import contextlib
import faulthandler
import inspect
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import attrs

_SPAWN = multiprocessing.get_context("spawn")
_JOIN_S = 60
#: The limits are looked at so often, and time in which a whole machine stood still counts as no more.
_STEP_S = 1.0
#: What a call on all ranks may take.
LIMIT_S = 60.0
#: For a policy: a rank that waits this long hangs, by the limit above. Who must be told at once is told before.
NEVER_S = 600


@attrs.frozen
class Outcome:
    """What one rank made of a call; `error` is None if it returned. `dead`: the process has ended."""

    rank: int
    value: object = None
    error: BaseException | None = None
    text: str = ""
    seconds: float = 0.0
    dead: bool = False


class Ranks:
    """`size` processes of one default process group.

    A rank that dies is started again by the next call, and all join a new default group.
    """

    def __init__(self, size):
        import torch.distributed as dist

        self.size = size
        self._logs = Path(tempfile.mkdtemp(prefix="ranks-"))
        # Held here, not by rank 0: the store survives the death of any rank, as it does under torchrun.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes = [None] * size
        self._pipes = [None] * size
        self._joined = 0
        self._whole = False

    def run(self, function, *arguments, limit_s=LIMIT_S):
        """Call `function(*arguments)` on every rank and return the results by rank; any failure is the test's."""
        outcomes = self.outcomes(function, *arguments, limit_s=limit_s)
        failed = [o for o in outcomes if o.error is not None or o.dead]
        if failed:
            raise AssertionError("\n".join(f"--- rank {o.rank} ---\n{o.text or 'died'}" for o in failed))
        return [o.value for o in outcomes]

    def outcomes(self, function, *arguments, limit_s=LIMIT_S):
        """Call `function(*arguments)` on every rank and return what came of it, failures included."""
        self._repair()
        return self._call(function, arguments, limit_s)

    def close(self):
        """End all processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process is not None:
                pipe.close()
                process.join(5)
                process.kill()

    def _repair(self):
        if self._whole and all(p is not None and p.is_alive() for p in self._processes):
            return
        for rank, process in enumerate(self._processes):
            if process is None or not process.is_alive():
                self._start(rank)
        self._joined += 1
        arguments = (self._store.port, str(self._joined), self.size)
        for outcome in self._call(_join, arguments, 2 * _JOIN_S):
            assert outcome.error is None, outcome.text
        self._whole = True

    def _start(self, rank):
        self._pipes[rank], other = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(rank, other, str(self._log(rank))), daemon=True)
        with _environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCH_SHOW_CPP_STACKTRACES="0"):
            process.start()
        other.close()
        self._processes[rank] = process

    def _call(self, function, arguments, limit_s):
        message = pickle.dumps((function, arguments))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        left_s, found = limit_s, {}
        while len(found) < self.size:
            waiting = {self._pipes[r]: r for r in range(self.size) if r not in found}
            began = time.monotonic()
            ready = wait(waiting, min(_STEP_S, left_s))
            # Time for which this process and its ranks were stopped counts as one step.
            left_s -= min(_STEP_S, time.monotonic() - began)
            if not ready and left_s <= 0:
                self._give_up(sorted(waiting.values()), function.__name__, limit_s)
            for pipe in ready:
                found[waiting[pipe]] = self._receive(pipe, waiting[pipe])
        return [found[rank] for rank in range(self.size)]

    def _receive(self, pipe, rank):
        try:
            answer = pipe.recv_bytes()
        except EOFError:
            self._whole = False
            self._processes[rank].join(10)
            return Outcome(rank, dead=True)
        try:
            return pickle.loads(answer)
        except Exception as error:
            return Outcome(rank, None, error, traceback.format_exc())

    def _give_up(self, ranks, name, limit_s):
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        stacks = [f"--- rank {rank} ---\n{self._log(rank).read_text()[-6000:]}" for rank in ranks]
        self._whole = False
        for process in self._processes:
            process.kill()
            process.join(10)
        raise AssertionError(f"{name}: ranks {ranks} hang after {limit_s} s\n" + "\n".join(stacks))

    def _log(self, rank):
        return self._logs / f"{rank}.log"


@contextlib.contextmanager
def _environment(**variables):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(rank, pipe, log):
    """Run what the pool sends, one call after the other; ends when the pool goes away."""
    file = open(log, "a", buffering=1)  # noqa: SIM115 - faulthandler keeps writing to it
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    import torch
    import torch._dynamo  # the first DTensor imports it
    import torch.distributed.tensor

    import functional_ckpt.store.zarr
    import functional_ckpt.torch.tensors  # noqa: F401 - what takes seconds to import is no part of any test's time

    torch.set_num_threads(1)
    os.environ["TEST_RANK"] = str(rank)
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        pipe.send_bytes(_answer(rank, message))


def _answer(rank, message):
    began = time.monotonic()
    try:
        function, arguments = pickle.loads(message)
        return pickle.dumps(Outcome(rank, function(*arguments), seconds=time.monotonic() - began))
    except BaseException as error:
        text, seconds = traceback.format_exc(), time.monotonic() - began
        try:
            found = pickle.dumps(Outcome(rank, None, error, text, seconds))
            pickle.loads(found)
        except Exception:
            return pickle.dumps(Outcome(rank, None, RuntimeError(text), text, seconds))
        return found


def _join(port, name, size):
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    meshes.clear()
    timeout = timedelta(seconds=_JOIN_S)
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout))
    dist.init_process_group("gloo", store=store, rank=rank(), world_size=size, timeout=timeout)


@contextlib.contextmanager
def telling(folder):
    """Leave a file named by this rank when the block ends, however it does."""
    try:
        yield
    finally:
        (folder / str(rank())).touch()


def outwait(folder, others):
    """Hang until that many ranks have told in `folder` that they are through; leave a file "all" if they did."""
    ends = time.monotonic() + LIMIT_S / 2
    while len(list(folder.iterdir())) < others:
        if time.monotonic() > ends:
            return
        time.sleep(0.02)
    (folder / "all").touch()


meshes = {}


def rank():
    """Return the rank of this process of the pool."""
    return int(os.environ["TEST_RANK"])


def mesh(*shape, names=None):
    """Return the mesh of all ranks in this `shape`, made once."""
    from torch.distributed.device_mesh import init_device_mesh

    names = names or tuple("abc"[: len(shape)])
    if (shape, names) not in meshes:
        meshes[shape, names] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return meshes[shape, names]


def distributed(whole, mesh, placements):
    """Return a tensor, of which every rank has the whole, as a DTensor."""
    from torch.distributed.tensor import distribute_tensor

    # Some versions cannot do it without sending.
    quietly = {"src_data_rank": None} if "src_data_rank" in inspect.signature(distribute_tensor).parameters else {}
    return distribute_tensor(whole, mesh, placements, **quietly)


def values(*shape, dtype="float32", seed=0):
    """Return a tensor whose every element is another bit pattern, the same on every rank."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(getattr(torch, dtype))


def same(found, expected, what=""):
    """Fail unless two tensors (local parts of DTensors) are bit-equal, of one shape and data type."""
    import torch
    from torch.distributed.tensor import DTensor

    if isinstance(expected, DTensor):
        found, expected = found.to_local(), expected.to_local()
    facts = f"{what} on rank {os.environ.get('TEST_RANK')}: {found} is not {expected}"
    assert found.shape == expected.shape, facts
    assert found.dtype == expected.dtype, facts
    one, other = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (found, expected))
    assert torch.equal(one, other), facts
