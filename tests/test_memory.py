"""However the elements of a leaf lie in memory, they are saved and filled as what they are."""

import numpy as np
import pytest
import torch

import functional_ckpt
from functional_ckpt import ArraySpec, LocalShards, SavePolicy, ShardSpec, load, open_checkpoint, save
from functional_ckpt.errors import SpecError
from functional_ckpt.spec.array import DTYPES
from functional_ckpt.spec.box import Box
from functional_ckpt.store.encoding import dtype_name
from functional_ckpt.testing.simulate import run_ranks

counter = iter(range(10**6))


@pytest.fixture
def url():
    """A fresh place in memory."""
    return f"memory://memory-{next(counter)}"


BASE = np.arange(120, dtype="i4").reshape(4, 5, 6)


@pytest.mark.parametrize(
    "array",
    [
        BASE.transpose(2, 0, 1), BASE[::2, 1:4], BASE[::-1, :, ::-2], np.asfortranarray(BASE),
        np.broadcast_to(BASE[0, 0], (3, 6)), BASE[1, :, 2], BASE[:, :, 3:3], BASE.astype(">i4"), BASE.astype(">c16"),
        np.zeros((1,) * 32, "i1"), np.frombuffer(bytes(range(8)), "u2"),
    ],
    ids=["transposed", "strided", "negative", "fortran", "broadcast", "column", "empty", "big-endian", "big complex",
         "rank 32", "read-only"],
)  # fmt: skip
def test_any_memory_layout(array, url, same):
    save({"w": array}, url)
    same(load({"w": np.zeros(array.shape, array.dtype.newbyteorder("="))}, url)["w"], np.array(array))
    if array.flags.writeable and array.size:
        target = array.copy()[..., ::-1]  # filled through its own strides
        target[...] = 0
        assert load({"w": target}, url)["w"] is target
        np.testing.assert_array_equal(target, array)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["array", "local shards"])
def test_a_target_that_is_read_only_is_refused(is_sharded, url):
    save({"w": BASE}, url)
    target = np.zeros_like(BASE)
    target.flags.writeable = False
    spec = ArraySpec("w", BASE.shape, "int32")
    with pytest.raises(SpecError, match=r"(?s)read-only.*w.*Pass a writable copy"):
        load({"w": LocalShards(ShardSpec(spec, spec.box), target) if is_sharded else target}, url)


def test_big_endian_target_is_filled(url):
    save({"w": BASE}, url)
    target = np.zeros(BASE.shape, ">i4")
    assert load({"w": target}, url)["w"] is target
    np.testing.assert_array_equal(target, BASE)


def laid(array, order, strides):
    """Return a copy of an array whose elements have a byte order and lie in memory in some way."""
    array = array.astype(array.dtype.newbyteorder(order)) if np.dtype(array.dtype).isbuiltin != 2 else array
    if strides == "F":
        return np.asfortranarray(array)
    if strides == "backwards":
        return array[(slice(None, None, -1),) * array.ndim].copy()[(slice(None, None, -1),) * array.ndim]
    return array.repeat(2, -1)[..., ::2] if strides == "every other" and array.ndim else array.copy()


def leaf_of(kind, array):
    """Return a leaf of some kind that holds all of an array."""
    spec = ArraySpec("", array.shape, dtype_name(array.dtype))
    if kind == "array":
        return array
    if kind == "flat shard":
        return LocalShards(ShardSpec(spec, spec.box, 0, (0, array.size)), array.reshape(-1))
    rows = [Box((0, 0), (1, 4)), Box((1, 0), (3, 4))]
    shards = [ShardSpec(spec, box) for box in ([spec.box] if kind == "shard" else rows)]
    return LocalShards(shards, [array[shard.box.slices] for shard in shards])


@pytest.mark.parametrize("codecs", [(), (("", ("crc32c",)),)], ids=["plain", "codecs"])
@pytest.mark.parametrize("strides", ["C", "F", "backwards", "every other"])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", ["array", "shard", "two shards", "flat shard"])
def test_how_the_elements_lie_in_memory_makes_no_difference(kind, order, strides, codecs, url, same, specials):
    arrays = {name: specials(name) for name in DTYPES}
    policy = SavePolicy(layout=functional_ckpt.LayoutPolicy(codecs=codecs, target_chunk_nbytes=16, min_chunk_nbytes=0))
    strides = "C" if kind == "flat shard" else strides  # they must be contiguous
    plain = save({name: leaf_of(kind, array) for name, array in arrays.items()}, url, policy=policy)
    state = {name: leaf_of(kind, laid(array, order, strides)) for name, array in arrays.items()}
    again = save(state, f"{url}-laid", policy=policy)
    assert [entry.digests for entry in again.arrays] == [entry.digests for entry in plain.arrays]
    same(open_checkpoint(f"{url}-laid").state(), arrays)
    targets = {name: laid(np.zeros_like(array), order, strides) for name, array in arrays.items()}
    load({name: leaf_of(kind, target) for name, target in targets.items()}, url)
    same({name: np.array(target, order="C") for name, target in targets.items()}, arrays)


def test_memory_mapped_arrays(tmp_path, url):
    source = np.memmap(tmp_path / "source", "f4", "w+", shape=(8, 3))
    source[:] = np.arange(24).reshape(8, 3)
    save({"w": source}, url)
    target = np.memmap(tmp_path / "target", "f4", "w+", shape=(8, 3))
    assert load({"w": target}, url)["w"] is target
    np.testing.assert_array_equal(np.fromfile(tmp_path / "target", "f4").reshape(8, 3), source)


@pytest.mark.parametrize(
    "view",
    [lambda t: t.t(), lambda t: t[::2], lambda t: t[1:, 1:], lambda t: t[0].expand(7, 4), lambda t: t.conj(),
    lambda t: t[2, 3],
     lambda t: torch.imag(t.conj()), lambda t: t.as_strided((3, 2), (1, 1))],
    ids=["t", "step", "corner", "expanded", "conj", "scalar", "neg", "overlapping"],
)  # fmt: skip
def test_torch_views(view, url, same):
    leaf = view(torch.randn(6, 4, dtype=torch.complex64))
    save({"w": leaf}, url)
    same(load({"w": torch.zeros(leaf.shape, dtype=leaf.dtype)}, url)["w"], leaf)


def test_non_contiguous_targets_are_filled_in_place(url):
    source = torch.arange(24.0).reshape(4, 6)
    save({"w": source}, url)
    whole = torch.full((6, 9), -1.0)
    target = whole.t()[1:5, :]
    assert load({"w": target}, url)["w"] is target
    assert torch.equal(target, source)
    assert whole.t()[0].eq(-1).all()
    assert whole.t()[5:].eq(-1).all()


def test_copies_of_different_byte_orders_are_copies(tmp_path, fast):
    def saving(gather):
        return save({"w": BASE.astype("<>"[gather.rank] + "i4")}, tmp_path / "a", policy=fast, process_group=gather)

    run_ranks(2, saving)
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "a")["w"][...], BASE)


@pytest.mark.parametrize(
    "views",
    [
        lambda t: (t, t.conj()),
        lambda t: (t.conj(), t),
        lambda t: (torch.imag(t), torch.imag(t.conj())),
        lambda t: (t.conj(), torch._neg_view(t)),
        lambda t: (torch._neg_view(t), torch._neg_view(t.conj())),
    ],
    ids=["conj", "of a conj", "neg", "conj and neg", "neg, and both"],
)
def test_views_that_read_one_memory_in_two_ways_are_not_tied(views, url, same):
    """Address, shape and strides are the same; a flag says that each element is conjugated, or negated."""
    one, other = views(torch.randn(3, 2, dtype=torch.complex64))
    assert one.data_ptr() == other.data_ptr()
    assert save({"a": one, "b": other}, url).aliases == ()
    plain = torch.zeros(one.shape, dtype=one.dtype)
    found = load({"a": plain, "b": plain.clone()}, url)
    same(found, {"a": one, "b": other})
