"""One rank fails, hangs or dies: every rank raises soon, nothing is published, the next save works."""

import os
import resource
import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest

import functional_ckpt as fc
from tests.mp import launch
from tests.mp.test_state import errors

pytestmark = pytest.mark.mp

TIMEOUT_S = 4
HANG_S = TIMEOUT_S + 1.5
EXCLUSIVE = fc.LayoutPolicy(min_chunk_nbytes=0)
POLICY = fc.SavePolicy(layout=EXCLUSIVE, timeout_s=launch.NEVER_S)
IMPATIENT = fc.SavePolicy(layout=EXCLUSIVE, timeout_s=TIMEOUT_S)


def state():
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = launch.values(64, 1024)
    return {"w": distribute_tensor(whole, launch.mesh(4), [Shard(0)], src_data_rank=None), "step": 1}


def save(path, policy=POLICY, **options):
    fc.save(state(), path, policy=policy, **options)


@contextmanager
def on(rank, act, when=lambda name: True):
    """On this rank only, call `act` whenever the store creates an object whose name fits."""
    from functional_ckpt.store.files import FileStore

    create = FileStore.create

    def creating(self, name, *arguments, **options):
        if when(name):
            act()
        return create(self, name, *arguments, **options)

    if launch.rank() != rank:
        yield
        return
    with patch.object(FileStore, "create", creating):
        yield


def check_works(four, path):
    """The next save of the same processes succeeds."""
    four.run(save, path)
    assert fc.verify(path).ok


def unsupported_leaf(path):
    extra = {"fn": launch.rank} if launch.rank() == 1 else {}
    fc.save({**state(), **extra}, path, policy=POLICY)


def two_unsupported(path):
    extra = {f"fn{launch.rank()}": launch.rank} if launch.rank() in (1, 3) else {}
    fc.save({**state(), **extra}, path, policy=POLICY)


class Rude:
    """A leaf whose very look raises."""

    @property
    def __class__(self):
        raise RuntimeError("do not look at me")


def foreign_error(path):
    extra = {"rude": Rude()} if launch.rank() == 2 else {}
    fc.save({**state(), **extra}, path, policy=POLICY)


def test_all_unsupported_leaves_are_named_with_their_ranks(four, tmp_path):
    for error in errors(four.outcomes(unsupported_leaf, tmp_path / "a")):
        assert isinstance(error, fc.errors.UnsupportedLeafError)
        assert (error.key, error.rank) == ("fn", 1)
    for error in errors(four.outcomes(two_unsupported, tmp_path / "a")):
        assert [(e.key, e.rank) for e in error.exceptions] == [("fn1", 1), ("fn3", 3)]
    assert not list(tmp_path.iterdir())
    check_works(four, tmp_path / "a")


def test_a_foreign_error_is_told_to_all(four, tmp_path):
    for error in errors(four.outcomes(foreign_error, tmp_path / "a")):
        assert isinstance(error, fc.errors.RankFailedError)
        assert error.rank == 2
        assert "do not look at me" in str(error)
    assert not list(tmp_path.iterdir())


def file_size_limit(path):
    """Rank 3 cannot write files over 16 KiB: the system itself refuses, whatever call is used."""
    if launch.rank() != 3:
        return save(path)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, before[1]))
    try:
        return save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def no_space():
    raise OSError(28, "No space left on device")


def full_disk(path, rank, name):
    with on(rank, no_space, lambda found: name in found):
        save(path)


def test_a_write_that_the_system_refuses(four, tmp_path):
    for error in errors(four.outcomes(file_size_limit, tmp_path / "a")):
        assert isinstance(error, fc.errors.StorageError)
        assert error.rank == 3
    assert not list(tmp_path.iterdir())
    check_works(four, tmp_path / "a")


@pytest.mark.parametrize(("rank", "name"), [(2, "/c"), (0, "/zarr.json"), (0, "manifest.json"), (0, "provenance.json")])
def test_a_full_disk_on_one_rank(four, tmp_path, rank, name):
    for error in errors(four.outcomes(full_disk, tmp_path / "a", rank, name)):
        assert isinstance(error, fc.errors.StorageError)
        assert error.rank == rank
        assert "No space left" in str(error)
    assert not list(tmp_path.iterdir())
    check_works(four, tmp_path / "a")


def failing_publish(path, **options):
    from functional_ckpt.run import saving

    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    with patch.object(saving, "publish", refuse):
        save(path, **options)


def overwrite_that_fails(path):
    failing_publish(path, overwrite=True)


def test_what_a_failed_overwrite_would_have_replaced_stays(four, tmp_path):
    four.run(save, tmp_path / "a")
    before = (tmp_path / "a" / "manifest.json").stat().st_ino
    for error in errors(four.outcomes(overwrite_that_fails, tmp_path / "a")):
        assert isinstance(error, fc.errors.StorageError)
        assert error.rank == 0
        assert "Permission denied" in str(error)
    assert (tmp_path / "a" / "manifest.json").stat().st_ino == before
    assert [item.name for item in tmp_path.iterdir()] == ["a"]
    assert fc.verify(tmp_path / "a").ok


def test_a_path_that_is_taken(four, tmp_path):
    four.run(save, tmp_path / "a")
    for error in errors(four.outcomes(save, tmp_path / "a")):
        assert isinstance(error, fc.errors.AlreadyExistsError)
        assert error.rank == 0
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("x")
    for error in errors(four.outcomes(save, tmp_path / "b")):
        assert isinstance(error, fc.errors.AlreadyExistsError)


def save_apart(path):
    save(path / ("b" if launch.rank() == 2 else "a") / "step")


def hidden(path):
    """Rank 2 does not see what rank 0 creates, as on a disk of its own."""
    from functional_ckpt.store import commit

    if launch.rank() != 2:
        return save(path)
    with patch.object(commit, "claimed_by", lambda *_: False):
        return save(path)


def test_a_path_that_one_rank_does_not_share(four, tmp_path):
    for error in errors(four.outcomes(hidden, tmp_path / "a")):
        assert isinstance(error, fc.errors.PathNotSharedError)
        assert error.rank == 2
    assert not list(tmp_path.iterdir())
    check_works(four, tmp_path / "a")


def test_different_paths_are_no_shared_path(four, tmp_path):
    for error in errors(four.outcomes(save_apart, tmp_path)):
        assert isinstance(error, fc.errors.PathNotSharedError)
    assert not list(tmp_path.rglob("zarr.json"))


def report_that_fails(path):
    def report(progress):
        if launch.rank() == 1 and progress.phase == "write":
            raise RuntimeError("the screen is gone")

    fc.save(state(), path, policy=IMPATIENT, progress=report)


def test_a_progress_callback_that_fails(four, tmp_path):
    for error in errors(four.outcomes(report_that_fails, tmp_path / "a")):
        assert "the screen is gone" in str(error)
    assert not list(tmp_path.iterdir())


def unpicklable_key(path):
    class Stage(str):
        __slots__ = ()

    extra = {Stage("x"): 1} if launch.rank() == 1 else {}
    fc.save({**state(), "extra": extra}, path, policy=POLICY)


def test_a_key_that_cannot_travel(four, tmp_path):
    outcomes = four.outcomes(unpicklable_key, tmp_path / "a")
    if outcomes[0].error is not None:
        for error in errors(outcomes):
            assert error.rank == 1


def dealt(values, rank, size):
    if rank == 1:
        raise RuntimeError("no cards left")
    return values[0]


def save_per_rank(path):
    fc.save({"seed": fc.PerRank(launch.rank())}, path, policy=POLICY)


def load_per_rank(path):
    return fc.load({"seed": fc.PerRank(0)}, path, policy=fc.LoadPolicy(per_rank=dealt, timeout_s=20))


def test_a_load_rule_that_fails_on_one_rank(two, four, tmp_path):
    four.run(save_per_rank, tmp_path / "a")
    for error in errors(two.outcomes(load_per_rank, tmp_path / "a")):
        assert "no cards left" in str(error)


def load_short_of_memory(path):
    from functional_ckpt.store.files import FileStore

    real = FileStore.read

    def refuse(store, name, *arguments):
        if "/c." in name:
            raise OSError(5, "Input/output error")
        return real(store, name, *arguments)

    like = state()
    if launch.rank() != 3:
        return fc.load(like, path)
    with ExitStack() as patches:
        for call in ("read", "read_ranges", "read_into"):
            patches.enter_context(patch.object(FileStore, call, refuse))
        return fc.load(like, path)


def test_a_load_that_fails_on_one_rank_while_reading(four, tmp_path):
    four.run(save, tmp_path / "a")
    for error in errors(four.outcomes(load_short_of_memory, tmp_path / "a")):
        assert isinstance(error, fc.errors.StorageError)
        assert error.rank == 3
        assert "Input/output error" in str(error)


def hang(path, rank, told):
    """A rank hangs while it writes, until all others have given up."""
    with on(rank, lambda: launch.outwait(told, 3), lambda name: "/c" in name), launch.telling(told):
        save(path, IMPATIENT)


def connected(path):
    """Save, so that those that hang later have connected."""
    save(path)


def test_a_rank_that_hangs_is_named_in_time(four, tmp_path, tmp_path_factory):
    four.run(connected, tmp_path / "before")
    told = tmp_path_factory.mktemp("told")
    outcomes = four.outcomes(hang, tmp_path / "a", 2, told)
    assert (told / "all").exists()  # the others gave up while it still hung
    for outcome in outcomes:
        assert isinstance(outcome.error, fc.errors.RankFailedError), outcome
        if outcome.rank != 2:
            assert outcome.error.rank == (2,)
    # The rank that was late has lost its place to write to, and leaves nothing there.
    assert [item.name for item in tmp_path.iterdir()] == ["before"]
    check_works(four, tmp_path / "a")


def hang_while_publishing(path):
    with on(0, lambda: time.sleep(HANG_S), lambda name: name == "manifest.json"):
        save(path, IMPATIENT)


def test_what_all_ranks_gave_up_is_not_published(four, tmp_path):
    outcomes = four.outcomes(hang_while_publishing, tmp_path / "a")
    assert all(isinstance(o.error, fc.errors.RankFailedError) for o in outcomes)
    assert not (tmp_path / "a").exists()


def die(path, rank, name):
    """Save a first time, so that connections exist; then die within the second save."""
    save(path.with_name("before"))
    with on(rank, lambda: os._exit(1), lambda found: name in found):
        save(path)  # a rank that waits for the timeout hangs


@pytest.mark.parametrize(("rank", "name"), [(3, "/c"), (0, "manifest.json")], ids=["writing", "publishing"])
def test_a_rank_that_dies_is_named_at_once(four, tmp_path, rank, name):
    outcomes = four.outcomes(die, tmp_path / "a", rank, name)
    assert [o.dead for o in outcomes] == [r == rank for r in range(4)]
    for outcome in outcomes:
        if outcome.rank != rank:
            assert isinstance(outcome.error, fc.errors.RankFailedError), outcome
            assert outcome.error.rank == (rank,)
    assert not (tmp_path / "a").exists()
    if rank == 0:  # nobody is left to clean up but the next sweep
        assert len(fc.sweep(tmp_path)) > 0
    assert [item.name for item in tmp_path.iterdir()] == ["before"]
    check_works(four, tmp_path / "a")


def absent(path, rank):
    held = state()  # a mesh is made by all ranks together
    if launch.rank() != rank:
        fc.save(held, path, policy=fc.SavePolicy(timeout_s=TIMEOUT_S - 1))


def test_a_rank_that_never_comes_is_named(four, tmp_path):
    """Not even the connections exist."""
    for outcome in four.outcomes(absent, tmp_path / "a", 1):
        if outcome.rank != 1:
            assert isinstance(outcome.error, fc.errors.RankFailedError), outcome
            assert outcome.error.rank == (1,)
    assert not list(tmp_path.iterdir())
    check_works(four, tmp_path / "a")


def in_thread(path):
    """A background save fails on a rank that hangs, then a new one works."""
    from functional_ckpt.store.files import FileStore

    with on(1, lambda: time.sleep(HANG_S), lambda name: "/c" in name):
        pending = fc.async_save(state(), path, policy=IMPATIENT)
        with pytest.raises(fc.errors.RankFailedError):
            pending.result(4 * TIMEOUT_S)
    assert FileStore.create.__name__ == "create"
    fc.async_save(state(), path.with_name("b"), policy=IMPATIENT).result(10)
    return threading.active_count()


def test_a_background_save_with_a_rank_that_hangs(four, tmp_path):
    four.run(in_thread, tmp_path / "a")
    fc.sweep(tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["b"]
