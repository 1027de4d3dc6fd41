"""A checkpoint that cannot be loaded as asked: a clear error of ours that names the key, and nothing is changed."""

import json

import ml_dtypes
import numpy as np
import pytest

import functional_ckpt
from functional_ckpt import LayoutPolicy, LoadPolicy, SavePolicy, load, open_checkpoint, save, verify
from functional_ckpt.errors import CheckpointError
from functional_ckpt.store.commit import manifest_digest


def names(problems):
    return [(type(p).__name__, p.key) for p in problems]


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
    problems = {p.key: p for p in problems_of(load, like, saved)}
    assert {key: type(p).__name__ for key, p in problems.items()} == {
        "zz": "KeyMismatchError", "sted": "KeyMismatchError", "step": "SpecError", "w": "ShapeError", "z": "CastError",
    }  # fmt: skip
    assert "Strict(missing='ignore')" in str(problems["sted"])  # `like` has 'step' already
    assert (problems["w"].expected, problems["w"].found) == ((8, 9), (8, 8))
    assert (problems["z"].expected, problems["z"].found) == ("float64", "int64")
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


DAMAGE = {"missing": lambda data: None, "flipped": flip, "truncated": lambda data: data[:-1],
"emptied": lambda data: b"",
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
        assert "manifest.json" in problem.path


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: b"{}",
                                    lambda data: data.replace(b"functional_ckpt", b"functional_cxpt")])  # fmt: skip
def test_a_damaged_root_is_no_missing_checkpoint(damage, saved, like, problems_of):
    """Who begins anew where there is no checkpoint must not do so here."""
    edit(saved / "zarr.json", damage)
    for function in (lambda p: load(like, p), open_checkpoint, verify, functional_ckpt.read_manifest):
        (problem,) = problems_of(function, saved)
        assert type(problem).__name__ == "CorruptionError"
        assert problem.path == str(saved / "zarr.json")
    (saved / "manifest.json").write_text("{}")  # of somebody else
    (problem,) = problems_of(load, like, saved)
    assert type(problem).__name__ == "NotACheckpointError"


def test_damaged_metadata_of_arrays_in_the_root(saved, like):
    """Zarr tools read it; loading does not, and is not slowed down by it."""
    edit(saved / "zarr.json", lambda data: data.replace(b'"shape":[8,8]', b'"shape":[8,8', 1))
    (problem,) = verify(saved).problems
    assert "root was changed" in str(problem)
    load(like, saved)
    assert like["w"][7, 7] == 63


def test_a_root_that_another_tool_wrote_or_that_looks_like_two(tmp_path, like):
    attributes = {"a": '"},"must_understand":false},', "z": {"x": {"y": {}, "must_understand": False}, "zz": 1}}
    for number, dtype in enumerate(("f8", ml_dtypes.bfloat16)):
        path = tmp_path / str(number)
        save({"w": np.ones(2, dtype)}, path, policy=SavePolicy(durability="none"), attributes=attributes)
        assert dict(open_checkpoint(path).attributes) == attributes
        root = json.loads((path / "zarr.json").read_bytes())
        # In front of the attributes, and compact as ours: members that begin and end like the metadata of our arrays.
        odd = {
            "consolidated_metadata": {"kind": "inline", "metadata": {"v": {"u": {}, "must_understand": False}, "x": 1}}
        }
        for text in (json.dumps(root, indent=1), json.dumps({**odd, **root}, separators=(",", ":"))):
            (path / "zarr.json").write_text(text)
            assert dict(open_checkpoint(path).attributes) == attributes


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
            assert name in problem.path
    assert "did not finish" in str(problems_of(load, like, saved)[0])


def test_an_object_whose_bytes_changed(tmp_path, problems_of):
    torch = pytest.importorskip("torch")
    state = {"o": {1, (2,)}, "x": (torch.ones(2), 1)}
    save(state, tmp_path / "a", policy=SavePolicy(object_codec="torch", durability="none"))
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
    with pytest.raises(CheckpointError, match="hdfs://"):
        save({}, "hdfs://host/a")
    with pytest.raises(CheckpointError, match="hdfs://"):
        load({}, "hdfs://host/a")
