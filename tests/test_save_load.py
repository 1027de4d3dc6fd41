"""`save`, `async_save` and `load` under every option of their policies, by one rank and by simulated ones."""

import json
import re
import threading
import warnings

import attrs
import numpy as np
import pytest

import functional_ckpt
from functional_ckpt import (
    Box,
    LayoutPolicy,
    LoadPolicy,
    PerRank,
    SavePolicy,
    Strict,
    async_save,
    load,
    open_checkpoint,
    save,
)
from functional_ckpt.errors import CheckpointWarning, NotImplementedYet, SaveCancelledError
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.sharding import ShardSpec


@pytest.fixture
def saved(tmp_path, fast, plain_tree):
    """The path of a saved `plain_tree(3)`."""
    save(plain_tree(3), tmp_path / "a", policy=fast)
    return tmp_path / "a"


def zeros_like(tree):
    return functional_ckpt.spec.tree.map_leaves(
        lambda _, x: np.zeros_like(x) if isinstance(x, np.ndarray) else None, tree
    )


# Saving


@pytest.mark.parametrize(
    "codecs", [("zstd",), ("zstd:-3",), ("gzip:1",), ("blosc",), ("crc32c",), ("zstd:3", "crc32c")], ids="+".join
)
def test_codecs_by_prefix(codecs, tmp_path, same):
    state = {"opt": {"m": np.tile(np.arange(50.0), (40, 1))}, "opt2": np.ones(8), "model": np.arange(9)}
    layout = LayoutPolicy(codecs=(("opt", ()), ("opt.", codecs)), target_chunk_nbytes=3000, min_chunk_nbytes=0)
    manifest = save(state, tmp_path / "a", policy=SavePolicy(layout=layout, durability="none"))
    assert {key: entry.layout.codecs for key, entry in manifest.by_key.items()} == {
        "opt.m": codecs,
        "opt2": (),
        "model": (),
    }
    assert manifest.by_key["opt.m"].grid.size > 1
    same(load(zeros_like(state), tmp_path / "a"), state)
    names = [c["name"] for c in json.loads((tmp_path / "a/opt.m/zarr.json").read_text())["codecs"]]
    assert names == ["bytes", *(c.partition(":")[0] for c in codecs)]


def test_extended_dtypes_as_bits(tmp_path, fast):
    import ml_dtypes
    import zarr

    state = {"w": np.arange(6).astype(ml_dtypes.bfloat16)}
    policy = SavePolicy(layout=LayoutPolicy(extended_dtypes="bits"), durability="none")
    save(state, tmp_path / "a", policy=policy)
    plain = zarr.open_group(tmp_path / "a", mode="r")["w"]
    np.testing.assert_array_equal(plain[:], state["w"].view("u2"))
    assert open_checkpoint(tmp_path / "a")["w"].dtype == "bfloat16"


@pytest.mark.parametrize("durability", ["auto", "fsync", "syncfs", "none"])
@pytest.mark.parametrize("commit", ["rename", "marker", "auto"])
def test_durability_and_commit_modes(durability, commit, tmp_path, plain_tree, same, monkeypatch):
    import os

    from functional_ckpt.store import files

    synced = []
    monkeypatch.setattr(os, "fsync", lambda file, real=os.fsync: (synced.append(file), real(file))[1])
    monkeypatch.setattr(
        files, "sync_file_system", lambda path, real=files.sync_file_system: (synced.append(path), real(path))[1]
    )
    save(plain_tree(1), tmp_path / "a", policy=SavePolicy(durability=durability, commit=commit))
    same(load(zeros_like(plain_tree(1)), tmp_path / "a"), plain_tree(1))
    assert bool(synced) == (durability != "none")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert not [p for p in (tmp_path / "a").iterdir() if p.name.startswith(".")]


def test_saving_twice_gives_the_same_bytes(tmp_path, fast, plain_tree, tree_bytes):
    for name in "ab":
        save(plain_tree(2), tmp_path / name, policy=fast, attributes={"run": 1})
    one, other = (tree_bytes(tmp_path / name) for name in "ab")
    assert one.pop("provenance.json") != other.pop("provenance.json")
    assert one == other


def test_attributes(tmp_path, fast, problems_of):
    import zarr

    attributes = {"run": "ü", "nested": {"a": [1, 2.5, None]}}
    save({"w": np.ones(1)}, tmp_path / "a", policy=fast, attributes=attributes)
    assert dict(open_checkpoint(tmp_path / "a").attributes) == attributes
    seen = dict(zarr.open_group(tmp_path / "a", mode="r").attrs)
    assert seen.pop("functional_ckpt")["format"] == "functional_ckpt"
    assert seen == attributes
    for bad in ({"functional_ckpt": 1}, {"x": float("nan")}, {"x": object()}, {(1, 2): 3}):
        (problem,) = problems_of(save, {}, tmp_path / "b", attributes=bad)
        assert problem.key in ("functional_ckpt", "attributes")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("consolidate", [True, False])
def test_consolidated_metadata(consolidate, tmp_path):
    save(
        {"w": np.ones(2), "W": np.ones(3)},
        tmp_path / "a",
        policy=SavePolicy(consolidate=consolidate, durability="none"),
    )
    root = json.loads((tmp_path / "a/zarr.json").read_text())
    assert ("consolidated_metadata" in root) == consolidate
    if consolidate:
        for name, member in root["consolidated_metadata"]["metadata"].items():
            assert json.loads((tmp_path / "a" / name / "zarr.json").read_text()) == member


def test_progress_counts_to_the_end(tmp_path, fast):
    seen = []
    state = {str(n): np.ones(100) for n in range(20)}
    save(state, tmp_path / "a", policy=fast, progress=seen.append)
    assert [p.phase for p in seen if p.phase != "write"] == ["publish", "done"]
    assert [p.done_nbytes for p in seen] == sorted(p.done_nbytes for p in seen)
    assert (seen[-1].done_nbytes, seen[-1].fraction) == (20 * 800, 1.0)
    seen.clear()
    load(zeros_like(state), tmp_path / "a", progress=seen.append)
    assert (seen[-1].phase, seen[-1].done_nbytes, seen[-1].fraction) == ("done", 20 * 800, 1.0)


def test_a_tiny_budget_still_works(tmp_path, same):
    state = {"w": np.arange(10_000), "z": np.arange(5.0)}
    layout = LayoutPolicy(target_chunk_nbytes=1000, min_chunk_nbytes=0, codecs=(("w", ("zstd",)),))
    save(state, tmp_path / "a", policy=SavePolicy(budget_nbytes=1, layout=layout, durability="none"))
    same(load(zeros_like(state), tmp_path / "a", policy=LoadPolicy(budget_nbytes=1)), state)


def test_announced_options_say_so():
    with pytest.raises(NotImplementedYet):
        save({}, "memory://x", base="memory://y")
    with pytest.raises(NotImplementedYet):
        functional_ckpt.diff("a", "b")


# Saving in the background


class Blocked:
    """A progress callback that stops the first write until it is let go."""

    def __init__(self):
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, progress):
        if progress.phase == "write":
            self.reached.set()
            assert self.go.wait(20)


@pytest.fixture
def blocked():
    """A `Blocked` that is let go at the end."""
    gate = Blocked()
    yield gate
    gate.go.set()


def test_changes_after_async_save_returns_do_not_reach_the_checkpoint(tmp_path, fast, blocked, same):
    torch = pytest.importorskip("torch")
    state = {
        "a": np.arange(1000.0),
        "t": torch.ones(50, 4).t(),
        "p": PerRank(np.ones(3)),
        "v": {"x": 1},
        "z": torch.tensor(2.0),
    }
    pending = async_save(state, tmp_path / "a", policy=fast, progress=blocked)
    assert blocked.reached.wait(20)
    assert not pending.done()
    with pytest.raises(TimeoutError):
        pending.result(0.01)
    state["a"][:] = -1
    state["t"].zero_()
    state["p"].value[:] = -1
    state["v"]["x"] = 2
    state["z"].zero_()
    assert not (tmp_path / "a").exists()
    blocked.go.set()
    pending.result(20)
    assert pending.done()
    assert pending.progress().fraction == 1.0
    loaded = open_checkpoint(tmp_path / "a").state("torch")
    expected = {"a": torch.arange(1000.0).double(), "t": torch.ones(4, 50), "v": {"x": 1}, "z": torch.tensor(2.0)}
    same({k: loaded[k] for k in expected}, expected)
    same(loaded["p"], {0: torch.ones(3).double()})


def test_cancel_publishes_nothing(tmp_path, fast, blocked):
    pending = async_save({"a": np.arange(100.0)}, tmp_path / "a", policy=fast, progress=blocked)
    assert blocked.reached.wait(20)
    pending.cancel()
    blocked.go.set()
    with pytest.raises(SaveCancelledError):
        pending.result(20)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_in_the_background_surfaces_in_result(tmp_path, fast, monkeypatch):
    from functional_ckpt.store.files import FileStore

    def full(self, name, *_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileStore, "create", full)
    pending = async_save({"a": np.arange(100.0)}, tmp_path / "a", policy=fast)
    with pytest.raises(functional_ckpt.errors.StorageError, match="No space"):
        pending.result(20)
    assert pending.done()
    assert list(tmp_path.iterdir()) == []


def test_two_saves_in_flight(tmp_path, fast, blocked, same):
    state, queued = {"a": np.zeros(100)}, attrs.evolve(fast, in_flight="queue")
    first = async_save(state, tmp_path / "1", policy=queued, progress=blocked)
    state["a"] += 1
    second = async_save(state, tmp_path / "2", policy=queued)
    assert blocked.reached.wait(20)
    assert not second.done()
    blocked.go.set()
    assert (first.result(20).nbytes, second.result(20).nbytes) == (800, 800)
    for step in (1, 2):
        same(open_checkpoint(tmp_path / str(step)).state(), {"a": np.full(100, step - 1.0)})


def test_a_dropped_pending_save_commits(tmp_path, fast):
    async_save({"a": np.zeros(100)}, tmp_path / "1", policy=fast)
    async_save({}, tmp_path / "2", policy=fast).result(20)  # runs after the first
    assert functional_ckpt.verify(tmp_path / "1").ok


def test_a_callback_that_raises_while_staging_leaves_nothing(tmp_path, fast):
    def fail(progress):
        raise KeyError(progress.phase)

    with pytest.raises(KeyError, match="stage"):
        async_save({"a": np.zeros(100)}, tmp_path / "1", policy=fast, progress=fail)
    assert list(tmp_path.iterdir()) == []


# Loading


def test_load_returns_the_saved_tree(saved, plain_tree, same):
    like = zeros_like(plain_tree(0))
    loaded = load(like, saved)
    same(loaded, plain_tree(3))
    assert loaded["model"]["w"] is like["model"]["w"]


@pytest.mark.parametrize("verify", ["covered", "full", "none"])
def test_verify_modes_see_a_flipped_bit_where_they_promise(verify, tmp_path, same, problems_of):
    state = {"w": np.arange(8.0 * 4096).reshape(8, 4096)}
    layout = LayoutPolicy(target_chunk_nbytes=2**17, min_chunk_nbytes=0)  # two chunks of four rows
    save(state, tmp_path / "a", policy=SavePolicy(layout=layout, durability="none"))
    chunk = tmp_path / "a/w/c.1.0"
    data = bytearray(chunk.read_bytes())
    data[-1] ^= 1  # row 7
    chunk.write_bytes(data)
    policy = LoadPolicy(verify=verify)
    spec = ArraySpec("w", (8, 4096), "float64")
    part = {"w": ShardSpec(spec, Box((2, 0), (6, 4096)))}  # touches both chunks, covers neither
    if verify == "full":
        (problem,) = problems_of(load, part, tmp_path / "a", policy=policy)
        assert (problem.key, problem.offset) == ("w", (4, 0))
    else:
        np.testing.assert_array_equal(load(part, tmp_path / "a", policy=policy)["w"], state["w"][2:6])
    if verify == "none":
        assert load(zeros_like(state), tmp_path / "a", policy=policy)["w"][7, 4095] != 8 * 4096 - 1.0
    else:
        (problem,) = problems_of(load, zeros_like(state), tmp_path / "a", policy=policy)
        assert (type(problem).__name__, problem.key, problem.offset) == ("CorruptionError", "w", (4, 0))
        assert "c.1.0" in str(problem)


def test_small_chunks_are_read_whole_and_checked(tmp_path, problems_of):
    save({"w": np.arange(64.0).reshape(8, 8)}, tmp_path / "a", policy=SavePolicy(durability="none"))
    chunk = tmp_path / "a/w/c.0.0"
    data = bytearray(chunk.read_bytes())
    data[-1] ^= 1
    chunk.write_bytes(data)
    part = {"w": ShardSpec(ArraySpec("w", (8, 8), "float64"), Box((0, 0), (1, 8)))}
    assert [type(p).__name__ for p in problems_of(load, part, tmp_path / "a")] == ["CorruptionError"]
    assert load(part, tmp_path / "a", policy=LoadPolicy(verify="none"))["w"][0, 7] == 7.0


def test_strict_modes(saved, plain_tree, problems_of):
    like = zeros_like(plain_tree(0))
    del like["lr"]
    like["model"]["new"] = np.full(2, 5.0)
    problems = problems_of(load, like, saved)
    assert [p.key for p in problems] == ["model.new", "lr.0", "lr.1", "lr.2"]
    unexpected = problems_of(load, like, saved, policy=LoadPolicy(strict=Strict(missing="ignore")))
    assert [p.key for p in unexpected] == ["lr.0", "lr.1", "lr.2"]
    with pytest.warns(CheckpointWarning) as caught:
        loaded = load(like, saved, policy=LoadPolicy(strict="report"))
    assert [re.findall(r"key '([^']*)'", str(w.message)) for w in caught] == [["model.new"], ["lr.0", "lr.1", "lr.2"]]
    assert loaded["model"]["new"].tolist() == [5.0, 5.0]
    assert loaded["step"] == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(like, saved, policy=LoadPolicy(strict="ignore"))["step"] == 3


def test_key_filter(saved, plain_tree):
    like = zeros_like(plain_tree(0))
    loaded = load(like, saved, policy=LoadPolicy(keys="model"))
    np.testing.assert_array_equal(loaded["model"]["w"], plain_tree(3)["model"]["w"])
    assert loaded["step"] is None
    chosen = load(zeros_like(plain_tree(0)), saved, policy=LoadPolicy(keys=lambda key: key in ("step", "lr.2")))
    assert (chosen["step"], chosen["lr"]) == (3, [None, None, (1, 2.5)])
    assert not chosen["model"]["w"].any()
    assert load({"model": {"b": np.zeros(3, int)}}, saved, policy=LoadPolicy(keys=["model.b"]))["model"]["b"].any()


def test_rename(saved, plain_tree, same):
    like = {"net": zeros_like(plain_tree(0))["model"], "step": 0, "lr": [0, 0, 0]}
    same(load(like, saved, policy=LoadPolicy(rename={"net": "model"}))["net"], plain_tree(3)["model"])
    like["net"]["w"][:] = 0
    by_function = LoadPolicy(rename=lambda key: key.replace("net", "model"))
    same(load(like, saved, policy=by_function)["net"], plain_tree(3)["model"])
    crossed = {"step": None, "other": None}
    policy = LoadPolicy(rename={"step": "lr.0", "other": "step"}, strict=Strict(unexpected="ignore"))
    assert load(crossed, saved, policy=policy) == {"step": pytest.approx(0.3), "other": 3}


@pytest.mark.parametrize(
    ("stored", "wanted", "rule"),
    [
        ("f4", "f8", "same_kind"), ("f8", "f4", "same_kind"), ("i4", "f4", "same_kind"), ("?", "i8", "same_kind"),
        ("u1", "i1", "same_kind"), ("f4", "c8", "same_kind"), ("i8", "u1", "any"), ("f4", "i4", "any"), ("f8", "?",
        "any"),
    ],
)  # fmt: skip
def test_casts(stored, wanted, rule, tmp_path, fast, problems_of):
    values = np.array([[0, 1, 2], [3, 100, 7]]).astype(stored)
    save({"w": values}, tmp_path / "a", policy=fast)
    target = {"w": np.zeros((2, 3), wanted)}
    refusing = ["error"] if rule == "same_kind" else ["error", "same_kind"]
    for cast in refusing:
        (problem,) = problems_of(load, target, tmp_path / "a", policy=LoadPolicy(cast=cast))
        assert (type(problem).__name__, problem.key) == ("CastError", "w")
        assert problem.expected == np.dtype(wanted).name
        assert problem.found == np.dtype(stored).name
        assert not target["w"].any()
    np.testing.assert_array_equal(
        load(target, tmp_path / "a", policy=LoadPolicy(cast=rule))["w"], values.astype(wanted)
    )


@pytest.mark.parametrize(("stored", "wanted"), [("c8", "f4"), ("f4", "i4")])
def test_lossy_casts_that_were_allowed_do_not_warn(stored, wanted, tmp_path, fast):
    values = np.array([1, np.nan], stored)
    save({"w": values}, tmp_path / "a", policy=fast)
    assert load({"w": np.zeros(2, wanted)}, tmp_path / "a", policy=LoadPolicy(cast="any"))["w"][0] == 1


def test_shape_mismatch_aligns_at_the_origin_and_fills_with_zeros(tmp_path, fast):
    source = np.arange(1.0, 13).reshape(3, 4)
    save({"w": source}, tmp_path / "a", policy=fast)
    policy = LoadPolicy(allow_shape_mismatch=True)
    larger = load({"w": np.full((5, 6), 9.0)}, tmp_path / "a", policy=policy)["w"]
    np.testing.assert_array_equal(larger, np.pad(source, ((0, 2), (0, 2))))
    mixed = load({"w": np.full((2, 5), 9.0)}, tmp_path / "a", policy=policy)["w"]
    np.testing.assert_array_equal(mixed, np.pad(source[:2], ((0, 0), (0, 1))))
