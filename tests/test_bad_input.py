"""Bad input gets a clear error of ours that names the key, before a byte is written or changed."""

import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import functional_ckpt
from functional_ckpt import Box, LayoutPolicy, LoadPolicy, PerRank, SavePolicy, load, open_checkpoint, save, verify
from functional_ckpt.errors import CheckpointError, PolicyError
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.store.commit import manifest_digest
from functional_ckpt.testing.simulate import run_ranks


def names(problems):
    return [(type(p).__name__, p.key) for p in problems]


@pytest.fixture
def refused(tmp_path, problems_of):
    """Save a state that must be refused with nothing left behind; return the problems."""

    def run(state, **options):
        problems = problems_of(save, state, tmp_path / "refused" / "a", **options)
        assert not (tmp_path / "refused").exists()
        return problems

    return run


# Worlds that do not fit together: every rank raises the same


GRID = np.arange(24.0).reshape(6, 4)
WHOLE = Box((0, 0), (6, 4))
TOP, BOTTOM = Box((0, 0), (3, 4)), Box((3, 0), (6, 4))
WORLDS = {
    # name: (replicas, pieces per rank as (box, replica id) or (box, replica id, other array)), class, rank, offset
    "gap": ("elect", [[(TOP, 0)], [(Box((4, 0), (6, 4)), 0)]], "GapError", None, (3, 0)),
    "overlap": ("elect", [[(TOP, 0)], [(Box((2, 0), (6, 4)), 0)]], "OverlapError", (0, 1), (2, 0)),
    "overlap on one rank": ("elect", [[], [(WHOLE, 0)], [(Box((0, 0), (1, 1)), 0)]], "OverlapError", (1, 2), (0, 0)),
    "two mains": ("declared", [[(TOP, 0)], [(BOTTOM, 0)], [(TOP, 0)]], "ReplicaError", (0, 2), (0, 0)),
    "no main": ("declared", [[(TOP, 0)], [(BOTTOM, 1)], [(BOTTOM, 2)]], "ReplicaError", (1, 2), (3, 0)),
    "dtype": ("elect", [[(TOP, 0)], [(BOTTOM, 0, GRID.astype("f4"))]], "DTypeError", (0, 1), None),
    "shape": ("elect", [[(TOP, 0)], [(BOTTOM, 0, np.zeros((7, 4)))]], "ShapeError", (0, 1), None),
    "rank": ("elect", [[(TOP, 0)], [(Box((0,), (6,)), 0, np.zeros(6))]], "ShapeError", (0, 1), None),
}  # fmt: skip


@pytest.mark.parametrize("name", WORLDS)
def test_worlds_that_do_not_fit_together(name, tmp_path, piece, problems_of):
    replicas, held, error, rank, offset = WORLDS[name]
    policy = SavePolicy(replicas=replicas, durability="none")

    def saving(gather):
        state = {"ok": np.ones(2) if replicas == "elect" else piece(np.ones(2), Box((0,), (2,)), gather.rank)}
        for part in held[gather.rank]:
            state["w"] = piece(part[2] if len(part) > 2 else GRID, part[0], part[1])
        return problems_of(save, state, tmp_path / "a", policy=policy, process_group=gather)

    for problems in run_ranks(len(held), saving):
        assert names(problems) == [(error, "w")]
        assert problems[0].rank == rank
        if offset is not None:
            assert problems[0].offset == offset
    assert list(tmp_path.iterdir()) == []


def test_all_problems_of_all_arrays_at_once(tmp_path, piece, problems_of):
    def saving(gather):
        half = (TOP, Box((2, 0), (5, 4)))[gather.rank]
        state = {key: piece(GRID, half) for key in ("one", "two")}
        return problems_of(save, state, tmp_path / "a", process_group=gather)

    for problems in run_ranks(2, saving):
        assert sorted(names(problems)) == sorted((e, k) for e in ("OverlapError", "GapError") for k in ("one", "two"))
    assert list(tmp_path.iterdir()) == []


def test_a_problem_of_one_rank_names_that_rank(tmp_path, problems_of):
    def saving(gather):
        state = {"w": object() if gather.rank == 1 else 3}
        return problems_of(save, state, tmp_path / "a", process_group=gather)

    for problems in run_ranks(3, saving):
        assert names(problems) == [("UnsupportedLeafError", "w")]
        assert problems[0].rank == 1
    assert list(tmp_path.iterdir()) == []


def test_one_key_with_two_paths_on_two_ranks(tmp_path, problems_of):
    states = [{"a": {"b": np.ones(1)}}, {"a.b": np.ones(1)}]
    for problems in run_ranks(2, lambda g: problems_of(save, states[g.rank], tmp_path / "a", process_group=g)):
        assert names(problems) == [("DuplicateKeyError", "a.b")]
    assert list(tmp_path.iterdir()) == []


def test_an_array_on_one_rank_and_a_value_on_another(tmp_path, problems_of):
    states = [{"a": np.ones(1)}, {"a": 1.0}]
    for problems in run_ranks(2, lambda g: problems_of(save, states[g.rank], tmp_path / "a", process_group=g)):
        assert names(problems) == [("DuplicateKeyError", "a")]
    assert list(tmp_path.iterdir()) == []


# Leaves and keys that cannot be saved


LEAVES = {
    "object array": (np.array([1, None]), "DTypeError"),
    "text array": (np.array(["a", "bc"]), "DTypeError"),
    "bytes array": (np.array([b"a"]), "DTypeError"),
    "dates": (np.array(["2020-01-01"], "M8[D]"), "DTypeError"),
    "a date": (np.datetime64("2020-01-01"), "DTypeError"),
    "durations": (np.array([1], "m8[s]"), "DTypeError"),
    "records": (np.zeros(2, [("x", "f4")]), "DTypeError"),
    "long double": (np.zeros(2, np.longdouble), "DTypeError"),
    "numpy text": (np.str_("x"), "DTypeError"),
    "masked": (np.ma.masked_array([1, 2], [0, 1]), "UnsupportedLeafError"),
    "matrix": (np.array([[1]]).view(np.matrix) if hasattr(np, "matrix") else None, "UnsupportedLeafError"),
    "a spec": (ArraySpec("w", (2,), "int8"), "UnsupportedLeafError"),
    "a function": (len, "UnsupportedLeafError"),
    "a class": (dict, "UnsupportedLeafError"),
    "a tuple with an array": ((1, np.ones(2)), "UnsupportedLeafError"),
    "nested PerRank": (PerRank({"x": PerRank(1)}), "UnsupportedLeafError"),
}


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_leaves_without_a_representation(name, refused):
    leaf, error = LEAVES[name]
    key = "a.bad.rank0.x" if name == "nested PerRank" else "a.bad"
    found = names(refused({"a": {"bad": leaf, "ok": 1}}))
    assert found in ([(error, key)], [(error, "a.bad.x")])


def test_rank_over_32(refused):
    class Wide:  # numpy itself allows up to 64
        pass

    array = np.zeros((1,) * 33)
    (problem,) = refused({"w": array})
    assert names([problem]) == [("ShapeError", "w")]
    assert problem.found == 33
    torch = pytest.importorskip("torch")
    assert names(refused({"w": torch.zeros((1,) * 33)})) == [("ShapeError", "w")]


def test_tensors_without_a_representation(refused):
    torch = pytest.importorskip("torch")
    with pytest.warns(UserWarning) if sys.version_info < (3, 0) else _quiet():
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        state = {
            "meta": torch.empty(3, device="meta"),
            "sparse": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
            "quantized": quantized,
            "complex32": torch.zeros(3, dtype=torch.complex32),
            "float4": torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "fine": torch.ones(2),
        }
    dtype, kind = "DTypeError", "UnsupportedLeafError"
    assert dict(map(reversed, names(refused(state)))) == {
        "meta": kind, "sparse": kind, "csr": kind, "quantized": kind, "complex32": dtype, "float4": dtype, "nested": kind,
    }  # fmt: skip


def _quiet():
    import warnings

    catcher = warnings.catch_warnings()
    warnings.simplefilter("ignore")
    return catcher


KEYS = {
    "joined twice": ({"a.b": 1, "a": {"b": 2}}, "DuplicateKeyError", "a.b"),
    "int and text": ({"s": {0: np.ones(1), "0": np.ones(2)}}, "DuplicateKeyError", "s.0"),
    "list and dict": ({"a": [1], "a.0": 2}, "DuplicateKeyError", "a.0"),
    "per rank": ({"p": PerRank(1), "p.rank0": 2}, "DuplicateKeyError", "p.rank0"),
    "tuple key": ({"a": {(1, 2): 3}}, "SpecError", "a.(1, 2)"),
    "bytes key": ({b"x": 3}, "SpecError", "b'x'"),
    "nan key": ({"a": {float("nan"): 3}}, "SpecError", "a.nan"),
    "infinite key": ({"a": {float("inf"): np.ones(1)}}, "SpecError", "a.inf"),
    "surrogate of an array": ({"\ud800": np.ones(1)}, "SpecError", "'\\ud800'"),
    "surrogate of a value": ({"\ud800": 1}, "SpecError", "'\\ud800'"),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys(name, refused):
    state, error, key = KEYS[name]
    assert names(refused(state)) == [(error, key)]


def test_node_names_that_collide(refused, monkeypatch):
    """No two keys are known to: the escape is injective. The check behind it is still there."""
    monkeypatch.setattr("functional_ckpt.saving.node_name", lambda key: "Same" if key == "a" else "same")
    assert names(refused({"a": np.ones(1), "b": np.ones(1)})) == [("DuplicateKeyError", "b")]


def test_a_container_that_contains_itself(refused):
    loop = {}
    loop["x"] = [loop]
    assert names(refused(loop)) == [("SpecError", "x.0")]


def test_problems_of_all_leaves_at_once(refused):
    found = refused({"a": object(), "b": np.array(["x"]), "c": 1, "d": {"e": {1, (2, object())}}}, attributes={"x": object()})
    assert [p.key for p in found] == ["a", "b", "d.e", "attributes"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: SavePolicy(commit="never"), lambda: SavePolicy(replicas="all"), lambda: SavePolicy(object_codec="pickle"),
        lambda: SavePolicy(budget_nbytes=0), lambda: SavePolicy(timeout_s=-1), lambda: SavePolicy(replicated="no"),
        lambda: LoadPolicy(cast="yes"), lambda: LoadPolicy(strict="maybe"), lambda: LoadPolicy(verify="some"),
        lambda: LoadPolicy(per_rank="last"), lambda: LayoutPolicy(target_chunk_nbytes=0), lambda: LayoutPolicy(extended_dtypes="no"),
        *(lambda c=c: LayoutPolicy(codecs=(("", (c,)),))
          for c in ("lzma", "zstd:x", "zstd:99", "gzip:10", "gzip:-1", "blosc:10", "crc32c:1", "zstd:--5", "zstd:²", "")),
    ],
)  # fmt: skip
def test_policies(make):
    with pytest.raises(PolicyError):
        make()


# Targets that cannot be written


def test_a_path_that_is_taken(tmp_path, fast, problems_of, tree_bytes):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/notes").write_text("mine")
    save({"w": np.ones(2)}, tmp_path / "ckpt", policy=fast)
    (tmp_path / "zarr").mkdir()
    (tmp_path / "zarr/zarr.json").write_text('{"zarr_format":3,"node_type":"group"}')
    (tmp_path / "zarr/manifest.json").write_text('{"mine": true}')
    before = tree_bytes(tmp_path)
    for name in ("file", "dir", "ckpt", "zarr", "file/below"):
        for overwrite in (False, True):
            if (name, overwrite) == ("ckpt", True):
                continue
            (problem,) = problems_of(save, {"w": np.ones(2)}, tmp_path / name, policy=fast, overwrite=overwrite)
            assert isinstance(problem, functional_ckpt.errors.StorageError)
            assert tree_bytes(tmp_path) == before, name


def test_overwrite_keeps_what_others_put_into_the_directory(tmp_path, fast, problems_of, tree_bytes):
    save({"w": np.ones(2)}, tmp_path / "a", policy=SavePolicy(commit="marker", durability="none"))
    (tmp_path / "a/common.pt").write_text("Megatron's")
    before = tree_bytes(tmp_path)
    (problem,) = problems_of(save, {"w": np.zeros(2)}, tmp_path / "a", policy=fast, overwrite=True)
    assert "common.pt" in str(problem)
    assert tree_bytes(tmp_path) == before


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_a_target_that_cannot_be_created(code, tmp_path, fast, problems_of, monkeypatch):
    def refuse(path, *_, **__):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    (problem,) = problems_of(save, {"w": np.ones(2)}, tmp_path / "a", policy=fast)
    monkeypatch.undo()
    assert type(problem).__name__ == "StorageError"
    assert os.strerror(code) in str(problem)
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_directory(tmp_path, problems_of):
    parent = "/proc" if os.geteuid() == 0 else str(tmp_path)  # root may write anywhere else
    if parent != "/proc":
        tmp_path.chmod(0o555)
    (problem,) = problems_of(save, {"w": np.ones(2)}, f"{parent}/a")
    assert type(problem).__name__ == "StorageError"


@pytest.mark.parametrize("commit", ["rename", "marker"])
@pytest.mark.parametrize("at", range(6))
def test_a_disk_that_fills_up(commit, at, tmp_path, problems_of, monkeypatch):
    """The n-th write fails: that of the claim, of metadata, of a chunk half-way, of the manifest."""
    count = iter(range(1000))
    real = os.write

    def write(file, data):
        if next(count) >= at:
            real(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    policy = SavePolicy(commit=commit, durability="none")
    (problem,) = problems_of(save, {"w": np.ones(50), "v": np.ones(3)}, tmp_path / "a", policy=policy)
    monkeypatch.undo()
    assert type(problem).__name__ == "StorageError"
    assert "No space left" in str(problem)
    assert [p for p in tmp_path.rglob("*") if p != tmp_path / "a"] == []
    save({"w": np.ones(50)}, tmp_path / "a", policy=policy)
    assert verify(tmp_path / "a").ok


LIMITED = """
import resource, sys, numpy as np, functional_ckpt
from functional_ckpt import LayoutPolicy, SavePolicy
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
state = {"small": np.ones(10), "large": np.random.default_rng(0).normal(size=20_000)}
layout = LayoutPolicy(codecs=(("", tuple(sys.argv[2:])),))
try:
    functional_ckpt.save(state, sys.argv[1], policy=SavePolicy(layout=layout))
except functional_ckpt.errors.StorageError as error:
    print(error)
"""


@pytest.mark.parametrize("codecs", [(), ("zstd",)], ids=["plain", "zstd"])
def test_a_file_larger_than_the_system_allows(codecs, tmp_path):
    """A real refusal by the system, of our own writes and of TensorStore's."""
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "a"), *codecs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "large" in done.stdout
    assert list(tmp_path.iterdir()) == []


# Checkpoints that cannot be loaded


@pytest.fixture
def saved(tmp_path, fast):
    """The path of a small checkpoint; `w` has two chunks, `z` a codec, `p` an extended data type."""
    layout = LayoutPolicy(target_chunk_nbytes=256, min_chunk_nbytes=0, codecs=(("z", ("zstd",)),))
    state = {"w": np.arange(64.0).reshape(8, 8), "z": np.arange(8), "step": 3}
    save(state, tmp_path / "a", policy=SavePolicy(layout=layout, durability="none"))
    return tmp_path / "a"


@pytest.fixture
def like():
    """Targets full of sevens, which a refused load leaves alone."""
    return {"w": np.full((8, 8), 7.0), "z": np.full(8, 7), "step": 0}


def test_several_keys_shapes_and_dtypes_at_once(saved, problems_of):
    like = {"w": np.full((8, 9), 7.0), "z": np.full(8, 7.0), "zz": np.ones(1), "sted": 1, "step": np.ones(1)}
    problems = problems_of(load, like, saved)
    assert names(problems) == [("KeyMismatchError", "zz"), ("KeyMismatchError", "sted"), ("SpecError", "step")]
    assert "Did you mean 'step'?" in str(problems[1])
    for key in ("zz", "sted", "step"):
        del like[key]
    problems = problems_of(load, {**like, "step": 0}, saved)
    assert names(problems) == [("ShapeError", "w"), ("CastError", "z")]
    assert (problems[0].expected, problems[0].found) == ((8, 9), (8, 8))
    assert (problems[1].expected, problems[1].found) == ("float64", "int64")
    assert (like["w"] == 7).all()


def test_unexpected_keys(saved, problems_of):
    assert names(problems_of(load, {"step": 0}, saved)) == [("KeyMismatchError", "w"), ("KeyMismatchError", "z")]


def test_an_array_wanted_as_a_value_and_back(saved, like, problems_of):
    assert names(problems_of(load, {**like, "w": 3}, saved)) == [("SpecError", "w")]
    assert names(problems_of(load, {**like, "step": np.ones(())}, saved)) == [("SpecError", "step")]


def test_another_number_of_dimensions_even_with_permission(saved, like, problems_of):
    policy = LoadPolicy(allow_shape_mismatch=True, cast="any")
    assert names(problems_of(load, {**like, "w": np.ones(64)}, saved, policy=policy)) == [("ShapeError", "w")]


def test_read_only_targets(saved, like, problems_of):
    like["w"].flags.writeable = False
    assert names(problems_of(load, like, saved)) == [("SpecError", "w")]


def edit(path, change):
    data = bytearray(path.read_bytes())
    data = change(data)
    path.unlink()
    if data is not None:
        path.write_bytes(data)


def flip(data):
    data[len(data) // 2] ^= 4
    return data


DAMAGE = {"missing": lambda data: None, "flipped": flip, "truncated": lambda data: data[:-1], "emptied": lambda data: b"",
          "longer": lambda data: data + b"\0"}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("chunk", ["w/c.0.0", "w/c.1.0", "z/c.0"])
def test_damaged_chunks(damage, chunk, saved, like, problems_of):
    if (damage, chunk) == ("longer", "z/c.0"):
        pytest.skip("bytes after a zstd frame are not part of the data")
    edit(saved / chunk, DAMAGE[damage])
    key, _, name = chunk.partition("/")
    (problem,) = problems_of(load, like, saved)
    assert names([problem]) == [("CorruptionError", key)]
    assert name in str(problem)
    if damage != "flipped":
        assert (like["w"] == 7).all() or chunk == "z/c.0"
    report = verify(saved)
    assert [p.key for p in report.problems] == [key]
    assert name in str(report.problems[0])
    (problem,) = problems_of(lambda: open_checkpoint(saved)[key][...])
    assert problem.key == key


def test_damaged_metadata_of_an_array(saved, like):
    edit(saved / "w/zarr.json", lambda data: data.replace(b"float64", b"float32"))
    (problem,) = verify(saved).problems
    assert names([problem]) == [("CorruptionError", "w")]
    edit(saved / "w/zarr.json", lambda data: None)
    assert "missing" in str(verify(saved).problems[0])
    load(like, saved)  # the manifest has all that loading needs
    assert like["w"][7, 7] == 63


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_manifest(damage, saved, like, problems_of):
    edit(saved / "manifest.json", DAMAGE[damage])
    for function in (lambda: load(like, saved), lambda: open_checkpoint(saved), lambda: verify(saved)):
        (problem,) = problems_of(function)
        assert type(problem).__name__ == "CorruptionError"
        assert "manifest.json" in problem.key


def rewrite_manifest(path, change):
    document = json.loads((path / "manifest.json").read_bytes())
    change(document)
    text = json.dumps(document).encode()
    (path / "manifest.json").write_bytes(text)
    root = json.loads((path / "zarr.json").read_bytes())
    root["attributes"]["functional_ckpt"]["manifest"] = manifest_digest(text)
    root["attributes"]["functional_ckpt"]["version"] = document["version"]
    (path / "zarr.json").write_text(json.dumps(root))


def test_newer_versions(saved, like, problems_of, same):
    rewrite_manifest(saved, lambda document: document.update(version=[1, 99], news=["?"]))
    load(like, saved)
    rewrite_manifest(saved, lambda document: document.update(version=[2, 0]))
    (problem,) = problems_of(load, like, saved)
    assert type(problem).__name__ == "FormatVersionError"
    assert "2.0" in str(problem)
    # A newer major version may keep its digest elsewhere; the root still says which version it is.
    root = json.loads((saved / "zarr.json").read_bytes())
    del root["attributes"]["functional_ckpt"]["manifest"]
    (saved / "zarr.json").write_text(json.dumps(root))
    (problem,) = problems_of(load, like, saved)
    assert type(problem).__name__ == "FormatVersionError"


def test_directories_without_a_checkpoint(saved, like, tmp_path, problems_of):
    (saved / "zarr.json").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/zarr.json").write_text('{"zarr_format":3,"node_type":"group","attributes":{"a":1}}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/zarr.json").write_text('{"zarr_for')
    (tmp_path / "file").write_text("x")
    for name in ("a", "empty", "foreign", "broken", "file", "nothing"):
        for function in (lambda p: load(like, p), open_checkpoint, verify, functional_ckpt.read_manifest):
            (problem,) = problems_of(function, tmp_path / name)
            assert type(problem).__name__ == "NotACheckpointError", name
            assert name in problem.key
    assert "did not finish" in str(problems_of(load, like, saved)[0])


def test_an_object_whose_bytes_changed(tmp_path, problems_of):
    pytest.importorskip("torch")
    save({"o": {1, (2,)}, "x": slice(1)}, tmp_path / "a", policy=SavePolicy(object_codec="torch", durability="none"))
    entry = open_checkpoint(tmp_path / "a").manifest.by_key["x"]
    assert entry.codec == "torch"
    chunk = tmp_path / "a/x/c.0"
    edit(chunk, flip)
    like = {"o": None, "x": None}
    for policy in (LoadPolicy(), LoadPolicy(safe_globals="trust")):
        assert names(problems_of(load, like, tmp_path / "a", policy=policy)) == [("CorruptionError", "x")]
    chunk.unlink()
    assert names(problems_of(load, like, tmp_path / "a")) == [("CorruptionError", "x")]


def test_url_schemes_without_a_store():
    with pytest.raises(CheckpointError, match="s3://"):
        save({}, "s3://bucket/a")
    with pytest.raises(CheckpointError, match="s3://"):
        load({}, "s3://bucket/a")
