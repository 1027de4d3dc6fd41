"""What a save may replace, what it needs before it writes, and what it does when something changes meanwhile."""

import errno
import os
import shutil
import stat
import threading
import time
import warnings
from pathlib import Path

import attrs
import numpy as np
import pytest

from functional_ckpt import SavePolicy, async_save, errors, load, save, verify
from functional_ckpt.errors import AlreadyExistsError, CheckpointWarning, RankFailedError, StorageError
from functional_ckpt.plan.layout import LayoutPolicy
from functional_ckpt.plan.save import plan_save, restrict
from functional_ckpt.run import saving
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.sharding import ShardSpec, World
from functional_ckpt.store import commit, directories, target
from functional_ckpt.store.files import FileStore
from functional_ckpt.testing.simulate import try_ranks
from tests.effects import watched

FAST = SavePolicy(durability="none")


def state(step):
    return {"w": np.full(5, step), "step": step}


def step_of(path):
    assert verify(path).ok
    loaded = load({"w": np.zeros(5, int), "step": 0}, path)
    assert (loaded["w"] == loaded["step"]).all()
    return loaded["step"]


def once(phase, act):
    """Call `act` when a save comes to a phase."""
    done = []

    def report(progress):
        if progress.phase == phase and not done:
            done.append(True)
            act()

    return report


# Durability


def test_only_the_files_of_this_rank_count():
    """A rank that writes one of 512 chunks syncs its one file, not the file system."""
    spec = ArraySpec("w", (512, 8), "float32")
    boxes = [Box((0, 0), (511, 8)), Box((511, 0), (512, 8))]
    world = World([(ShardSpec(spec, box),) for box in boxes])
    plan = plan_save(world, LayoutPolicy(target_chunk_nbytes=32, min_chunk_nbytes=0))
    assert plan.arrays[0].grid.size == 512
    assert [restrict(plan, rank).file_count(rank) for rank in (0, 1)] == [512, 1]  # with the metadata
    assert [saving._sync_mode("auto", restrict(plan, rank), rank) for rank in (0, 1)] == ["syncfs", "fsync"]


def test_chunks_made_of_moved_pieces_count_once():
    spec = ArraySpec("w", (8, 8), "float32")
    boxes = [Box((0, n), (8, n + 1)) for n in range(8)]
    plan = plan_save(World([(ShardSpec(spec, box),) for box in boxes]), LayoutPolicy())
    assert plan.arrays[0].layout.ownership == "owned"
    assert sum(restrict(plan, rank).file_count(rank) for rank in range(8)) == 2


# Before anything is written


def test_a_file_system_that_cannot_exchange_is_found_first(tmp_path, monkeypatch):
    def refuse(name, *arguments):
        raise OSError(errno.EINVAL, "Invalid argument")

    save(state(1), tmp_path / "a", policy=FAST)
    monkeypatch.setattr(directories, "call_system", refuse)
    phases = []
    with pytest.raises(StorageError, match="exchange"):
        save(state(2), tmp_path / "a", policy=FAST, overwrite=True, progress=lambda p: phases.append(p.phase))
    assert phases == []
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    save(state(2), tmp_path / "b", policy=FAST, overwrite=True)
    assert (step_of(tmp_path / "a"), step_of(tmp_path / "b")) == (1, 2)


def test_an_empty_path_is_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.PolicyError, match="path"):
        save(state(1), "", policy=FAST)
    assert list(tmp_path.iterdir()) == []


def test_the_working_directory_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AlreadyExistsError, match="working directory"):
        save(state(1), ".", policy=FAST)
    assert os.path.samefile(tmp_path, ".")
    save(state(1), ".", policy=attrs.evolve(FAST, commit="marker"))
    assert step_of(tmp_path) == 1


def test_a_mount_point_is_found_first(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.setattr(directories, "is_mount_point", lambda path: path == tmp_path / "a")
    phases = []
    with pytest.raises(AlreadyExistsError, match="mount point"):
        save(state(1), tmp_path / "a", policy=FAST, progress=lambda p: phases.append(p.phase))
    assert phases == []
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_is_mounted(tmp_path):
    assert directories.is_mount_point(Path("/proc"))
    assert not directories.is_mount_point(tmp_path)


@pytest.mark.parametrize("overwrite", [False, True])
def test_mode_and_group_of_the_directory_stay(overwrite, tmp_path):
    path = tmp_path / "a"
    if overwrite:
        save(state(1), path, policy=FAST)
    else:
        path.mkdir()
    group = next(iter(set(os.getgroups()) - {path.stat().st_gid}), path.stat().st_gid)
    os.chown(path, -1, group)
    path.chmod(0o2770)
    save(state(2), path, policy=FAST, overwrite=overwrite)
    assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) == (0o2770, group)
    assert step_of(path) == 2


def test_too_many_open_files_are_called_so(tmp_path):
    def refuse(call):
        if call.name == "open":  # whatever is not created
            raise OSError(errno.EMFILE, "Too many open files")
        return call.do()

    with pytest.raises(StorageError, match="Too many open files") as caught, watched(tmp_path, refuse):
        save(state(1), tmp_path / "a", policy=FAST)
    assert not isinstance(caught.value, errors.PathNotSharedError)
    assert list(tmp_path.iterdir()) == []


# What changes while saving


@pytest.mark.parametrize("durability", ["none", "fsync", "syncfs"])
@pytest.mark.parametrize("phase", ["write", "publish"])
def test_a_lost_private_directory_replaces_nothing(phase, durability, tmp_path):
    save(state(1), tmp_path / "a", policy=FAST)

    def lose():
        (private,) = tmp_path.glob("*.saving")
        shutil.rmtree(private)

    policy = SavePolicy(durability=durability)
    with pytest.raises(errors.CheckpointError):
        save(state(2), tmp_path / "a", policy=policy, overwrite=True, progress=once(phase, lose))
    assert step_of(tmp_path / "a") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_lost_chunk_is_found_before_publishing(tmp_path):
    def lose():
        (chunk,) = tmp_path.glob("*.saving/w/c.0")
        chunk.unlink()

    save(state(1), tmp_path / "a", policy=FAST)
    with pytest.raises(errors.CorruptionError, match="missing"):
        save(state(2), tmp_path / "a", policy=FAST, overwrite=True, progress=once("publish", lose))
    assert step_of(tmp_path / "a") == 1


def test_a_store_never_makes_its_root(tmp_path):
    with pytest.raises(StorageError):
        FileStore(tmp_path / "gone").create("manifest.json", [memoryview(b"{}")], 2)
    with pytest.raises(StorageError):
        FileStore(tmp_path / "gone").create("w/zarr.json", [memoryview(b"{}")], 2)
    assert list(tmp_path.iterdir()) == []


def test_a_lost_claim_ends_the_save(tmp_path):
    """A sweep on another machine that does not see the lock may have removed it, and more."""

    def lose():
        (claim,) = tmp_path.glob(".*.claim")
        claim.unlink()

    with pytest.raises(StorageError, match="claim"):
        save(state(1), tmp_path / "a", policy=FAST, progress=once("publish", lose))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", [True, False])
def test_of_two_saves_the_one_that_began_last_stays(there, tmp_path):
    if there:
        save(state(1), tmp_path / "a", policy=FAST)
    newer = once("publish", lambda: save(state(101), tmp_path / "a", policy=FAST, overwrite=True))
    with pytest.raises(AlreadyExistsError, match="after this save had begun"):
        save(state(100), tmp_path / "a", policy=FAST, overwrite=True, progress=newer)
    assert step_of(tmp_path / "a") == 101
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_saves_that_wait_for_one_another_replace_in_their_order(tmp_path):
    begun = threading.Event()
    save(state(0), tmp_path / "a", policy=FAST)
    hold = once("publish", lambda: begun.wait(60))
    queued = attrs.evolve(FAST, in_flight="queue")
    pending = [
        async_save(state(step), tmp_path / "a", policy=queued, overwrite=True, progress=hold) for step in (1, 2, 3)
    ]
    begun.set()
    for save_ in pending:
        save_.result(60)
    assert step_of(tmp_path / "a") == 3
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_save_that_comes_right_before_the_exchange_stays(tmp_path, monkeypatch):
    """As when rank 0 is stopped there, and the job that was started again has saved meanwhile."""
    save(state(1), tmp_path / "a", policy=FAST)

    def stopped(work, final, real=target.exchange_paths):
        monkeypatch.setattr(target, "exchange_paths", real)
        save(state(3), tmp_path / "a", policy=FAST, overwrite=True)
        real(work, final)

    monkeypatch.setattr(target, "exchange_paths", stopped)
    with pytest.raises(AlreadyExistsError, match="after this save had begun"):
        save(state(2), tmp_path / "a", policy=FAST, overwrite=True)
    assert step_of(tmp_path / "a") == 3
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@attrs.frozen
class Between:
    """A group in which something happens after each agreement of rank 0."""

    gather: object
    act: object
    rank = property(lambda self: self.gather.rank)
    size = property(lambda self: self.gather.size)

    def all_gather(self, value):
        found = self.gather.all_gather(value)
        if self.rank == 0:
            self.act()
        return found


def test_rank_0_that_was_stopped_before_publishing_gives_up(tmp_path, monkeypatch):
    """The others have waited in vain by then: from their last agreement on, not from when rank 0 goes on."""
    checked, away = [], []
    monkeypatch.setattr(saving.time, "monotonic", lambda real=time.monotonic: real() + 1000 * len(away))
    policy = attrs.evolve(FAST, timeout_s=500)
    once_checked = once("publish", lambda: checked.append(True))

    def run(gather):
        report = once_checked if gather.rank == 0 else None
        group = Between(gather, lambda: away.append(True) if checked and not away else None)
        return save(state(1), tmp_path / "a", policy=policy, process_group=group, progress=report)

    outcomes = try_ranks(2, run)
    assert all(isinstance(outcome, StorageError) and "took longer" in str(outcome) for outcome in outcomes), outcomes
    assert list(tmp_path.iterdir()) == []


class Ending:
    """A group that rank 1 leaves at its agreement number `last`, without a word."""

    def __init__(self, gather, last):
        self.gather, self.rank, self.size, self.last = gather, gather.rank, gather.size, last

    def all_gather(self, value):
        self.last -= 1
        if self.rank == 1 and self.last < 0:
            raise RankFailedError("this rank is gone")
        return self.gather.all_gather(value)


def test_ranks_that_end_do_not_unpublish(tmp_path):
    """Rank 0 knows that the checkpoint is there, whoever does not hear of it; before that it is not."""
    stood = []
    for last in range(1, 100):
        path = tmp_path / str(last) / "a"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            first, second = try_ranks(2, lambda g: save(state(1), path, policy=FAST, process_group=Ending(g, last)))  # noqa: B023
        said = [str(warning.message) for warning in caught if warning.category is CheckpointWarning]
        left = [p.name for p in path.parent.iterdir()] if path.parent.exists() else []
        if isinstance(second, RankFailedError) and not isinstance(first, BaseException):
            stood.append(last)
            assert ["published" in text for text in said] == [True]
        assert left == ([] if isinstance(first, BaseException) else ["a"])
        if not isinstance(second, BaseException):
            break
    assert stood == [last - 1], "it is the last agreement of all"


def test_a_checkpoint_that_another_save_has_replaced_meanwhile_has_no_foreign_files(tmp_path, monkeypatch):
    """The names are those of the old one, the manifest is the new one's."""
    save({"old": np.ones(3)}, tmp_path / "a", policy=FAST)
    look, others = target._committed_nodes, [{"new": np.zeros(2)}]

    def replaced(final):
        if others:
            save(others.pop(), final, policy=FAST, overwrite=True)
        return look(final)

    monkeypatch.setattr(target, "_committed_nodes", replaced)
    assert target.foreign_in(tmp_path / "a") == ()


def test_a_save_in_place_that_ended_while_another_began_is_called_a_checkpoint(tmp_path, monkeypatch):
    take, others = commit.take_claim, [{"w": np.zeros(2)}]

    def late(*arguments):
        if others:
            save(others.pop(), tmp_path / "a", policy=SavePolicy(durability="none", commit="marker"))
        return take(*arguments)

    monkeypatch.setattr(commit, "take_claim", late)
    with pytest.raises(AlreadyExistsError, match="holds a committed checkpoint"):
        save(state(1), tmp_path / "a", policy=SavePolicy(durability="none", commit="marker"))
    assert verify(tmp_path / "a").ok
