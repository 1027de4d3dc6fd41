"""Who lives: claims, ranks that are late, and what ranks see of one another."""

import fcntl
import gc
import os
import struct
import threading
import traceback
from unittest.mock import patch

import numpy as np
import pytest

from functional_ckpt import LayoutPolicy, SavePolicy, api, errors, load, save, sweep, verify
from functional_ckpt.errors import AlreadyExistsError, CheckpointWarning, CorruptionError, RankFailedError, StorageError
from functional_ckpt.plan.layout import ArrayPlan, Layout
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.store import file_claim
from functional_ckpt.store.chunk import update_chunk, write_chunk
from functional_ckpt.store.commit import Site
from functional_ckpt.store.file_claim import ABANDONED, Claim, state_of
from functional_ckpt.store.files import FileStore
from functional_ckpt.store.opening import open_store
from functional_ckpt.testing.simulate import try_ranks
from tests.effects import watched

FAST = SavePolicy(durability="none")
MARKER = SavePolicy(commit="marker", durability="none")
ID = "abcdefghijklmnop"


def state(step):
    return {"w": np.full(5, step), "step": step}


def step_of(path):
    assert verify(path).ok
    return load({"w": np.zeros(5, int), "step": 0}, path)["step"]


# Claims


def test_a_claim_goes_before_its_lock(tmp_path, monkeypatch):
    """Nobody may find an unlocked claim of a live save: a sweep would take what it stands for."""
    claim = Claim.take(tmp_path / f".{'a' * 16}.{ID}.claim", ID)
    seen = []

    def look(call):
        if call.name in ("flock", "close"):
            seen.append(claim.path.exists())
        return call.do()

    with watched(tmp_path, look):
        second = Claim.take(tmp_path / f".{'b' * 16}.{ID}.claim", ID)
        claim = second
        seen.clear()
        second.release()
    assert seen == [False, False]


def test_a_claim_that_nobody_refers_to_is_dead(tmp_path):
    claim = Claim.take(tmp_path / ".x.claim", "1f")
    child = os.fork()
    if not child:  # it has the object too, but the save goes on in its parent
        del claim
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert state_of(tmp_path / ".x.claim") == "live"
    del claim
    assert state_of(tmp_path / ".x.claim") == "dead"
    first = Claim.take_in_memory("memory://x")
    first.release()
    second = Claim.take_in_memory("memory://x")
    del first
    with pytest.raises(AlreadyExistsError):
        Claim.take_in_memory("memory://x")
    del second
    Claim.take_in_memory("memory://x").release()


@pytest.mark.parametrize("policy", [FAST, MARKER], ids=["rename", "marker"])
def test_what_an_interrupt_between_two_steps_leaves_goes_with_the_next_save(policy, tmp_path):
    """Ctrl-C may come when no step has begun yet that would clean up."""
    with patch.object(api, "write", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        save(state(1), tmp_path / "a", policy=policy)
    gc.collect()  # the error refers to what was prepared
    save(state(2), tmp_path / "a", policy=policy)
    assert step_of(tmp_path / "a") == 2
    assert [item.name for item in tmp_path.iterdir()] == ["a"]
    assert not [*(tmp_path / "a").glob(".*")]


@pytest.mark.parametrize("name", [f".{'a' * 16}.{ID}.claim", f".{ID}.claim"])
def test_a_claim_of_another_machine_is_left_with_a_word(name, tmp_path, monkeypatch):
    """With locks that other machines do not see, it looks like that of a dead process."""
    monkeypatch.setattr(file_claim, "_machine", lambda: {"host": "elsewhere", "boot": "then"})
    Claim.take(tmp_path / name, ID).drop()
    (tmp_path / f".{'a' * 16}.{ID}.saving").mkdir()
    monkeypatch.undo()
    assert state_of(tmp_path / name) == "foreign"
    with pytest.warns(CheckpointWarning, match="another machine"):
        assert sweep(tmp_path) == (() if ".aaaa" in name else (str(tmp_path / f".{'a' * 16}.{ID}.saving"),))
    assert (tmp_path / name).exists()
    if ".aaaa" not in name:
        with pytest.raises(AlreadyExistsError, match="running"):
            save(state(1), tmp_path, policy=MARKER)


@pytest.mark.parametrize(
    "other", [{"host": "renamed"}, {"boot": "before the last start"}, {"host": None, "boot": None}]
)
def test_a_claim_of_this_machine_under_another_name_is_judged(other, tmp_path, monkeypatch):
    """A container has a name of its own, and a machine that was started again another number."""
    here = file_claim._machine()
    monkeypatch.setattr(file_claim, "_machine", lambda: {**here, **other})
    Claim.take(tmp_path / f".{'a' * 16}.{ID}.claim", ID).drop()
    monkeypatch.undo()
    assert sweep(tmp_path) == (str(tmp_path / f".{'a' * 16}.{ID}.claim"),)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    """Nobody knows who lives: a claim stands until somebody deletes it."""

    def refuse(file, operation):
        raise OSError(file_claim.ENOLCK, "No locks available")

    monkeypatch.setattr(file_claim.fcntl, "flock", refuse)
    Claim.take(tmp_path / f".{'a' * 16}.{ID}.claim", ID).drop()
    assert sweep(tmp_path) == ()
    assert state_of(tmp_path / f".{'a' * 16}.{ID}.claim") == "live"


# Ranks that are late


def coded(codecs):
    return LayoutPolicy(codecs={"": codecs}) if codecs else LayoutPolicy()


class Leaving:
    """A group that breaks for rank 0 once rank 1 has begun to write; rank 1 goes on when rank 0 has given up."""

    def __init__(self, gather, writing, given_up):
        self.gather, self.rank, self.size = gather, gather.rank, gather.size
        self.writing, self.given_up = writing, given_up

    def all_gather(self, value):
        if self.rank == 0 and self.writing.is_set():
            raise RankFailedError("rank 1 does not answer")
        return self.gather.all_gather(value)


def late_save(path, policy):
    """Save on two ranks, the second of which comes to write when the first has given up; return what came of it."""
    writing, given_up = threading.Event(), threading.Event()

    def run(gather):
        def wait(progress):
            if progress.phase == "write":
                writing.set() if gather.rank else writing.wait(20)
                _ = gather.rank and given_up.wait(20)

        try:
            mine = {f"x{gather.rank}": np.full(3, gather.rank)}
            return save(mine, path, policy=policy, process_group=Leaving(gather, writing, given_up), progress=wait)
        finally:
            given_up.set()

    return try_ranks(2, run)


def test_what_a_failed_save_cannot_remove_is_left_with_its_claim(tmp_path, monkeypatch):
    """Without the claim nobody could tell whose it is, and no save would ever work there again."""

    def refuse(self, names):
        raise StorageError("deleting failed")

    def fail(progress):
        if progress.phase == "publish":
            monkeypatch.setattr(FileStore, "delete", refuse)
            raise OSError("the first cause")

    with pytest.raises(StorageError, match="the first cause") as caught:
        save(state(1), tmp_path / "a", policy=MARKER, progress=fail)
    assert "could not be removed" in caught.value.__notes__[0]
    monkeypatch.undo()
    assert (tmp_path / "a/w/c.0").exists()
    save(state(2), tmp_path / "a", policy=MARKER)
    assert step_of(tmp_path / "a") == 2


@pytest.mark.parametrize("codecs", ["", "zstd"])
def test_a_late_rank_writes_nothing_more(codecs, tmp_path):
    policy = SavePolicy(commit="marker", durability="none", layout=coded(codecs))
    outcomes = late_save(tmp_path / "a", policy)
    assert all(isinstance(outcome, errors.CheckpointError) for outcome in outcomes)
    assert "abandoned" in "".join(traceback.format_exception(outcomes[1]))
    (left,) = [p.name for p in (tmp_path / "a").rglob("*")]
    assert left.endswith(ABANDONED)
    save(state(3), tmp_path / "a", policy=MARKER)
    assert step_of(tmp_path / "a") == 3
    assert not list((tmp_path / "a").glob(".*"))


@pytest.mark.parametrize("swept", [True, False])
def test_what_a_late_rank_still_writes_is_swept(swept, tmp_path, monkeypatch):
    """It has looked at the claim, and then rank 0 gave up."""
    monkeypatch.setattr(FileStore, "check_guard", lambda self: None)
    late_save(tmp_path / "a", MARKER)
    assert list((tmp_path / "a").glob("x*"))
    if swept:
        assert sweep(tmp_path / "a")
        assert list((tmp_path / "a").iterdir()) == []
    save({"x1": np.full(3, 7)}, tmp_path / "a", policy=MARKER)
    assert load({"x1": np.zeros(3, int)}, tmp_path / "a")["x1"].tolist() == [7, 7, 7]


@pytest.mark.parametrize("codecs", ["", "zstd", "crc32c"])
def test_a_chunk_is_never_replaced(codecs, tmp_path, tree_bytes):
    """As by a slow rank of a failed save, in a directory in which another one has been committed since."""
    policy = SavePolicy(commit="marker", durability="none", layout=coded(codecs))
    manifest = save(state(2), tmp_path / "a", policy=policy)
    before = tree_bytes(tmp_path)
    entry = manifest.arrays[0]
    with pytest.raises(AlreadyExistsError):
        write_chunk(open_store(tmp_path / "a"), ArrayPlan(entry.spec, entry.layout), (0,), np.full(5, 1))
    assert tree_bytes(tmp_path) == before


def test_who_writes_part_of_a_chunk_looks_at_the_claim_first(tmp_path):
    save(state(2), tmp_path / "a", policy=MARKER)
    manifest = save(state(2), tmp_path / "b", policy=MARKER)
    entry = manifest.arrays[0]
    store = open_store(tmp_path / "a", guard=f".{ID}.claim")
    with pytest.raises(StorageError, match="abandoned"):
        update_chunk(store, entry.spec, entry.layout, Box((0,), (2,)), np.full(2, 1))
    assert step_of(tmp_path / "a") == 2


# What ranks see of one another


def test_a_rank_looks_for_what_its_neighbour_wrote(tmp_path, monkeypatch):
    """Where ranks share no file system after all, each finds its own files."""
    ranks = {}

    def apart(site, sync="none"):
        other = tmp_path / f"disk of {ranks[threading.get_ident()]}"
        other.mkdir(parents=True)
        return FileStore(other, sync)

    def run(gather):
        ranks[threading.get_ident()] = gather.rank
        return save({f"x{gather.rank}": np.ones(3)}, tmp_path / "a", policy=FAST, process_group=gather)

    monkeypatch.setattr(Site, "store", apart)
    for outcome in try_ranks(2, run):
        assert isinstance(outcome, errors.CheckpointErrors)
        assert {(type(problem), problem.what) for problem in outcome.exceptions} == {
            (CorruptionError, "a stored chunk is missing")
        }
    assert not (tmp_path / "a").exists()


@pytest.mark.skipif(not hasattr(fcntl, "F_OFD_SETLK"), reason="the kind of lock that TensorStore takes on Linux")
def test_parts_of_one_chunk_are_written_under_a_lock(tmp_path):
    """Two ranks that rewrite one chunk file: without the lock the one that comes last undoes the other's part."""
    spec, layout = ArraySpec("w", (64,), "float64"), Layout("shared", (64,), (), "float64")
    (tmp_path / "w").mkdir()
    lock = os.open(tmp_path / "w/c.0.__lock", os.O_RDWR | os.O_CREAT)
    fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    done = threading.Event()

    def write():
        update_chunk(FileStore(tmp_path), spec, layout, Box((0,), (32,)), np.ones(32))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert not done.wait(0.5), "it has not waited"
    finally:
        os.close(lock)
        writer.join(60)
    assert done.is_set()
    assert np.fromfile(tmp_path / "w/c.0")[:33].tolist() == [1.0] * 32 + [0.0]
