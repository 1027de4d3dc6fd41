"""`rm` and `sweep`, and `ls` of the directory of a run: what is pinned, what was measured, what may not be removed."""

import io
import json
import sys

import numpy as np
import pytest

import functional_ckpt as fc
from functional_ckpt.cli import main
from functional_ckpt.errors import NotACheckpointError, StorageError
from functional_ckpt.store import steps
from functional_ckpt.store.steps import remove_checkpoint

FAST = fc.SavePolicy(durability="none")


@pytest.fixture
def runs(tmp_path):
    root = tmp_path / "runs"
    with fc.Checkpoints(root, policy=FAST) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, {"w": np.zeros(100)}, metrics={"loss": 1 / step, "grad": float("inf")})
        checkpoints.pin(20)
    fc.save({"w": np.zeros(3)}, root / "by-hand", policy=FAST)
    return root


def run(capsys, *words):
    status = main([str(word) for word in words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_ls_of_a_run_tells_metrics_and_pins(capsys, runs):
    status, out, err = run(capsys, "ls", runs)
    assert (status, err) == (0, "")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["step-00000020"][-5:] == ["pinned", "grad", "inf,", "loss", "0.05"]
    assert rows["step-00000030"][-4:] == ["grad", "inf,", "loss", "0.0333333"]
    assert rows["by-hand"][-3:] == ["24", "B", "1"]
    found = json.loads(run(capsys, "ls", runs, "--json")[1])["checkpoints"]
    assert [(each["name"], each["pinned"]) for each in found][:3] == [
        ("by-hand", False), ("step-00000010", False), ("step-00000020", True),
    ]  # fmt: skip
    assert found[1]["metrics"] == {"loss": 0.1, "grad": "inf"}


def test_rm_removes_what_is_named(capsys, runs):
    status, out, err = run(capsys, "rm", runs / "step-00000010", runs / "by-hand", "--yes")
    assert (status, err) == (0, "")
    assert out == f"removed {runs / 'step-00000010'}, 800 B\nremoved {runs / 'by-hand'}, 24 B\n"
    assert names(runs) == ["step-00000020", "step-00000020.pin", "step-00000030"]


def test_rm_says_what_it_would_do(capsys, runs):
    before = names(runs)
    status, out, _ = run(capsys, "rm", runs / "by-hand", "--dry-run", "--json")
    assert (status, json.loads(out)["checkpoints"]) == (0, [{"path": str(runs / "by-hand"), "nbytes": 24}])
    assert names(runs) == before


def foreign(runs):
    (runs / "by-hand" / "meta.pt").write_text("")
    return runs / "by-hand", "holds files that are not part of a checkpoint"


def pinned(runs):
    return runs / "step-00000020", "it is pinned"


def link(runs):
    (runs / "last").symlink_to(runs / "by-hand")
    return runs / "last", "a symbolic link"


@pytest.mark.parametrize("made", [foreign, pinned, link])
def test_rm_refuses_before_anything_is_removed(capsys, runs, made):
    path, why = made(runs)
    before = names(runs)
    status, out, err = run(capsys, "rm", runs / "step-00000010", path, "--yes")
    assert (status, out) == (1, "")
    assert why in err
    assert names(runs) == before
    with pytest.raises(StorageError, match=why):
        remove_checkpoint(path)
    assert names(runs) == before


def test_rm_of_what_is_no_checkpoint_ends_with_2(capsys, runs, tmp_path):
    before = names(runs)
    for path in (runs, tmp_path / "nowhere"):
        status, out, err = run(capsys, "rm", runs / "by-hand", path, "--yes")
        assert (status, out) == (2, "")
        assert err.startswith("functional-ckpt: ")
    assert names(runs) == before


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("n\n", 1), ("\n", 1), ("", 1)])
def test_rm_asks_on_a_terminal(capsys, runs, monkeypatch, answer, status):
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert run(capsys, "rm", runs / "by-hand")[0] == status
    assert (runs / "by-hand").exists() is bool(status)


def test_rm_does_not_remove_unasked(capsys, runs, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    status, _, err = run(capsys, "rm", runs / "by-hand")
    assert (status, (runs / "by-hand").exists()) == (2, True)
    assert "--yes" in err


def test_a_removal_that_is_killed_leaves_no_half_of_a_checkpoint(runs, monkeypatch, capsys):
    def die(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "remove_tree", die)
    assert main(["rm", str(runs / "by-hand"), "--yes"]) == 130
    monkeypatch.undo()
    assert "by-hand" not in names(runs)
    assert run(capsys, "sweep", runs)[1].startswith(f"removed {runs}")
    assert names(runs) == ["step-00000010", "step-00000020", "step-00000020.pin", "step-00000030"]


def test_sweep_of_nothing_and_of_no_directory(capsys, runs, tmp_path):
    assert run(capsys, "sweep", runs) == (0, "nothing to remove\n", "")
    assert json.loads(run(capsys, "sweep", runs, "--json")[1]) == {"path": str(runs), "removed": [], "left": []}
    assert run(capsys, "sweep", tmp_path / "nowhere")[0] == 2


def test_a_checkpoint_in_memory_is_removed():
    for url in ("memory://rm-one", "memory://rm/two"):
        fc.save({"w": np.ones(2)}, url)
        remove_checkpoint(url)
        with pytest.raises(NotACheckpointError):
            fc.open_checkpoint(url)
