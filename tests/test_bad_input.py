"""Bad input gets a clear error of ours that names the key, before a byte is written or changed."""

import errno
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

import functional_ckpt
from functional_ckpt import Box, LayoutPolicy, LoadPolicy, PerRank, SavePolicy, load, open_checkpoint, save, verify
from functional_ckpt.errors import PolicyError
from functional_ckpt.spec.array import ArraySpec
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
        assert problems[0].rank in (rank, rank and rank[::-1])
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


@pytest.mark.parametrize(
    ("other", "words"),
    [(np.ones(3), "found (3,). Parts of one array need its global shape"), (np.ones(2, "f4"), "one data type on all")],
    ids=["shape", "data type"],
)
def test_ranks_that_hold_other_arrays_under_one_key_are_told_what_to_do(other, words, tmp_path, problems_of):
    arrays = (np.ones(2), other)
    for problems in run_ranks(2, lambda g: problems_of(save, {"a": arrays[g.rank]}, tmp_path / "a", process_group=g)):
        assert words in str(problems[0])


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
    "durations": (np.array([1], "m8[s]"), "DTypeError"),
    "records": (np.zeros(2, [("x", "f4")]), "DTypeError"),
    "long double": (np.zeros(2, np.longdouble), "DTypeError"),
    "a long double": (np.longdouble(2), "UnsupportedLeafError"),
    "masked": (np.ma.masked_array([1, 2], [0, 1]), "UnsupportedLeafError"),
    "matrix": (np.array([[1]]).view(np.matrix) if hasattr(np, "matrix") else None, "UnsupportedLeafError"),
    "a spec": (ArraySpec("w", (2,), "int8"), "UnsupportedLeafError"),
    "a function": (len, "UnsupportedLeafError"),
    "a class": (dict, "UnsupportedLeafError"),
    "a tuple with objects": ((1, np.array([None])), "UnsupportedLeafError"),
    "a tuple with records": ((1, np.zeros(2, [("x", "f4")])), "UnsupportedLeafError"),
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
    (problem,) = refused({"w": np.zeros((1,) * 33)})  # numpy itself allows 64
    assert names([problem]) == [("ShapeError", "w")]
    assert problem.found == 33
    torch = pytest.importorskip("torch")
    assert names(refused({"w": torch.zeros((1,) * 33)})) == [("ShapeError", "w")]


def test_tensors_without_a_representation(refused):
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these kinds are beta or on their way out
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
        "meta": kind, "sparse": kind, "csr": kind, "quantized": kind, "complex32": dtype, "float4": dtype,
        "nested": kind,
    }  # fmt: skip


def test_tensors_whose_storage_was_freed(refused, tmp_path, problems_of):
    """FSDP gives back the storage of gathered parameters, whose shape stays: to read one ends the process."""
    torch = pytest.importorskip("torch")
    whole, part, narrow = torch.ones(8), torch.ones(8), torch.ones(8).bfloat16()
    state = {"whole": whole, "part": part[4:], "narrow": narrow, "cut": (cut := torch.ones(64))[32:].reshape(4, 8).t()}
    for tensor in (whole, part, narrow):
        tensor.untyped_storage().resize_(0)
    cut.untyped_storage().resize_(64)
    spread, empty = torch.ones(1).expand(8), torch.empty(0)
    found = refused({**state, "spread": spread, "empty": empty})
    assert sorted(names(found)) == [("UnsupportedLeafError", key) for key in sorted(state)]
    save({key: np.ones(tensor.shape, "f4") for key, tensor in state.items()}, tmp_path / "a")
    problems = problems_of(load, state, tmp_path / "a", policy=LoadPolicy(cast="any"))
    assert sorted(names(problems)) == sorted(names(found))


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
    monkeypatch.setattr("functional_ckpt.run.planning.node_name", lambda key: "Same" if key == "a" else "same")
    assert names(refused({"a": np.ones(1), "b": np.ones(1)})) == [("DuplicateKeyError", "b")]


def test_a_container_that_contains_itself(refused):
    loop = {}
    loop["x"] = [loop]
    assert names(refused(loop)) == [("SpecError", "x.0")]


def test_problems_of_all_leaves_at_once(refused):
    found = refused(
        {"a": object(), "b": np.array(["x"]), "c": 1, "d": {"e": {1, (2, object())}}}, attributes={"x": object()}
    )
    assert [p.key for p in found] == ["a", "b", "d.e", "attributes"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: SavePolicy(commit="never"), lambda: SavePolicy(replicas="all"),
        lambda: SavePolicy(object_codec="pickle"),
        lambda: SavePolicy(budget_nbytes=0), lambda: SavePolicy(timeout_s=-1), lambda: SavePolicy(replicated="no"),
        lambda: LoadPolicy(cast="yes"), lambda: LoadPolicy(strict="maybe"), lambda: LoadPolicy(verify="some"),
        lambda: LoadPolicy(per_rank="last"), lambda: LayoutPolicy(target_chunk_nbytes=0),
        lambda: LayoutPolicy(extended_dtypes="no"),
        *(lambda c=c: LayoutPolicy(codecs=(("", (c,)),))
          for c in ("lzma", "zstd:x", "zstd:99", "gzip:10", "gzip:-1", "blosc:10", "crc32c:1", "zstd:--5",
          "zstd:²", "")),
    ],
)  # fmt: skip
def test_policies(make):
    with pytest.raises(PolicyError):
        make()


class Weird:
    """An object that only ``torch.save`` can write."""


@pytest.mark.filterwarnings("ignore:objects that are not plain")
def test_classes_that_can_be_iterated_once_serve_every_object(tmp_path):
    pytest.importorskip("torch")
    state = {name: Weird() for name in "abc"}
    save(state, tmp_path / "a", policy=SavePolicy(object_codec="torch", durability="none"))
    loaded = load(dict.fromkeys(state), tmp_path / "a", policy=LoadPolicy(safe_globals=iter([Weird])))
    opened = open_checkpoint(tmp_path / "a").state(safe_globals=iter([Weird]))
    assert {type(value) for value in (*loaded.values(), *opened.values())} == {Weird}


def test_an_unknown_framework(tmp_path, fast):
    save({"w": np.ones(2)}, tmp_path / "a", policy=fast)
    with pytest.raises(PolicyError, match="framework: expected 'numpy' or 'torch', found 'pytorch'"):
        open_checkpoint(tmp_path / "a").state("pytorch")


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
    assert problem.path.startswith(str(tmp_path))  # which of the disks is full
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


def test_a_dtensor_of_partial_sums(refused):
    torch = pytest.importorskip("torch")
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Partial, Replicate, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        (problem,) = refused({"g": partial, "fine": DTensor.from_local(torch.ones(4), mesh, [Replicate()])})
        assert names([problem]) == [("UnsupportedLeafError", "g")]
        assert "redistribute" in str(problem)
    finally:
        dist.destroy_process_group()
