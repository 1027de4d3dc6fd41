"""A checkpoint that is replaced or removed while it is read: the old one whole, or an error that says so."""

import copy
import gc
import os
import pickle
import shutil
import threading

import numpy as np
import pytest

from functional_ckpt import (
    ArraySpec,
    Box,
    SavePolicy,
    ShardSpec,
    errors,
    load,
    open_checkpoint,
    read_manifest,
    save,
    verify,
)
from functional_ckpt.cli import main
from functional_ckpt.errors import ReplacedError
from functional_ckpt.store.files import FileStore
from functional_ckpt.testing.simulate import try_ranks

FAST = SavePolicy(durability="none")
MARKER = SavePolicy(durability="none", commit="marker")
SPEC = ArraySpec("w", (64, 1024), "float32")
PART = {"w": ShardSpec(SPEC, Box((8, 0), (40, 1024))), "step": 0}  # of a chunk that is too large to be checked for it


def state(step):
    return {"w": np.full(SPEC.shape, step, "f4"), "step": step}


def in_place(path):
    """Remove a checkpoint and save another into the same directory, which keeps its inode."""
    for item in path.iterdir():
        shutil.rmtree(item) if item.is_dir() else item.unlink()
    save(state(2), path, policy=MARKER)


def overwrite(path):
    for step in (2, 3):
        save(state(step), path, overwrite=True, policy=FAST)


def remove(path):
    shutil.rmtree(path)


REPLACE = [in_place, overwrite, remove]


@pytest.fixture(params=REPLACE, ids=lambda replace: replace.__name__)
def replace(request):
    return request.param


@pytest.fixture
def saved(tmp_path):
    save(state(1), tmp_path / "a", policy=FAST)
    return tmp_path / "a"


def test_an_open_checkpoint_is_never_another(saved, replace):
    checkpoint = open_checkpoint(saved)
    array = checkpoint["w"]
    replace(saved)
    for call in (lambda: array[8:40], lambda: array[...], checkpoint.state, lambda: checkpoint["w"][0, 0]):
        with pytest.raises(ReplacedError, match="was replaced or removed"):
            call()


@pytest.mark.parametrize("phase", ["plan", "read"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_is_of_one_checkpoint_or_says_why_not(phase, ranks, saved, replace):
    replaced = threading.Event()

    def loading(gather):
        def report(now):
            if now.phase == phase and gather.rank == 0 and not replaced.is_set():
                replace(saved)
                replaced.set()
            if now.phase == phase:
                replaced.wait(60)

        return load(PART, saved, process_group=gather, progress=report)

    for outcome in try_ranks(ranks, loading):
        assert isinstance(outcome, ReplacedError), outcome
        assert "load it again" in str(outcome)


def test_what_was_read_before_its_place_was_taken_is_whole(saved):
    """An exchange leaves the old directory as it was until it is removed."""
    for new in (state(2), {"v": np.zeros(3)}):
        checkpoint = open_checkpoint(saved)
        save(new, saved.parent / "b", policy=FAST)
        old = saved.rename(saved.parent / "old")
        (saved.parent / "b").rename(saved)
        assert checkpoint["w"][8:40].tolist() == state(1)["w"][8:40].tolist()
        assert list(open_checkpoint(saved)) == [key for key in new if key != "step"]
        saved.rename(saved.parent / f"{len(new)}")
        old.rename(saved)


def test_verify_says_that_it_was_replaced_and_not_that_files_are_lost(saved, replace, capsys):
    def once(nbytes):
        if todo:
            todo.pop()(saved)

    todo = [replace]
    with pytest.raises(ReplacedError):
        verify(saved, once)


def test_the_root_is_compared_by_content_where_its_time_says_nothing(saved):
    """A root in the same file, of the same size, written in the same tick of the clock."""
    checkpoint = open_checkpoint(saved)
    before = os.stat(saved / "zarr.json")
    manifest = read_manifest(saved)
    root = (saved / "zarr.json").read_bytes()
    digest = root[root.index(b'"manifest":"') + 12 :][:32]
    (saved / "zarr.json").write_bytes(root.replace(digest, digest[::-1]))
    os.utime(saved / "zarr.json", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ReplacedError):
        checkpoint["w"][8:40]
    assert manifest == checkpoint.manifest


def test_a_link_to_an_old_root_is_no_other_checkpoint(saved):
    os.utime(saved / "zarr.json", ns=(0, 10**18))
    checkpoint = open_checkpoint(saved)
    os.utime(saved / "zarr.json")  # as a copy would: another time, the same content
    os.link(saved / "zarr.json", saved.parent / "link")
    assert checkpoint["w"][8, 0] == 1


def test_opening_goes_on_with_what_took_the_place(saved, monkeypatch):
    """Between the root and the manifest of one open."""
    real, todo = FileStore.read, [1]

    def read(self, name, *limit):
        if name == "manifest.json" and todo:
            todo.pop()
            overwrite(saved)
        return real(self, name, *limit)

    monkeypatch.setattr(FileStore, "read", read)
    assert load({**PART, "step": 0}, saved)["step"] == 3
    assert not todo


def test_what_is_lost_while_the_old_one_is_removed_is_no_damage(saved):
    """The path has the new one already, and the old one its root still."""
    checkpoint = open_checkpoint(saved)
    old = saved.rename(saved.parent / ".aaaaaaaaaaaaaaaa.abcdefghijklmnop.saving")
    save(state(2), saved, policy=FAST)
    (old / "w/c.0.0").unlink()
    with pytest.raises(ReplacedError):
        checkpoint["w"][8:40]


def test_damage_is_still_damage(saved, problems_of):
    checkpoint = open_checkpoint(saved)
    (saved / "w/c.0.0").unlink()
    for call in (lambda: checkpoint["w"][8:40], lambda: load(PART, saved)):
        (problem,) = problems_of(call)
        assert type(problem) is errors.CorruptionError
    assert [type(p) for p in verify(saved).problems] == [errors.CorruptionError]


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux to count descriptors")
def test_no_descriptor_is_left_open(saved, tmp_path):
    before = descriptors()
    gc.collect()
    gc.disable()  # references alone must do
    try:
        for _ in range(100):
            load(PART, saved)
            verify(saved)
            read_manifest(saved)
            open_checkpoint(saved).state()
            for call in (lambda: load({"x": 1}, saved), lambda: open_checkpoint(tmp_path)):
                with pytest.raises(errors.CheckpointError):
                    call()
            assert main(["show", str(saved), "step"]) == 0
            assert descriptors() <= before + 3
        arrays = [open_checkpoint(saved)["w"] for _ in range(20)]
        assert descriptors() > before + 15
        assert arrays[0][0, 0] == 1
        del arrays
        assert descriptors() <= before + 3
    finally:
        gc.enable()


def test_open_checkpoints_are_copied_and_pickled(saved):
    checkpoint = open_checkpoint(saved)
    for other in (copy.copy(checkpoint), copy.deepcopy(checkpoint), pickle.loads(pickle.dumps(checkpoint))):
        assert other["w"][8:40].tolist() == state(1)["w"][8:40].tolist()
    text = pickle.dumps(checkpoint)
    overwrite(saved)
    with pytest.raises(ReplacedError):
        pickle.loads(text)["w"][8:40]
    shutil.rmtree(saved)
    with pytest.raises(errors.CheckpointError):
        pickle.loads(text)["w"][8:40]
