"""One rank of a soak: it saves, and at a chosen effect (a call of the system) it is killed, fails or sleeps."""

import contextlib
import json
import os
import random
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

#: What counts as an effect: what the interpreter reports of files, directories, locks and connections.
AUDITED = ("open", "os.", "fcntl.", "socket.connect", "socket.bind", "shutil.", "ctypes.call_function")
#: Calls that it does not report.
CALLS = ("write", "pwrite", "pwritev", "writev", "fsync", "fdatasync", "close")


class Effects:
    """Counts the effects of this process, and acts at one of them."""

    def __init__(self, place):
        self.place, self.count, self.at, self.act = place, None, -1, None
        sys.addaudithook(self._audit)
        for name in CALLS:
            setattr(os, name, self._counted(getattr(os, name)))

    @contextlib.contextmanager
    def watched(self, at=-1, act=None):
        """Count within the block, and call `act` at number `at`."""
        self.count, self.at, self.act = 0, at, act
        try:
            yield
        finally:
            self.act = None

    def _counted(self, function):
        def call(*arguments, **options):
            self._happens()
            return function(*arguments, **options)

        return call

    def _audit(self, event, arguments):
        if not event.startswith(AUDITED):
            return
        if event == "open" and not str(arguments[0]).startswith(self.place):
            return
        self._happens()

    def _happens(self):
        if self.count is None:
            return
        self.count += 1
        if self.act is not None and self.count == self.at:
            act, self.act = self.act, None
            act()


def kill():
    """End this process as a crash does."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    """Fail as a full or broken disk does."""
    raise OSError(random.choice([5, 28]), "on purpose")


def state(step, rank, size):
    """Return what a rank holds at a step: pieces that move, shards with chunks of their own, copies, values."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    whole = torch.full((24, 40), float(step))
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(whole.clone(), mesh, [Shard(1)], src_data_rank=None),
        "copy": torch.full((5,), float(step)),
        "step": step,
    }


def save(kind, path, step, rank, size, timeout_s):
    """Save once, in the way of this `kind`, and wait for it."""
    import functional_ckpt as fc

    layout = fc.LayoutPolicy(min_chunk_nbytes=random.Random(step).choice([0, 2**20]), target_chunk_nbytes=2**10)
    policy = fc.SavePolicy(layout=layout, timeout_s=timeout_s, commit="marker" if kind == "marker" else "auto")
    held = state(step, rank, size)
    if kind.startswith("dcp"):
        return through_dcp(kind, held, path, policy)
    overwrite = kind in ("overwrite", "async")
    if kind in ("async", "async fresh"):
        return fc.async_save(held, path, policy=policy, overwrite=overwrite).result(600)
    return fc.save(held, path, policy=policy, overwrite=overwrite)


def through_dcp(kind, held, path, policy):
    """Save through PyTorch's own functions."""
    import torch.distributed.checkpoint as dcp

    from functional_ckpt.torch.dcp.storage_writer import ZarrStorageWriter

    writer = ZarrStorageWriter(path, policy=policy)
    if kind == "dcp async":
        return dcp.async_save(held, storage_writer=writer).result()
    return dcp.save(held, storage_writer=writer)


def outcome_of(function):
    """Return what came of a call: None, or the kind of error and its text."""
    from functional_ckpt.errors import CheckpointError

    try:
        function()
    except CheckpointError as error:
        return ["CheckpointError", f"{type(error).__name__}: {error}"]
    except BaseException as error:  # a rank may end with anything, and the soak judges it
        return [type(error).__name__, str(error)[:2000]]
    return None


def run(order, rank):
    """Do what `order` says: a save in peace, one with a fault, and another in peace if nobody has died."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    random.seed(order["seed"] + rank)
    size, kind, place, timeout_s = order["size"], order["kind"], order["place"], order["timeout_s"]
    host = order["port"] is None and rank == 0
    if order["port"] is None and rank:
        while not Path(place, "port").exists():
            time.sleep(0.01)
    port = order["port"] or (0 if host else int(Path(place, "port").read_text()))
    timeout = timedelta(seconds=order["limit_s"] / 3)
    store = dist.TCPStore("127.0.0.1", port, is_master=host, wait_for_workers=False, timeout=timeout)
    if host:
        Path(place, "port.new").write_text(str(store.port))
        Path(place, "port.new").rename(Path(place, "port"))
    store = dist.PrefixStore(order["name"], store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    act = {
        "kill": kill,
        "fail": fail,
        "sleep": lambda: time.sleep(timeout_s + 1.5),
    }[order["act"]]
    effects, found = Effects(place), []
    for number, step in enumerate(order["steps"]):
        path = str(Path(place, order["paths"][number]))
        is_faulty = number == order["faulty"] and rank == order["victim"]
        at = 1 + int(order["share"] * effects.count) if is_faulty else -1
        with effects.watched(at, act):
            found.append(outcome_of(lambda step=step, path=path: save(kind, path, step, rank, size, timeout_s)))
    Path(place, f"outcome.{rank}.new").write_text(json.dumps(found))
    Path(place, f"outcome.{rank}.new").rename(Path(place, f"outcome.{rank}"))
