"""A power cut at any moment of a save leaves the old or the new checkpoint whole; every sync is needed for that."""

import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from functional_ckpt import SavePolicy, save
from functional_ckpt.store import unsynced
from functional_ckpt.store.file_claim import claimed_nodes
from functional_ckpt.testing.simulate import run_ranks
from tests.disk import Cut, Log, files_below, is_aside, put
from tests.places import MODES, check_recovery, put_foreign, run_save

CASES = [(mode, durability) for mode in MODES for durability in ("fsync", "syncfs")]
AT = {"rename": "new/deep/a", "marker": "new/deep/a", "overwrite": "a", "keep": "a"}


def saved_by_two(place, mode, durability):
    """Save from two ranks, each of which writes something."""
    options, overwrite = MODES[mode]
    policy = SavePolicy(durability=durability, **options)

    def run(gather):
        mine = {f"x{gather.rank}": np.full(3, 7)}
        return save(mine, place / "a", policy=policy, overwrite=overwrite, process_group=gather)

    run_ranks(2, run)


def saved_early(place, mode, durability):
    """Save with few files kept open, which the disk is told to begin with however small they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unsynced, "MOST", 3)
        patch.setattr(unsynced, "EARLY_NBYTES", 0)
        run_save(place, mode, durability)


@functools.cache
def logged(mode, durability, start=run_save):
    """Return the log of a save, and the files of the old and of the new checkpoint."""
    root = Path(tempfile.mkdtemp())
    place = (root / AT[mode]).parent
    if MODES[mode][1]:
        run_save(place, mode, "none", step=1)
    if mode == "keep":
        put_foreign(place / "a")
    log = Log(root)
    old = files_below(log.image(), AT[mode])
    with log.recorded():
        start(place, mode, durability)
    new = files_below(log.image(), AT[mode])
    there = (path for path in (root / AT[mode]).rglob("*") if path.is_file())
    assert new == {str(path.relative_to(root / AT[mode])): path.read_bytes() for path in there} != old
    shutil.rmtree(root)
    return log, old, new


def violations(mode, logged, dropped=()):
    """Yield the moments at which a power cut breaks the promise, and what it leaves at the path."""
    log, old, new = logged
    for count in range(len(log.steps) + 1):
        for image in Cut(log, count, dropped).images():
            at_path = files_below(image, AT[mode])
            found = {name: data for name, data in at_path.items() if not is_aside(name)}
            if found == new or (count < len(log.steps) and found == old):
                continue
            if mode == "marker" and count < len(log.steps) and can_be_swept(at_path):
                continue
            yield count, at_path


def can_be_swept(files):
    """Tell whether there is no root, and a claim that names what else is there."""
    nodes = {node for name, data in files.items() if name.endswith(".claim") for node in claimed_nodes(data) or ()}
    others = {name.partition("/")[0] for name in files if not is_aside(name)}
    return "zarr.json" not in others and others <= {*nodes, "manifest.json", "provenance.json"}


@pytest.mark.parametrize(("mode", "durability"), CASES)
def test_a_power_cut_leaves_the_old_or_the_new(mode, durability):
    assert next(violations(mode, logged(mode, durability)), None) is None


@pytest.mark.parametrize(("mode", "durability"), CASES)
def test_a_power_cut_while_two_ranks_save(mode, durability):
    assert next(violations(mode, logged(mode, durability, saved_by_two)), None) is None


@pytest.mark.parametrize("mode", MODES)
def test_that_the_disk_begins_early_takes_no_sync_away(mode):
    assert next(violations(mode, logged(mode, "fsync", saved_early)), None) is None


@pytest.mark.parametrize("mode", MODES)
def test_without_syncs_the_model_finds_it(mode):
    assert next(violations(mode, logged(mode, "none")), None) is not None


@pytest.mark.parametrize(("mode", "durability"), CASES)
def test_every_sync_is_needed(mode, durability):
    found = logged(mode, durability)
    steps = found[0].steps
    # A directory that files of others are linked into, too, is synced once more after that.
    last = {steps[at][1]: at for at in found[0].syncs()} if mode == "keep" else {}
    needed = [at for at in found[0].syncs() if last.get(steps[at][1], at) == at]
    assert [steps[at] for at in needed if next(violations(mode, found, {at}), None) is None] == []


def check_recoveries(root, mode, durability, step, image_step=None):
    """Make real what every `step`-th cut may leave (the last image of each, or every `image_step`-th), and go on."""
    log, _, _ = logged(mode, durability)
    for count in range(0, len(log.steps) + 1, step):
        images = list(Cut(log, count).images())
        for number in range(0, len(images), image_step) if image_step else (len(images) - 1,):
            here = root / f"{count}-{number}"
            put({"": None, **images[number]}, here)
            place = (here / AT[mode]).parent
            place.mkdir(parents=True, exist_ok=True)
            (place / "mine").touch()
            check_recovery(place, mode)
            shutil.rmtree(here)


@pytest.mark.parametrize(("mode", "durability"), CASES)
def test_after_a_power_cut_the_next_save_works(mode, durability, tmp_path):
    check_recoveries(tmp_path, mode, durability, 5)
