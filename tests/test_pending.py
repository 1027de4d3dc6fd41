"""Saves in the background of one process: their order, failures that nobody asks for, forks, exits and interrupts."""

import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from unittest.mock import DEFAULT, patch

import numpy as np
import pytest

import functional_ckpt
from functional_ckpt import SavePolicy, async_save, save
from functional_ckpt.errors import SaveInFlightError, StorageError
from functional_ckpt.run import pending
from functional_ckpt.run.comm import LocalGather
from functional_ckpt.run.progress import Tracker
from functional_ckpt.store.files import FileStore
from functional_ckpt.store.work import Work, run_all
from functional_ckpt.testing.simulate import run_ranks

FAST = SavePolicy(durability="none")
ONES = {"w": np.ones(3)}


def at(step):
    return {"w": np.full(3, float(step))}


def no_space(self, *arguments, **options):
    raise OSError(28, "No space left on device")


def test_a_later_save_is_published_later(tmp_path):
    def report(progress):
        time.sleep(0.5 * (progress.phase == "publish"))

    save(at(99), tmp_path / "last", policy=FAST)
    pending = async_save(at(100), tmp_path / "last", policy=FAST, overwrite=True, progress=report)
    save(at(101), tmp_path / "last", policy=FAST, overwrite=True)
    pending.result()
    assert functional_ckpt.open_checkpoint(tmp_path / "last")["w"][0] == 101


def events_of_two(tmp_path, in_flight):
    """Begin a save in the background that takes its time, and another one; return in which order what took place."""
    events = []

    def report(number):
        def tell(progress):
            if progress.phase == "publish":
                time.sleep(0.3)
            events.append(f"{progress.phase} {number}")

        return tell

    policy = SavePolicy(durability="none", in_flight=in_flight)
    first = async_save(at(1), tmp_path / "first", policy=FAST, progress=report(1))
    try:
        async_save(at(2), tmp_path / "second", policy=policy, progress=report(2)).result()
    finally:
        first.result()
    return events


def test_the_next_save_copies_the_state_when_the_one_before_is_done(tmp_path):
    """So that one copy of the state is held at a time, however often a loop saves."""
    events = events_of_two(tmp_path, "wait")
    assert events.index("done 1") < events.index("stage 2")


def test_a_queue_of_saves_holds_a_copy_each(tmp_path):
    events = events_of_two(tmp_path, "queue")
    assert events.index("stage 2") < events.index("done 1") < events.index("publish 2")


def test_a_save_is_refused_while_another_runs_if_the_policy_says_so(tmp_path):
    with pytest.raises(SaveInFlightError, match=r"still running.*in_flight='wait'"):
        events_of_two(tmp_path, "refuse")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first"]
    async_save(at(2), tmp_path / "second", policy=SavePolicy(in_flight="refuse")).result()


def test_one_rank_that_is_busy_refuses_for_all(tmp_path):
    lingering = threading.Event()

    def run(gather):
        mine = LocalGather()
        busy = None
        if gather.rank == 1:
            busy = async_save(at(1), tmp_path / "mine", policy=FAST, process_group=mine, progress=wait_for(lingering))
        policy = SavePolicy(durability="none", in_flight="refuse")
        try:
            with pytest.raises(SaveInFlightError):
                async_save(at(2), tmp_path / "all", policy=policy, process_group=gather)
        finally:
            lingering.set()
            if busy is not None:
                busy.result()

    run_ranks(2, run)


def wait_for(event):
    def report(progress):
        if progress.phase == "publish":
            event.wait(30)

    return report


def test_a_save_within_a_save_in_the_background_does_not_wait_for_it(tmp_path):
    def report(progress):
        if progress.phase == "publish":
            save(ONES, tmp_path / "inner", policy=FAST)

    async_save(ONES, tmp_path / "outer", policy=FAST, progress=report).result(30)
    assert functional_ckpt.verify(tmp_path / "inner").ok


def dropped(path):
    """Begin a save that fails, and forget it."""
    with patch.object(FileStore, "create", no_space):
        async_save(ONES, path, policy=FAST)
        wait_idle()


def wait_idle():
    from functional_ckpt.run.pending import wait_for_all

    wait_for_all()


def test_a_dropped_save_that_fails_is_logged_and_raised_by_the_next_one(tmp_path, caplog):
    dropped(tmp_path / "a")
    [record] = [record for record in caplog.records if record.name == "functional_ckpt"]
    assert record.levelno == logging.ERROR
    assert "No space left" in caplog.text
    with pytest.raises(StorageError, match=r"earlier async_save .*No space left"):
        save(ONES, tmp_path / "b", policy=FAST)
    assert not list(tmp_path.iterdir())
    save(ONES, tmp_path / "b", policy=FAST)


def test_a_failure_that_somebody_can_ask_for_is_raised_there_only(tmp_path):
    with patch.object(FileStore, "create", no_space):
        pending = async_save(ONES, tmp_path / "a", policy=FAST)
        wait_idle()
    save(ONES, tmp_path / "b", policy=FAST)
    with pytest.raises(StorageError, match="No space left"):
        pending.result()
    del pending
    save(ONES, tmp_path / "c", policy=FAST)


def script(tmp_path, text):
    """Run `text` in a process of its own."""
    prelude = "import atexit, os\nimport numpy as np, functional_ckpt as fc\npath = os.environ['PLACE']\n"
    program = f"{prelude}ones = {{'w': np.ones(300_000)}}\n{textwrap.dedent(text)}"
    environment = {**os.environ, "PLACE": str(tmp_path / "a")}
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert found.returncode == 0, found.stderr
    return found


def test_a_dropped_save_that_fails_last_is_a_warning_at_exit(tmp_path):
    found = script(
        tmp_path,
        """
        fc.async_save(ones, path, progress=lambda p: p.phase == "publish" and 1 / 0)
        """,
    )
    assert "a save in the background failed: ZeroDivisionError" in found.stderr


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_a_first_save_at_exit(tmp_path, call):
    found = script(tmp_path, f"atexit.register(lambda: fc.{call}(ones, path))")
    assert not found.stderr
    assert functional_ckpt.verify(tmp_path / "a").ok
    assert [item.name for item in tmp_path.iterdir()] == ["a"]


def test_a_save_in_the_background_without_a_thread(tmp_path):
    with patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        assert async_save(ONES, tmp_path / "a", policy=FAST).done()
    assert [item.name for item in tmp_path.iterdir()] == ["a"]
    async_save(ONES, tmp_path / "b", policy=FAST).result(30)


def test_large_pieces_are_written_without_threads(tmp_path):
    with patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        save({str(n): np.ones(2**17) for n in range(4)}, tmp_path / "a", policy=FAST)
    assert functional_ckpt.verify(tmp_path / "a").ok


@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_an_interrupt_while_the_thread_begins_leaves_nothing(tmp_path, commit):
    policy = SavePolicy(durability="none", commit=commit)
    with patch.object(threading.Thread, "start", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        async_save(ONES, tmp_path / "a", policy=policy)
    assert not [item for item in tmp_path.rglob("*") if item.is_file()]
    async_save(ONES, tmp_path / "a", policy=policy).result(30)


def test_a_start_that_is_interrupted_runs_a_save_once(tmp_path, monkeypatch):
    """Neither the caller nor the thread knows of the other; a later save of the same lane runs, too."""
    started, ran, begin = [], [], threading.Thread.start

    class Interrupted(threading.Thread):
        def start(self):
            begin(self)
            started.append(self)
            raise KeyboardInterrupt

        def is_alive(self):  # what the system says before the thread has told that it runs
            return False

    def work(number):
        ran.append(number)
        time.sleep(0.05)
        return number

    lane = object()
    monkeypatch.setattr(pending.threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        pending.start(lambda: work(0), Tracker(), lane)
    monkeypatch.undo()
    assert pending.start(lambda: work(1), Tracker(), lane).result(60) == 1
    assert threading.Thread.join(started[0]) is None
    assert ran == [0, 1]


def test_an_interrupt_before_there_is_a_thread_does_not_stop_later_saves():
    ran, lane = [], object()
    with patch.object(pending.threading, "Thread", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        pending.start(lambda: ran.append(0), Tracker(), lane)
    pending.start(lambda: ran.append(1), Tracker(), lane).result(30)
    assert ran == [0, 1]


def test_an_interrupt_where_no_save_takes_it_does_not_stop_later_saves():
    """Without a thread saves run in the caller's, and Ctrl-C may come between two of them."""
    ran, lane = [], object()
    no_thread = patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))

    def queued():
        pending.start(lambda: ran.append(2), Tracker(), lane)
        ran.append(1)

    twice = patch.object(pending, "_next", wraps=pending._next, side_effect=[DEFAULT] + 2 * [KeyboardInterrupt])
    with no_thread, twice, pytest.raises(KeyboardInterrupt):
        pending.start(queued, Tracker(), lane)
    assert ran == [1]
    pending.wait_for_all()
    assert ran == [1, 2]
    with no_thread, patch.object(pending._Job, "run", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        pending.start(queued, Tracker(), lane)
    pending.wait_for_all()
    assert ran == [1, 2]
    pending.start(lambda: ran.append(3), Tracker(), lane).result(30)
    pending.refuse_while_running()


@pytest.mark.parametrize("is_late", [False, True])
def test_an_interrupt_while_threads_begin_leaves_none_at_work(is_late, monkeypatch):
    started, done, begin = [], [], threading.Thread.start

    def interrupted(thread):
        started.append(thread)
        if not is_late:
            begin(thread)
        raise KeyboardInterrupt

    def call():
        time.sleep(0.02)
        done.append(1)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all([Work(2**20, call, 0)] * 20, 2**30, concurrency=4)
    count = len(done)
    if is_late:
        begin(started[0])
    started[0].join()
    assert len(done) == count < 20


def test_a_forked_child_saves_in_the_background(tmp_path):
    script(
        tmp_path,
        """
        fc.async_save(ones, path + ".parent")
        child = os.fork()
        if not child:
            fc.async_save(ones, path).result(20)
            fc.save(ones, path + ".more")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """,
    )
    assert functional_ckpt.verify(tmp_path / "a").ok
    assert functional_ckpt.verify(tmp_path / "a.parent").ok


def test_a_forked_child_is_told_where_tensorstore_would_abort_it(tmp_path):
    script(
        tmp_path,
        """
        zstd = fc.SavePolicy(layout=fc.LayoutPolicy(codecs={"": "zstd"}))
        fc.save(ones, path, policy=zstd)
        fc.save(ones, "memory://a")
        calls = [lambda: fc.save(ones, path + ".b", policy=zstd), lambda: fc.load(ones, path)]
        for call in [*calls, lambda: fc.save(ones, "memory://b"), lambda: fc.load(ones, "memory://a")]:
            child = os.fork()
            if not child:
                try:
                    print(call())
                except fc.errors.StorageError as error:
                    os._exit("forked" not in str(error))
                os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """,
    )
    assert [item.name for item in tmp_path.iterdir()] == ["a"]


def test_a_callback_that_fails_in_one_process_raises_itself(tmp_path):
    def report(progress):
        raise TypeError("no such screen")

    with pytest.raises(TypeError, match="no such screen"):
        save(ONES, tmp_path / "a", policy=FAST, progress=report)
    with pytest.raises(TypeError, match="no such screen"):
        async_save(ONES, tmp_path / "a", policy=FAST, progress=report).result(30)
    assert not list(tmp_path.iterdir())
