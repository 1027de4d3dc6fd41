"""Memory to load into that cannot hold what is stored is refused; what is tied as it was saved can, and parts too."""

from threading import get_ident

import numpy as np
import pytest

from functional_ckpt import ArraySpec, Box, LoadPolicy, LocalShards, SavePolicy, ShardSpec, load, save
from functional_ckpt.errors import SpecError
from functional_ckpt.store.files import FileStore

FAST = SavePolicy(durability="none")
A, B = np.arange(16.0).reshape(4, 4), -np.arange(16.0).reshape(4, 4)


def strided(array, shape, strides):
    return np.lib.stride_tricks.as_strided(array, shape, strides)


def check_refused(like, path, keys, problems_of, state):
    """Check that loading `state` into `like` fails for these keys, with one problem each."""
    save(state, path, policy=FAST)
    problems = problems_of(load, like, path)
    assert {type(p) for p in problems} == {SpecError}
    assert sorted(p.key for p in problems) == keys
    return problems


@pytest.mark.parametrize("target", [
    lambda: strided(np.zeros(4), (3, 4), (0, 8)),
    lambda: strided(np.zeros(8), (3, 4), (8, 8)),
    lambda: strided(np.zeros(8), (4,), (4,)),
])  # fmt: skip
def test_an_array_that_holds_an_element_twice(target, tmp_path, problems_of):
    x = target()
    (problem,) = check_refused({"x": x}, tmp_path / "a", ["x"], problems_of, {"x": np.full(x.shape, 5.0)})
    assert "twice" in str(problem)
    assert not x.any()


@pytest.mark.parametrize("second", [
    lambda x: x[:2], lambda x: x.T, lambda x: x[::-1], lambda x: x[1:, 1:], lambda x: x.reshape(16),
    lambda x: x.view("i8"), lambda x: x[1],
])  # fmt: skip
def test_two_leaves_that_share_elements(second, tmp_path, problems_of):
    x = np.zeros((4, 4))
    y = second(x)
    save({"x": A, "y": second(A).copy()}, tmp_path / "a", policy=FAST)
    load({"x": x, "y": y}, tmp_path / "a")  # what is stored goes together
    np.testing.assert_array_equal(x, A)
    other = second(A).copy()
    other.reshape(-1)[-1] = 99
    (problem,) = check_refused({"x": x, "y": y}, tmp_path / "b", ["y"], problems_of, {"x": A, "y": other})
    assert "'x'" in str(problem)


def test_parts_of_one_buffer_that_share_nothing(tmp_path):
    flat, square = np.zeros(100), np.zeros((12, 12))
    like = {f"f{i}": flat[10 * i : 10 * i + 10].reshape(2, 5) for i in range(10)}
    like |= {"even": square[::2, ::2], "odd": square[1::2, 1::2], "back": square[-2::-2, 1::2], "empty": square[3:3]}
    like |= {"left": square[1::2, :6:2], "right": square[1::2, 6::2]}
    stored = {key: np.random.default_rng(i).normal(size=leaf.shape) for i, (key, leaf) in enumerate(like.items())}
    save(stored, tmp_path / "a", policy=FAST)
    loaded = load(like, tmp_path / "a")
    for key, leaf in stored.items():
        np.testing.assert_array_equal(loaded[key], leaf)


def test_one_view_of_one_memory_is_tied(tmp_path, problems_of):
    save({"x": A, "y": A}, tmp_path / "a", policy=FAST)
    x = np.zeros((4, 4))
    load({"x": x, "y": x[:]}, tmp_path / "a")
    np.testing.assert_array_equal(x, A)
    check_refused({"x": x, "y": x[:]}, tmp_path / "b", ["y"], problems_of, {"x": A, "y": B})


def test_shards_of_one_memory(tmp_path, problems_of):
    spec = ArraySpec("w", (4, 4), "float64")
    save({"w": A}, tmp_path / "a", policy=FAST)
    memory = np.zeros((4, 4))
    top, bottom = (ShardSpec(spec, Box((i, 0), (i + 2, 4))) for i in (0, 2))
    load({"w": LocalShards((top, bottom), (memory[:2], memory[2:]))}, tmp_path / "a")
    np.testing.assert_array_equal(memory, A)
    for other in (memory[:2], memory[1:3]):
        (problem,) = problems_of(load, {"w": LocalShards((top, bottom), (memory[:2], other))}, tmp_path / "a")
        assert (problem.key, problem.offset) == ("w", (2, 0))


def test_torch(tmp_path, problems_of):
    torch = pytest.importorskip("torch")
    save({"x": A, "y": B}, tmp_path / "a", policy=FAST)
    x = torch.zeros(4, 4, dtype=torch.float64)
    for y in (x.t(), x.numpy(), x.view(16).view(4, 4), x.numpy().T, torch.as_strided(x, (4, 4), (1, 1))):
        problems = problems_of(load, {"x": x, "y": y}, tmp_path / "a")
        assert {p.key for p in problems} == {"y"}, problems
    save({"x": A, "y": A}, tmp_path / "b", policy=FAST)
    load({"x": x, "y": x.numpy()}, tmp_path / "b")
    assert x.tolist() == A.tolist()
    both = torch.zeros(4, 8, dtype=torch.float64)
    load({"x": both[:, :4], "y": both[:, 4:]}, tmp_path / "a")
    assert both.tolist() == np.hstack([A, B]).tolist()


@pytest.mark.filterwarnings("ignore")
def test_dcp(tmp_path):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    from functional_ckpt.torch.dcp.storage_writer import ZarrStorageReader

    save({"x": A, "y": B}, tmp_path / "a", policy=FAST)
    x = torch.zeros(4, 4, dtype=torch.float64)
    with pytest.raises(dcp.api.CheckpointException, match="is shared with"):
        dcp.load({"x": x, "y": x.t()}, storage_reader=ZarrStorageReader(tmp_path / "a"))
    save({"x": A, "y": A.T}, tmp_path / "b", policy=FAST)
    dcp.load({"x": x, "y": x.t()}, storage_reader=ZarrStorageReader(tmp_path / "b"))
    assert x.tolist() == A.tolist()


def test_a_selection_may_leave_out_what_shares_memory(tmp_path):
    save({"x": A, "y": B}, tmp_path / "a", policy=FAST)
    x = np.zeros((4, 4))
    load({"x": x, "y": x.T}, tmp_path / "a", policy=LoadPolicy(keys="x"))
    np.testing.assert_array_equal(x, A)


def test_leaves_that_share_memory_are_read_one_after_the_other(tmp_path, problems_of, monkeypatch):
    """Else one is compared with its digest while the other is written to its place, and called corrupt."""
    monkeypatch.setattr("functional_ckpt.store.work.thread_count", lambda: 8)
    threads, real = set(), FileStore.read_into
    monkeypatch.setattr(FileStore, "read_into", lambda self, *a: (threads.add(get_ident()), real(self, *a)))
    state = {key: np.full((256, 256), n, "f8") for n, key in enumerate("xyz")}
    save(state, tmp_path / "a", policy=FAST)
    x = np.zeros((256, 256))
    problems = problems_of(load, {"x": x, "y": x.T, "z": x[::-1]}, tmp_path / "a")
    assert {p.key for p in problems} == {"y", "z"}
    assert len(threads) == 1


def test_a_transposed_view_of_a_tensor_is_not_that_tensor(tmp_path, problems_of):
    torch = pytest.importorskip("torch")
    like = torch.zeros(4, 4, dtype=torch.float64)
    check_refused({"a": like, "b": like.T}, tmp_path / "a", ["b"], problems_of, {"a": A, "b": A})
