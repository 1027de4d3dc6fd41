"""A path holds a whole checkpoint or none: overwriting, marker mode among foreign files, claims, sweeping."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import attrs
import numpy as np
import pytest

import functional_ckpt
from functional_ckpt import SavePolicy, async_save, errors, load, open_checkpoint, save, sweep, verify
from functional_ckpt.store.commit import begin
from functional_ckpt.store.file_claim import Claim, state_of
from functional_ckpt.store.opening import open_store

MARKER = SavePolicy(commit="marker", durability="none")
ID = "abcdefghijklmnop"


def state(step):
    return {"w": np.full(5, step), "step": step}


def step_of(path):
    loaded = load({"w": np.zeros(5, int), "step": 0}, path)
    assert (loaded["w"] == loaded["step"]).all()
    return loaded["step"]


def test_overwrite_replaces_the_whole(tmp_path, fast):
    save({**state(1), "old": np.ones(2)}, tmp_path / "a", policy=fast)
    save(state(2), tmp_path / "a", policy=fast, overwrite=True)
    assert step_of(tmp_path / "a") == 2
    assert not (tmp_path / "a/old").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_overwrite_where_nothing_is(tmp_path, fast):
    save(state(1), tmp_path / "new" / "a", policy=fast, overwrite=True)
    (tmp_path / "empty").mkdir()
    save(state(2), tmp_path / "empty", policy=fast)
    assert (step_of(tmp_path / "new/a"), step_of(tmp_path / "empty")) == (1, 2)


def test_a_link_is_followed_and_stays(tmp_path, fast):
    save(state(1), tmp_path / "step1", policy=fast)
    (tmp_path / "latest").symlink_to("step1")
    save(state(2), tmp_path / "latest", policy=fast, overwrite=True)
    assert (tmp_path / "latest").is_symlink()
    assert step_of(tmp_path / "step1") == step_of(tmp_path / "latest") == 2


def test_a_file_url_is_a_path(tmp_path, fast):
    save(state(1), f"file://{tmp_path}/a%20b", policy=fast)
    assert step_of(tmp_path / "a b") == 1


def test_a_path_that_appears_while_saving_is_kept(tmp_path, fast, problems_of):
    def appear(progress):
        if progress.phase == "publish":
            (tmp_path / "a").mkdir()
            (tmp_path / "a/mine").write_text("mine")

    (problem,) = problems_of(save, state(1), tmp_path / "a", policy=fast, progress=appear)
    assert type(problem).__name__ == "AlreadyExistsError"
    assert [p.name for p in tmp_path.rglob("*")] == ["a", "mine"]


def test_two_savers_of_one_path_and_one_wins(tmp_path, fast, problems_of):
    def other(progress):
        if progress.phase == "publish":
            save(state(2), tmp_path / "a", policy=fast)

    problems_of(save, state(1), tmp_path / "a", policy=fast, progress=other)
    assert step_of(tmp_path / "a") == 2
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


# Marker mode


def foreign(path):
    """Put files of others into a directory, some with names that we use too."""
    (path / "sub").mkdir(parents=True)
    names = {"common.pt": b"x", "manifest.json": b'{"mine": 1}', "provenance.json": b"[]", "sub/c.0": b"y",
    "sub/zarr.json": b"{}",
             ".claim": b"", "w.bin": b"z"}  # fmt: skip
    for name, data in names.items():
        (path / name).write_bytes(data)
    return names


def test_marker_mode_among_foreign_files(tmp_path, problems_of, tree_bytes):
    names = foreign(tmp_path / "a")
    before = tree_bytes(tmp_path)
    (problem,) = problems_of(save, state(1), tmp_path / "a", policy=MARKER)  # their manifest.json is in the way
    assert type(problem).__name__ == "AlreadyExistsError"
    assert tree_bytes(tmp_path) == before
    for taken in ("manifest.json", "provenance.json"):
        (tmp_path / "a" / taken).unlink()
        names.pop(taken)
    save(state(1), tmp_path / "a", policy=MARKER)
    assert step_of(tmp_path / "a") == 1
    for overwrite in (False, True):
        (problem,) = problems_of(save, state(2), tmp_path / "a", policy=MARKER, overwrite=overwrite)
        assert type(problem).__name__ == "AlreadyExistsError"
    assert sweep(tmp_path / "a") == ()
    assert sweep(tmp_path) == ()
    after = tree_bytes(tmp_path / "a")
    assert {name: after[name] for name in names} == names
    assert step_of(tmp_path / "a") == 1


def test_a_failed_marker_save_keeps_foreign_files(tmp_path, problems_of, tree_bytes):
    def fail(progress):
        raise OSError("no")

    foreign(tmp_path / "a")
    before = tree_bytes(tmp_path)
    problems_of(save, state(1), tmp_path / "a", policy=MARKER, progress=lambda p: p.phase == "publish" and fail(p))
    assert tree_bytes(tmp_path) == before


def test_a_second_marker_save_waits_its_turn(tmp_path, problems_of):
    seen = []

    def other(progress):
        if progress.phase == "publish":
            seen.extend(problems_of(save, state(2), tmp_path / "a", policy=MARKER))

    save(state(1), tmp_path / "a", policy=MARKER, progress=other)
    assert [type(p).__name__ for p in seen] == ["AlreadyExistsError"]
    assert step_of(tmp_path / "a") == 1


def test_memory_has_marker_mode_only(problems_of):
    save(state(1), "memory://commit/a")
    for policy, overwrite in ((SavePolicy(), False), (SavePolicy(), True), (SavePolicy(commit="rename"), False)):
        problems_of(save, state(2), "memory://commit/a", policy=policy, overwrite=overwrite)
    assert step_of("memory://commit/a") == 1
    assert sweep("memory://commit/a") == ()


# Sweeping


def test_sweep_removes_exactly_the_leftovers(tmp_path, fast, tree_bytes):
    save(state(1), tmp_path / "a", policy=fast)
    for name in (
        f".{'a' * 16}.{ID}.saving/w/c.0",
        f".{'b' * 16}.{ID}.saving/x",
        "mine/x",
        ".mine.saving/x",
        f"{ID}.saving/x",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("x")
    (tmp_path / f".{'c' * 16}.{ID}.claim").write_text("{}")
    (tmp_path / ".x.claim").write_text("")
    live = Claim.take(tmp_path / f".{'d' * 16}.{ID}.claim", ID)
    (tmp_path / f".{'d' * 16}.{ID}.saving").mkdir()
    (tmp_path / f".{'d' * 16}.{ID}.saving/x").write_text("x")
    before = set(tree_bytes(tmp_path))
    dead = [f".{'a' * 16}.{ID}.saving", f".{'b' * 16}.{ID}.saving", f".{'c' * 16}.{ID}.claim"]
    assert sweep(tmp_path) == tuple(sorted(str(tmp_path / name) for name in dead))
    removed = before - set(tree_bytes(tmp_path))
    assert {name.partition("/")[0] for name in removed} == set(dead)
    assert state_of(live.path) == "live"
    live.release()
    assert sweep(tmp_path) == (str(tmp_path / f".{'d' * 16}.{ID}.saving"),)
    assert sweep(tmp_path) == ()
    assert step_of(tmp_path / "a") == 1


@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_sweep_leaves_a_running_save_alone(commit, tmp_path):
    swept = []

    def check(progress):
        swept.extend(sweep(tmp_path))
        swept.extend(sweep(tmp_path / "a"))

    policy = SavePolicy(commit=commit, durability="none")
    async_save(state(4), tmp_path / "a", policy=policy, progress=check).result(20)
    assert swept == []
    assert step_of(tmp_path / "a") == 4


def test_sweep_of_nothing(tmp_path):
    assert sweep(tmp_path / "no-such") == ()
    (tmp_path / "file").write_text("x")
    assert sweep(tmp_path / "file") == ()


KILLED = """
import os, signal, sys, numpy as np, functional_ckpt
def report(progress):
    if progress.phase == sys.argv[3]:
        print("reached", flush=True)
        if sys.argv[4] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
policy = functional_ckpt.SavePolicy(commit=sys.argv[2])
functional_ckpt.save({"w": np.full(5, 9), "step": 9}, sys.argv[1], policy=policy, overwrite=True, progress=report)
"""


@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_a_live_process_is_seen_and_a_killed_one_is_swept(commit, tmp_path, problems_of):
    path = tmp_path / "a"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path), commit, "publish", "wait"], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout.readline() == b"reached\n"
        before = sorted(tmp_path.rglob("*"))
        assert sweep(tmp_path) == ()
        assert sweep(path) == ()
        assert sorted(tmp_path.rglob("*")) == before
        (problem,) = problems_of(open_checkpoint, path)
        assert type(problem).__name__ == "NotACheckpointError"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(20)
        child.stdout.close()
    assert sweep(tmp_path if commit == "rename" else path)
    assert [p for p in tmp_path.rglob("*") if p != path] == []
    save(state(2), path, policy=SavePolicy(commit=commit, durability="none"))
    assert step_of(path) == 2


def test_provenance_stays_out_of_the_digest(tmp_path, fast):
    begun = time.time()
    save(state(1), tmp_path / "a", policy=fast)
    path = tmp_path / "a/provenance.json"
    provenance = json.loads(path.read_bytes())
    assert begun - 1 <= provenance["started"] <= provenance["finished"] <= time.time() + 1
    assert provenance["ranks"] == [{"arrays": ["w"], "nbytes": 40, "messages": 0, "moved_nbytes": 0}]
    path.write_text("{}")
    assert verify(tmp_path / "a").ok
    os.unlink(path)
    assert step_of(tmp_path / "a") == 1


def test_before_the_root_no_tool_opens_the_path(tmp_path):
    import zarr

    def look(progress):
        if progress.phase == "publish":
            assert (tmp_path / "a/w/zarr.json").exists()
            with pytest.raises(FileNotFoundError):
                zarr.open_group(tmp_path / "a", mode="r")

    save(state(1), tmp_path / "a", policy=MARKER, progress=look)
    assert zarr.open_group(tmp_path / "a", mode="r")["w"][0] == 1
    assert functional_ckpt.verify(tmp_path / "a").ok


def test_a_running_save_keeps_its_memory(fast):
    """A second save to the same place is refused, and takes nothing from the first."""
    hold, held = threading.Event(), threading.Event()
    queued = attrs.evolve(fast, in_flight="queue")

    def wait(progress):
        if progress.phase == "publish":
            held.set()
            assert hold.wait(20)

    pending = async_save({"w": np.ones(3)}, "memory://running", policy=queued, progress=wait)
    assert held.wait(20)
    with pytest.raises(errors.AlreadyExistsError, match="running"):
        async_save({"w": np.zeros(3)}, "memory://running", policy=queued)
    assert sweep("memory://running") == ()
    hold.set()
    pending.result(20)
    assert load({"w": np.zeros(3)}, "memory://running")["w"].sum() == 3


@pytest.mark.parametrize("late", ["notes.txt", "w/notes.txt"])
def test_files_that_come_while_saving_are_kept(late, tmp_path, fast):
    save({"w": np.ones(3)}, tmp_path / "a", policy=fast)

    def write_notes(progress):
        if progress.phase == "write":
            (tmp_path / "a" / late).write_text("mine")

    with pytest.raises(errors.AlreadyExistsError):
        save({"w": np.zeros(3)}, tmp_path / "a", policy=fast, overwrite=True, progress=write_notes)
    assert (tmp_path / "a" / late).read_text() == "mine"
    assert load({"w": np.zeros(3)}, tmp_path / "a")["w"].sum() == 3


@pytest.mark.parametrize("name", ["manifest.json", "w"])
def test_marker_mode_does_not_write_among_names_of_others(name, tmp_path, fast):
    (tmp_path / "a" / name).mkdir(parents=True)
    (tmp_path / "a" / name / "mine").write_text("mine")
    with pytest.raises(errors.AlreadyExistsError, match="names that the checkpoint needs"):
        save({"w": np.ones(3)}, tmp_path / "a", policy=attrs.evolve(fast, commit="marker"))
    assert [p.name for p in (tmp_path / "a").rglob("*")] == [name, "mine"]


def test_a_killed_marker_save_of_plain_values_can_be_repeated(tmp_path):
    """It has no node to name, and yet its manifest is told from that of others."""
    store = open_store(tmp_path)
    _, claim = begin(tmp_path, "marker", False, [])
    store.create("manifest.json", [memoryview(b'{"aliases":[')], 12)
    claim.drop()
    save({"step": 1}, tmp_path, policy=MARKER)
    assert open_checkpoint(tmp_path).state() == {"step": 1}
