"""Sweeps beside running saves, other sweeps, and what is somebody else's."""

import contextlib
import fcntl
import json
import os
import shutil

import numpy as np
import pytest

from functional_ckpt import SavePolicy, load, save, sweep, verify
from functional_ckpt.errors import AlreadyExistsError
from functional_ckpt.store import file_claim
from functional_ckpt.store.file_claim import Claim
from functional_ckpt.store.temporary import claim_name, working_name
from tests.effects import EFFECTS, watched

FAST = SavePolicy(durability="none")
MARKER = SavePolicy(commit="marker", durability="none")
ID = "abcdefghijklmnop"


def state(step):
    return {"w": np.full(5, step), "step": step}


def step_of(path):
    assert verify(path).ok
    return load({"w": np.zeros(5, int), "step": 0}, path)["step"]


@pytest.mark.parametrize("policy", [FAST, MARKER])
def test_a_claim_that_is_swept_before_it_is_locked_is_made_again(policy, tmp_path, monkeypatch):
    swept = []
    path = tmp_path / "a"

    def flock(file, operation, real=fcntl.flock):
        if operation == fcntl.LOCK_EX and len(swept) < 3:
            monkeypatch.setattr(file_claim.fcntl, "flock", real)
            swept.append(sweep(tmp_path) + sweep(path))
            monkeypatch.setattr(file_claim.fcntl, "flock", flock)
        return real(file, operation)

    monkeypatch.setattr(file_claim.fcntl, "flock", flock)
    save(state(1), path, policy=policy)
    assert [len(names) for names in swept] == [1, 1, 1]
    assert step_of(path) == 1


@pytest.mark.parametrize("commit_mode", ["rename", "marker"])
def test_two_sweeps_at_once(commit_mode, tmp_path):
    """At each call of one, the other removes everything."""
    for at in range(1000):
        place = tmp_path / str(at)
        leave_leftovers(place, commit_mode)
        count = iter(range(10**6))

        def interfere(call, at=at, count=count, place=place):
            if next(count) == at:
                for path in [*place.glob(".*"), *place.glob("*")]:
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            return call.do()

        with watched(place, interfere):
            sweep(place)
        assert list(place.iterdir()) == []
        if next(count) <= at:
            break
    assert at > 10


def test_a_tree_that_grows_while_it_is_removed(tmp_path):
    """By a rank that is late."""
    leave_leftovers(tmp_path / "p", "rename")
    late = []

    def write(call):
        if call.name == "rmdir" and len(late) < 9:
            path = tmp_path / f"p/.{'a' * 16}.{ID}.saving/late{len(late)}"
            late.append(path)
            path.touch()
        return call.do()

    with watched(tmp_path, write):
        sweep(tmp_path / "p")
    assert len(late) == 9
    assert list((tmp_path / "p").iterdir()) == []


def leave_leftovers(place, commit_mode):
    place.mkdir()
    if commit_mode == "rename":
        (place / f".{'a' * 16}.{ID}.saving/w").mkdir(parents=True)
        (place / f".{'a' * 16}.{ID}.saving/w/c.0").touch()
        Claim.take(place / f".{'a' * 16}.{ID}.claim", ID).drop()
    else:
        Claim.take(place / f".{ID}.claim", ID, ["w"]).drop()
        (place / "w").mkdir()
        (place / "w/c.0").touch()


def test_a_sweep_leaves_a_save_that_begins_meanwhile(tmp_path):
    """A sweep has found the claim of a dead save; before it removes anything, a save has begun under the same names."""
    path = tmp_path / "a"

    def meanwhile(progress):
        if progress.phase == "publish":
            Claim.take(path / f".{ID}.claim", ID, ["w"]).drop()
            assert sweep(path) == ()

    save(state(1), path, policy=MARKER, progress=meanwhile)
    assert step_of(path) == 1


def test_no_save_begins_where_a_sweep_is_at_work(tmp_path):
    Claim.take(tmp_path / f".{ID}.claim", ID, ["w"]).drop()
    held = Claim.adopt(tmp_path / f".{ID}.claim")
    with pytest.raises(AlreadyExistsError, match="swept"):
        save(state(1), tmp_path, policy=MARKER)
    held.drop()
    save(state(1), tmp_path, policy=MARKER)
    assert step_of(tmp_path) == 1


@pytest.mark.parametrize("left", [b"", b'{"attrib', b'{"att' + bytes(80), bytes(100)])
def test_what_a_power_cut_has_torn_is_swept(left, tmp_path):
    Claim.take(tmp_path / f".{ID}.claim", ID, ["w"]).drop()
    (tmp_path / "w").mkdir()
    for name in ("w/zarr.json", "w/c.0", "manifest.json", "zarr.json.new"):
        (tmp_path / name).write_bytes(left if "w" in name else bytes(50))
    assert len(sweep(tmp_path)) == 5
    assert list(tmp_path.iterdir()) == []


def test_a_save_killed_before_it_looked_owns_nothing(tmp_path):
    """Its claim was there, and nobody had checked yet whose arrays lay there."""
    save(state(1), tmp_path / "a", policy=FAST)
    (tmp_path / "b").mkdir()
    shutil.copytree(tmp_path / "a/w", tmp_path / "b/w")
    Claim.take(tmp_path / f"b/.{ID}.claim", ID).drop()
    assert [os.path.basename(name) for name in sweep(tmp_path / "b")] == [f".{ID}.claim"]
    assert sorted(os.listdir(tmp_path / "b/w")) == ["c.0", "zarr.json"]


def test_killed_at_any_moment_it_leaves_what_is_not_its_own(tmp_path, monkeypatch):
    """The same, wherever the save is killed."""

    class Killed(BaseException):
        pass

    save(state(1), tmp_path / "a", policy=FAST)
    # As a kill does, the process leaves everything as it is.
    monkeypatch.setattr(Claim, "release", Claim.drop)
    for at in range(1000):
        place = tmp_path / str(at)
        place.mkdir()
        shutil.copytree(tmp_path / "a/w", place / "w")
        count = iter(range(10**6))

        def kill(call, at=at, count=count):
            if call.name in EFFECTS and next(count) == at:
                raise Killed
            return call.do()

        with contextlib.suppress(Killed, AlreadyExistsError), watched(place, kill):
            save(state(2), place, policy=MARKER)
        sweep(place)
        assert sorted(os.listdir(place)) == ["w"]
        assert sorted(os.listdir(place / "w")) == ["c.0", "zarr.json"]
        if next(count) <= at:
            break
    assert at > 2


def killed_save(path):
    """Leave what a save to `path` leaves that is killed while it writes."""
    work = path.parent / working_name(path.name, ID)
    (work / "w").mkdir(parents=True)
    (work / "w/c.0").write_text("half")
    (path.parent / claim_name(ID, path.name)).write_text(json.dumps({"save_id": ID, "pid": 1, "locked": True}))


def test_a_save_removes_what_a_dead_save_to_its_path_has_left(tmp_path):
    killed_save(tmp_path / "a")
    save(state(1), tmp_path / "a", policy=FAST)
    assert os.listdir(tmp_path) == ["a"]


def test_a_save_leaves_what_is_of_saves_to_other_paths_or_of_live_ones(tmp_path):
    killed_save(tmp_path / "a")
    killed_save(tmp_path / "b")
    before = {*os.listdir(tmp_path)}
    live = os.open(tmp_path / claim_name(ID, "a"), os.O_RDWR)
    try:
        fcntl.flock(live, fcntl.LOCK_EX)
        save(state(1), tmp_path / "a", policy=FAST)
    finally:
        os.close(live)
    assert {*os.listdir(tmp_path)} == {"a", *before}


def test_a_save_that_cannot_remove_what_a_dead_one_has_left_goes_on(tmp_path):
    killed_save(tmp_path / "a")

    def refuse(call):
        if call.name == "unlink" and "c.0" in call.paths[0]:
            raise OSError(13, "refused")
        return call.do()

    with watched(tmp_path, refuse):
        save(state(1), tmp_path / "a", policy=FAST)
    assert step_of(tmp_path / "a") == 1
    assert len(sweep(tmp_path)) == 2
    assert os.listdir(tmp_path) == ["a"]
