"""The directory of a run's steps: what is listed, pinned and removed, and what is somebody else's."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from functional_ckpt import Checkpoints, KeepLast, SavePolicy, errors, save, sweep, verify
from functional_ckpt.plan.retention import step_attributes
from functional_ckpt.run import shelf
from functional_ckpt.store import steps
from functional_ckpt.store.files import FileStore
from functional_ckpt.store.steps import find_steps, pin_step, read_step, remove_step, step_path, unpin_step
from tests.disk import Cut, Log, files_below
from tests.effects import killing_at, watched

FAST = SavePolicy(durability="none")
STATE = {"w": np.arange(6.0).reshape(2, 3), "b": np.ones(2, "i4"), "step": 3}


def put(root, *numbers, **options):
    for step in numbers:
        save(STATE, step_path(root, step), policy=FAST, **options)


def test_only_committed_steps_under_our_names_are_listed(tmp_path):
    put(tmp_path, 20, 3, 123456789)
    for name in ("step-5", "step-000000007", "step-00000009.old", "best", "step-00000008", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000011").write_text("a file")
    shutil.copytree(tmp_path / "step-00000020", tmp_path / "step-00000012")
    (tmp_path / "step-00000012/zarr.json").unlink()  # copied in part
    assert find_steps(tmp_path) == {3: False, 20: False, 123456789: False}
    assert [*find_steps(tmp_path)] == [3, 20, 123456789]
    assert find_steps(tmp_path / "nothing") == {}


def test_a_save_that_is_not_finished_is_not_listed(tmp_path):
    seen, looking = [], []

    def look(call):
        if not looking:
            looking.append(True)
            seen.append([*find_steps(tmp_path)])
            looking.clear()
        return call.do()

    with watched(tmp_path, look):
        put(tmp_path, 7)
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert seen[0] == []
    assert find_steps(tmp_path) == {7: False}


def test_the_list_of_many_steps_costs_one_look_at_each(tmp_path):
    for step in range(50):
        (tmp_path / f"step-{step:08d}").mkdir()
        (tmp_path / f"step-{step:08d}/zarr.json").touch()
    calls = []
    with watched(tmp_path.parent, lambda call: (calls.append(call.name), call.do())[1]):
        assert len(find_steps(tmp_path)) == 50
    assert calls.count("scandir") == 1
    assert len(calls) == 51


@pytest.mark.parametrize("where", ["file", "memory"])
def test_what_is_known_of_a_step(where, tmp_path):
    root = tmp_path if where == "file" else f"memory://{tmp_path.name}"
    metrics = {"loss": np.float32(0.5), "nan": float("nan"), "inf": float("inf")}
    put(root, 10, attributes={"git": "1f2e", **step_attributes(10, metrics)})
    info = read_step(root, 10)
    assert (info.step, info.path, info.attributes) == (10, f"{root}/step-00000010", {"git": "1f2e"})
    assert info.nbytes == 48 + 8
    assert info.time > 1.6e9
    assert str(info.metrics) == "{'inf': inf, 'loss': 0.5, 'nan': nan}"
    assert hash(info)
    pin_step(root, 10)
    assert read_step(root, 10).pinned
    assert find_steps(root) == {10: True}
    with pytest.raises(errors.StorageError, match="pinned"):
        remove_step(root, 10)
    unpin_step(root, 10)
    remove_step(root, 10)
    assert find_steps(root) == {}
    with pytest.raises(errors.NotACheckpointError):
        read_step(root, 10)


@pytest.mark.parametrize("act", [pin_step, remove_step])
def test_a_step_that_is_not_there(act, tmp_path):
    put(tmp_path, 1, 2)
    with pytest.raises(errors.NotACheckpointError, match="2 others, from 1 to 2"):
        act(tmp_path, 3)
    with pytest.raises(errors.NotACheckpointError, match="none"):
        act(tmp_path / "nowhere", 3)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("foreign", ["notes.txt", "w/notes.txt", "logs/"])
def test_a_step_that_holds_files_of_others_stays(foreign, tmp_path):
    put(tmp_path, 1)
    path = tmp_path / "step-00000001" / foreign
    path.mkdir() if foreign.endswith("/") else path.write_text("theirs")
    with pytest.raises(errors.StorageError, match=r"not part of a checkpoint.*Move these files"):
        remove_step(tmp_path, 1)
    assert path.exists()
    assert verify(tmp_path / "step-00000001").ok


def test_a_link_to_a_step_stays(tmp_path):
    save(STATE, tmp_path / "elsewhere", policy=FAST)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/step-00000001").symlink_to(tmp_path / "elsewhere")
    assert find_steps(tmp_path / "run") == {1: False}
    with pytest.raises(errors.StorageError, match="symbolic link"):
        remove_step(tmp_path / "run", 1)
    assert verify(tmp_path / "elsewhere").ok


@pytest.mark.parametrize("at", ["before the look", "after the rename"])
def test_a_step_that_is_pinned_while_it_is_removed_stays(at, tmp_path, monkeypatch):
    put(tmp_path, 1)
    real = os.rename

    def rename(old, new):
        monkeypatch.setattr(steps.os, "rename", real)
        (tmp_path / "step-00000001.pin").touch()
        real(old, new)

    monkeypatch.setattr(steps.os, "rename", rename)
    if at == "before the look":
        (tmp_path / "step-00000001.pin").touch()
    with pytest.raises(errors.StorageError, match="pinned"):
        remove_step(tmp_path, 1)
    assert find_steps(tmp_path) == {1: True}
    assert verify(tmp_path / "step-00000001").ok


def test_who_pins_a_step_that_is_being_removed_is_told(tmp_path, monkeypatch):
    put(tmp_path, 1)
    create = FileStore.create

    def create_late(store, *arguments):
        remove_step(tmp_path, 1)
        create(store, *arguments)

    monkeypatch.setattr(FileStore, "create", create_late)
    with pytest.raises(errors.NotACheckpointError):
        pin_step(tmp_path, 1)
    assert os.listdir(tmp_path) == []


def victim(root):
    """Fork a remover per effect, which dies there."""
    for at in range(100):
        put(root / str(at), 1, 2)
        child = os.fork()
        if not child:
            with watched(root / str(at), killing_at(at)):
                remove_step(root / str(at), 1)
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended != -signal.SIGKILL:
            assert ended == 0
            return


def test_a_removal_that_is_killed_leaves_the_step_whole_or_without_its_name(tmp_path):
    command = [sys.executable, "-m", "tests.test_steps", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = []
    for root in sorted(tmp_path.iterdir(), key=lambda path: int(path.name)):
        found.append([*find_steps(root)])
        assert all(verify(step_path(root, step)).ok for step in found[-1])
        sweep(root)
        assert sorted(os.listdir(root)) == [f"step-{step:08d}" for step in found[-1]]
    assert found[0] == [1, 2]
    assert found[1:] == [[2]] * (len(found) - 1)
    assert len(found) > 8, "the effects are no longer seen"


def test_a_power_cut_leaves_a_step_whole_or_without_its_name(tmp_path):
    put(tmp_path, 1)
    log = Log(tmp_path)
    whole = files_below(log.image(), "step-00000001")
    with log.recorded():
        remove_step(tmp_path, 1)
    for count in range(len(log.steps) + 1):
        for image in Cut(log, count).images():
            assert files_below(image, "step-00000001") in ({}, whole)


def test_a_process_that_lists_steps_imports_neither_torch_nor_tensorstore(tmp_path):
    put(tmp_path, 1)
    code = (
        "import sys; from functional_ckpt.store.steps import find_steps, read_step;"
        f"print([*find_steps({str(tmp_path)!r})], read_step({str(tmp_path)!r}, 1).step,"
        " {'torch', 'tensorstore'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[1] 1 set()\n"


@pytest.mark.parametrize("began", [False, True])
def test_an_interrupt_while_removals_begin_is_made_up_for(began, tmp_path):
    begin = threading.Thread.start

    def interrupted(thread):
        if began:
            begin(thread)
            thread.join()
        raise KeyboardInterrupt

    with Checkpoints(tmp_path, keep=KeepLast(1), policy=FAST) as checkpoints:
        checkpoints.save(1, STATE)
        with patch.object(threading.Thread, "start", interrupted), pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, STATE)
        assert checkpoints.steps() == ((2,) if began else (1, 2))
        checkpoints.save(3, STATE)
    assert checkpoints.steps() == (3,)
    assert [item.name for item in tmp_path.iterdir()] == ["step-00000003"]


def test_a_step_whose_removal_ends_while_steps_are_listed_is_not_among_them(tmp_path):
    may_go, removed = threading.Event(), threading.Event()

    def remove(*arguments, real=shelf.remove_step):
        assert may_go.wait(60)
        real(*arguments)

    def find(*arguments, real=shelf.find_steps):
        found = real(*arguments)
        may_go.set()
        checkpoints._keeper.shelf._thread.join()
        removed.set()
        return found

    with Checkpoints(tmp_path, keep=KeepLast(1), policy=FAST) as checkpoints:
        with patch.object(shelf, "remove_step", remove):
            for step in (1, 2):
                checkpoints.save(step, STATE)
            with patch.object(shelf, "find_steps", find):
                assert checkpoints.steps() == (2,)
        assert removed.is_set()


if __name__ == "__main__":
    victim(Path(sys.argv[1]))
