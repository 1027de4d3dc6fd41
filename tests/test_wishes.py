"""What a caller asks for is done or refused, by words that say what to write instead."""

import os
from pathlib import Path

import numpy as np
import pytest

from functional_ckpt import async_save, load, open_checkpoint, save, verify
from functional_ckpt.errors import NotImplementedYet, PolicyError
from functional_ckpt.store.opening import local_path
from functional_ckpt.store.sweep import sweep
from functional_ckpt.testing.simulate import run_ranks

STATE = {"w": np.ones(2), "step": 3}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, in which a refused call leaves nothing."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


PATHS = {
    # no path: words of the message
    "None": (None, "expected a path or URL, found None"),
    "an int": (7, "found 7"),
    "bytes": (b"a", "found b'a'"),
    "a bytes path": (type("P", (), {"__fspath__": lambda self: b"a"})(), "found b'a'"),
    "a list": (["a"], "found ['a']"),
    "no text": ("", "found ''"),
    "a URL in a Path": (Path("s3://b/x"), "Pass text: 's3://b/x'"),
    "memory in a Path": (Path("memory://b/x"), "Pass text: 'memory://b/x'"),
    "a file URL in a Path": (Path("file:///b/x"), "Pass text: 'file:///b/x'"),
    "one slash": ("s3:/b/x", "Pass text: 's3://b/x'"),
    "a host": ("file://b/x", "Pass 'file:///b/x'"),
    "a fragment": ("file:///b/x#1", "%23"),
    "a query": ("file:///b/x?1", "%3F"),
}


@pytest.mark.parametrize("name", PATHS)
def test_what_is_no_path(name, here, problems_of):
    path, words = PATHS[name]
    for call in (lambda: save(STATE, path), lambda: async_save(STATE, path), lambda: load(STATE, path),
                 lambda: open_checkpoint(path), lambda: verify(path), lambda: sweep(path),
                 lambda: local_path(path)):  # fmt: skip
        (problem,) = problems_of(call)
        assert isinstance(problem, PolicyError)
        assert words in str(problem)


def test_a_scheme_without_a_store(here, problems_of):
    for path in ("s3://b/x", "S3://b/x"):
        (problem,) = problems_of(save, STATE, path)
        assert isinstance(problem, NotImplementedYet)


@pytest.mark.parametrize("call", [save, async_save, load])
def test_arguments_that_are_swapped(call, here, problems_of):
    order = f"{call.__name__}({'like' if call is load else 'state'}, path)"
    for path in ("step-1", Path("step-1")):
        (problem,) = problems_of(call, path, STATE)
        assert isinstance(problem, PolicyError)
        assert order in str(problem)


class Named:
    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return os.fspath(self.path)


def test_paths_of_every_kind(tmp_path, fast, same):
    kinds = [
        tmp_path / "a", str(tmp_path / "b"), Named(tmp_path / "c"), f"file://{tmp_path}/d", f"FILE://{tmp_path}/e",
        f"file://localhost{tmp_path}/f", tmp_path / "s3:" / "g",
    ]  # fmt: skip
    for path in kinds:
        save(STATE, path, policy=fast)
        same(open_checkpoint(path).state(), STATE)
        assert verify(path).ok
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c", "d", "e", "f", "s3:"]


ARGUMENTS = {
    "policy": (None, "a SavePolicy", save), "policy of a load": (None, "a LoadPolicy", load),
    "overwrite": ("no", "True or False", save), "progress": (3, "a function", save),
    "progress of a load": ("bar", "a function", load), "attributes": (["a"], "a dict", save),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_another_type(name, here, problems_of):
    value, expected, call = ARGUMENTS[name]
    field = name.partition(" ")[0]
    (problem,) = problems_of(call, STATE, "a", **{field: value})
    assert isinstance(problem, PolicyError)
    assert f"does not accept this {field}: expected {expected}" in str(problem)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_is_wrong_on_one_rank_fails_on_all(name, here, problems_of):
    value, _, call = ARGUMENTS[name]
    field = name.partition(" ")[0]

    def calling(gather):
        options = {field: value} if gather.rank == 1 else {}
        return problems_of(call, STATE, "a", process_group=gather, **options)

    for problems in run_ranks(2, calling):
        assert [(type(p), p.rank) for p in problems if "does not accept" in str(p)] == [(PolicyError, 1)]
