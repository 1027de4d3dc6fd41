"""Checkpoints in an object store: what works on a path works there, in few requests, and no save harms another."""

import json
import threading

import numpy as np
import pytest

import functional_ckpt
from functional_ckpt import (
    Checkpoints,
    KeepLast,
    LayoutPolicy,
    LocalShards,
    SavePolicy,
    StorePolicy,
    load,
    open_checkpoint,
    save,
    verify,
)
from functional_ckpt.cli import main
from functional_ckpt.errors import CheckpointError, CorruptionError, NotACheckpointError, PolicyError, StorageError
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.shard import ShardSpec
from functional_ckpt.store import object_store
from functional_ckpt.store.base import UNSIZED
from functional_ckpt.store.joiner import REUSED_NBYTES, Joiner
from functional_ckpt.store.object_store import ObjectStore
from functional_ckpt.store.opening import open_store
from functional_ckpt.store.steps import find_steps, remove_step, sweep_steps
from functional_ckpt.store.work import COPIES
from functional_ckpt.testing.simulate import run_ranks
from tests.pages import shown

CHUNKED = LayoutPolicy(target_chunk_nbytes=2**14, min_chunk_nbytes=2**10)


def state(step=3):
    return {
        "w": np.arange(64 * 512, dtype="f4").reshape(64, 512) + step,
        "small": [np.full(3, step + i, "f8") for i in range(4)],
        "step": step,
        "long": "x" * 70_000,
    }


def same(one, other):
    one, other = (json.dumps(each, default=lambda x: x.tolist(), sort_keys=True) for each in (one, other))
    return one == other


def names(url, access):
    return sorted(open_store(url, access=access).names())


# What works


def test_what_is_saved_is_loaded_shown_and_verified(server, url, capsys):
    manifest = save(state(), url, policy=server.saving(layout=CHUNKED))
    assert same(load(state(0), url), state())
    assert same(open_checkpoint(url).state(), state())
    assert open_checkpoint(url)["w"][5, 7:9].tolist() == state()["w"][5, 7:9].tolist()
    report = verify(url, store=server.access())
    assert report.ok
    assert report.chunks == sum(entry.grid.size for entry in manifest.arrays) > 8
    assert functional_ckpt.read_manifest(url) == manifest
    assert main(["ls", url]) == main(["verify", url]) == main(["show", url]) == main(["show", url, "w"]) == 0
    assert "128.0 KiB" in capsys.readouterr().out
    assert main(["ls", url + "-none"]) == 2
    assert not [name for name in names(url, server.access()) if "claim" in name]


def test_codecs_ranks_and_the_background(server, url):
    rows = ArraySpec("w", (64, 8), "float32")
    whole = np.arange(512, dtype="f4").reshape(64, 8)

    def part(gather):
        box = Box((gather.rank * 64 // gather.size, 0), ((gather.rank + 1) * 64 // gather.size, 8))
        return ShardSpec(rows, box), whole[box.slices].copy()

    def save_mine(gather):
        policy = server.saving(layout=LayoutPolicy(codecs={"": "zstd"}))
        state = {"w": LocalShards(*part(gather)), "step": 1}
        return functional_ckpt.async_save(state, url, policy=policy, process_group=gather).result()

    def load_mine(gather):
        shard, wanted = part(gather)
        policy = server.loading(strict="ignore", read_once=True)
        found = load({"w": LocalShards(shard, np.zeros_like(wanted))}, url, policy=policy, process_group=gather)
        return found["w"].data[0].tolist() == wanted.tolist()

    assert len({manifest.to_json() for manifest in run_ranks(4, save_mine, timeout_s=300)}) == 1
    assert run_ranks(2, load_mine, timeout_s=300) == [True, True]


def test_requests_are_chunks_arrays_and_a_constant(server, url):
    """A save writes each chunk and each array's metadata once; a load reads each chunk once."""
    save({"step": 1}, url + "-first", policy=server.saving())  # tells whether the server knows all conditions
    counts = {}
    for arrays in (4, 24):
        state = {f"a{i}": np.ones((4, 512), "f4") for i in range(arrays)}
        layout = LayoutPolicy(target_chunk_nbytes=2**11, min_chunk_nbytes=2**10)
        policy = SavePolicy(layout=layout, store=server.access(lease_s=600))  # no renewal is counted
        for what in ("save", "load"):
            server.proxy.reset()
            save(state, f"{url}-{arrays}", policy=policy) if what == "save" else load(state, f"{url}-{arrays}")
            counts[what, arrays] = len(server.proxy.requests)
    assert counts["save", 24] - counts["save", 4] == 20 * (4 + 1)
    assert counts["load", 24] - counts["load", 4] == 20 * 4
    # Swift knows no condition for writing over an object: before each of three renewals we look.
    assert counts["save", 4] - 4 * 5 <= 13 + 3 * (server.name == "swift")
    assert counts["load", 4] - 4 * 4 <= 5


def _listings(server):
    return sum("list-type" in request.target for request in server.proxy.requests)


def test_one_listing_of_a_load_and_each_chunk_read_once(server, url):
    """By one rank for all, however many ranks want parts of a chunk, unless the policy says otherwise."""
    rows = ArraySpec("w", (64, 512), "float32")
    whole = np.arange(2**15, dtype="f4").reshape(64, 512)
    layout = LayoutPolicy(target_chunk_nbytes=2**15, min_chunk_nbytes=2**14)
    save({"w": whole, "long": "x" * 70_000, "longer": "y" * 80_000}, url, policy=server.saving(layout=layout))
    chunks = [name for name in names(url, server.access()) if "/c." in name]
    assert len([name for name in chunks if name.startswith("w/")]) == 4

    def columns(gather, **more):
        box = Box((0, gather.rank * 128), (64, gather.rank * 128 + 128))
        like = {"w": LocalShards(ShardSpec(rows, box), np.zeros((64, 128), "f4")), "long": "", "longer": ""}
        found = load(like, url, policy=server.loading(**more), process_group=gather)
        return np.array_equal(found["w"].data[0], whole[box.slices])

    for more, reads in (({}, 4), ({"read_once": False}, 16), ({"budget_nbytes": 40_000}, 16)):
        server.proxy.reset()
        assert run_ranks(4, lambda gather, more=more: columns(gather, **more), timeout_s=300) == [True] * 4
        assert _listings(server) == 1
        assert sum("/w/c." in request.target for request in server.proxy.requests) == reads
    server.proxy.reset()
    assert open_checkpoint(url)["w"][5, 3] == whole[5, 3]
    assert _listings(server) == 0


def test_what_a_server_does_not_list_yet_is_there(server, url, monkeypatch):
    """As rclone, which may list what was there a moment ago."""
    listed = ObjectStore.names
    monkeypatch.setattr(ObjectStore, "names", lambda self: (n for n in listed(self) if not n.endswith("w/c.1.0")))
    save(state(), url, policy=server.saving(layout=CHUNKED))
    assert same(load(state(0), url), state())


def test_a_missing_chunk_is_named_before_anything_is_read(server, url):
    save(state(), url, policy=server.saving(layout=CHUNKED))
    open_store(url).delete(["w/c.1.0"])
    server.proxy.reset()
    with pytest.raises(CorruptionError, match="a stored chunk is missing") as caught:
        load(state(0), url)
    assert (caught.value.key, caught.value.chunk) == ("w", "c.1.0")
    looked_at = {request.path.rpartition("/")[2] for request in server.proxy.requests if "/w/c." in request.path}
    assert looked_at == {"c.1.0"}  # once more, and no other
    with pytest.raises(CorruptionError, match="missing"):
        open_checkpoint(url)["w"][:]


def test_many_requests_at_a_time(server, url):
    server.proxy.latency_s = 0.02
    state = {f"a{i}": np.full(16, i, "f4") for i in range(64)}
    save(state, url, policy=server.saving())
    saving = server.proxy.most_in_flight
    server.proxy.reset()
    load(state, url, policy=server.loading())
    assert min(saving, server.proxy.most_in_flight) >= 16


def _is_node(request, _):
    return request.method == "PUT" and "/a" in request.path


def _is_listing_or_second_claim(request, earlier):
    is_claim = request.method == "PUT" and request.path.endswith(".claim")
    return "list-type=2" in request.target or (is_claim and sum(one.path == request.path for one in earlier) == 2)


def _is_root_or_manifest_of_a_load(request, earlier):
    is_saved = any(one.method == "PUT" and one.path.endswith("step-1/zarr.json") for one in earlier)
    return is_saved and request.method == "GET" and request.path.endswith(("step-1/zarr.json", "manifest.json"))


def _ends_with(method, *names):
    return lambda request, _: request.method == method and request.path.endswith(names)


@pytest.mark.parametrize(
    ("count", "is_one"),
    [
        pytest.param(24, _is_node, id="metadata and chunks of 12 arrays"),
        pytest.param(2, _is_listing_or_second_claim, id="the listing and the second try to create the claim"),
        pytest.param(2, _ends_with("PUT", "manifest.json", "provenance.json"), id="manifest and provenance"),
        pytest.param(2, _is_root_or_manifest_of_a_load, id="root and manifest"),
        pytest.param(12, _ends_with("GET", "c.0.0"), id="chunks of 12 arrays"),
    ],
)
def test_requests_that_need_nothing_of_one_another_go_together(server, url, count, is_one):
    """None of these is answered before all of them have come."""
    if is_one is _is_listing_or_second_claim and not server.heeds_conditions:
        pytest.skip("who is alone does not try a second time")
    barrier, came, met = threading.Barrier(count), [], []

    def meet(request):
        if len(came) < count and is_one(request, server.proxy.requests):
            came.append(request)
            barrier.wait(120)  # a loaded machine
            met.append(request)

    state = {f"a{i}": np.full((4, 4), i, "f4") for i in range(12)}
    server.proxy.reset(meet)
    save(state, url, policy=server.saving())
    load(state, url, policy=server.loading())
    assert len(met) == count


def test_chunks_in_flight_keep_to_the_budget(server, url):
    """No queue grows: no more chunks are on their way than the budget holds twice."""
    server.proxy.latency_s = 0.02
    state = {"w": np.zeros((16, 2**14), "f4")}
    layout = LayoutPolicy(target_chunk_nbytes=2**16, min_chunk_nbytes=2**16)
    budget_nbytes = 4 * COPIES * 2**16
    save(state, url, policy=server.saving(layout=layout, budget_nbytes=budget_nbytes))
    assert 1 < server.proxy.most_in_flight <= 4 + 2  # and metadata, and the renewal of the claim
    server.proxy.reset()
    load(state, url, policy=server.loading(budget_nbytes=budget_nbytes))
    assert 1 < server.proxy.most_in_flight <= 4


def test_large_objects_are_handed_over_by_one_thread(server, url, monkeypatch):
    """Each thread that hands one over keeps memory of that size."""
    opened, threads = ObjectStore._kv, []

    class Watched:
        def __init__(self, store):
            self.kv = opened(store)

        def __getattr__(self, name):
            return getattr(self.kv, name)

        def write(self, name, data, **condition):
            if data is not None and len(data) >= REUSED_NBYTES:
                threads.append(threading.get_ident())
            return self.kv.write(name, data, **condition)

    monkeypatch.setattr(ObjectStore, "_kv", lambda store: Watched(store))
    state = {f"w{i}": np.full((2 + i % 2, 2**18), i, "f4") for i in range(8)}
    save(state, url, policy=server.saving())
    assert len(threads) == 8
    assert len({*threads}) == 1
    loaded = load({key: np.zeros_like(value) for key, value in state.items()}, url, policy=server.loading())
    assert all(np.array_equal(loaded[key], value) for key, value in state.items())


def test_an_object_is_joined_while_another_is_handed_over():
    joiner, began, joined = Joiner(), threading.Event(), threading.Event()

    class Telling(list):
        def __iter__(self):
            joined.set()
            return super().__iter__()

    def write(memory):
        began.set()
        return joined.wait(60), bytes(memory)

    first = threading.Thread(target=lambda: found.append(joiner.passed([memoryview(b"abc")], 4, write)))
    found = []
    first.start()
    assert began.wait(60)
    second = joiner.passed(Telling([memoryview(b"de")]), 4, bytes)
    first.join()
    assert (found, second) == ([(True, b"abc\0")], b"de\0\0")


@pytest.mark.parametrize(("count", "budget", "each"), [(1, 2**30, 4), (8, 2**30, 2), (16, 2**30, 1), (16, 2**19, 4)])
def test_a_chunk_is_as_many_requests_as_keep_the_server_busy(server, url, monkeypatch, count, budget, each):
    """One if many chunks are read at a time; several if there are few, or the budget holds few."""
    for name, nbytes in (("_BLOCK", 2**14), ("_PART", 2**15), ("_LARGEST", 2**17)):
        monkeypatch.setattr(object_store, f"{name}_NBYTES", nbytes)
    layout = LayoutPolicy(target_chunk_nbytes=2**17, min_chunk_nbytes=2**17)
    state = {"w": np.arange(count * 2**15, dtype="f4").reshape(count, 2**15)}
    save(state, url, policy=server.saving(layout=layout))
    server.proxy.reset()
    loaded = load({"w": np.zeros_like(state["w"])}, url, policy=server.loading(budget_nbytes=budget))
    assert np.array_equal(loaded["w"], state["w"])
    found = sum("/w/c." in request.target for request in server.proxy.requests)
    assert server.name == "rclone" or found == count * each  # it answers a range as if it were all of the object
    server.proxy.reset()
    assert verify(url, store=server.access()).ok
    found = sum("/w/c." in request.target for request in server.proxy.requests)
    assert server.name == "rclone" or found == count + min(count * 4, 16)  # each is looked at first


def test_a_large_chunk_is_read_by_ranges_in_parallel(server, url):
    state = {"w": np.arange(2**23, dtype="f4")}
    save(state, url, policy=server.saving())
    server.proxy.reset()
    loaded = load({"w": np.zeros(2**23, "f4")}, url)
    assert np.array_equal(loaded["w"], state["w"])
    whole = sum("/w/c.0" in request.target for request in server.proxy.requests)
    server.proxy.reset()
    assert open_checkpoint(url)["w"][5:7].tolist() == [5, 6]
    part = sum("/w/c.0" in request.target for request in server.proxy.requests)
    assert server.name == "rclone" or (whole, part) == (4, 1)  # it answers a range as if it were all of the object


def test_a_checkpoint_is_read_over_http(server, url, monkeypatch):
    if server.name != "small":
        pytest.skip("reads without a signature are refused there")
    save(state(), url, policy=server.saving(layout=CHUNKED))
    place = url.replace("s3://", server.proxy.url + "/")
    assert same(load(state(0), place), state())
    assert verify(place).ok
    with pytest.raises(CheckpointError):
        save(state(), place + "-new", policy=server.saving())
    with pytest.raises(NotACheckpointError):
        load(state(), place + "-none")


def test_a_chunk_that_is_missing_or_short_is_named(server, url):
    save(state(), url, policy=server.saving(layout=CHUNKED))
    store = open_store(url)
    assert store.nbytes_of("w/c.1.0") == UNSIZED
    data = store.read("w/c.1.0")
    store.delete(["w/c.1.0"])
    with pytest.raises(StorageError, match=r"a stored chunk is missing: key 'w'.*c\.1\.0"):
        load(state(0), url)
    store.create("w/c.1.0", [memoryview(data)[:-1]], len(data) - 1)
    with pytest.raises(StorageError, match=r"a wrong size: key 'w'.*c\.1\.0.*found 16383 bytes"):
        load(state(0), url)
    assert not verify(url).ok


def test_the_program_of_the_page_runs(server, monkeypatch):
    if not server.heeds_conditions:
        pytest.skip("it says nothing of a server that ignores conditions")
    names = shown("object-stores.md", "to_a_bucket.py")
    assert functional_ckpt.verify("s3://ckpt/run-7/step-100").ok
    assert names["state"]["step"] == 100


def test_the_steps_of_a_run(server, url, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # the policy is what tells the endpoint
    root = url.rpartition("/")[0]
    policies = {"policy": server.saving(in_flight="wait"), "load_policy": server.loading()}
    with Checkpoints(root, keep=KeepLast(2), **policies) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(step), metrics={"loss": 1 / step})
        assert checkpoints.steps() == (2, 3)
        assert checkpoints.best("loss") == 3
        assert checkpoints.info(2).metrics == {"loss": 0.5}
    with Checkpoints(root, **policies) as checkpoints:
        assert same(checkpoints.resume(state(0)), state(3))
        checkpoints.pin(2)
        with pytest.raises(StorageError, match="pinned"):
            checkpoints.remove(2)
        checkpoints.unpin(2)
        assert checkpoints.sweep() == ()
    assert {name.partition("/")[0] for name in names(root, server.access())} == {"step-00000002", "step-00000003"}


def test_a_step_whose_removal_was_cut_off_is_swept(server, url):
    root = url.rpartition("/")[0]
    with Checkpoints(root, policy=server.saving(in_flight="wait")) as checkpoints:
        checkpoints.save(1, state(1))
    server.proxy.reset(lambda r: "403" if r.method == "DELETE" and r.path.endswith("/w/c.0.0") else None)
    with pytest.raises(StorageError):
        remove_step(root, 1)
    server.proxy.reset()
    assert find_steps(root) == {}
    sweep_steps(root)
    assert names(root, server.access()) == []


@pytest.mark.parametrize("text", ["s3://", "s3:///a", "s3://b/a//c", "s3://b/../c", "gs://"])
def test_urls_that_name_no_place(text):
    with pytest.raises(PolicyError, match="bucket"):
        open_store(text)


def test_a_store_policy_is_checked():
    for wrong in ({"retries": -1}, {"lease_s": 0}, {"endpoint": ""}, {"alone": "no"}, {"credentials": "x"}):
        with pytest.raises(PolicyError):
            StorePolicy(**wrong)
    with pytest.raises(PolicyError, match="StorePolicy"):
        SavePolicy(store="s3")
