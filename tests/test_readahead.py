"""What the system is told before parts of chunks are read from a cold disk."""

import os

import numpy as np
import pytest

from functional_ckpt import ArraySpec, Box, LocalShards, SavePolicy, ShardSpec, load, save
from functional_ckpt.plan.layout import LayoutPolicy
from functional_ckpt.store import readahead
from functional_ckpt.testing.simulate import run_ranks

MIB = 2**20
CHUNK = 2 * MIB
ROWS = np.arange(2 * CHUNK // 4, dtype="f4").reshape(-1, 4096)  # two chunks of rows of 16 KiB
W = ArraySpec("w", ROWS.shape, "float32")
POLICY = SavePolicy(durability="none", layout=LayoutPolicy(target_chunk_nbytes=CHUNK))

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice")


@pytest.fixture
def saved(tmp_path):
    save({"w": ROWS}, tmp_path / "a", policy=POLICY)
    assert (tmp_path / "a/w/c.1.0").stat().st_size == CHUNK
    return tmp_path / "a"


class Disk:
    """A cold one: notes the advice."""

    def __init__(self, monkeypatch):
        self.advised = []
        monkeypatch.setattr(readahead, "_is_cached", lambda file, ends: False)
        monkeypatch.setattr(os, "posix_fadvise", lambda *advice: self.advised.append(advice))

    def wanted_nbytes(self):
        """The bytes that were asked for."""
        return sum(nbytes for *_, nbytes, what in self.advised if what == os.POSIX_FADV_WILLNEED)

    def goes_ahead(self):
        """Whether the system is asked for nothing but to read ahead."""
        return {what for *_, what in self.advised} == {os.POSIX_FADV_SEQUENTIAL}


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def left(rank=0, of=2):
    """The columns of a rank."""
    width = ROWS.shape[1] // of
    return ShardSpec(W, Box((0, rank * width), (ROWS.shape[0], (rank + 1) * width)))


def test_one_process_fetches_its_columns_and_nothing_between(saved, disk):
    found = load({"w": left()}, saved)
    np.testing.assert_array_equal(found["w"], ROWS[:, :2048])
    assert disk.wanted_nbytes() == ROWS.nbytes // 2
    assert not disk.goes_ahead()


def test_one_range_is_fetched_and_nothing_after_it(saved, disk):
    def run(gather):
        load({"w": ShardSpec(W, Box((0, 0), (64, 4096)))}, saved, process_group=gather)

    run_ranks(2, run)
    assert disk.wanted_nbytes() == 2 * 64 * 4096 * 4
    assert not disk.goes_ahead()


def shards(rank, of, into):
    return {"w": LocalShards(left(rank, of), into)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_of_one_machine_fetch_their_columns_together(saved, disk, ranks):
    def run(gather):
        into = np.zeros((ROWS.shape[0], ROWS.shape[1] // ranks), "f4")
        load(shards(gather.rank, ranks, into), saved, process_group=gather)
        return into

    np.testing.assert_array_equal(np.hstack(run_ranks(ranks, run)), ROWS)
    assert disk.goes_ahead()


def test_a_process_that_is_alone_on_its_machine_fetches_its_columns_only(saved, disk, monkeypatch):
    machines = iter(range(100))
    monkeypatch.setattr("functional_ckpt.run.loading.boot_id", lambda: f"machine {next(machines)}")

    def run(gather):
        into = np.zeros((ROWS.shape[0], 2048), "f4")
        load(shards(gather.rank, 2, into), saved, process_group=gather)

    run_ranks(2, run)
    assert disk.wanted_nbytes() == ROWS.nbytes
    assert not disk.goes_ahead()


def test_what_memory_has_is_not_asked_for(saved, monkeypatch):
    disk = Disk(monkeypatch)
    monkeypatch.setattr(readahead, "_is_cached", lambda file, ends: True)
    load({"w": left()}, saved)
    assert disk.advised == []
