"""Checkpoints in an object store: what works on a path works there, in few requests, and no save harms another."""

import json
import threading
import time

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
    sweep,
    verify,
)
from functional_ckpt.cli import main
from functional_ckpt.errors import AlreadyExistsError, CheckpointError, NotACheckpointError, PolicyError, StorageError
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.sharding import ShardSpec
from functional_ckpt.store.base import UNSIZED
from functional_ckpt.store.lease import Lease, _process
from functional_ckpt.store.opening import open_store
from functional_ckpt.store.steps import find_steps, remove_step, sweep_steps
from functional_ckpt.testing.simulate import run_ranks, try_ranks
from tests.pages import shown
from tests.stores.small import SmallServer

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

    assert len({manifest.to_json() for manifest in run_ranks(4, save_mine)}) == 1
    assert run_ranks(2, load_mine) == [True, True]


def test_requests_are_chunks_arrays_and_a_constant(server, url):
    """A save writes each chunk and each array's metadata once; a load reads each chunk once."""
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
    assert counts["save", 4] - 4 * 5 <= 20
    assert counts["load", 4] - 4 * 4 <= 8


def test_many_requests_at_a_time(server, url):
    server.proxy.latency_s = 0.02
    state = {f"a{i}": np.full(16, i, "f4") for i in range(64)}
    save(state, url, policy=server.saving())
    saving = server.proxy.most_in_flight
    server.proxy.reset()
    load(state, url, policy=server.loading())
    assert min(saving, server.proxy.most_in_flight) >= 16


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
    with pytest.raises(StorageError, match=r"too short: .*key 'w'.*c\.1\.0"):
        load(state(0), url)
    assert not verify(url).ok


def test_the_program_of_the_page_runs(server, monkeypatch):
    if not server.heeds_conditions:
        pytest.skip("it says nothing of a server that ignores conditions")
    names = shown("object-stores.md", "to_a_bucket.py")
    assert functional_ckpt.verify("s3://ckpt/run-7/step-100").ok
    assert names["state"]["step"] == 100


def test_the_steps_of_a_run(server, url):
    root = url.rpartition("/")[0]
    with Checkpoints(root, keep=KeepLast(2), policy=server.saving(in_flight="wait")) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(step), metrics={"loss": 1 / step})
        assert checkpoints.steps() == (2, 3)
        assert checkpoints.best("loss") == 3
    with Checkpoints(root) as checkpoints:
        assert same(checkpoints.resume(state(0)), state(3))
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


# What one save does to another


def test_a_committed_checkpoint_is_never_overwritten(server, url):
    save(state(1), url, policy=server.saving())
    before = names(url, server.access())
    for overwrite in (False, True):
        with pytest.raises(AlreadyExistsError, match="one for each step"):
            save(state(2), url, policy=server.saving(), overwrite=overwrite)
    assert names(url, server.access()) == before
    assert same(load(state(0), url), state(1))
    assert sweep(url) == sweep(url.rpartition("/")[0]) == ()
    assert same(load(state(0), url), state(1))


def test_rename_is_refused(server, url):
    with pytest.raises(PolicyError, match="cannot rename"):
        save(state(), url, policy=server.saving(commit="rename"))


def test_a_root_that_came_meanwhile_stays(server, url):
    """The root is written on the condition that there is none: whoever has put one there, it stays."""
    if not server.heeds_conditions:
        pytest.skip("a server that writes over it")
    key = url.removeprefix("s3://ckpt/") + "/zarr.json"

    def meanwhile(request):
        if request.method == "PUT" and request.path.endswith(key):
            server.proxy.fault = lambda _: None
            open_store(url, access=server.access()).publish("zarr.json", b'{"zarr_format":3}')

    server.proxy.reset(meanwhile)
    with pytest.raises(AlreadyExistsError):
        save(state(), url, policy=server.saving())
    assert open_store(url).read("zarr.json") == b'{"zarr_format":3}'


def test_a_server_that_ignores_conditions_is_found(server, url):
    heedless = SmallServer(heeds_conditions=False)
    access = server.access(endpoint=f"http://127.0.0.1:{heedless.port}", alone=False)
    with pytest.raises(StorageError, match=r"alone=True"):
        save(state(), url, policy=SavePolicy(store=access))
    assert not heedless.objects
    alone = SavePolicy(store=StorePolicy(endpoint=access.endpoint, alone=True))
    save(state(), url, policy=alone)
    assert same(load(state(0), url, policy=functional_ckpt.LoadPolicy(store=access)), state())
    heedless.close()


def test_of_two_saves_at_once_at_most_one_is_published(server, url):
    barrier = threading.Barrier(2)

    def one(gather):
        barrier.wait()
        return save(state(gather.rank), url, policy=server.saving())

    outcomes = try_ranks(2, one)
    won = [number for number, found in enumerate(outcomes) if not isinstance(found, BaseException)]
    assert len(won) <= 1
    assert all(isinstance(found, AlreadyExistsError) for number, found in enumerate(outcomes) if number not in won)
    if won:
        assert same(load(state(9), url), state(won[0]))
    else:  # each has seen the other
        save(state(5), url, policy=server.saving())
    assert verify(url).ok


def _at(server, ending, action):
    """Run `action` once, when a request for a key with this ending arrives, before the server sees it."""
    done = []

    def fault(request):
        if not done and request.method == "PUT" and request.path.endswith(ending):
            done.append(request)
            action()

    server.proxy.reset(fault)
    return done


def test_a_live_save_is_not_swept(server, url):
    found = []
    done = _at(server, "/w/c.0.0", lambda: found.append(sweep(url.rpartition("/")[0], store=server.access())))
    save(state(), url, policy=server.saving())
    assert done
    assert found == [()]
    assert verify(url).ok


def _leaseless(monkeypatch):
    """The saver does not renew its claim by itself, as one that is stopped."""
    monkeypatch.setattr(Lease, "_keep", lambda self: None)


@pytest.mark.parametrize("ending", ["/manifest.json", "/step-1/zarr.json"])
def test_a_save_that_was_taken_for_dead_publishes_nothing(server, url, monkeypatch, ending):
    """The second: between its last look at the claim and the root. It looks again, and takes the root back."""
    if not server.heeds_conditions:
        pytest.skip("the caller says that nobody sweeps meanwhile")
    _leaseless(monkeypatch)
    found = []
    _at(server, ending, lambda: found.append(sweep(url, store=server.access(lease_s=0.3))))
    with pytest.raises(StorageError, match=r"claim of this save was|abandoned or swept"):
        save(state(), url, policy=SavePolicy(store=server.access(lease_s=0.3)))
    assert found[0]
    with pytest.raises(NotACheckpointError):
        load(state(), url)
    monkeypatch.undo()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test:tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    save(state(4), url, policy=server.saving())
    assert same(load(state(0), url, policy=server.loading()), state(4))


def test_what_a_dead_saver_of_another_machine_left_is_swept_when_its_lease_is_over(server, url):
    store = open_store(url, access=server.access())
    save(state(), url, policy=server.saving())
    store.delete(["zarr.json"])
    claim = {"save_id": "a" * 16, "lease_s": 0.3, "host": "elsewhere", "nodes": ["w", "manifest.json"]}
    store.publish(f".{'a' * 16}.claim", json.dumps(claim).encode())
    store.publish("w/notes.txt", b"somebody's")
    left = sweep(url.rpartition("/")[0], store=server.access())
    assert f"{url}/manifest.json" in left
    assert not any("/w/" in name for name in left)  # something of others is there
    assert "w/notes.txt" in names(url, server.access())


def _left_by_a_dead_process(url, server, **more):
    """Turn a checkpoint into what a saver of this machine leaves that was killed right before its root; return it."""
    save(state(), url, policy=server.saving())
    store = open_store(url, access=server.access())
    root = store.read("zarr.json")
    store.delete(["zarr.json"])
    nodes = [*{name.partition("/")[0] for name in store.names() if "/" in name}, "manifest.json"]
    claim = {"save_id": "a" * 16, "lease_s": 0.5, "nodes": nodes, **_process(), "began": "0", **more}
    store.publish(f".{'a' * 16}.claim", json.dumps(claim).encode())
    return root


def test_a_process_that_has_ended_is_known_at_once(server, url):
    _left_by_a_dead_process(url, server, lease_s=60)
    began = time.monotonic()
    assert f"{url}/manifest.json" in sweep(url, store=server.access())
    assert time.monotonic() - began < 50  # of the 60 of its lease
    assert not [name for name in names(url, server.access()) if "claim" in name]


def test_a_root_that_was_on_its_way_is_waited_for(server, url):
    """The request of a process that was killed may come after it: a claim says so, and its lease is waited for."""
    root = _left_by_a_dead_process(url, server, publishing=True)
    late = threading.Timer(0.2, lambda: open_store(url, access=server.access()).publish("zarr.json", root))
    late.start()
    assert not [name for name in sweep(url, store=server.access()) if "claim" not in name]
    late.join()
    assert verify(url, store=server.access()).ok


def test_a_sweep_that_fails_half_way_can_be_repeated(server, url):
    """The claim goes last: without it nobody could tell what is left."""
    _left_by_a_dead_process(url, server)
    late = "late:0.5+403"  # after the others are done
    server.proxy.reset(lambda r: late if r.method == "DELETE" and r.path.endswith("/manifest.json") else None)
    with pytest.raises(StorageError):
        sweep(url, store=server.access())
    server.proxy.reset()
    sweep(url, store=server.access())
    save(state(4), url, policy=server.saving())
    assert verify(url, store=server.access()).ok


def test_a_rank_whose_save_was_given_up_writes_nothing_more(server, url):
    store = open_store(url, guard=f".{'a' * 16}.claim", access=server.access())
    with pytest.raises(StorageError, match="abandoned"):
        store.create("w/c.0", [memoryview(b"x")], 1)
    assert names(url, server.access()) == []


def test_an_object_is_never_replaced(server, url):
    if not server.heeds_conditions:
        pytest.skip("a server that writes over it")
    store = open_store(url, access=server.access())
    store.create("w/c.0", [memoryview(b"x")], 2)
    store.create("w/c.0", [memoryview(b"x\0")], 2)  # the same bytes: as when our own request is repeated
    with pytest.raises(AlreadyExistsError):
        store.create("w/c.0", [memoryview(b"y")], 2)
    assert store.read("w/c.0") == b"x\0"


def test_a_rank_that_saves_to_another_place_is_told(server, url):
    def run(gather):
        place = url + "-other" * gather.rank
        return save({f"x{gather.rank}": np.ones(3)}, place, policy=server.saving(), process_group=gather)

    assert {type(found).__name__ for found in try_ranks(2, run)} == {"PathNotSharedError"}
    assert names(url, server.access()) == []


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
