"""Completion: what the command says may come next, and bash that asks it. (zsh and fish are not there to be tried.)"""

import subprocess
import sys

import numpy as np
import pytest

import functional_ckpt as fc
from functional_ckpt.cli import main
from functional_ckpt.cli.completion import SCRIPTS, VARIABLE, candidates
from functional_ckpt.cli.parser import make_parser


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "c"
    state = {"model": {"w": np.ones(2), "layers": {0: np.ones(1), 1: np.ones(1)}}, "step": 1, "$(touch x)": 1, "a b": 2}
    fc.save(state, path, policy=fc.SavePolicy(durability="none"))
    return str(path)


def found(*words):
    return candidates(make_parser(), words)


def test_commands_and_options():
    assert found("") == sorted(["ls", "tree", "show", "map", "verify", "rm", "sweep", "completion"])
    assert found("s") == ["show", "sweep"]
    assert found("--v") == ["--version"]
    assert found("tree", "--") == ["--all", "--depth", "--help", "--json", "--prefix"]
    assert found("completion", "") == ["bash", "fish", "zsh"]
    assert found("nonsense", "") == []
    assert found() == found("")


def test_paths_are_left_to_the_shell(checkpoint):
    for words in (["show", ""], ["ls", checkpoint[:-1]], ["verify", "x"], ["map", checkpoint, "step", "--svg", ""]):
        assert found(*words) == []


def test_keys_are_completed_up_to_the_next_dot(checkpoint):
    assert found("show", checkpoint, "") == ["model.", "step"]
    assert found("show", checkpoint, "model.") == ["model.layers.", "model.w"]
    assert found("map", "--json", checkpoint, "model.layers.") == ["model.layers.0", "model.layers.1"]
    assert found("ls", checkpoint, "--prefix", "mod") == ["model."]
    assert found("ls", "--prefix", "step", checkpoint, "--prefix", "s") == ["step"]
    assert found("show", checkpoint, "step", "") == []


@pytest.mark.parametrize("path", ["nowhere", "\0", "memory://nothing", ""])
def test_what_cannot_be_opened_has_no_keys(path):
    assert found("show", path, "") == []


def test_a_key_that_a_shell_would_run_is_never_offered(checkpoint):
    assert [name for name in found("show", checkpoint, "") if "$" in name or " " in name] == []


@pytest.mark.parametrize("shell", SCRIPTS)
def test_scripts_are_printed(capsys, shell):
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == SCRIPTS[shell]
    assert VARIABLE in SCRIPTS[shell]


@pytest.mark.parametrize(
    ("words", "expected"), [(["sh"], ["show"]), (["show", "C", "model.la"], ["model.layers."]), (["ls", ""], [])]
)
def test_bash_completes(checkpoint, words, expected):
    words = [checkpoint if word == "C" else word for word in words]
    program = f"""
        functional-ckpt() {{ {sys.executable} -m functional_ckpt.cli "$@"; }}
        eval "$(functional-ckpt completion bash)"
        complete -p functional-ckpt >/dev/null
        COMP_WORDS=(functional-ckpt "$@"); COMP_CWORD=$#
        _functional_ckpt
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-euc", program, "_", *words], capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (expected, "")
