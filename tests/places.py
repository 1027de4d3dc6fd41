"""A small save into a place that holds something, and what must be true of the place whatever happens to the save."""

import contextlib

import numpy as np

from functional_ckpt import SavePolicy, errors, load, save, sweep, verify

#: commit mode, overwrite
MODES = {
    "rename": ("rename", False),
    "overwrite": ("rename", True),
    "marker": ("marker", False),
    "withdraw": ("withdraw", True),
}
#: Modes that find a checkpoint.
OVERWRITES = ("overwrite", "withdraw")


def state(step):
    return {"w": np.full((5, 3), step, "i4"), "edge": np.arange(7) + step, "step": step}


def make_place(place, mode, step=1):
    place.mkdir(parents=True)
    (place / "mine").write_text("mine")
    if mode in OVERWRITES:
        save(state(step), place / "a", policy=SavePolicy(durability="none"))


def run_save(place, mode, durability, start=save, step=2):
    commit, overwrite = MODES[mode]
    return start(state(step), place / "a", policy=SavePolicy(commit=commit, durability=durability), overwrite=overwrite)


def check_place(place, mode):
    """Return the step of the checkpoint that is there, else 0; fail if it is a mix, or if there has to be one."""
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
    found = set()
    for path in place.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() or any(path.iterdir()):
                found.add(str(path.relative_to(place)))
    return found - {"a"}


def whole(place):
    """The names that a place holds when nothing is left over."""
    nodes = {"a/w", "a/w/zarr.json", "a/w/c.0.0", "a/edge", "a/edge/zarr.json", "a/edge/c.0"}
    documents = {"a/zarr.json", "a/manifest.json", "a/provenance.json"}
    return {"mine", *(nodes | documents if (place / "a/zarr.json").exists() else ())}


def check_recovery(place, mode):
    """What is there is whole; sweep removes all else of ours; the next save works. Return the step that was there."""
    found = check_place(place, mode)
    sweep(place)
    sweep(place / "a")
    assert everything(place) == whole(place), everything(place) ^ whole(place)
    assert check_place(place, mode) == found
    if mode == "marker" and found:
        return found
    commit, overwrite = MODES[mode]
    policy = SavePolicy(commit=commit, durability="none")
    save(state(3), place / "a", policy=policy, overwrite=overwrite or bool(found))
    assert check_place(place, mode) == 3
    assert everything(place) == whole(place)
    return found
