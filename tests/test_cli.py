"""The `functional-ckpt` command: what it prints, into a pipe and on a terminal, and how it ends."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import functional_ckpt as fc
from functional_ckpt.cli import main

LONG = "optim.state.blocks.0.attention.query.weight.exp_avg"


@pytest.fixture
def checkpoint(tmp_path):
    weight = np.arange(600_000, dtype="f4").reshape(1000, 600)
    state = {
        "model": {"w": weight, "same": weight, "half": np.ones((5, 3), "f2")},
        "optim": {"state": {"blocks.0.attention.query.weight": {"exp_avg": np.zeros((4, 4))}}},
        "rng": fc.PerRank({"seed": 3, "words": np.arange(4, dtype="u4")}),
        "odd": np.array([1.0, np.nan, np.inf, 3.0]),
        "counts": np.array([2**62 + 1, -5]),
        "waves": np.array([1 + 2j, 3 - 2j]),
        "scalar": np.float32(2.5),
        "nothing": np.zeros((0, 3)),
        "betas": (0.9, float("inf")),
        "long": tuple(range(100)),
        "step": 7,
    }
    codecs = (("model.half", ("zstd:3", "crc32c")),)
    policy = fc.SavePolicy(layout=fc.LayoutPolicy(target_chunk_nbytes=2**20, codecs=codecs), durability="none")
    path = tmp_path / "checkpoint"
    fc.save(state, path, policy=policy, attributes={"run": "a", "step": 7})
    return path


def run(capsys, *words):
    status = main([str(word) for word in words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys, *words):
    status, out, _ = run(capsys, *words, "--json")
    return status, json.loads(out)


def lines_of(out):
    return {line.split("  ")[0].strip(): line for line in out.splitlines() if line.strip()}


def test_ls_prints_one_line_per_array_into_a_pipe(capsys, checkpoint):
    status, out, err = run(capsys, "ls", checkpoint)
    lines = lines_of(out)
    assert (status, err) == (0, "")
    assert lines["model.same"].split() == ["model.same", "float32", "[1000,", "600]", "3", "2.3", "MiB", "exclusive"]
    assert lines[LONG].split()[0] == LONG
    assert lines["model.w"].split() == ["model.w", "model.same"]
    assert lines["betas"].endswith("(0.9, inf)")
    assert lines["long"].endswith("...")
    assert lines["step"].endswith("7")
    assert out.splitlines()[-1] == "9 arrays (2.3 MiB in 10 chunks), 1 tied key, 4 values"
    assert all(line == line.rstrip() for line in out.splitlines())


def test_ls_prefix_selects_keys(capsys, checkpoint):
    _, out, _ = run(capsys, "ls", checkpoint, "--prefix", "model.")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("model")] == [
        "model.half",
        "model.same",
        "model.w",
    ]
    assert "betas" not in out
    assert run(capsys, "ls", checkpoint, "--prefix", "model")[1] == out
    _, out, _ = run(capsys, "ls", checkpoint, "--prefix", "step", "--prefix", "model.half")
    assert [line.split()[0] for line in out.splitlines() if line][1::2] == ["model.half", "step"]


@pytest.mark.parametrize("command", ["ls", "tree"])
def test_a_prefix_that_no_key_has_is_a_problem(capsys, checkpoint, command):
    """As that of `LoadPolicy(keys=...)`: it ends at a dot, and a misspelt one does not mean nothing."""
    for prefix, hint in (("modle", "Did you mean 'model'?"), ("mod", "model"), ("model.*", "not a pattern")):
        status, out, err = run(capsys, command, checkpoint, "--prefix", "step", "--prefix", prefix)
        assert (status, out) == (1, "")
        assert err.startswith("functional-ckpt: no key has this prefix")
        assert hint in err


def test_ls_json_is_the_whole_list(capsys, checkpoint):
    status, found = run_json(capsys, "ls", checkpoint)
    arrays = {array["key"]: array for array in found["arrays"]}
    assert status == 0
    assert arrays["model.same"]["shape"] == [1000, 600]
    assert arrays["model.same"]["chunk"] == [334, 600]
    assert arrays["model.half"]["codecs"] == ["zstd:3", "crc32c"]
    assert found["tied"] == [{"key": "model.w", "target": "model.same"}]
    assert {"key": "betas", "value": {"~tuple": [0.9, {"~float": "inf"}]}} in found["values"]
    assert found["totals"]["nbytes"] == fc.read_manifest(checkpoint).nbytes


def test_show_describes_the_checkpoint(capsys, checkpoint):
    status, out, _ = run(capsys, "show", checkpoint)
    lines = lines_of(out.replace("  ", "", 1)) | {line.split()[0]: line for line in out.splitlines()}
    assert status == 0
    assert out.splitlines()[0] == str(checkpoint)
    assert "9 in 10 chunks, 2.3 MiB" in lines["arrays"]
    assert "model.w = model.same" in lines["tied"]
    assert "rng (1 rank)" in lines["per"]
    assert 'run: "a"' in lines["attributes"]
    assert "rank 0: 2.3 MiB" in lines["written"]


def test_show_json_names_who_wrote_it(capsys, checkpoint):
    _, found = run_json(capsys, "show", checkpoint)
    assert found["version"] == [1, 0]
    assert found["per_rank"] == [{"key": "rng", "world_size": 1}]
    assert found["attributes"] == {"run": "a", "step": 7}
    assert len(found["provenance"]["ranks"]) == 1


@pytest.mark.parametrize(
    "content", [None, b"", b"[1]", b'{"ranks": 3, "started": "x", "versions": []}', b'{"ranks": [NaN]}']
)
def test_show_does_not_need_provenance(capsys, checkpoint, content):
    path = checkpoint / "provenance.json"
    path.unlink() if content is None else path.write_bytes(content)
    assert run(capsys, "show", checkpoint)[0] == 0
    assert run(capsys, "show", checkpoint, "--json")[0] == 0


def test_show_value(capsys, checkpoint):
    assert run(capsys, "show", checkpoint, "betas")[1] == "betas\n(0.9, inf)\n"
    _, out, _ = run(capsys, "show", checkpoint, "long")
    assert out.endswith(", 98, 99)\n")


@pytest.mark.parametrize(
    ("key", "hint"), [("model.x", "Did you mean"), ("rng", "2 keys begin with it"), ("zz", "functional-ckpt ls")]
)
def test_show_unknown_key_says_what_to_try(capsys, checkpoint, key, hint):
    status, out, err = run(capsys, "show", checkpoint, key)
    assert (status, out) == (1, "")
    assert err.startswith("functional-ckpt: the checkpoint has no such key")
    assert hint in err


def test_verify_a_good_checkpoint(capsys, checkpoint):
    status, out, err = run(capsys, "verify", checkpoint)
    assert (status, err) == (0, "")
    assert out == "ok: 10 chunks of 9 arrays, 2.3 MiB, every one as it was saved\n"


def test_verify_names_every_problem(capsys, checkpoint):
    damage(checkpoint)
    status, found = run_json(capsys, "verify", checkpoint)
    assert (status, found["ok"]) == (1, False)
    assert {(p["key"], p["chunk"]) for p in found["problems"]} == {
        ("model.same", "c.1.0"), ("model.same", "c.2.0"), ("scalar", "c"), ("odd", None),
    }  # fmt: skip
    status, out, _ = run(capsys, "verify", checkpoint)
    assert status == 1
    assert "scalar      c      a stored chunk is missing: expected 4 bytes, found nothing" in out
    assert out.splitlines()[-1].startswith("4 problems in 10 chunks of 9 arrays")


def damage(path: Path):
    flipped = path / "model.same" / "c.1.0"
    data = bytearray(flipped.read_bytes())
    data[1000] ^= 1
    flipped.write_bytes(data)
    with open(path / "model.same" / "c.2.0", "ab") as file:
        file.write(b"more")
    (path / "scalar" / "c").unlink()
    header = path / "odd" / "zarr.json"
    header.write_text(header.read_text().replace('"shape":[4]', '"shape":[3]'))


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_a_path_without_a_checkpoint_ends_with_2(capsys, tmp_path, command):
    (tmp_path / "a file").write_text("")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "a file"):
        status, out, err = run(capsys, command, path)
        assert (status, out) == (2, "")
        assert err.startswith("functional-ckpt: ")
        assert err.count("\n") == 1


def test_a_changed_manifest_ends_with_1(capsys, checkpoint):
    manifest = checkpoint / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"float32", b"float16"))
    for command in ("ls", "show", "verify"):
        status, out, err = run(capsys, command, checkpoint)
        assert (status, out) == (1, "")
        assert "not the one that was committed" in err


def test_keys_cannot_steer_the_terminal(capsys, tmp_path):
    fc.save({"\x1b[2Jw\n": np.ones(1), "\x1bv": 1}, tmp_path / "c")
    for words in (["ls"], ["show", "\x1b[2Jw\n"], ["show", "\x1bv"]):
        _, out, _ = run(capsys, words[0], tmp_path / "c", *words[1:])
        assert "\x1b" not in out
        assert "\\x1b" in out


def command(*words):
    return [sys.executable, "-m", "functional_ckpt.cli", *map(str, words)]


def test_the_command_needs_no_torch(checkpoint):
    code = "import sys; from functional_ckpt.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "show", checkpoint], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n0 False\n")


def test_a_closed_pipe_is_no_error(checkpoint):
    shell = subprocess.run(
        ["bash", "-o", "pipefail", "-c", '"$@" | head -1', "_", *command("ls", checkpoint)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (shell.returncode, shell.stderr) == (0, "")


def test_lines_fit_a_terminal_of_80_columns(checkpoint):
    for words in (["ls"], ["show"], ["show", "model.w"], ["verify"], ["tree"]):
        text = on_a_terminal(command(words[0], checkpoint, *words[1:]))
        # A path is told whole, so that it can be copied.
        assert max(len(line) for line in text.splitlines() if str(checkpoint) not in line) <= 80
        assert "Traceback" not in text
        assert "\x1b" not in text
    listed = on_a_terminal(command("ls", checkpoint)).splitlines()
    first = next(i for i, line in enumerate(listed) if line.startswith("optim.state.blocks.0.  "))
    assert listed[first + 1].startswith("  attention.query.")  # long keys are broken after dots


@pytest.mark.parametrize(("environment", "has_colours"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_gets_lines_and_colours_unless_it_wants_none(checkpoint, environment, has_colours):
    text = on_a_terminal(command("tree", checkpoint), TERM="xterm", PYTHONIOENCODING="utf-8", **environment)
    assert ("\x1b[1m" in text) is has_colours
    assert "├─ half" in text


def on_a_terminal(words, **environment):
    """Run a command on a terminal of 80 columns and return what it shows there."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb"} | environment
    process = subprocess.Popen(words, stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 4096):
            shown += data
    except OSError:
        pass  # how a terminal says that nobody writes to it any more
    finally:
        process.communicate()
        os.close(ours)
    assert process.returncode == 0
    return shown.decode()
