"""`Checkpoints` and what ends a process: signals that are noted, and kills at any moment."""

import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from functional_ckpt import Checkpoints, KeepBest, KeepLast, SavePolicy, save, sweep, verify
from functional_ckpt.errors import PolicyError
from functional_ckpt.store.steps import step_path
from tests.effects import killing_at, watched
from tests.test_manager import at, like, names

FAST = SavePolicy(durability="none")


def test_signals_are_noted_passed_on_and_given_back(tmp_path):
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    handled = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)}
    try:
        with Checkpoints(tmp_path, on_signal=tuple(handled)) as checkpoints:
            assert not checkpoints.should_stop()
            for number in handled:
                signal.raise_signal(number)
            assert checkpoints.should_stop()
            checkpoints.save(1, at(1))
        assert seen == [signal.SIGUSR1]
        assert {number: signal.getsignal(number) for number in handled} == handled
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signals_are_given_back_where_checkpoints_cannot_be_made(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(PolicyError):
        Checkpoints(tmp_path, on_signal=(signal.SIGTERM, 10**6))
    save(at(1), tmp_path / "one", policy=FAST)
    with pytest.raises(PolicyError):
        Checkpoints(tmp_path / "one", on_signal=(signal.SIGTERM,))
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_handler_that_came_later_stays_and_is_still_answered(tmp_path):
    seen = []
    checkpoints = Checkpoints(tmp_path, on_signal=(signal.SIGUSR1,))
    ours = signal.getsignal(signal.SIGUSR1)

    def later(number, frame):
        seen.append(number)
        ours(number, frame)

    try:
        signal.signal(signal.SIGUSR1, later)
        signal.raise_signal(signal.SIGUSR1)
        assert checkpoints.should_stop()
        checkpoints.close()
        assert signal.getsignal(signal.SIGUSR1) is later
        assert len(seen) == 1
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_thread_cannot_take_signals(tmp_path):
    outcome = []

    def make():
        try:
            Checkpoints(tmp_path, on_signal=(signal.SIGTERM,))
        except PolicyError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in outcome[0]


def run_steps(root):
    """A run in the background and at once, which has begun before or not."""
    with Checkpoints(root, keep=KeepLast(2) | KeepBest("loss"), policy=FAST) as checkpoints:
        first = checkpoints.resume(like())["step"] + 1
        for step in range(first, first + 3):
            (checkpoints.save if step % 2 else checkpoints.async_save)(step, at(step), {"loss": step % 3})
        checkpoints.wait()
        with open(root.parent / f"{root.name}.done", "a") as file:  # beside it: what has returned
            file.write(f"{checkpoints.latest()}\n")


def victim(root, stride):
    """For every effect of a run fork one that dies there."""
    for at_effect in range(0, 2000, stride):
        place = root / str(at_effect)
        child = os.fork()
        if not child:
            run_steps(place)
            with watched(place, killing_at(at_effect)):
                run_steps(place)
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended != -signal.SIGKILL:
            assert ended == 0, ended
            return


def check_killed(place):
    """The run goes on without a hand, from a whole step, and nothing is left of what was killed."""
    done = int(Path(f"{place}.done").read_text().split()[-1])
    seen = Checkpoints(place, policy=FAST).steps()
    assert all(verify(step_path(place, step)).ok for step in seen)
    assert done <= seen[-1] <= done + 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_steps(place)
    last = seen[-1] + 3
    left = Checkpoints(place).steps()
    assert {last, last - 1} <= {*left}
    assert len(left) <= 3
    assert names(place) == [f"step-{step:08d}" for step in left]
    assert sweep(place) == ()
    assert Checkpoints(place).resume(like())["w"].tolist() == [float(last)] * 5


def test_a_run_that_is_killed_at_any_effect_goes_on(tmp_path):
    check_kills(tmp_path, 17)


def check_kills(root, stride):
    """Kill runs at every `stride`-th effect; `tox -e soak` does it at each."""
    command = [sys.executable, "-m", "tests.test_manager_kills", str(root), str(stride)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2000, check=False)
    assert done.returncode == 0, done.stderr
    places = [path for path in root.iterdir() if path.is_dir()]
    assert len(places) * stride > 60, "the effects are no longer seen"
    for place in places:
        check_killed(place)


if __name__ == "__main__":
    victim(Path(sys.argv[1]), int(sys.argv[2]))
