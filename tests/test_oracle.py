"""zarr-python and TensorStore read what we write, and TensorStore writes the same bytes from our metadata."""

import json

import numpy as np
import pytest
import tensorstore as ts
import zarr

import functional_ckpt.store.zarr_dtypes  # noqa: F401 - teaches zarr the types of machine learning
from functional_ckpt import Box, LayoutPolicy, SavePolicy, open_checkpoint, save
from functional_ckpt.spec.array import DTYPES
from functional_ckpt.store.encoding import numpy_dtype
from functional_ckpt.testing.simulate import run_ranks
from functional_ckpt.testing.values import special_words

# zarr lists a group without consolidated metadata file by file, and says that manifest.json is no array.
pytestmark = pytest.mark.filterwarnings("ignore:Object at .* is not recognized")

CODECS = {
    "none": (),
    "zstd": ("zstd:2",),
    "gzip": ("gzip:6",),
    "blosc": ("blosc:4",),
    "crc32c": ("crc32c",),
    "two": ("zstd", "crc32c"),
}


def array_of(dtype, shape):
    words = special_words(dtype)
    size = int(np.prod(shape)) * numpy_dtype(dtype).itemsize // words.itemsize
    return np.resize(words, size).view(numpy_dtype(dtype)).reshape(shape)


def tensorstore_read(path):
    return ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}).result().read().result()


def policy_of(itemsize, codecs=(), chunk_items=8):
    layout = LayoutPolicy(target_chunk_nbytes=chunk_items * itemsize, min_chunk_nbytes=0, codecs=(("", codecs),))
    return SavePolicy(layout=layout, durability="none")


def rewritten_by_tensorstore(source, into):
    """Write an array of ours again, by TensorStore from our zarr.json; return its files, name -> bytes."""
    metadata = json.loads((source / "zarr.json").read_bytes())
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(into)}, "store_data_equal_to_fill_value": True}
    array = ts.open({**spec, "metadata": metadata}, create=True).result()
    array.write(tensorstore_read(source)).result()
    return {p.name: p.read_bytes() for p in into.iterdir()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype, tmp_path, same):
    state = {"w": array_of(dtype, (5, 7)), "scalar": array_of(dtype, ()), "empty": array_of(dtype, (0, 3))}
    save(state, tmp_path / "a", policy=policy_of(DTYPES[dtype][0]))
    group = zarr.open_group(tmp_path / "a", mode="r")
    assert sorted(group.array_keys()) == sorted(state)
    for key, array in state.items():
        same(np.asarray(group[key][...]), array)
        same(tensorstore_read(tmp_path / "a" / key), array)
        ours = {p.name: p.read_bytes() for p in (tmp_path / "a" / key).iterdir()}
        theirs = rewritten_by_tensorstore(tmp_path / "a" / key, tmp_path / key)
        header, other = json.loads(ours.pop("zarr.json")), json.loads(theirs.pop("zarr.json"))
        assert ours == theirs
        assert {k: v for k, v in header.items() if k in other} == other


@pytest.mark.parametrize("codecs", CODECS)
@pytest.mark.parametrize(
    ("shape", "items"), [((9, 5), 10), ((9, 5), 3), ((13,), 4), ((2, 3, 5), 7), ((), 1), ((4, 4), 1000)], ids=str
)
def test_codecs_and_edge_chunks(codecs, shape, items, tmp_path, same):
    array = np.arange(np.prod(shape), dtype="i4").reshape(shape)
    save({"w": array}, tmp_path / "a", policy=policy_of(4, CODECS[codecs], items))
    same(np.asarray(zarr.open_group(tmp_path / "a", mode="r")["w"][...]), array)
    same(tensorstore_read(tmp_path / "a/w"), array)
    theirs = rewritten_by_tensorstore(tmp_path / "a/w", tmp_path / "w")
    ours = {p.name: p.read_bytes() for p in (tmp_path / "a/w").iterdir()}
    assert ours.keys() == theirs.keys()
    if codecs in ("none", "crc32c"):  # a compressor may choose its bytes
        assert {k: v for k, v in ours.items() if k != "zarr.json"} == {
            k: v for k, v in theirs.items() if k != "zarr.json"
        }


def test_chunks_of_several_writers(tmp_path, same, piece, gather_only):
    array = np.arange(1.0, 61).reshape(10, 6)
    layout = LayoutPolicy(shared_chunk_nbytes=200)
    boxes = [Box((0, 0), (3, 6)), Box((3, 0), (4, 6)), Box((4, 0), (10, 6))]
    policy = SavePolicy(layout=layout, durability="none")

    def saving(gather):
        state = {"w": piece(array, boxes[gather.rank])}
        return save(state, tmp_path / "a", policy=policy, process_group=gather_only(gather))

    run_ranks(3, saving)
    assert open_checkpoint(tmp_path / "a").manifest.by_key["w"].layout.ownership == "shared"
    same(np.asarray(zarr.open_group(tmp_path / "a", mode="r")["w"][...]), array)
    theirs = rewritten_by_tensorstore(tmp_path / "a/w", tmp_path / "w")
    ours = {p.name: p.read_bytes() for p in (tmp_path / "a/w").iterdir()}
    theirs.pop("zarr.json")
    assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.parametrize("consolidate", [True, False])
def test_zarr_lists_every_key(consolidate, tmp_path, same):
    names = [
        "layers.0.weight",
        "W",
        "w",
        "a/b",
        "a\\b",
        "ü",
        "",
        ".",
        "..",
        "__x",
        "zarr.json",
        "k" * 300,
        "a b",
        "~",
        "#?%",
    ]
    state = {name: np.arange(i + 1) for i, name in enumerate(names)}
    save(state, tmp_path / "a", policy=SavePolicy(consolidate=consolidate, durability="none"))
    group = zarr.open_group(tmp_path / "a", mode="r")
    seen = {array.attrs["functional_ckpt"]["key"]: np.asarray(array[...]) for _, array in group.arrays()}
    same(seen, state)
    for _, array in group.arrays():
        assert array.metadata.dimension_names == (f"{array.attrs['functional_ckpt']['key']}:0",)


def test_values_are_readable_in_zarr(tmp_path, fast):
    save({"lr": 0.1, "betas": (0.9, float("inf")), "w": np.ones(1)}, tmp_path / "a", policy=fast)
    values = zarr.open_group(tmp_path / "a", mode="r").attrs["functional_ckpt"]["values"]
    assert values == {"lr": 0.1, "betas": {"~tuple": [0.9, {"~float": "inf"}]}}


def test_all_zero_chunks_are_stored(tmp_path, fast):
    state = {"w": np.zeros(40), "z": np.zeros(40)}
    layout = LayoutPolicy(target_chunk_nbytes=80, min_chunk_nbytes=0, codecs=(("z", ("zstd",)),))
    save(state, tmp_path / "a", policy=SavePolicy(layout=layout, durability="none"))
    for key in state:
        assert len(list((tmp_path / "a" / key).glob("c.*"))) == 4
