"""`Checkpoints` in one process and over simulated ranks: steps, retention, resume, back-pressure, failures."""

import gc
import os
import threading
from unittest.mock import patch

import attrs
import numpy as np
import pytest

from functional_ckpt import (
    Checkpoints,
    KeepBest,
    KeepEvery,
    KeepLast,
    PerRank,
    SavePolicy,
    save,
    verify,
)
from functional_ckpt.errors import (
    AlreadyExistsError,
    CheckpointError,
    CheckpointWarning,
    NotACheckpointError,
    PolicyError,
    SaveInFlightError,
    SpecError,
    StorageError,
)
from functional_ckpt.run.comm import LocalGather
from functional_ckpt.store.files import FileStore
from functional_ckpt.store.steps import pin_step, step_path
from functional_ckpt.testing.simulate import run_ranks, try_ranks

FAST = SavePolicy(durability="none")
REFUSES = attrs.evolve(FAST, in_flight="refuse")


def at(step):
    return {"w": np.full(5, float(step)), "step": step}


def like():
    return {"w": np.zeros(5), "step": 0}


def names(root):
    return sorted(os.listdir(root))


def held_until(event):
    def report(progress):
        if progress.phase == "publish":
            event.wait(30)

    return report


def no_space(self, *arguments, **options):
    raise OSError(28, "No space left on device")


# ---- Steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["file", "memory"])
def test_a_run_resumes_where_it_was(where, tmp_path):
    root = tmp_path / "run" if where == "file" else f"memory://{tmp_path.name}"
    with Checkpoints(root, policy=FAST) as checkpoints:
        assert checkpoints.steps() == ()
        assert checkpoints.latest() is None
        first = like()
        assert checkpoints.resume(first) is first
        with pytest.raises(NotACheckpointError, match=r"no step to load.*resume"):
            checkpoints.load(like())
        for step in (10, 20, 30):
            checkpoints.save(step, at(step), metrics={"loss": abs(step - 19)}, attributes={"git": "1f"})
    with Checkpoints(root) as checkpoints:
        assert checkpoints.steps() == (10, 20, 30)
        assert checkpoints.latest() == 30
        assert checkpoints.resume(like())["w"].tolist() == [30.0] * 5
        assert checkpoints.load(like(), 10)["step"] == 10
        assert checkpoints.best("loss") == 20
        assert checkpoints.best("loss", "max") == 30
        assert checkpoints.best("acc") is None
        info = checkpoints.info(20)
        assert (info.metrics, info.attributes, info.nbytes, info.pinned) == ({"loss": 1.0}, {"git": "1f"}, 40, False)
        with pytest.raises(NotACheckpointError):
            checkpoints.load(like(), 40)
        with pytest.raises(AlreadyExistsError, match="path holds a"):
            checkpoints.save(30, at(31))
        checkpoints.remove(30)
        assert checkpoints.latest() == 20
        if where == "file":
            checkpoints.save(20, at(21), overwrite=True)
            assert checkpoints.load(like())["step"] == 21


def test_the_steps_of_another_process_are_seen(tmp_path):
    watching = Checkpoints(tmp_path)
    Checkpoints(tmp_path).save(5, at(5))
    assert watching.steps() == (5,)
    assert watching.resume(like())["step"] == 5


@pytest.mark.parametrize("keep", [KeepLast(2), KeepLast(1) | KeepEvery(20), KeepBest("loss", 2), None], ids=str)
def test_what_the_rules_do_not_keep_is_removed_also_after_a_new_start(keep, tmp_path):
    left = {"KeepLast(n=2)": [50, 60], "None": [10, 20, 30, 40, 50, 60]}
    left |= {str(KeepLast(1) | KeepEvery(20)): [20, 40, 60], str(KeepBest("loss", 2)): [20, 30, 60]}
    for start in (10, 40):
        with Checkpoints(tmp_path, keep=keep, policy=FAST) as checkpoints:
            for step in range(start, start + 30, 10):
                checkpoints.save(step, at(step), metrics={"loss": abs(step - 24)})
                assert checkpoints.latest() == step
    assert names(tmp_path) == [f"step-{step:08d}" for step in left[str(keep)]]


def test_what_is_pinned_stays(tmp_path):
    with Checkpoints(tmp_path, keep=KeepLast(1), policy=FAST) as checkpoints:
        checkpoints.save(1, at(1))
        checkpoints.pin(1)
        checkpoints.save(2, at(2))
        pin_step(tmp_path, 2)  # by somebody else
        checkpoints.save(3, at(3))
        assert checkpoints.steps() == (1, 2, 3)
        with pytest.raises(StorageError, match="pinned"):
            checkpoints.remove(1)
        checkpoints.unpin(1)
        checkpoints.save(4, at(4))
        assert checkpoints.steps() == (2, 4)
        with pytest.raises(NotACheckpointError):
            checkpoints.pin(1)
    assert names(tmp_path) == ["step-00000002", "step-00000002.pin", "step-00000004"]


def save_and_wait(checkpoints, step):
    checkpoints.save(step, at(step))
    checkpoints.wait()


def test_files_of_others_are_left_alone(tmp_path):
    for name in ("logs", "step-5", "step-00000005"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "theirs.txt").write_text("theirs")
    (tmp_path / "config.yaml").write_text("theirs")
    before = names(tmp_path)
    with Checkpoints(tmp_path, keep=KeepLast(1), policy=FAST) as checkpoints:
        checkpoints.save(1, at(1))
        (tmp_path / "step-00000001/notes.txt").write_text("theirs")
        with pytest.warns(CheckpointWarning, match=r"step 1 was not removed.*notes\.txt"):
            save_and_wait(checkpoints, 2)
        checkpoints.save(3, at(3))
        assert checkpoints.steps() == (1, 3)
        with pytest.raises(AlreadyExistsError):
            checkpoints.save(5, at(5))
    assert names(tmp_path) == sorted([*before, "step-00000001", "step-00000003"])
    assert (tmp_path / "step-00000005/theirs.txt").read_text() == "theirs"


def test_a_step_that_cannot_be_read_is_told_and_left(tmp_path):
    Checkpoints(tmp_path, policy=FAST).save(1, at(1))
    (tmp_path / "step-00000001/zarr.json").write_text("{}")
    with pytest.warns(CheckpointWarning, match="step 1 was not removed"):
        checkpoints = Checkpoints(tmp_path, keep=KeepBest("loss"), policy=FAST)
    for step in (2, 3):
        checkpoints.save(step, at(step), metrics={"loss": -step})
    checkpoints.close()
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_arguments_that_cannot_be(tmp_path):
    checkpoints = Checkpoints(tmp_path, policy=FAST)
    for step in (-1, "1", 1.0, None, True):
        with pytest.raises(PolicyError, match="step"):
            checkpoints.save(step, at(1))
    for metrics in ({"loss": "low"}, {3: 1.0}, [1]):
        with pytest.raises(PolicyError, match="metric"):
            checkpoints.save(1, at(1), metrics)
    for attributes in ([1], {"functional_ckpt_step": 1}):
        with pytest.raises(PolicyError, match="attributes"):
            checkpoints.save(1, at(1), attributes=attributes)
    assert names(tmp_path) == []
    for options in ({"keep": 3}, {"policy": 3}, {"load_policy": FAST}, {"policy": SavePolicy(in_flight="queue")},
                    {"on_signal": 15}, {"on_signal": (10**6,)}):  # fmt: skip
        with pytest.raises(PolicyError):
            Checkpoints(tmp_path, **options)
    save(at(1), tmp_path / "one", policy=FAST)
    with pytest.raises(PolicyError, match="itself a checkpoint"):
        Checkpoints(tmp_path / "one")
    (tmp_path / "train.py").touch()
    for path in (tmp_path / "train.py", tmp_path / "train.py/steps"):
        with pytest.raises(PolicyError, match=r"is a file: path .*train\.py"):
            Checkpoints(path)


# ---- In the background ---------------------------------------------------------------------------


def test_a_step_in_flight_is_seen_when_it_is_published(tmp_path):
    with Checkpoints(tmp_path, keep=KeepLast(1), policy=FAST) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.async_save(step, at(step), metrics={"loss": step})
        checkpoints.wait()
        assert checkpoints.steps() == (3,)
        checkpoints.async_save(4, at(4))
        assert checkpoints.load(like())["step"] == 4
        checkpoints.async_save(5, at(5))
    assert names(tmp_path) == ["step-00000005"]


def test_nothing_is_removed_before_its_successor_is_committed(tmp_path):
    release = threading.Event()
    with Checkpoints(tmp_path, keep=KeepLast(1), policy=FAST) as checkpoints:
        checkpoints.save(1, at(1))
        pending = checkpoints.async_save(2, at(2), progress=held_until(release))
        assert verify(tmp_path / "step-00000001").ok
        release.set()
        pending.result()
        with patch.object(FileStore, "create", no_space), pytest.raises(StorageError, match="No space"):
            checkpoints.save(3, at(3))
        assert checkpoints.steps() == (2,)
    assert names(tmp_path) == ["step-00000002"]


def test_one_save_is_in_flight_and_the_next_is_refused(tmp_path):
    release = threading.Event()
    with Checkpoints(tmp_path, policy=REFUSES) as checkpoints:
        checkpoints.async_save(1, at(1), progress=held_until(release))
        with pytest.raises(SaveInFlightError, match=r"step 1 is still running.*wait"):
            checkpoints.async_save(2, at(2))
        release.set()
        checkpoints.wait()
        checkpoints.async_save(3, at(3))
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def fail(checkpoints, step):
    """Begin a save in the background that fails."""
    with patch.object(FileStore, "create", no_space):
        pending = checkpoints.async_save(step, at(step))
        while not pending.done():
            pass
    return pending


@pytest.mark.parametrize("call", ["save", "async_save", "load", "wait", "pin", "exit"])
@pytest.mark.parametrize("held", [True, False])
def test_a_failure_that_nobody_asked_for_is_raised_by_the_next_call(call, held, tmp_path):
    checkpoints = Checkpoints(tmp_path, policy=FAST)
    checkpoints.save(1, at(1))
    pending = fail(checkpoints, 2)
    if not held:
        del pending
        gc.collect()
    calls = {
        "save": lambda: checkpoints.save(3, at(3)),
        "async_save": lambda: checkpoints.async_save(3, at(3)),
        "load": lambda: checkpoints.load(like()),
        "wait": checkpoints.wait,
        "pin": lambda: checkpoints.pin(1),
        "exit": lambda: checkpoints.__exit__(None, None, None),
    }
    with pytest.raises(StorageError, match="No space"):
        calls[call]()
    checkpoints.save(4, at(4))  # told once
    checkpoints.close()
    assert checkpoints.steps() == (1, 4)


def test_a_failure_that_was_asked_for_is_not_raised_again(tmp_path):
    with Checkpoints(tmp_path, policy=FAST) as checkpoints:
        with pytest.raises(StorageError):
            fail(checkpoints, 2).result()
        checkpoints.save(3, at(3))
    assert names(tmp_path) == ["step-00000003"]


def test_an_exception_in_the_loop_stays_and_the_save_in_flight_is_published(tmp_path):
    def run(begin):
        with Checkpoints(tmp_path, policy=FAST) as checkpoints:
            begin(checkpoints)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(lambda checkpoints: checkpoints.async_save(1, at(1)))
    assert verify(tmp_path / "step-00000001").ok
    with pytest.raises(ZeroDivisionError) as caught:
        run(lambda checkpoints: fail(checkpoints, 2))
    assert "No space" in caught.value.__notes__[0]


# ---- Several ranks -------------------------------------------------------------------------------


def state_of(gather, step):
    return {"w": np.full(5, float(step)), "step": step, "mine": PerRank(10 * step + gather.rank)}


def test_ranks_see_the_same_steps_whoever_looks(tmp_path):
    def run(gather):
        options = {"policy": FAST, "process_group": gather}
        with Checkpoints(tmp_path, keep=KeepLast(2) | KeepBest("loss"), **options) as checkpoints:
            seen = []
            for step in (1, 2, 3, 4):
                checkpoints.save(step, state_of(gather, step), metrics={"loss": step + gather.rank})
                seen.append((checkpoints.steps(), checkpoints.latest(), checkpoints.best("loss")))
            checkpoints.async_save(5, state_of(gather, 5))
            seen.append(checkpoints.steps())
            checkpoints.wait()
            seen.append(checkpoints.steps())
            found = checkpoints.resume(state_of(gather, 0))
            return seen, found["step"], found["mine"].value

    found = run_ranks(3, run)
    assert found[0][0] == found[1][0] == found[2][0]
    assert found[0][0][3] == ((1, 3, 4), 4, 1)
    assert found[0][0][4:] == [(1, 3, 4), (1, 4, 5)]
    assert [f[1:] for f in found] == [(5, 50), (5, 51), (5, 52)]
    assert names(tmp_path) == [f"step-{step:08d}" for step in (1, 4, 5)]


def test_a_step_that_one_rank_does_not_see_is_loaded_by_none(tmp_path):
    """Rank 0 looks; a rank whose file system shows another directory fails, and with it all."""
    for step in (1, 2):
        save(at(step), step_path(tmp_path / "new", step), policy=FAST)
    save(at(1), step_path(tmp_path / "old", 1), policy=FAST)

    def run(gather):
        root = tmp_path / ("old" if gather.rank else "new")
        checkpoints = Checkpoints(root, policy=FAST, process_group=gather)
        seen = checkpoints.steps()
        with pytest.raises(CheckpointError, match="rank 1"):
            checkpoints.resume(like())
        return seen

    assert run_ranks(2, run) == [(1, 2), (1, 2)]


def test_a_step_that_came_from_elsewhere_is_loaded_by_all_ranks(tmp_path):
    def run(gather):
        checkpoints = Checkpoints(tmp_path, policy=FAST, process_group=gather)
        if gather.rank == 0:
            save(at(3), step_path(tmp_path, 3), policy=FAST, process_group=LocalGather())
        return checkpoints.resume(like())["step"], checkpoints.steps()

    assert run_ranks(3, run) == [(3, (3,))] * 3


def test_ranks_that_name_different_steps_are_told(tmp_path):
    def run(gather):
        checkpoints = Checkpoints(tmp_path, policy=FAST, process_group=gather)
        with pytest.raises(SpecError, match=r"save different steps.*0, 1"):
            checkpoints.save(gather.rank, at(1))
        checkpoints.save(1, at(1))
        with pytest.raises(SpecError, match=r"load different steps.*None, 1"):
            checkpoints.load(like(), gather.rank or None)

    run_ranks(2, run)


@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_rank_cannot_do_all_ranks_are_told(failing, tmp_path):
    def run(gather):
        checkpoints = Checkpoints(tmp_path, policy=FAST, process_group=gather)
        checkpoints.save(7, at(7), metrics={"loss": 1} if gather.rank != failing else "low")

    outcomes = try_ranks(2, run)
    assert all(isinstance(outcome, PolicyError) for outcome in outcomes), outcomes
    assert all(outcome.rank == failing for outcome in outcomes)

    def make(gather):
        Checkpoints(tmp_path, policy=3 if gather.rank == failing else FAST, process_group=gather)

    assert all(isinstance(outcome, PolicyError) for outcome in try_ranks(2, make))


def test_the_stop_of_one_rank_is_that_of_all(tmp_path):
    def run(gather):
        checkpoints = Checkpoints(tmp_path, process_group=gather)
        before = checkpoints.should_stop()
        checkpoints._signals.seen = gather.rank == 1
        return before, checkpoints.should_stop()

    assert run_ranks(3, run) == [(False, True)] * 3
