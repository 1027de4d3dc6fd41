"""The ways that are compared: ours, DCP over s3fs, and the same bytes sent and read by TensorStore alone."""

import warnings
from collections.abc import Callable
from functools import partial
from itertools import islice

import attrs
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import functional_ckpt
from benchmarks.objects.start import BUCKET
from benchmarks.state import tensors_of
from functional_ckpt import LoadPolicy, SavePolicy, StorePolicy
from functional_ckpt.plan.save import GIB

# DCP says so at every call, even with `no_dist=True`.
warnings.filterwarnings("ignore", "torch.distributed is disabled")

CHUNK_NBYTES = 32 * 2**20
OURS, DCP, BARE, SERIAL = "functional_ckpt", "DCP over s3fs", "bare key-value store", "one request after the other"


@attrs.frozen
class Way:
    """How a state is saved to a place, and loaded into allocated tensors; `scale` of it is the whole state."""

    name: str
    save: Callable
    load: Callable
    scale: float = 1.0


def ways(server, state, concurrency, what, apart=0):
    """Return ours, DCP, and the bare store with as many requests in flight; with `apart` also one that waits for each.

    `what` is "save" or "load": the metadata of an array is written with it, but not read.
    """
    plain = dict(tensors_of(state))
    found = [ours(server, concurrency), _dcp(server), _bare(server, BARE, _objects(plain, what), concurrency)]
    if apart:
        some = _objects(dict(islice(plain.items(), 0, None, apart)), what)
        found.append(attrs.evolve(_bare(server, SERIAL, some, 1), scale=float(apart)))
    return found


def ours(server, concurrency, budget_nbytes=GIB):
    access = StorePolicy(endpoint=server.endpoint, concurrency=concurrency)
    saving = SavePolicy(store=access, budget_nbytes=budget_nbytes)
    loading = LoadPolicy(store=access, budget_nbytes=budget_nbytes)
    return Way(
        OURS,
        lambda state, place: functional_ckpt.save(state, f"s3://{BUCKET}/{place}", policy=saving),
        lambda state, place: functional_ckpt.load(state, f"s3://{BUCKET}/{place}", policy=loading),
    )


def _dcp(server):
    options = {"endpoint_url": server.endpoint, "key": "test:tester", "secret": "testing"}
    return Way(
        DCP,
        lambda state, place: dcp.save(
            state, storage_writer=FsspecWriter(f"s3://{BUCKET}/{place}", **options), no_dist=True
        ),
        lambda state, place: dcp.load(
            state, storage_reader=FsspecReader(f"s3://{BUCKET}/{place}", **options), no_dist=True
        ),
    )


def _bare(server, name, objects, concurrency):
    """Put and get objects whose bytes are there before the clock runs, so many at a time."""

    def save(_, place):
        kv = server.store(f"{place}/", concurrency)
        _run((partial(kv.write, name, data) for name, data in objects.items()), concurrency)

    def load(_, place):
        kv = server.store(f"{place}/", concurrency)
        _run((partial(kv.read, name) for name in objects), concurrency)

    return Way(name, save, load)


def _objects(tensors, what):
    """Return the objects that a checkpoint of tensors has: chunks of 32 MiB, and metadata if they are saved."""
    found = {}
    for name, tensor in tensors.items():
        data = memoryview(tensor.numpy()).cast("B")
        if what == "save":
            found[f"{name}/zarr.json"] = bytes(500)
        for at in range(0, len(data), CHUNK_NBYTES):
            found[f"{name}/c.{at // CHUNK_NBYTES}"] = bytes(data[at : at + CHUNK_NBYTES])
    return found


def _run(requests, concurrency):
    requests = iter(requests)
    flying = [request() for request in islice(requests, concurrency)]
    while flying:
        found = flying.pop(0).result()
        if hasattr(found, "value"):
            len(found.value)
        flying += [request() for request in islice(requests, 1)]
