"""`tree`, and `ls` of a directory of checkpoints: golden texts for several widths, and hostile names."""

import json
import os
import time

import numpy as np
import pytest

import functional_ckpt as fc
from functional_ckpt.cli import main, tables
from functional_ckpt.cli.screen import Screen, columns
from functional_ckpt.show.outline import Leaf, folded, outline, outline_of

FAST = fc.SavePolicy(durability="none")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    square, wide = np.zeros((4, 4), "f4"), np.zeros((4, 16), "f2")
    layers = {i: {"attention": {"query": square + i, "key": square - i}, "mlp": wide + i} for i in range(12)}
    layers[3] = {"attention": {"query": np.zeros((4, 4), "f4")}}
    model = {"embed": {"weight": np.zeros((10, 4), "f4")}, "layers": layers, "norm": np.ones(4)}
    state = {"model": model, "optim": {"state": {0: {"step": 3}, 1: {"step": 3}}, "betas": (0.9, 0.99)}, "step": 7}
    path = tmp_path_factory.mktemp("tree") / "c"
    fc.save(state, path, policy=FAST)
    return path


def run(capsys, *words):
    status = main([str(word) for word in words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def lines_of(checkpoint, screen, depth=None, is_whole=False):
    root = outline_of(fc.read_manifest(checkpoint))
    return "\n".join(line.rstrip() for line in tables.tree(screen, root, depth, is_whole)) + "\n"


WIDE = """\
key                      parameters    bytes  holds
model                         1,116  3.0 KiB  36 arrays: float16, float32, float64
├─ embed.weight                  40    160 B  float32 [10, 4]
├─ layers                     1,072  2.8 KiB  34 arrays: float16, float32
│  ├─ {0,1,..,11}             1,056  2.8 KiB  33 arrays: float16, float32
│  │  ├─ attention              352  1.4 KiB  22 arrays: float32
│  │  │  ├─ key                 176    704 B  11 x float32 [4, 4]
│  │  │  └─ query               176    704 B  11 x float32 [4, 4]
│  │  └─ mlp                    704  1.4 KiB  11 x float16 [4, 16]
│  └─ 3.attention.query          16     64 B  float32 [4, 4]
└─ norm                           4     32 B  float64 [4]
optim                                         3 values
├─ betas                                      (0.9, 0.99)
└─ state.{0..1}.step                          2 x 3
step                                          7

36 arrays, 4 values: 1,116 parameters, 3.0 KiB
"""
NARROW = """\
key                   parameters    bytes  holds
model                      1,116  3.0 KiB  36 arrays: float16,
                                           float32, float64
├─ embed.weight               40    160 B  float32 [10, 4]
├─ layers                  1,072  2.8 KiB  34 arrays: float16,
│                                          float32
└─ norm                        4     32 B  float64 [4]
optim                                      3 values
├─ betas                                   (0.9, 0.99)
└─ state.{0..1}.step                       2 x 3
step                                       7

36 arrays, 4 values: 1,116 parameters, 3.0 KiB
"""
PIPE = """\
key    parameters    bytes  holds
model       1,116  3.0 KiB  36 arrays: float16, float32, float64
optim                       3 values
step                        7

36 arrays, 4 values: 1,116 parameters, 3.0 KiB
"""


@pytest.mark.parametrize(
    ("screen", "depth", "expected"),
    [(Screen(120, False, True), None, WIDE), (Screen(64, False, True), 2, NARROW), (Screen(), 1, PIPE)],
    ids=["wide", "narrow", "pipe"],
)
def test_the_tree_is_readable(checkpoint, screen, depth, expected):
    text = lines_of(checkpoint, screen, depth)
    assert text == expected


def test_all_shows_every_key(checkpoint):
    text = lines_of(checkpoint, Screen(), is_whole=True)
    assert "{" not in text
    assert sum("float32 [4, 4]" in line for line in text.splitlines()) == 11 * 2 + 1


def test_json_has_sums_for_every_branch_and_nothing_folded(capsys, checkpoint):
    found = json.loads(run(capsys, "tree", checkpoint, "--json")[1])
    manifest = fc.read_manifest(checkpoint)
    assert (found["arrays"], found["nbytes"], found["values"]) == (36, manifest.nbytes, 4)
    layers = next(b for b in found["children"][0]["children"] if b["name"] == "layers")
    names = ["0", "1", "2", "3.attention.query", *map(str, range(4, 12))]
    assert [child["name"] for child in layers["children"]] == names
    assert layers["children"][0]["key"] == "model.layers.0"
    assert sum(child["parameters"] for child in layers["children"]) == layers["parameters"] == 1072
    shallow = json.loads(run(capsys, "tree", checkpoint, "--json", "--depth", "1", "--prefix", "model.layers")[1])
    assert (shallow["parameters"], [child["children"] for child in shallow["children"]]) == (1072, [[]])


def test_folding_keeps_every_sum(checkpoint):
    root = outline_of(fc.read_manifest(checkpoint))

    def check(branch):
        if branch.children and branch.leaf is None:
            for name in ("arrays", "parameters", "nbytes", "chunks", "values"):
                assert sum(getattr(c, name) for c in branch.children) == getattr(branch, name), branch.key
        for child in branch.children:
            check(child)

    check(root)
    check(folded(root))


def test_keys_that_are_also_branches_or_odd_are_all_shown():
    keys = ["", "a", "a.b", "a.b.c", ".x", "x.", "..", "1.w", "2.w", "²", "007", "7", "9" * 5000]
    root = outline(Leaf(key, "v") for key in keys)
    assert sorted(branch.key for _, branch in root.rows() if branch.leaf) == sorted(keys)
    assert root.values == sum(b.times for _, b in folded(root).rows() if b.leaf) == len(keys)


def test_the_default_depth_keeps_a_large_model_on_two_pages(capsys):
    leaves = [Leaf(f"block_{i}.part_{i % 7}.w{i}.x{j}", f"int8 [{i}, {j}]") for i in range(60) for j in range(9)]
    assert len(tables.tree(Screen(), outline(leaves), None, False)) < 110


@pytest.mark.parametrize("width", [None, 40, 80])
def test_hostile_keys_cannot_steer_the_terminal(width):
    key = "\x1b[2J.\x07\r\n.\u202e.\x9b31m"
    text = tables.tree(Screen(width, False, True), outline([Leaf(key, "\x1b]0;x\x07", 1, 1)]), None, True)
    assert all(line.isprintable() for line in text)
    assert all(line.isprintable() for line in columns(Screen(width), ("a", "b"), "<<", [(key, key)]))


def test_a_name_that_is_broken_keeps_its_place_in_the_tree():
    keys = (f"{name}.{key}" for name in ("bias", "weight") for key in ("exponential_average", "step"))
    leaves = [Leaf(f"optim.state.{key}", "float32 [5, 13]", 65, 260) for key in keys]
    assert [line[:20].rstrip() for line in tables.tree(Screen(50, False, True), outline(leaves), None, True)[1:9]] == [
        "optim.state",
        "├─ bias",
        "│  ├─ exponential_av",
        "│  │  erage",
        "│  └─ step",
        "└─ weight",
        "   ├─ exponential_av",
        "   │  erage",
    ]


def test_wide_characters_are_counted_as_wide():
    assert columns(Screen(), ("k", "n"), "<>", [("\u91cd", "1"), ("ab", "2")])[1:] == ["\u91cd  1", "ab  2"]


# ---- Directories of checkpoints -----------------------------------------------------------------


@pytest.fixture
def runs(tmp_path):
    for step in (9, 10, 100):
        fc.save({"w": np.zeros(100), "step": step}, tmp_path / "runs" / f"step-{step}", policy=FAST)
    return tmp_path / "runs"


def test_ls_lists_a_directory_of_checkpoints_whoever_made_it(capsys, runs):
    (runs / "notes.txt").write_text("")
    (runs / "tensorboard").mkdir()
    (runs / ".tmp.saving").mkdir()
    status, out, err = run(capsys, "ls", runs)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["step-9", "step-10", "step-100"]
    assert [line.split()[3:5] for line in lines[1:4]] == [["800", "B"]] * 3
    assert lines[-1] == "3 checkpoints, 2.3 KiB"


def test_ls_of_a_directory_in_json(capsys, runs):
    found = json.loads(run(capsys, "ls", runs, "--json")[1])
    first = found["checkpoints"][0]
    assert (first["name"], first["path"], first["nbytes"]) == ("step-9", str(runs / "step-9"), 800)
    assert abs(first["saved"] + first["age_s"] - time.time()) < 60
    assert found["totals"] == {"nbytes": 2400}


@pytest.mark.parametrize(
    "content",
    [None, b"", b"[1]", b'{"ranks": 3, "finished": "x"}', b'{"ranks": [1, {"nbytes": "y"}], "finished": 1e99}'],
)
def test_a_directory_is_listed_without_provenance(capsys, runs, content):
    path = runs / "step-9" / "provenance.json"
    path.unlink() if content is None else path.write_bytes(content)
    os.utime(runs / "step-9" / "zarr.json", (1e9, 1e9))
    assert run(capsys, "ls", runs)[0] == 0
    step = json.loads(run(capsys, "ls", runs, "--json")[1])["checkpoints"][0]
    assert (step["nbytes"], step["saved"]) == (None, 1e9)


@pytest.mark.parametrize("command", ["show", "verify", "tree"])
def test_other_commands_say_that_one_is_to_be_named(capsys, runs, command):
    status, out, err = run(capsys, command, runs)
    assert (status, out) == (2, "")
    assert "step-100" in err
    assert "one of them" in err
