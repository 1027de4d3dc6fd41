"""What one save to an object store does to another: none harms one that is committed, live, or somebody else's."""

import json
import random
import threading
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import functional_ckpt
from functional_ckpt import (
    SavePolicy,
    StorePolicy,
    load,
    save,
    sweep,
    verify,
)
from functional_ckpt.errors import (
    AlreadyExistsError,
    CheckpointError,
    CheckpointWarning,
    NotACheckpointError,
    OutcomeUnknownError,
    PolicyError,
    StorageError,
)
from functional_ckpt.run.comm import LocalGather
from functional_ckpt.store.joiner import REUSED_NBYTES
from functional_ckpt.store.lease import Lease, _process
from functional_ckpt.store.opening import open_store
from functional_ckpt.testing.simulate import try_ranks
from tests.stores.small import SmallServer
from tests.stores.test_objects import names, same, state

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
    key = url.partition("://ckpt/")[2] + "/zarr.json"

    def meanwhile(request):
        if request.method == "PUT" and request.path.endswith(key):
            server.proxy.fault = lambda _: None
            open_store(url, access=server.access()).publish("zarr.json", b'{"zarr_format":3}')

    server.proxy.reset(meanwhile)
    with pytest.raises(AlreadyExistsError):
        save(state(), url, policy=server.saving())
    assert open_store(url).read("zarr.json") == b'{"zarr_format":3}'


def test_a_server_that_ignores_conditions_is_found(server, url, monkeypatch):
    heedless = SmallServer(heeds_conditions=False)
    access = server.access(endpoint=f"http://127.0.0.1:{heedless.port}", alone=False)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", access.endpoint)
    with pytest.raises(StorageError, match=r"alone=True"):
        save(state(), url, policy=SavePolicy(store=access))
    assert not heedless.objects
    alone = SavePolicy(store=StorePolicy(endpoint=access.endpoint, alone=True))
    save(state(), url, policy=alone)
    assert same(load(state(0), url, policy=functional_ckpt.LoadPolicy(store=access)), state())
    heedless.close()


def test_of_many_savers_that_meet_trouble_at_most_one_is_published(server, url):
    """Four at a time, while requests are throttled, cut and answered late; what is there is whole, of one of them."""
    if not server.heeds_conditions:
        pytest.skip("the caller says that he is alone")
    chance = random.Random(16)
    faults = ["503", "reset", "lost", "torn", "late:0.05", "late:0.3+lost"]
    for number in range(2 if server.step > 1 else 30):
        place = f"{url}-{number}"
        server.proxy.reset(lambda _: chance.choice(faults) if chance.random() < 0.05 else None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            outcomes = try_ranks(
                4, _one_of_many(server, place, [chance.random() / 10 for _ in range(4)]), timeout_s=300
            )
        server.proxy.reset()
        won = [rank for rank, found in enumerate(outcomes) if not isinstance(found, BaseException)]
        unknown = [rank for rank, found in enumerate(outcomes) if isinstance(found, OutcomeUnknownError)]
        assert all(isinstance(found, CheckpointError) for rank, found in enumerate(outcomes) if rank not in won)
        assert len(won) <= 1
        if not won and open_store(place, access=server.access()).read("zarr.json") is None:
            save(state(9), place, policy=server.saving())
            won = [9]
        found = load(state(0), place, policy=server.loading())
        assert any(same(found, state(rank)) for rank in won or unknown)
        assert verify(place, store=server.access()).ok


def _one_of_many(server, place, waits):
    def run(gather):
        time.sleep(waits[gather.rank])
        return save(state(gather.rank), place, policy=server.saving(), process_group=LocalGather())

    return run


def test_of_two_saves_at_once_at_most_one_is_published(server, url):
    if not server.heeds_conditions:
        pytest.skip("the caller says that he is alone")  # the second may come right after the first, and write over it
    barrier = threading.Barrier(2)

    def one(gather):
        barrier.wait()
        return save(state(gather.rank), url, policy=server.saving())

    outcomes = try_ranks(2, one, timeout_s=300)
    won = [number for number, found in enumerate(outcomes) if not isinstance(found, BaseException)]
    assert len(won) <= 1
    assert all(isinstance(found, AlreadyExistsError) for number, found in enumerate(outcomes) if number not in won)
    if won:
        assert same(load(state(9), url), state(won[0]))
    else:  # each has seen the other
        save(state(5), url, policy=server.saving())
    assert verify(url).ok


def test_of_two_saves_that_claim_together_one_sees_the_other(server, url):
    """Claims are listed only after one's own is there: what both then saw of the other could not be too early."""
    barrier, came = threading.Barrier(2), {}

    def meet(request):
        if request.method == "PUT" and request.path.endswith(".claim") and request.path not in came and len(came) < 2:
            came[request.path] = request
            barrier.wait(120)  # a loaded machine

    server.proxy.reset(meet)
    outcomes = try_ranks(2, _one_of_many(server, url, [0.0, 0.0]), timeout_s=300)
    assert any("another save to this path" in str(found) for found in outcomes), outcomes


def test_a_save_that_comes_to_a_live_one_is_refused(server, url):
    found = []

    saving = SavePolicy(store=server.access(lease_s=2))  # a loaded machine renews late

    def other():
        try:
            save(state(4), url, policy=saving)
        except CheckpointError as error:
            found.append(error)

    _at(server, "/w/c.0.0", other)
    save(state(3), url, policy=saving)
    assert [type(error) for error in found] == [AlreadyExistsError]
    assert "another save to this path" in str(found[0])
    assert same(load(state(0), url, policy=server.loading()), state(3))


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
    save(state(), url, policy=SavePolicy(store=server.access(lease_s=2)))  # a loaded machine renews late
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


def test_a_saver_that_renews_at_last_is_not_taken_over(server, url, monkeypatch):
    """Between the sweep's last look at its claim and the taking over, which rests on the claim that was seen first."""
    if not server.heeds_conditions:
        pytest.skip("the caller says that nobody sweeps meanwhile")
    _leaseless(monkeypatch)
    held, _ = Lease.take(open_store(url, access=server.access()), "a" * 16)

    def sleep(_):
        time.sleep(1)  # longer than the lease
        assert held.is_held()

    monkeypatch.setattr("functional_ckpt.store.lease.time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    assert sweep(url, store=server.access()) == ()
    assert held.is_held()
    assert held.release() is None


def test_a_lost_claim_is_not_made_anew(server, url, monkeypatch):
    """Nor is it held ever again, however often its saver looks."""
    if not server.heeds_conditions:
        pytest.skip("the caller says that nobody sweeps meanwhile")
    _leaseless(monkeypatch)
    store = open_store(url, access=server.access())
    held, _ = Lease.take(store, "a" * 16)
    held.name(["w"])
    assert f"{url}/{held.label}" in sweep(url, store=server.access())
    assert [held.is_held(), held.is_held()] == [False, False]
    assert store.stamp(held.label) is None


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


def test_a_process_that_has_ended_is_known(server, url, monkeypatch):
    _left_by_a_dead_process(url, server, lease_s=60)
    slept = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr("functional_ckpt.store.lease.time", clock)
    assert f"{url}/manifest.json" in sweep(url, store=server.access())
    assert sum(slept) < 3  # of the 60 of its lease
    assert not [name for name in names(url, server.access()) if "claim" in name]


def test_a_root_that_was_on_its_way_is_waited_for(server, url):
    """The request of a process that was killed may come after it: a claim says so, and its lease is waited for."""
    root = _left_by_a_dead_process(url, server, publishing=True)
    late = threading.Timer(0.2, lambda: open_store(url, access=server.access()).publish("zarr.json", root))
    late.start()
    assert not [name for name in sweep(url, store=server.access()) if "claim" not in name]
    late.join()
    assert verify(url, store=server.access()).ok


def test_a_chunk_that_was_on_its_way_is_waited_for(server, url):
    """As long as a request may take: otherwise it would be in the way of the next save."""
    _left_by_a_dead_process(url, server, lease_s=60)
    store, name = open_store(url, access=server.access()), "w/c.0.0"
    data = store.read(name)
    store.delete([name])
    sending = threading.Event()

    def send():
        sending.set()
        store.publish(name, data)
        sending.clear()

    late = threading.Timer(0.3, send)

    def fault(request):
        if late.ident is None and request.method != "GET":
            late.start()
        is_chunk = request.method != "GET" and request.path.endswith(f"/{name}")
        return "late:0.8" if is_chunk and not sending.is_set() else None

    server.proxy.reset(fault)
    save(state(4), url, policy=server.saving())
    late.join()
    server.proxy.reset()
    assert verify(url, store=server.access()).ok
    assert not [name for name in names(url, server.access()) if "claim" in name]


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
    with pytest.raises(AlreadyExistsError):
        store.replace("w/c.0", b"y", None)
    assert store.read("w/c.0") == b"x\0"
    large = bytes(REUSED_NBYTES)
    store.create("w/c.1", [memoryview(large)], len(large))
    store.create("w/c.1", [memoryview(large)[1:]], len(large))
    with pytest.raises(AlreadyExistsError):
        store.create("w/c.1", [memoryview(large)[1:], memoryview(b"y")], len(large))
    assert store.read("w/c.1") == large


def test_a_rank_that_saves_to_another_place_is_told(server, url):
    def run(gather):
        place = url + "-other" * gather.rank
        return save({f"x{gather.rank}": np.ones(3)}, place, policy=server.saving(), process_group=gather)

    assert {type(found).__name__ for found in try_ranks(2, run, timeout_s=300)} == {"PathNotSharedError"}
    assert names(url, server.access()) == []


# Writing over an object on a condition


def test_a_server_that_knows_no_such_condition_is_asked_for_it_once(server, url):
    if server.name == "google":
        pytest.skip("by Google's API there is one condition for everything")
    server.proxy.reset(lambda request: "501" if request.replaces else None)
    for number in (1, 2):
        save(state(number), f"{url}-{number}", policy=server.saving())
        assert same(load(state(0), f"{url}-{number}"), state(number))
    assert sum(request.replaces for request in server.proxy.requests) == 1


@pytest.mark.parametrize("fault", ["403", "500"])
def test_no_other_error_means_that_a_condition_is_not_known(server, url, fault):
    """Whatever its text says: without the condition this would write over what another has written."""
    store = open_store(url, access=server.access(retries=0))
    stamp = store.replace("x", b"1", None)
    server.proxy.reset(lambda request: fault if request.conditional else None)
    with pytest.raises(StorageError, match="writing failed"):
        store.replace("x", b"2", stamp)
    assert store.read("x") == b"1"
