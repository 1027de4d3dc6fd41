"""How long each phase of a save and of a load took: on the manifest that a save returns, and in `Progress`."""

import pickle
import time

import numpy as np
import pytest

import functional_ckpt as fc
from functional_ckpt.plan.timings import Timings
from functional_ckpt.store.files import FileStore
from functional_ckpt.testing.simulate import run_ranks

FAST = fc.SavePolicy(durability="none")
PAUSE_S = 0.2


@pytest.fixture
def slowed(monkeypatch):
    """Make a method take longer."""

    def slow(owner, name):
        fast = getattr(owner, name)

        def wait(*arguments, **options):
            time.sleep(PAUSE_S)
            return fast(*arguments, **options)

        monkeypatch.setattr(owner, name, wait)

    return slow


def test_a_save_tells_its_phases_which_are_all_of_its_time(tmp_path):
    begun = time.monotonic()
    timings = fc.save({"w": np.ones(1000)}, tmp_path / "c").timings
    elapsed_s = time.monotonic() - begun
    assert [phase for phase in timings if phase != "done"] == list(timings)
    assert {"plan", "agree", "write", "sync", "publish"} == set(timings)
    assert all(seconds >= 0 for seconds in timings.values())
    assert 0 < timings.total_s <= elapsed_s
    # What is outside is the call itself: less than what is inside, on however slow a machine.
    assert timings.total_s == pytest.approx(sum(timings.values()))


@pytest.mark.parametrize(("method", "phase"), [("create", "write"), ("flush", "sync"), ("nbytes_of", "publish")])
def test_time_is_counted_where_it_is_spent(tmp_path, slowed, method, phase):
    slowed(FileStore, method)
    timings = fc.save({"w": np.ones(1000)}, tmp_path / "c").timings
    assert timings[phase] >= PAUSE_S
    assert timings["plan"] + timings["agree"] < timings.total_s - PAUSE_S


def test_a_load_tells_its_phases_to_the_callback(tmp_path, slowed):
    fc.save({"w": np.ones(100_000)}, tmp_path / "c", policy=FAST)
    slowed(FileStore, "read_into")
    seen = []
    fc.load({"w": np.zeros(100_000)}, tmp_path / "c", progress=seen.append)
    assert seen[-1].phase == "done"
    assert set(seen[-1].timings) == {"plan", "agree", "read"}
    assert seen[-1].timings["read"] >= PAUSE_S
    assert [progress.timings.total_s for progress in seen] == sorted(progress.timings.total_s for progress in seen)


def test_a_save_in_the_background_tells_staging_and_its_wait_for_a_turn(tmp_path, slowed):
    slowed(FileStore, "create")
    state = {"w": np.ones(1000)}
    queue = fc.SavePolicy(durability="none", in_flight="queue")
    first = fc.async_save(state, tmp_path / "a", policy=queue)
    second = fc.async_save(state, tmp_path / "b", policy=queue)
    first.result()
    timings = second.result().timings
    assert {"plan", "agree", "stage", "wait", "write", "publish"} <= set(timings)
    assert timings["wait"] >= PAUSE_S / 2
    assert second.progress().timings == timings  # it does not grow any more


def test_waiting_for_another_rank_is_no_writing(tmp_path, piece):
    whole = np.arange(8.0)

    def save(gather):
        half = fc.Box((4 * gather.rank,), (4 * gather.rank + 4,))

        def late(progress):
            time.sleep(PAUSE_S * (gather.rank == 1 and progress.phase == "write" and not progress.done_nbytes))

        return fc.save({"w": piece(whole, half)}, tmp_path / "c", policy=FAST, process_group=gather, progress=late)

    first, second = (manifest.timings for manifest in run_ranks(2, save))
    assert first["exchange"] + first["agree"] >= PAUSE_S / 2  # the chunk is owned: one sends its half to the other
    assert second["write"] >= PAUSE_S


def test_timings_change_nothing_that_a_manifest_is(tmp_path):
    saved = fc.save({"w": np.ones(3)}, tmp_path / "c", policy=FAST)
    read = fc.read_manifest(tmp_path / "c")
    assert saved == read
    assert hash(saved) == hash(read)
    assert read.timings is None
    assert saved.to_json() == read.to_json()
    assert pickle.loads(pickle.dumps(saved)).timings == saved.timings


def test_timings_are_a_mapping():
    timings = Timings((("plan", 0.5), ("write", 1.0)))
    assert dict(timings) == {"plan": 0.5, "write": 1.0}
    assert timings == {"plan": 0.5, "write": 1.0}
    with pytest.raises(KeyError):
        timings["read"]
