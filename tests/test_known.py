"""What is remembered from save to save, or found by a shorter way, is what the long way gives: fact by fact, twice."""

import copy
import pickle
import warnings
from itertools import combinations

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from functional_ckpt.errors import CheckpointError
from functional_ckpt.plan.derived import Deriving
from functional_ckpt.plan.layout import Layout
from functional_ckpt.run.leaves import LocalShards, NumpyLeaves, Target, adapter_of
from functional_ckpt.spec.array import ArraySpec, known_spec
from functional_ckpt.spec.box import Box, known_box
from functional_ckpt.spec.shard import ShardSpec, known_shard
from functional_ckpt.store import encoding
from functional_ckpt.store.buffer import HostBuffer, address_of
from functional_ckpt.torch import memory, tensors
from functional_ckpt.torch.local import LocalTensors, OpaqueObject

SPEC = ArraySpec("w", (4, 2), "bfloat16")
SHARD = {"array": SPEC, "box": Box((0, 0), (2, 2)), "replica_id": (0,), "flat": None, "grid": None}
LAYOUT = Layout("exclusive", (2, 2), (), "bfloat16")
SPECS = [SPEC, *(attrs.evolve(SPEC, **fact) for fact in ({"key": "v"}, {"shape": (4, 3)}, {"dtype": "uint16"}))]
SHARDS = [SHARD, *({**SHARD, **fact} for fact in (
    {"array": SPECS[1]}, {"array": SPECS[2]}, {"array": SPECS[3]}, {"box": Box((0, 0), (2, 1))},
    {"box": Box((2, 0), (4, 2))}, {"replica_id": (1,)}, {"flat": (0, 3)}, {"grid": (2, 1)},
))]  # fmt: skip
LAYOUTS = [LAYOUT, *(attrs.evolve(LAYOUT, **fact) for fact in (
    {"chunk": (1, 2)}, {"codecs": ("zstd:3",)}, {"codecs": ("zstd:4",)}, {"stored": "uint16"},
))]  # fmt: skip


@attrs.frozen
class Number(Deriving):
    """A value that keeps what is made of it."""

    of: int


def added(number, more):
    return [number.of + more]


def test_what_is_derived_is_kept_with_one_value_and_for_all_arguments():
    one = Number(1)
    assert [one.derived(added, more) for _ in range(2) for more in (1, 2)] == [[2], [3]] * 2
    assert one.derived(added, 1) is one.derived(added, 1)
    assert one == Number(1)
    # Another value, however it came to be, makes its own.
    for other in (Number(1), attrs.evolve(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert other.derived(added, 1) == [2]
        assert other.derived(added, 1) is not one.derived(added, 1)
    assert attrs.evolve(one, of=5).derived(added, 1) == [6]
    assert pickle.dumps(one) == pickle.dumps(Number(1)), "what is derived travels with the value"


def test_a_known_shard_is_the_shard():
    for _ in range(2):
        for fields in SHARDS:
            assert known_shard(*fields.values()) == ShardSpec(**fields)
            assert known_shard(*fields.values()) is known_shard(*fields.values())


def test_a_known_spec_and_a_known_box_are_spec_and_box():
    for _ in range(2):
        for spec in SPECS:
            assert known_spec(*attrs.astuple(spec)) == spec
        for shape, offset in (((2, 3), (0, 0)), ((2, 3), (1, 0)), ((3, 2), (1, 0)), ((2,), (1,))):
            assert known_box(shape, offset) == Box.from_shape(shape, offset)


@pytest.mark.parametrize("name", ["array_metadata", "named_metadata"])
def test_a_known_header_is_of_all_of_spec_and_layout(name):
    """The text is kept for each spec and layout, and around the key for all that differ only in that."""
    function, cases = getattr(encoding, name), [(spec, layout) for spec in SPECS for layout in LAYOUTS]

    def fresh(case):
        encoding.array_metadata.cache_clear()
        encoding._metadata_parts.cache_clear()
        return function(*case)

    expected = [fresh(case) for case in cases]
    assert len({*expected}) == len(cases)
    assert [function(*case) for _ in range(2) for case in cases] == 2 * expected


class Subclass(torch.Tensor):
    """A subclass, which the format has no place for, though numpy makes an array of it."""


class Parameter(torch.nn.Parameter):
    """A subclass that is a plain tensor once it is detached."""


ONES = torch.ones(2, 3)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of kinds that torch calls experimental
    TENSORS = {
        "dense": ONES, "strided": ONES.t(), "parameter": torch.nn.Parameter(ONES), "part": ONES[1:], "empty": ONES[:0],
        "scalar": torch.tensor(3), "bfloat16": ONES.bfloat16(), "bool": ONES.bool(), "wants a gradient": ONES.bfloat16()
        .requires_grad_(), "complex": torch.ones(3) * 1j, "conjugated": (torch.ones(3) * 1j).conj(),
        "negated": (torch.ones(3) * 1j).conj().imag, "negated bits": torch._neg_view(ONES.bfloat16()),
        "repeated": ONES[:1].expand(4, 3), "meta": torch.ones(3, device="meta"), "sparse": ONES.to_sparse(),
        "complex32": torch.ones(3).to(torch.complex32), "subclass of parameters": Parameter(ONES),
        "quantized": torch.quantize_per_tensor(ONES, 0.1, 0, torch.quint8),
        "subclass": ONES.as_subclass(Subclass), "sparse rows": ONES.bfloat16().to_sparse_csr(),
    }  # fmt: skip


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_is_described_as_if_all_was_asked(kind):
    """A plain tensor is described by one call of torch's `numpy`, which must refuse what needs a closer look."""
    tensor = TENSORS[kind]

    def told(describe):
        try:
            dtype, buffer = describe()
        except CheckpointError as error:
            return str(error)
        array = buffer.array
        shared = buffer.address == tensor.data_ptr()
        return dtype, shared, array.dtype, array.shape, array.strides, array.tobytes()

    def ask_all():
        tensors._check_readable("w", tensor, 0)
        return tensors.dtype_name_of("w", tensor), memory.buffer_of("w", tensors._resolved(tensor))

    assert told(lambda: tensors.readable("w", tensor, 0)) == told(ask_all)


@pytest.fixture
def line():
    """A mesh of one rank."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


NEVER_CUT = ("scalar", "subclass", "subclass of parameters", "sparse", "sparse rows", "quantized", "complex32")
LEAVES = [(kind, is_cut) for kind in TENSORS for is_cut in (False, True) if not (is_cut and kind in NEVER_CUT)]


@pytest.mark.parametrize(("kind", "is_cut"), LEAVES)
def test_a_leaf_is_described_as_if_all_was_asked(kind, is_cut, line, monkeypatch):
    """What a short look tells of a tensor, or of a local tensor, is what asking for each of its facts tells."""
    leaf = DTensor.from_local(TENSORS[kind], line, [Shard(0)], run_check=False) if is_cut else TENSORS[kind]

    def told(describe):
        try:
            found, again = describe(), describe()
        except CheckpointError as error:
            return str(error)
        buffer, shards = found.buffers[0], found.shards if isinstance(found, Target) else found.all_shards(0)
        local = leaf._local_tensor if is_cut else leaf
        facts = buffer.array.dtype, buffer.array.shape, buffer.array.strides, kind == "meta" or buffer.array.tobytes()
        return buffer.address == local.data_ptr(), found.identity == again.identity, len(found.buffers), shards, facts

    calls = [
        lambda: tensors.TORCH_LEAVES.hold("w", leaf, 0),
        lambda: tensors.TORCH_LEAVES.target("w", leaf, 0, "cpu"),
    ]
    short = [told(call) for call in calls]
    monkeypatch.setattr(tensors, "host_memory", lambda key, tensor: None)
    assert short == [told(call) for call in calls]


def test_a_part_of_a_mesh_is_known_by_the_rank_too():
    """A process may join another group later, with another rank: the same part of the mesh is then other ranks."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    for rank, ranks in ((0, (0, 1)), (2, (2, 3)), (0, (0, 1))):
        dist.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=4)
        try:
            rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "rows"))["rows"]
            held = tensors.TORCH_LEAVES.hold("w", DTensor.from_local(ONES, rows, [Shard(0)], run_check=False), rank)
        finally:
            dist.destroy_process_group()
        assert held.sharding.mesh.ranks == ranks
        assert [shard.box.shape for shard in held.all_shards(rank)] == [ONES.shape]


def test_leaves_of_each_kind_have_their_adapter():
    part = ShardSpec(SPEC, SPEC.box)
    ours = [np.ones(3), np.float32(3), np.memmap, SPEC, part, LocalShards(part, np.ones((4, 2)))]
    ours[2] = np.ones(3).view(np.recarray)
    theirs = [ONES, torch.nn.Parameter(ONES), LocalTensors((part,), (ONES,)), OpaqueObject(3), Subclass()]
    neither = [3, "x", None, np.str_("x"), np.datetime64("2026-01-01"), np.longdouble(1), {}, object()]
    for _ in range(2):
        assert all(isinstance(adapter_of(leaf), NumpyLeaves) for leaf in ours)
        assert all(adapter_of(leaf) is tensors.TORCH_LEAVES for leaf in theirs)
        assert [adapter_of(leaf) for leaf in neither] == [None] * len(neither)


def test_buffers_of_one_memory_are_equal():
    array = np.arange(6, dtype="f4")
    same = [array, array[:], torch.from_numpy(array).numpy()]
    others = [array[1:], array[::2], array[:3], array.reshape(2, 3), array.reshape(3, 2), array.reshape(3, 2).T,
              array.view("i4"), array.view(">f4"), array.copy()]  # fmt: skip
    distinct = {HostBuffer(each, address_of(each)) for each in (*same, *others)}
    assert len(distinct) == 1 + len(others)
    assert all(one != other for one, other in combinations(distinct, 2))  # whatever their hashes are
    assert HostBuffer(array) != HostBuffer(array)  # nobody knows where they are
