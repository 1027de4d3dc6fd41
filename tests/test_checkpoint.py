"""`open_checkpoint`: a mapping of lazy arrays that index as numpy does, and the tree they stand in."""

from collections.abc import Mapping

import numpy as np
import pytest

from functional_ckpt import Checkpoint, LayoutPolicy, PerRank, SavePolicy, StoredArray, open_checkpoint, save
from functional_ckpt.errors import KeyMismatchError, ShapeError
from functional_ckpt.store.files import FileStore

CUBE = np.arange(7 * 5 * 6, dtype="f4").reshape(7, 5, 6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """An open checkpoint whose arrays have many chunks, with ragged edges."""
    layout = LayoutPolicy(target_chunk_nbytes=100, min_chunk_nbytes=0, codecs=(("zipped", ("zstd",)),))
    tied = np.arange(11)
    state = {"cube": CUBE, "zipped": CUBE, "scalar": np.array(2.5), "empty": np.zeros((3, 0, 2)), "a": tied,
    "b": {"c": tied},
             "step": 7, "p": PerRank({"x": np.ones(2), "n": 1}), "s": [{0: np.arange(2)}, (1, 2)]}  # fmt: skip
    state["zipped"] = CUBE.copy()
    path = tmp_path_factory.mktemp("open") / "a"
    save(state, path, policy=SavePolicy(layout=layout, durability="none"), attributes={"run": [1, "x"]})
    return open_checkpoint(path)


def test_it_is_a_mapping(checkpoint):
    assert isinstance(checkpoint, Mapping)
    assert isinstance(checkpoint, Checkpoint)
    assert list(checkpoint) == ["a", "b.c", "cube", "empty", "p.rank0.x", "s.0.0", "scalar", "zipped"]
    assert len(checkpoint) == 8
    assert "cube" in checkpoint
    assert "step" not in checkpoint
    assert checkpoint.get("nothing") is None
    with pytest.raises(KeyMismatchError, match="nothing"):
        checkpoint["nothing"]
    with pytest.raises(KeyError):
        checkpoint["nothing"]


def test_facts_of_an_array(checkpoint):
    array = checkpoint["cube"]
    assert isinstance(array, StoredArray)
    assert (array.key, array.shape, array.dtype, array.nbytes) == ("cube", (7, 5, 6), "float32", 840)
    assert array.chunks == checkpoint.manifest.by_key["cube"].layout.chunk
    assert array.chunks < (7, 5, 6)
    assert (checkpoint["scalar"].shape, checkpoint["scalar"].chunks) == ((), ())
    assert checkpoint["b.c"].key == "a"
    assert dict(checkpoint.attributes) == {"run": [1, "x"]}
    with pytest.raises(TypeError):
        checkpoint.attributes["run"] = 2


INDICES = [
    (), ..., 0, -1, 3, np.int64(2), slice(None), slice(2, 5), slice(None, None, 2), slice(None, None, -1), slice(5,
    1, -2),
    slice(-3, None), slice(3, 3), slice(100, 200), slice(-100, 100, 3), (1, 2), (1, 2, 3), (-1, -1, -1), (slice(1,
    3), 2),
    (slice(None), slice(None, None, -3), slice(1, -1)), (..., 0), (0, ...), (1, ..., 2), (1, 2, 3, ...), (...,
    slice(None, None, -1)),
    (slice(4, 2), 1, ...), (slice(6, None, -6), slice(4, None, -5), 5), (slice(None), slice(1, 2), slice(5, 0, -4)),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=repr)
@pytest.mark.parametrize("key", ["cube", "zipped"])
def test_indexing_is_that_of_numpy(checkpoint, key, index, same):
    same(checkpoint[key][index], CUBE[index])


def test_random_indices(checkpoint, same):
    random = np.random.default_rng(0)

    def axis(extent):
        if random.random() < 0.25:
            return int(random.integers(-extent, extent))
        low, high = (None if random.random() < 0.3 else int(random.integers(-extent - 2, extent + 3)) for _ in range(2))
        return slice(low, high, int(random.choice([-3, -2, -1, 1, 2, 3])))

    for _ in range(150):
        index = tuple(axis(n) for n in CUBE.shape[: random.integers(0, 4)])
        same(checkpoint["cube"][index], CUBE[index])


@pytest.mark.parametrize("index", [(), ..., (...,)], ids=repr)
def test_rank_0(checkpoint, index, same):
    same(checkpoint["scalar"][index], np.array(2.5)[index])


@pytest.mark.parametrize("index", [..., 1, slice(1), (slice(None), slice(None), 1), (2, ..., 0)], ids=repr)
def test_arrays_without_cells(checkpoint, index, same):
    same(checkpoint["empty"][index], np.zeros((3, 0, 2))[index])


@pytest.mark.parametrize("index", [7, -8, (0, 5), (0, 0, 0, 0), (slice(None),) * 4], ids=repr)
def test_indices_outside(checkpoint, index):
    with pytest.raises(IndexError):
        CUBE[index]
    with pytest.raises(IndexError):
        checkpoint["cube"][index]


@pytest.mark.parametrize(
    "index", [[0, 1], None, np.array([1]), True, np.bool_(True), "x", 1.5, (..., ...), (0, [1])], ids=repr
)
def test_other_indices_are_refused(checkpoint, index):
    with pytest.raises(ShapeError) as caught:
        checkpoint["cube"][index]
    assert caught.value.key == "cube"


def test_only_touched_chunks_are_read(checkpoint, monkeypatch):
    read = []
    for name in ("read", "scan", "read_into", "read_ranges"):
        real = getattr(FileStore, name)
        monkeypatch.setattr(FileStore, name, lambda self, n, *a, real=real: (read.append(n), real(self, n, *a))[1])
    array = checkpoint["cube"]
    assert read == []
    assert array[0, 0, 0] == 0
    assert [name for name in read if "/" in name] == ["cube/c.0.0.0"]
    read.clear()
    assert array[0:0].shape == (0, 5, 6)
    assert [name for name in read if "/" in name] == []


def test_tree_holds_values_and_lazy_arrays(checkpoint):
    tree = checkpoint.tree()
    assert tree["step"] == 7
    assert isinstance(tree["b"]["c"], StoredArray)
    assert tree["p"][0]["n"] == 1
    assert tree["s"][1] == (1, 2)


def test_state(checkpoint, same):
    state = checkpoint.state()
    same(state["cube"], CUBE)
    same(state["s"], [{0: np.arange(2)}, (1, 2)])
    same(state["p"], {0: {"x": np.ones(2), "n": 1}})
    assert state["a"] is state["b"]["c"]
    state["cube"][:] = 0  # ours to change
    same(checkpoint["cube"][...], CUBE)


def test_torch(checkpoint, same):
    torch = pytest.importorskip("torch")
    same(checkpoint["cube"].torch(), torch.from_numpy(CUBE))
    same(checkpoint["scalar"].torch(), torch.tensor(2.5, dtype=torch.float64))
    assert checkpoint["empty"].torch().shape == (3, 0, 2)
    state = checkpoint.state("torch")
    assert state["a"] is state["b"]["c"]
    assert state["step"] == 7


def test_a_stored_array_is_one_for_numpy(tmp_path, fast):
    x = np.arange(6.0).reshape(2, 3)
    save({"w": x, "step": 7}, tmp_path / "a", policy=fast)
    stored = open_checkpoint(tmp_path / "a")["w"]
    np.testing.assert_array_equal(np.asarray(stored), x)
    assert (len(stored), stored.ndim, np.asarray(stored, "f4").dtype) == (2, 2, np.float32)


def test_a_plain_value_is_not_an_array(tmp_path, fast):
    save({"w": np.ones(2), "step": 7}, tmp_path / "a", policy=fast)
    with pytest.raises(KeyError, match="plain value"):
        open_checkpoint(tmp_path / "a")["step"]
