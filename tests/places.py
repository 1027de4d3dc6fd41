"""A small save into a place that holds something, and what must be true of the place whatever happens to the save."""

from pathlib import Path

import numpy as np

from functional_ckpt import SavePolicy, errors, load, save, sweep, verify

#: What the policy says, overwrite
MODES = {
    "rename": ({"commit": "rename"}, False),
    "overwrite": ({"commit": "rename"}, True),
    "marker": ({"commit": "marker"}, False),
    "keep": ({"commit": "rename", "foreign": "keep", "metadata_file": True}, True),
}
#: What others have put into the checkpoint that is overwritten, in the last mode.
FOREIGN = {"meta.pt": "theirs", "logs/deep/1.txt": "log", "w/notes.txt": "note"}


def state(step):
    return {"w": np.full((5, 3), step, "i4"), "edge": np.arange(7) + step, "step": step}


def put_foreign(path):
    for name, text in FOREIGN.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)


def make_place(place, mode, step=1):
    place.mkdir(parents=True)
    (place / "mine").write_text("mine")
    if MODES[mode][1]:
        save(state(step), place / "a", policy=SavePolicy(durability="none"))
    if mode == "keep":
        put_foreign(place / "a")


def run_save(place, mode, durability, start=save, step=2):
    options, overwrite = MODES[mode]
    return start(state(step), place / "a", policy=SavePolicy(durability=durability, **options), overwrite=overwrite)


def check_place(place, mode):
    """Return the step of the checkpoint that is there, else 0; fail if it is a mix, or if there has to be one."""
    try:
        loaded = load({"w": np.zeros((5, 3), "i4"), "edge": np.zeros(7, int), "step": 0}, place / "a")
    except errors.NotACheckpointError:
        assert not MODES[mode][1], "the old checkpoint is gone"
        return 0
    assert verify(place / "a").ok
    if mode == "keep":
        assert {name: (place / "a" / name).read_text() for name in FOREIGN} == FOREIGN
    step = loaded["step"]
    np.testing.assert_array_equal(loaded["w"], state(step)["w"])
    np.testing.assert_array_equal(loaded["edge"], state(step)["edge"])
    return step


def everything(place):
    """All that a place holds but `a` itself: a killed marker save leaves an empty directory, which may be anybody's."""
    return {str(path.relative_to(place)) for path in place.rglob("*")} - {"a"}


def whole(place, mode):
    """The names that a place holds when nothing is left over."""
    nodes = {"a/w", "a/w/zarr.json", "a/w/c.0.0", "a/edge", "a/edge/zarr.json", "a/edge/c.0"}
    documents = {"a/zarr.json", "a/manifest.json", "a/provenance.json"}
    if mode == "keep":
        documents |= {f"a/{part}" for name in FOREIGN for part in (name, *map(str, Path(name).parents[:-1]))}
        documents |= {"a/.metadata"} if (place / "a/.metadata").exists() else set()
    return {"mine", *(nodes | documents if (place / "a/zarr.json").exists() else ())}


def check_recovery(place, mode):
    """What is there is whole; sweep removes all else of ours; the next save works. Return the step that was there."""
    found = check_place(place, mode)
    sweep(place)
    sweep(place / "a")
    assert everything(place) == whole(place, mode), everything(place) ^ whole(place, mode)
    assert check_place(place, mode) == found
    if mode == "marker" and found:
        return found
    options, overwrite = MODES[mode]
    policy = SavePolicy(durability="none", **options)
    save(state(3), place / "a", policy=policy, overwrite=overwrite or bool(found))
    assert check_place(place, mode) == 3
    assert everything(place) == whole(place, mode)
    return found
