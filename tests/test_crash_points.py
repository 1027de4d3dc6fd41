"""One small save, killed after each of its effects in turn: the old or the new checkpoint is whole, never a mix.

Run as a program, this file is the victim: it forks a saver for every effect, and kills it there (SIGKILL).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.effects import killing_at, watched
from tests.places import MODES, check_recovery, make_place, run_save

CASES = ["rename", "overwrite", "marker", "keep"]


def victim(root, mode):
    """Fork a saver per effect; effect n is done half if it is a write, else not at all, and nothing after it."""
    for at in range(1000):
        place = root / str(at)
        make_place(place, mode)
        child = os.fork()
        if not child:
            with watched(place, killing_at(at)):
                run_save(place, mode, "none")  # a kill loses nothing that was written
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            print(at)
            return


@pytest.mark.parametrize("mode", CASES)
def test_killed_after_each_effect(mode, tmp_path):
    command = [sys.executable, "-m", "tests.test_crash_points", str(tmp_path), mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    count = int(done.stdout)
    assert count > 15, "the effects are no longer seen"
    found = [check_recovery(tmp_path / str(at), mode) for at in range(count + 1)]
    assert found == sorted(found), "once published it stays"
    assert set(found) == {1 if MODES[mode][1] else 0, 2}
    assert found[-1] == 2


if __name__ == "__main__":
    assert "tensorstore" not in sys.modules
    victim(Path(sys.argv[1]), sys.argv[2])
