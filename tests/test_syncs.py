"""The disk begins early with the files of a durable save; all are synced before it is published, or it fails."""

import errno
import os
import re
import threading

import numpy as np
import pytest

from functional_ckpt import SavePolicy, async_save, errors, save, verify
from functional_ckpt.plan.layout import LayoutPolicy
from functional_ckpt.store import directories, unsynced
from functional_ckpt.testing.simulate import try_ranks
from tests.effects import watched

MIB = 2**20
FSYNC = SavePolicy(durability="fsync", layout=LayoutPolicy(target_chunk_nbytes=MIB, min_chunk_nbytes=MIB))
LARGE = np.arange(6 * MIB // 8).reshape(6, -1)  # chunks of 1 MiB
linux = pytest.mark.skipif(not hasattr(directories._libc(), "sync_file_range"), reason="the system has no such call")


class Calls:
    """The calls of a save in their order, as (name, file), with paths below the directory that is saved to.

    `refused` maps a call and a file to what raises.
    """

    def __init__(self, root, refused=()):
        self.root, self.refused, self.found = root, refused, []
        self._lock = threading.Lock()

    def __call__(self, call):
        path = os.path.relpath(call.paths[0], self.root) if call.paths[0] else ""
        path = re.sub(r"^[^/]*saving/?", "", path)
        with self._lock:
            self.found.append((call.name, path))
        if (call.name, path) in self.refused:
            raise OSError(errno.EIO, f"refused {call.name}")
        return call.do()

    def at(self, name, path=None):
        return [i for i, found in enumerate(self.found) if found == (name, path or found[1])]

    def open_at_once(self):
        """The most files that were written and open at a time."""
        return max(map(len, self._open()), default=0)

    def open_now(self):
        """The number of files that are written and open."""
        with self._lock:
            return len([*self._open()][-1]) if self.found else 0

    def _open(self):
        now = frozenset()
        for name, path in self.found:
            now |= {path} if name == "create" else set()
            now -= {path} if name == "close" else set()
            yield now


def saved(tmp_path, state, policy=FSYNC, refused=(), start=save):
    calls = Calls(tmp_path, refused)
    with watched(tmp_path, calls):
        start(state, tmp_path / "a", policy=policy)
    return calls


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@linux
@pytest.mark.parametrize("start", [save, lambda *a, **k: async_save(*a, **k).result(60)], ids=["save", "async"])
def test_the_disk_writes_chunks_while_later_ones_are_made(tmp_path, start):
    calls = saved(tmp_path, {"w": LARGE}, start=start)
    chunks = [f"w/c.{n}.0" for n in range(6)]
    assert all(calls.at("write", name)[-1] < calls.at("sync_file_range", name)[0] for name in chunks)
    # No thread waits for the disk while there is anything to copy.
    last_written = max(calls.at("write", name)[-1] for name in chunks)
    assert all(calls.at("fsync", name)[0] > last_written for name in chunks)
    assert max(calls.at("fsync", name)[0] for name in chunks) < calls.at("create", "manifest.json")[0]


@linux
def test_a_file_system_that_is_synced_once_begins_early_too(tmp_path):
    calls = saved(tmp_path, {"w": LARGE}, SavePolicy(durability="syncfs", layout=FSYNC.layout))
    assert len(calls.at("sync_file_range")) == 6
    assert [path for name, path in calls.found if name == "fsync"] == ["."]  # the new name, at the end
    assert len(calls.at("syncfs")) == 1


@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_a_file_system_is_synced_through_a_handle_from_before_the_first_write(tmp_path, commit):
    """Through such a handle the system tells of an error even if it has told another program, and only then."""
    opened, written, synced = {}, [], []

    def handle(call):
        found = call.do()
        if call.name == "open":
            opened[found] = len(written)
        elif call.name == "write" and "c.0" in call.paths[0]:
            written.append(call.paths[0])
        elif call.name == "syncfs":
            synced.append(opened[call.arguments[1]])
        elif call.name == "close":
            opened.pop(call.arguments[0], None)
        return found

    policy = SavePolicy(durability="syncfs", commit=commit)
    with watched(tmp_path, handle):
        save({"w": LARGE}, tmp_path / "a", policy=policy)
    assert written
    assert synced == [0]


def test_without_durability_nothing_begins(tmp_path):
    calls = saved(tmp_path, {"w": LARGE}, SavePolicy(durability="none", layout=FSYNC.layout))
    assert calls.at("sync_file_range") + calls.at("fsync") + calls.at("syncfs") == []


def test_few_files_are_open_at_a_time_and_all_are_synced(tmp_path):
    state = {f"x{n:03}": np.full(3, n) for n in range(100)}
    calls = saved(tmp_path, state)
    files = {path for name, path in calls.found if name == "create" and ".claim" not in path}
    assert len(files) == 203
    assert [path for path in files if not calls.at("fsync", path)] == []
    assert unsynced.MOST // 2 < calls.open_at_once() <= unsynced.MOST + 2


@pytest.mark.parametrize("state", [{"w": LARGE}, {f"x{n:03}": np.full(3, n) for n in range(50)}], ids=["six", "many"])
@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_files_that_wait_for_their_syncs_do_not_use_up_the_descriptors(tmp_path, state, commit):
    """A program may have few left; then those that are kept open are synced first."""
    calls, most = Calls(tmp_path), 6

    def handle(call):
        if call.name == "create" and calls.open_now() >= most:
            raise OSError(errno.EMFILE, "Too many open files")
        return calls(call)

    with watched(tmp_path, handle):
        save(state, tmp_path / "a", policy=SavePolicy(durability="fsync", commit=commit, layout=FSYNC.layout))
    assert verify(tmp_path / "a").ok
    assert calls.open_at_once() == most
    files = {path for name, path in calls.found if name == "create" and ".claim" not in path}
    assert [path for path in files if not calls.at("fsync", path)] == []


def test_without_a_descriptor_a_save_fails_at_once(tmp_path):
    calls = Calls(tmp_path)

    def handle(call):
        if call.name == "create" and "c.0" in call.paths[0]:
            raise OSError(errno.EMFILE, "Too many open files")
        return calls(call)

    with watched(tmp_path, handle), pytest.raises(errors.StorageError, match="Too many open files"):
        save({"w": np.ones(3)}, tmp_path / "a", policy=FSYNC)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_known", [False, True], ids=["no such call", "refused"])
def test_where_the_disk_cannot_begin_files_are_synced_at_once(tmp_path, monkeypatch, is_known):
    if not is_known:
        monkeypatch.setattr(directories, "_libc", lambda: object())
    monkeypatch.setattr("functional_ckpt.store.work.thread_count", lambda: 2)
    calls = saved(tmp_path, {"w": LARGE}, refused=[("sync_file_range", f"w/c.{n}.0") for n in range(6)])
    assert all(calls.at("fsync", f"w/c.{n}.0") for n in range(6))
    assert calls.open_at_once() <= 1 + 2 + 1  # the claim, a file for each of two threads, metadata


@pytest.mark.parametrize("state", [{"w": LARGE}, {f"x{n:03}": np.full(3, n) for n in range(100)}], ids=["six", "many"])
def test_a_file_that_the_disk_refuses_fails_the_save_and_is_named(tmp_path, state):
    name = "w/c.3.0" if "w" in state else "x001/c.0"
    before = descriptors() if os.path.exists("/proc/self/fd") else 0
    with pytest.raises(errors.StorageError, match=r"syncing failed.*refused fsync") as failure:
        saved(tmp_path, state, refused=[("fsync", name)])
    assert failure.value.path.startswith(str(tmp_path))
    assert failure.value.path.endswith(f"/{name}")
    assert list(tmp_path.iterdir()) == []
    assert not before or descriptors() == before


def test_a_save_that_fails_otherwise_leaves_no_file_open(tmp_path):
    before = descriptors()
    with pytest.raises(errors.StorageError, match="refused create"):
        saved(tmp_path, {"w": LARGE, "x": np.ones(3)}, refused=[("create", "w/c.5.0")])
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == []


def test_a_sync_that_fails_on_one_rank_fails_on_all(tmp_path):
    calls = Calls(tmp_path, [("fsync", "x1/c.0"), ("fsync", "x2/c.0")])

    def run(gather):
        mine = {f"x{gather.rank}": np.full(3, 7)}
        return save(mine, tmp_path / "a", policy=FSYNC, process_group=gather)

    with watched(tmp_path, calls):
        outcomes = try_ranks(3, run)
    for found in outcomes:
        assert isinstance(found, errors.CheckpointErrors)
        assert [(type(each), each.path.rpartition(".saving/")[2]) for each in found.exceptions] == [
            (errors.StorageError, f"x{rank}/c.0") for rank in (1, 2)
        ]
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_the_number_of_one_just_closed_is_watched_too(tmp_path):
    """As when another thread opens it before the one that closes goes on: its sync could not be refused."""
    seen, opened = [], []

    def handle(call):
        seen.append((call.name, os.path.basename(call.paths[0])))
        found = call.do()
        if call.name == "close" and not opened:
            opened.append(os.open(tmp_path / "second", os.O_CREAT | os.O_WRONLY))
        return found

    with watched(tmp_path, handle):
        first = os.open(tmp_path / "first", os.O_CREAT | os.O_WRONLY)
        os.close(first)
        assert opened == [first]
        os.fsync(first)
        os.close(first)
    assert [file for _, file in seen] == ["first", "first", "second", "second", "second"]
    assert [name for name, _ in seen] == ["create", "close", "create", "fsync", "close"]
