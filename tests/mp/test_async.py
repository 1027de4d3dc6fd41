"""Background saves of four ranks: training goes on, several are in flight, one is cancelled, one fails."""

import time
from unittest.mock import patch

import attrs
import numpy as np
import pytest

import functional_ckpt as fc
from tests.mp import launch

pytestmark = pytest.mark.mp

SOON = fc.SavePolicy(timeout_s=20)
QUEUED = attrs.evolve(SOON, in_flight="queue")


def state_at(step):
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.full((256, 33), float(step))
    rows = distribute_tensor(whole, launch.mesh(4), [Shard(0)], src_data_rank=None)
    columns = distribute_tensor(whole.clone(), launch.mesh(4), [Shard(1)], src_data_rank=None)
    return {"rows": rows, "columns": columns, "plain": torch.full((9,), float(step)), "step": step,
            "array": np.full(5, step), "mine": fc.PerRank(np.full(3, 10 * step + launch.rank()))}  # fmt: skip


def train(state):
    """Change every array in place, as an optimizer does."""
    for key in ("rows", "columns"):
        state[key].to_local().add_(1)
    state["plain"].add_(1)
    state["array"] += 1
    state["mine"].value[:] += 10
    state["step"] += 1


def held_back():
    """Return a patch that makes every write of this rank slow, so that a save is surely still running."""
    from functional_ckpt.store.files import FileStore

    create = FileStore.create

    def slow(self, *arguments, **options):
        time.sleep(0.05)
        return create(self, *arguments, **options)

    return patch.object(FileStore, "create", slow)


def save_while_training(path):
    import torch.distributed as dist

    state = state_at(0)
    with held_back():
        pending = []
        for step in range(3):
            # The third copies to what the second has written, while that is still being saved.
            pending.append(fc.async_save(state, path / str(step), policy=QUEUED if step else SOON))
            train(state)
            # The caller's own collectives run at the same time.
            dist.all_reduce(state["plain"].clone())
        fc.save(state, path / "3", policy=SOON)
        running = not pending[-1].done()
        manifests = [p.result(20) for p in pending]
    assert all(p.done() for p in pending)
    assert pending[0].progress().fraction == 1.0
    return running, [m.nbytes for m in manifests]


def test_training_goes_on_while_saves_are_in_flight(four, tmp_path):
    four.run(save_while_training, tmp_path)
    for step in range(4):
        assert fc.verify(tmp_path / str(step)).ok
        found = fc.open_checkpoint(tmp_path / str(step))
        for key in ("rows", "columns", "plain", "array"):
            assert set(found[key][...].reshape(-1).tolist()) == {float(step)}, (key, step)
        assert found.tree()["step"] == step
        assert [found[f"mine.rank{r}"][0] for r in range(4)] == [10 * step + r for r in range(4)]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["0", "1", "2", "3"]


def dropped(path):
    fc.async_save({"w": np.arange(4.0)}, path, policy=SOON)


def flush():
    """Wait for what goes on in the background: a save does."""
    from functional_ckpt.run.comm import LocalGather

    fc.save({}, "memory://flush", process_group=LocalGather())


def test_a_dropped_save_publishes_by_itself(four, tmp_path):
    four.run(dropped, tmp_path / "a")
    four.run(flush)
    assert fc.verify(tmp_path / "a").ok


def cancelled_by_one(path):
    with held_back():
        pending = fc.async_save({"w": launch.values(8, 8), "v": np.ones(3)}, path, policy=SOON)
        if launch.rank() == 2:
            pending.cancel()
        pending.result(20)


def cancelled_late(path):
    """Rank 2 cancels when rank 0 may publish already."""
    pending = []

    def report(progress):
        if launch.rank() == 2 and progress.phase == "publish":
            pending[0].cancel()

    with held_back():
        pending.append(fc.async_save({"w": launch.values(8, 8)}, path, policy=SOON, progress=report))
        pending[0].result(20)


def test_one_rank_cancels_for_all(four, tmp_path):
    outcomes = four.outcomes(cancelled_by_one, tmp_path / "a")
    if (tmp_path / "a").exists():  # too late: then nobody may say that it was cancelled
        assert [o.error for o in outcomes] == [None] * 4
        return
    assert all(isinstance(o.error, fc.errors.SaveCancelledError) for o in outcomes), outcomes
    assert not list(tmp_path.iterdir())


def test_a_cancelled_save_is_never_published(four, tmp_path):
    outcomes = four.outcomes(cancelled_late, tmp_path / "a")
    raised = [o.error is not None for o in outcomes]
    assert raised == [not (tmp_path / "a").exists()] * 4


def failing_in_background(path):
    from functional_ckpt.store.files import FileStore

    def full(self, *arguments, **options):
        raise OSError(28, "No space left on device")

    if launch.rank() == 1:
        with patch.object(FileStore, "create", full):
            fc.async_save({"w": state_at(1)["rows"]}, path, policy=SMALL).result(20)
    fc.async_save({"w": state_at(1)["rows"]}, path, policy=SMALL).result(20)


SMALL = fc.SavePolicy(layout=fc.LayoutPolicy(min_chunk_nbytes=0), timeout_s=launch.NEVER_S)


def test_a_failure_in_the_background_reaches_every_rank(four, tmp_path):
    for outcome in four.outcomes(failing_in_background, tmp_path / "a"):
        assert isinstance(outcome.error, fc.errors.StorageError), outcome
        assert "rank 1" in str(outcome.error)
        assert "No space left" in str(outcome.error)
    assert not list(tmp_path.iterdir())


def failing_while_staging(path):
    """Rank 1 runs out of memory while it copies its part."""

    def full(*arguments):
        raise MemoryError("no room for a copy")

    if launch.rank() == 1:
        with patch("functional_ckpt.run.staging.staged", full):
            fc.async_save({"w": state_at(1)["rows"]}, path, policy=SMALL).result(20)
    fc.async_save({"w": state_at(1)["rows"]}, path, policy=SMALL).result(20)


def test_a_rank_that_cannot_stage_fails_all_at_once(four, tmp_path):
    for outcome in four.outcomes(failing_while_staging, tmp_path / "a"):
        assert isinstance(outcome.error, fc.errors.RankFailedError), outcome
        assert outcome.error.rank == 1
        assert "no room for a copy" in str(outcome.error)
    assert not list(tmp_path.iterdir())


def failing_then_whole(path):
    """The save queued behind one that failed is none the worse for it."""
    first = fc.async_save({"w": np.ones(3)}, path, policy=QUEUED)
    second = fc.async_save({"w": np.ones(3)}, path, policy=QUEUED)
    third = fc.async_save({"w": np.full(3, 2.0)}, path.with_name("b"), policy=QUEUED)
    first.result(20)
    with pytest.raises(fc.errors.AlreadyExistsError):
        second.result(20)
    third.result(20)


def test_a_failed_save_does_not_break_the_next(four, tmp_path):
    four.run(failing_then_whole, tmp_path / "a")
    assert fc.verify(tmp_path / "b").ok
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a", "b"]
