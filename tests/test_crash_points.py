"""One small save, stopped after each of its effects in turn: the old or the new checkpoint is whole, never a mix.

Run as a program, this file is the victim: it forks a saver for every effect, and kills it there (SIGKILL). It imports
neither TensorStore nor torch, which do not survive a fork.
"""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from functional_ckpt import SavePolicy, errors, load, save, sweep, verify

EFFECTS = ("open", "write", "mkdir", "rename", "unlink", "rmdir", "ftruncate", "fsync")
MODES = {"rename": ("rename", False), "overwrite": ("rename", True), "marker": ("marker", False)}
CASES = ["rename", "overwrite", "marker"]


def state(step):
    return {"w": np.full((5, 3), step, "i4"), "edge": np.arange(7) + step, "step": step}


def patched(stop):
    """Put `stop` before every effect; returns how to take it away again. `write` is stopped half-way."""
    from functional_ckpt.store import commit

    def wrap(real, name):
        def effect(*arguments, **options):
            reads = name == "open" and not arguments[1] & (os.O_CREAT | os.O_WRONLY)
            if not reads:
                stop(name, arguments)
            return real(*arguments, **options)

        return effect

    saved = [(os, name, getattr(os, name)) for name in EFFECTS]
    saved.append((commit, "exchange_paths", commit.exchange_paths))
    for owner, name, real in saved:
        setattr(owner, name, wrap(real, name))
    return lambda: [setattr(owner, name, real) for owner, name, real in saved]


def make_place(place, mode):
    place.mkdir(parents=True)
    (place / "mine").write_text("mine")
    if mode == "overwrite":
        save(state(1), place / "a", policy=SavePolicy(durability="none"))


def run_save(place, mode, durability):
    commit, overwrite = MODES[mode]
    save(state(2), place / "a", policy=SavePolicy(commit=commit, durability=durability), overwrite=overwrite)


def check_place(place, mode):
    """Return 1 or 2 for the checkpoint that is there, else 0; fail if it is a mix."""
    try:
        loaded = load({"w": np.zeros((5, 3), "i4"), "edge": np.zeros(7, int), "step": 0}, place / "a")
    except errors.NotACheckpointError:
        assert mode != "overwrite", "the old checkpoint is gone"
        return 0
    assert verify(place / "a").ok
    step = loaded["step"]
    np.testing.assert_array_equal(loaded["w"], state(step)["w"])
    np.testing.assert_array_equal(loaded["edge"], state(step)["edge"])
    return step


def everything(place):
    """All that a place holds but empty directories: a killed marker save leaves one, which may be anybody's."""
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file() or any(path.iterdir())} - {"a"}


def whole(place):
    """The names that a place holds when nothing is left over."""
    nodes = {"a/w", "a/w/zarr.json", "a/w/c.0.0", "a/edge", "a/edge/zarr.json", "a/edge/c.0"}
    documents = {"a/zarr.json", "a/manifest.json", "a/provenance.json"}
    return {"mine", *(nodes | documents if (place / "a/zarr.json").exists() else ())}


def check_recovery(place, mode):
    """What is there is whole; sweep removes all else of ours; the next save works."""
    found = check_place(place, mode)
    sweep(place)
    sweep(place / "a")
    assert everything(place) == whole(place)
    assert check_place(place, mode) == found
    if mode == "marker" and found:
        return found
    save(
        state(3),
        place / "a",
        policy=SavePolicy(commit=MODES[mode][0], durability="none"),
        overwrite=MODES[mode][1] or bool(found),
    )
    assert check_place(place, mode) == 3
    assert everything(place) == whole(place)
    return found


def victim(root, mode):
    """Fork a saver per effect; effect n is done half if it is a write, else not at all, and nothing after it."""
    for at in range(1000):
        place = root / str(at)
        make_place(place, mode)
        child = os.fork()
        if not child:
            seen = iter(range(10**6))

            def stop(name, arguments, at=at, seen=seen):
                if next(seen) == at:
                    if name == "write":
                        os.pwrite(arguments[0], bytes(arguments[1][: len(arguments[1]) // 2]), 0)
                    os.kill(os.getpid(), signal.SIGKILL)

            patched(stop)
            run_save(place, mode, "none")  # a kill loses nothing that was written
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            print(at)
            return


@pytest.mark.parametrize("mode", CASES)
def test_killed_after_each_effect(mode, tmp_path):
    command = [sys.executable, __file__, str(tmp_path), mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    count = int(done.stdout)
    assert count > 15, "the effects are no longer seen"
    found = [check_recovery(tmp_path / str(at), mode) for at in range(count + 1)]
    assert found == sorted(found), "once published it stays"
    assert set(found) == {1 if mode == "overwrite" else 0, 2}
    assert found[-1] == 2


@pytest.mark.parametrize("mode", CASES)
def test_an_error_at_each_effect(mode, tmp_path):
    """The system refuses effect n and nothing else: the save says so and cleans up, or has published."""
    for at in range(1000):
        place = tmp_path / str(at)
        make_place(place, mode)
        before = check_place(place, mode)
        seen = iter(range(10**6))

        def stop(name, _arguments, at=at, seen=seen):
            if next(seen) == at:
                raise OSError(errno.EIO, f"refused {name}")

        undo = patched(stop)
        failed = ""
        try:
            run_save(place, mode, "none" if mode == "rename" else "fsync")
        except errors.CheckpointError as error:
            failed = str(error)
            assert "refused" in failed, failed
        finally:
            undo()
        found = check_place(place, mode)
        # Published, but the directory it is published in could not be synced: the caller has to know.
        undurable = found == 2 and "refused fsync" in failed
        assert found == (before if failed else 2) or undurable, (at, failed)
        if failed:
            assert everything(place) == whole(place), at
        check_recovery(place, mode)
        if next(seen) <= at:
            break
    assert at > 15, "the effects are no longer seen"


if __name__ == "__main__":
    assert "tensorstore" not in sys.modules
    victim(Path(sys.argv[1]), sys.argv[2])
