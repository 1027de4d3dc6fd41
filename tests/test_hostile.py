"""Hostile checkpoints and directories: an error of ours, no abort, no hang, nothing of others deleted."""

import contextlib
import difflib
import enum
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from functional_ckpt import (
    LayoutPolicy,
    LoadPolicy,
    PerRank,
    SavePolicy,
    Strict,
    load,
    open_checkpoint,
    read_manifest,
    save,
    sweep,
    verify,
)
from functional_ckpt.cli import main
from functional_ckpt.errors import CheckpointError
from functional_ckpt.store.commit import manifest_digest

ID = "abcdefghijklmnop"
ZSTD = SavePolicy(layout=LayoutPolicy(codecs=(("", ("zstd",)),)), durability="none")
MARKER = SavePolicy(commit="marker", durability="none")


def rewrite(path, change):
    document = json.loads((path / "manifest.json").read_bytes())
    change(document)
    text = json.dumps(document).encode()
    (path / "manifest.json").write_bytes(text)
    root = json.loads((path / "zarr.json").read_bytes())
    root["attributes"]["functional_ckpt"]["manifest"] = manifest_digest(text)
    (path / "zarr.json").write_text(json.dumps(root))


def array(path, /, **fields):
    rewrite(path, lambda document: document["arrays"][0].update(fields))


@pytest.fixture
def saved(tmp_path):
    save({"w": np.arange(64).reshape(8, 8), "step": 3}, tmp_path / "a", policy=SavePolicy(durability="none"))
    return tmp_path / "a"


@pytest.fixture
def coded(tmp_path):
    save({"w": np.arange(64).reshape(8, 8), "step": 3}, tmp_path / "a", policy=ZSTD)
    return tmp_path / "a"


def outcome(code, *arguments, seconds=60):
    """Run code in a process of its own: it may abort or hang."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)


BEGIN = "import sys, numpy as np, functional_ckpt as f\nfrom functional_ckpt.cli import main\np = sys.argv[1]\n"
READS = """
for call in (lambda: main(["show", p]), lambda: f.verify(p), lambda: f.open_checkpoint(p)["w"][...],
             lambda: f.load({"w": np.zeros((8, 8), int), "step": 0}, p)):
    try: call()
    except f.errors.CheckpointError: pass
"""
WRITES = """
for call in (lambda: f.sweep(p), lambda: f.save({"z": 1}, p, policy=f.SavePolicy(commit="marker")),
             lambda: f.save({"z": 1}, p, overwrite=True)):
    try: call()
    except f.errors.CheckpointError: pass
"""


@pytest.mark.parametrize("fields", [
    {"chunk": [2**40, 8]}, {"chunk": [2**56, 8]}, {"chunk": [2**62, 8]}, {"chunk": [10**30, 8]},
    {"shape": [2**50, 8], "chunk": [2**50, 8]}, {"shape": [2**61, 8], "chunk": [2**61, 8]},
])  # fmt: skip
def test_chunks_larger_than_memory_do_not_abort_the_process(fields, coded):
    array(coded, **fields)
    done = outcome(BEGIN + READS, coded)
    assert done.returncode == 0, done.stderr


# As much memory as the imports take, and half a GiB: what is read whole must be a fraction of that.
LITTLE_MEMORY = """
import resource
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + 2**29,) * 2)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux to tell the memory of a process")
@pytest.mark.parametrize("name", ["zarr.json", "manifest.json", "provenance.json", "w/zarr.json", "w/c.0.0"])
def test_files_are_looked_at_before_they_are_read(name, coded):
    os.truncate(coded / name, 2**31)
    done = outcome(BEGIN + LITTLE_MEMORY + READS + WRITES, coded)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", ["zarr.json", "manifest.json"])
def test_a_file_that_is_too_large_is_named_with_its_size(name, saved):
    os.truncate(saved / name, 2**40)
    with pytest.raises(CheckpointError, match=rf"{name}.*{2**40} bytes"):
        open_checkpoint(saved)


def test_a_path_with_dots_and_codecs(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    save({"w": np.arange(3)}, "../a", policy=ZSTD)
    assert verify("../a").ok
    assert load({"w": np.zeros(3, int)}, "../a")["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["zarr.json", "manifest.json", "provenance.json", "w/zarr.json", "w/c.0.0"])
def test_pipes_in_place_of_files_do_not_hang(name, coded):
    (coded / name).unlink()
    os.mkfifo(coded / name)
    done = outcome(BEGIN + READS + WRITES, coded, seconds=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [f".{ID}.claim", f".{'e' * 16}.{ID}.claim"])
def test_pipes_in_place_of_claims_do_not_hang(name, tmp_path):
    os.mkfifo(tmp_path / name)
    done = outcome(BEGIN + WRITES, tmp_path, seconds=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("change", [
    lambda d: d["values"][0].update(value={"~float": "\x1b[2J"}),
    lambda d: d["values"][0].update(value={"~\x1b[2J": 1}),
    lambda d: d["arrays"][0].update(dtype="\x1b[2J"),
    lambda d: d["arrays"][0].update(codecs=["\x1b[2J"]),
])  # fmt: skip
def test_no_text_of_a_checkpoint_steers_the_terminal(change, saved, capsys):
    rewrite(saved, change)
    for arguments in (["ls", str(saved)], ["show", str(saved), "step"], ["verify", str(saved)]):
        main(arguments)
        assert "\x1b" not in "".join(capsys.readouterr())


def test_an_object_is_not_taken_for_an_array(tmp_path):
    pytest.importorskip("torch")
    save({"w": slice(1)}, tmp_path / "a", policy=SavePolicy(object_codec="torch", durability="none"))
    with pytest.raises(CheckpointError, match="'w'"):
        load({"w": np.zeros(3)}, tmp_path / "a", policy=LoadPolicy(safe_globals="trust"))


def test_overwrite_keeps_files_of_others_inside_an_array(saved):
    (saved / "w/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        save({"z": 1}, saved, overwrite=True)
    (saved / "w/notes.txt").unlink()
    (saved / f".{ID}.claim").mkdir()
    (saved / f".{ID}.claim/mine").write_text("mine")
    with pytest.raises(CheckpointError):
        save({"z": 1}, saved, overwrite=True)


def test_marker_saves_delete_nothing_that_no_claim_stands_for(saved, tmp_path):
    shutil.copytree(saved / "w", tmp_path / "b/w")
    (tmp_path / "b/manifest.json").touch()
    try:
        save({"z": np.zeros(2)}, tmp_path / "b", policy=MARKER)
    except CheckpointError:
        assert (tmp_path / "b/manifest.json").exists()  # refusing is fine too
    assert (tmp_path / "b/w/c.0.0").exists()


def test_sweep_passes_by_what_it_cannot_have_made(tmp_path):
    (tmp_path / "outside").mkdir()
    os.symlink(tmp_path / "outside", tmp_path / f".{'a' * 16}.{ID}.saving")
    (tmp_path / f".{'b' * 16}.{ID}.claim").mkdir()
    (tmp_path / f".{'c' * 16}.{ID}.claim").write_text("[" * 100_000)
    (tmp_path / f".{ID}.claim").mkdir()
    (tmp_path / f".{'e' * 16}.{ID}.saving").mkdir()
    sweep(tmp_path)
    assert (tmp_path / "outside").is_dir()
    assert not (tmp_path / f".{'e' * 16}.{ID}.saving").exists()


def test_a_claim_nested_too_deeply_is_a_leftover(tmp_path):
    (tmp_path / f".{ID}.claim").write_text("[" * 100_000)
    assert sweep(tmp_path) == (str(tmp_path / f".{ID}.claim"),)


def test_hints_do_not_cost_more_than_the_load(tmp_path, monkeypatch):
    """To compare a name with all others takes milliseconds: it is done for the few that are named."""
    compared, compare = [], difflib.get_close_matches
    monkeypatch.setattr(difflib, "get_close_matches", lambda *a, **k: compared.append(a) or compare(*a, **k))
    names = [(i, k) for i in range(150) for k in "qkvo"]
    save({f"model.layers.{i}.self_attn.{k}_proj.weight": 1 for i, k in names}, tmp_path / "a")
    like = {f"module.layers.{i}.attention.{k}.weight": 1 for i, k in names}
    load(like, tmp_path / "a", policy=LoadPolicy(strict=Strict(missing="ignore", unexpected="ignore")))
    assert len(compared) < 10


BAD = {  # what is wrong with it, and where it must show at the latest
    "digits": {"chunk": [10**4299, 10]},
    "too big": {"shape": [2**61, 8], "chunk": [2**61, 8]},
    "nothing of much": {"shape": [0, 2**61], "chunk": [1, 1], "digests": []},
    "deep path": {"path": ["a"] * 2000},
    "no object": {"codec": "torch", "shape": [0, 0], "digests": []},
    "unknown codec": {"codec": "pickle9"},
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_arrays_get_an_error_of_ours(bad, saved):
    array(saved, **BAD[bad])

    def read():
        verify(saved)
        open_checkpoint(saved)["w"][...]
        open_checkpoint(saved).state()

    with pytest.raises(CheckpointError):
        read()


@pytest.mark.parametrize("value", [{"~complex": [10**400, 0]}, {"~tuple": 5}, {"~dict": [[1]]}, "deep"])
def test_bad_values_get_an_error_of_ours(value, saved):
    if value == "deep":
        for _ in range(700):
            value = [value]
    rewrite(saved, lambda document: document["values"][0].update(value=value))
    for arguments in (["ls", str(saved)], ["show", str(saved), "step"], ["show", "--json", str(saved), "step"]):
        assert main(arguments) in (0, 1)
    # How deep is too deep differs between versions of Python.
    with contextlib.suppress(CheckpointError) if isinstance(value, list) else pytest.raises(CheckpointError):
        open_checkpoint(saved).tree()


# Ints are found by their remainder: it is one for all of these, and finding them takes the square of their number.
COLLIDING = [i * (2**61 - 1) for i in range(10_000)]
CODED = [{"~int": hex(i)} for i in COLLIDING]


@pytest.mark.parametrize("value", [
    {"~set": CODED}, {"~frozenset": CODED}, {"~dict": [[i, 0] for i in CODED]}, {"~counter": [[i, 1] for i in CODED]},
    {"~ordered": [[i, 1] for i in CODED]}, {"~set": [{"~tuple": [i]} for i in CODED]},
])  # fmt: skip
def test_values_whose_hashes_collide_are_refused(value, saved, problems_of):
    rewrite(saved, lambda document: document["values"][0].update(value=value))
    (problem,) = problems_of(lambda: open_checkpoint(saved).tree())
    assert (type(problem).__name__, problem.key) == ("CorruptionError", "step")
    assert "hash" in str(problem)


def test_paths_whose_hashes_collide_are_refused(saved, problems_of):
    entries = [{"key": f"k{i}", "value": 0, "path": ["a", [n]]} for i, n in enumerate(COLLIDING)]
    rewrite(saved, lambda document: document.update(values=sorted(entries, key=lambda entry: entry["key"])))
    (problem,) = problems_of(lambda: open_checkpoint(saved).tree())
    assert "hash" in str(problem)


def test_values_that_collide_a_little_are_values(saved):
    save({"v": set(COLLIDING[:500]), "d": {-1: 0, -2: 1, 2**61 - 2: 2}}, saved.parent / "b")
    assert open_checkpoint(saved.parent / "b").state() == {"v": set(COLLIDING[:500]), "d": {-1: 0, -2: 1, 2**61 - 2: 2}}


def test_two_leaves_of_one_dict_key(tmp_path):
    save({"a": 1, "b": 2}, tmp_path / "a", policy=SavePolicy(durability="none"))
    rewrite(tmp_path / "a", lambda d: (d["values"][0].update(path=["x"]), d["values"][1].update(path=[["x"]])))
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "a").tree()


@pytest.mark.parametrize("size", [[2**61] * 32])
def test_the_command_line_prints_any_size(size, saved):
    array(saved, shape=size, chunk=size)
    for arguments in (["ls", str(saved)], ["show", str(saved)], ["verify", str(saved)]):
        assert main(arguments) in (0, 1)


@pytest.mark.parametrize("text", [
    '{"ranks":[{"nbytes":1e999,"arrays":[]}]}', '{"ranks":[{"nbytes":%s,"arrays":[]}]}' % ("9" * 400), '{"a":1e999}',
])  # fmt: skip
def test_provenance_is_never_an_error(text, saved):
    (saved / "provenance.json").write_text(text)
    assert [main(["show", str(saved)]), main(["show", "--json", str(saved)])] == [0, 0]


def test_provenance_that_cannot_be_read_is_never_an_error(saved):
    (saved / "provenance.json").unlink()
    (saved / "provenance.json").mkdir()
    assert main(["show", str(saved)]) == 0


@pytest.mark.parametrize("path", ["http://[x", "/tmp/a\0b", "~no-such-user/x", "/" + "a" * 300, "/tmp/\ud800"])
def test_paths_that_no_system_takes(path):
    saves = (lambda p: save({}, p), lambda p: save({}, p, policy=MARKER))
    for call in (open_checkpoint, verify, read_manifest, sweep, lambda p: load({}, p), *saves):
        with contextlib.suppress(CheckpointError):
            call(path)
    assert main(["ls", path]) in (1, 2)


@pytest.mark.parametrize("name", ["w/zarr.json", "w/c.0.0"])
def test_verify_returns_the_problems_of_arrays(name, saved):
    (saved / name).unlink()
    (saved / name).symlink_to(saved / name)
    assert [problem.key for problem in verify(saved).problems] == ["w"]


def test_a_key_named_as_the_root_before_its_publication(tmp_path):
    save({"zarr.json.new": np.zeros(2)}, tmp_path / "a", policy=MARKER)
    assert verify(tmp_path / "a").ok


def test_verify_compares_the_root(saved):
    root = json.loads((saved / "zarr.json").read_bytes())
    root["attributes"]["functional_ckpt"]["values"]["step"] = 999
    root["consolidated_metadata"]["metadata"]["w"]["shape"] = [4, 16]
    (saved / "zarr.json").write_text(json.dumps(root))
    assert not verify(saved).ok


def test_a_path_that_looks_like_markup(saved, tmp_path, monkeypatch):
    from rich.console import Console

    monkeypatch.setattr(Console, "is_terminal", True)
    (tmp_path / "run[").mkdir()
    shutil.move(saved, tmp_path / "run[/x]")
    assert main(["verify", str(tmp_path / "run[/x]")]) == 0


@pytest.mark.parametrize("fields", [{"attributes": [["a", 1]]}, {"attributes": ""}, {"version": [0, -1]},
                                    {"per_rank": [{"key": "x", "world_size": -5}]}])  # fmt: skip
def test_what_is_no_manifest_is_refused(fields, saved):
    rewrite(saved, lambda document: document.update(fields))
    with pytest.raises(CheckpointError):
        open_checkpoint(saved)


def test_a_very_long_chain_of_codecs_is_refused(coded):
    array(coded, codecs=["crc32c"] * 1000)
    with pytest.raises(CheckpointError):
        open_checkpoint(coded)


class Kind(str, enum.Enum):  # noqa: UP042 - unlike StrEnum, its str() is not its text
    A = "a"


def test_a_key_that_is_an_enum_of_text_is_its_text(tmp_path):
    save({Kind.A: 1}, tmp_path / "a", policy=SavePolicy(durability="none"))
    assert open_checkpoint(tmp_path / "a").state() == {"a": 1}
    assert load({"a": 0}, tmp_path / "a") == load({Kind.A: 0}, tmp_path / "a") == {"a": 1}


def test_a_failed_marker_save_leaves_what_no_claim_names(saved, tmp_path):
    shutil.copytree(saved / "w", tmp_path / "b/w")
    (tmp_path / "b" / f".{ID}.claim").write_text(json.dumps({"nodes": ["x"]}))
    save({"z": np.zeros(2)}, tmp_path / "b", policy=MARKER)
    assert (tmp_path / "b/w/c.0.0").exists()
    assert not (tmp_path / "b" / f".{ID}.claim").exists()
    assert verify(tmp_path / "b").ok


def test_values_of_more_ranks_than_are_stored(tmp_path):
    save({"x": PerRank(1)}, tmp_path / "a", policy=SavePolicy(durability="none"))
    rewrite(tmp_path / "a", lambda document: document["per_rank"][0].update(world_size=10**18))
    policy = LoadPolicy(per_rank=lambda values, rank, size: values[0], strict=Strict(missing="ignore"))
    with pytest.raises(CheckpointError, match="not stored"):
        load({"x": PerRank(0)}, tmp_path / "a", policy=policy)


def test_dots_follow_links(tmp_path, monkeypatch):
    (tmp_path / "real/below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real/below")
    save({"w": np.arange(3)}, tmp_path / "link/../a", policy=ZSTD)
    assert verify(tmp_path / "real/a").ok
    monkeypatch.chdir(tmp_path / "real/below")
    assert sweep("..") == ()
