"""torchtitan's own CheckpointManager over our storage: `tox -e torchtitan`.

With STOCK=1 it is DCP's own storage: what fails then is torchtitan's, DCP's or this file's.
"""

import contextlib
import os

import pytest
import torch.distributed as dist

import functional_ckpt as fc
from tests import pages
from tests.mp import launch
from tests.programs.setting import pool
from tests.programs.titan import MODES, Job, die, hold, listed, same, wait_for

pytestmark = pytest.mark.mp

STOCK = bool(os.environ.get("STOCK"))


def storage():
    """DCP saves to our storage inside: by the lines that the documentation shows."""
    return contextlib.nullcontext() if STOCK else pages.shown("programs.md", "program_torchtitan.py")["installed"]


def check(path, *names):
    """Fail unless these checkpoints are there, whole, and nothing else."""
    assert listed(path) == sorted(names)
    if not STOCK:
        assert all(fc.verify(path / "checkpoint" / name).ok for name in names)


# ---- Saves, and runs that go on ------------------------------------------------------------------


def run_and_resume(path, dp, tp, mode):
    with storage():
        first = Job.begun(path, dp, tp, async_mode=mode)
        first.run(50, 100)
        expected = first.whole()
        losses = first.train(150)
        first.close()
        second = Job.begun(path, dp, tp, seed=1)
        assert second.manager.load()
        same(second.whole(), expected)
        assert second.state.step == 100
        assert second.train(150) == losses
        second.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_run_goes_on_on_two_ranks(two, tmp_path, mode):
    two.run(run_and_resume, tmp_path, 1, 2, mode)
    check(tmp_path, "step-50", "step-100")


@pytest.mark.parametrize("mode", MODES)
def test_a_run_goes_on_on_four_ranks(four, tmp_path, mode):
    four.run(run_and_resume, tmp_path, 2, 2, mode)
    check(tmp_path, "step-50", "step-100")


def run(path, dp, tp, to_steps=(), config=()):
    """Begin or go on, train, save; return where it began, the losses, and what the last save holds."""
    with storage():
        mine = Job.begun(path, dp, tp, seed=dp, exclude_from_loading=["dataloader"], **dict(config))
        begun = mine.manager.load() and (mine.state.step, mine.whole())
        losses = mine.run(*to_steps)
        expected = mine.whole()
        mine.close()
    return begun, losses, expected


def test_tp_2_then_1_then_4(four, tmp_path):
    before = (100, four.run(run, tmp_path, 2, 2, (50, 100))[0][2])
    for dp, tp, step in ((4, 1, 150), (1, 4, 200), (2, 2, 250)):
        begun, _, now = four.run(run, tmp_path, dp, tp, (step,), {"async_mode": "async"})[0]
        assert begun[0] == before[0]
        same(begun[1], before[1])
        before = step, now
    check(tmp_path, *(f"step-{step}" for step in (50, 100, 150, 200, 250)))


def test_from_two_ranks_to_four_and_back(two, four, tmp_path):
    before = two.run(run, tmp_path, 1, 2, (50,))[0][2]
    begun, _, before_four = four.run(run, tmp_path, 2, 2, (100,))[0]
    same(begun[1], before)
    begun, _, _ = two.run(run, tmp_path, 2, 1)[0]
    same(begun[1], before_four)


# ---- A model for others ---------------------------------------------------------------------------


def export(path):
    with storage():
        mine = Job.begun(path / "run", 2, 2, last_save_model_only=True, export_dtype="bfloat16")
        mine.run(50)
        mine.train(60)
        mine.save(60, last=True)
        expected = mine.whole()
        mine.close()
    return {key: expected[key] for key in mine.model.state_dict()}


def begin_with(path, dp, tp, casts=True):
    from functional_ckpt.torch import install

    with storage() if casts else install():
        mine = Job.begun(path / f"{dp}", dp, tp, seed=1, initial_load_path=str(path / "run" / "checkpoint" / "step-60"))
        assert mine.manager.load()
        found = mine.whole()
        mine.close()
    return {key: found[key] for key in mine.model.state_dict()}


def test_a_model_in_bfloat16_begins_a_run_in_float32(two, four, tmp_path):
    expected = four.run(export, tmp_path)[0]
    for ranks, dp, tp in ((four, 1, 4), (two, 2, 1)):
        found = ranks.run(begin_with, tmp_path, dp, tp)[0]
        same(found, {key: value.bfloat16().float() for key, value in expected.items()})
    if not STOCK:
        assert all(
            "CastError" in o.text and "same_kind" in o.text for o in two.outcomes(begin_with, tmp_path, 1, 2, {})
        )


# ---- Kills ----------------------------------------------------------------------------------------


def keep_two(path, dp, tp, mode):
    """Begin or go on; torchtitan keeps the two newest."""
    return Job.begun(path, dp, tp, keep_latest_k=2, async_mode=mode)


def run_unkilled(path, dp, tp):
    with storage():
        mine = keep_two(path, dp, tp, "disabled")
        mine.run(200, 300, 350)
        expected = mine.whole()
        losses = mine.run(400)
        mine.close()
    return expected, losses, mine.whole()


def run_killed(path, dp, tp, mode, ranks):
    """A rank that fails ends, as it does under torchrun: gloo tells the others so."""
    with storage(), ending():
        mine = keep_two(path, dp, tp, mode)
        mine.run(200, 300, 350)
        pids = [None] * (dp * tp)
        dist.all_gather_object(pids, os.getpid())
        if launch.rank() == ranks[-1]:
            mine.arm(die, path, *(pids[rank] for rank in ranks))
        mine.run(400)


@contextlib.contextmanager
def ending():
    try:
        yield
    except BaseException:
        os._exit(1)


def run_again(path, dp, tp, mode):
    with storage():
        mine = keep_two(path, dp, tp, mode)
        assert mine.manager.load()
        found = mine.whole()
        losses = mine.run(400)
        mine.close()
    return found, losses, mine.whole()


@pytest.mark.parametrize(
    ("size", "mode", "ranks"),
    [(2, mode, ranks) for mode in MODES for ranks in ((1,), (0, 1))]
    + [(4, "disabled", (3,)), (4, "async", (0,)), (4, MODES[2], (0, 1, 2, 3))],
)
def test_after_a_kill_in_the_middle_of_a_save_the_newest_whole_step_is_loaded(tmp_path, size, mode, ranks):
    shape = (size // 2, 2)
    with pool(size) as first:
        expected = first.run(run_unkilled, tmp_path / "unkilled", *shape)
        outcomes = first.outcomes(run_killed, tmp_path, *shape, mode, ranks)
    assert all(o.dead for o in outcomes)
    assert (tmp_path / "killed").exists()
    left = {name for name in listed(tmp_path) if "step" in name}
    if not STOCK:  # which leaves step-400, torchtitan counts it, and removes step-300
        assert left - {"step-200"} == {"step-300", "step-350"}  # the thread that removes may have been killed, too
    with pool(size) as second:
        found = second.run(run_again, tmp_path, *shape, mode)
    for one, other in zip(found, expected, strict=True):
        same(one[0], other[0])
        assert one[1] == other[1]
        same(one[2], other[2])
    fc.sweep(tmp_path / "checkpoint")
    # While it is saved in the background a step is not there, and not counted.
    check(tmp_path, *(["step-300"] if mode != "disabled" and not STOCK else []), "step-350", "step-400")


def run_slowly(path, dp, tp, mode):
    with storage():
        mine = keep_two(path, dp, tp, mode)
        mine.run(200, 300, 350)
        if launch.rank() == 1:
            mine.arm(hold, path)
        mine.train(400)
        mine.save(400)
        wait_for(path / "held")
        mine.manager.close()  # what torchtitan wants to remove is gone now
        dist.barrier()
        newest, there = mine.manager._find_load_step(), listed(path)
        dist.barrier()
        (path / "go").touch()
        mine.manager.maybe_wait_for_saving()
    return newest, there


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_slow_save_counts_as_no_step_until_it_is_there(two, tmp_path, mode):
    for newest, there in two.run(run_slowly, tmp_path, 1, 2, mode):
        assert newest == 350
        assert [name for name in there if "step" in name] == ["step-300", "step-350", *(["step-400"] if STOCK else [])]
    check(tmp_path, "step-300", "step-350", "step-400")


# ---- Saves that fail ------------------------------------------------------------------------------


def fail_then_save(path, mode, then, cause):
    """Save well, badly, well, badly, well; the second manager saves as `then` says."""
    with storage():
        for step, kind in ((100, mode), (200, then)):
            mine = Job.begun(path, 1, 2, async_mode=kind)
            if step > 100:
                assert mine.manager.load()
            mine.run(step)
            broken = path / "checkpoint" / f"step-{step + 50}"
            if launch.rank() == 1:
                mine.spoil(cause, broken)
            with pytest.raises(BaseException, match=r"meta|pickle|director|File exists"):
                mine.run(step + 50)
            dist.barrier()
            broken.unlink(missing_ok=True)
            mine.manager.save_future = None  # torchtitan waits for a save that failed once more
            mine.close()


def resume_last(path, dp, tp):
    with storage():
        mine = Job.begun(path, dp, tp)
        assert mine.manager.load()
        assert mine.state.step == 200
        mine.run(250)
        mine.close()


@pytest.mark.parametrize(
    ("mode", "then", "cause"),
    [
        ("disabled", "disabled", "meta"),
        ("disabled", "async", "object"),
        ("async", "disabled", "object"),
        (MODES[2], MODES[2], "object"),
        ("disabled", "async", "file"),
        (MODES[2], MODES[2], "file"),
    ],
)
def test_a_save_that_fails_keeps_no_later_one_waiting(two, tmp_path, mode, then, cause):
    two.run(fail_then_save, tmp_path, mode, then, cause)
    two.run(resume_last, tmp_path, 1, 2)
    check(tmp_path, "step-100", "step-200", "step-250")
