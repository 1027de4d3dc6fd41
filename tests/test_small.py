"""Many small tensors: how many tasks, descriptors and handles a save of them takes."""

import os
from unittest.mock import patch

import attrs
import numpy as np
import pytest

import functional_ckpt
from functional_ckpt.plan.layout import LayoutPolicy
from functional_ckpt.run.policy import SavePolicy
from functional_ckpt.store import execute
from functional_ckpt.store.files import FileStore
from functional_ckpt.store.work import SMALL_NBYTES

STATE = {
    "small": [np.full(1024, i, "f4") for i in range(200)],
    "scalars": [np.int64(i) for i in range(100)],
    "cut": np.arange(1000, dtype="i4"),
    "large": np.arange(100_000, dtype="f8"),
    "empty": np.zeros((0, 3)),
    "turned": np.arange(12, dtype="i2").reshape(3, 4).T,
}
POLICY = SavePolicy(durability="none", layout=LayoutPolicy(target_chunk_nbytes=2**19, min_chunk_nbytes=0))


def tasks_of(path):
    """Return the tasks of a save."""
    tasks, run = [], execute.run_all

    def seen(work, *arguments):
        tasks.extend(work := list(work))
        return run(work, *arguments)

    with patch.object(execute, "run_all", seen):
        functional_ckpt.save(STATE, path, policy=POLICY)
    return tasks


def require_saved(path):
    found = functional_ckpt.load(STATE, path)
    assert functional_ckpt.verify(path).ok
    for i, each in enumerate(found["small"]):
        assert (each == i).all()
    assert [int(each) for each in found["scalars"]] == list(range(100))
    assert (found["large"] == np.arange(100_000)).all()
    assert found["turned"].tolist() == STATE["turned"].tolist()


def test_small_pieces_are_written_many_at_a_time(tmp_path):
    tasks = tasks_of(tmp_path / "a")
    require_saved(tmp_path / "a")
    small = [task for task in tasks if 0 < task.nbytes < SMALL_NBYTES]
    assert sum(task.nbytes for task in tasks) == functional_ckpt.read_manifest(tmp_path / "a").nbytes
    assert len(small) <= 8  # so that one thread runs them, and a cancelled save ends soon
    assert len(small) >= 200 * 4096 // SMALL_NBYTES


def test_where_each_waits_for_a_server_they_are_written_one_by_one(tmp_path):
    before = FileStore.capabilities
    with patch.object(FileStore, "capabilities", property(lambda s: attrs.evolve(before.fget(s), concurrency=4))):
        tasks = tasks_of(tmp_path / "a")
    require_saved(tmp_path / "a")
    assert len([task for task in tasks if task.nbytes == 4096]) == 200
    assert len([task for task in tasks if task.nbytes == 0]) == len(
        functional_ckpt.read_manifest(tmp_path / "a").arrays
    )


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")
def test_a_save_leaves_nothing_open(tmp_path):
    functional_ckpt.save(STATE, tmp_path / "a", policy=POLICY)
    before = len(os.listdir("/proc/self/fd"))
    for step in range(3):
        functional_ckpt.save(STATE, tmp_path / str(step), policy=POLICY)
        functional_ckpt.async_save(STATE, tmp_path / f"{step}-async", policy=POLICY).result()
    assert len(os.listdir("/proc/self/fd")) == before
