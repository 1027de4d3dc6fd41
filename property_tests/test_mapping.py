"""M: sharded leaves say of tensors what specs say of arrays, and factories have inverses."""

import copy
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from functional_ckpt.errors import CheckpointError  # noqa: E402
from functional_ckpt.spec.array import ArraySpec  # noqa: E402
from functional_ckpt.spec.box import Box  # noqa: E402
from functional_ckpt.spec.flat import joined  # noqa: E402
from functional_ckpt.spec.shard import narrow_runs  # noqa: E402
from functional_ckpt.spec.sharding import ShardSpec, World, from_rank_offsets, narrow  # noqa: E402
from functional_ckpt.testing import laws, model  # noqa: E402
from functional_ckpt.testing import strategies as fst  # noqa: E402
from functional_ckpt.torch.megatron.factory import built, merged  # noqa: E402
from functional_ckpt.torch.megatron.mapping import (  # noqa: E402
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)
from functional_ckpt.torch.megatron.state_tree import assign_in_place, map_leaves  # noqa: E402
from functional_ckpt.torch.megatron.strategies.checkpointable import CheckpointableShardedTensor  # noqa: E402


@st.composite
def grids(draw, min_rank=0):
    """A local shape, how many axes are prepended, and the number of shards along each global axis."""
    local = tuple(draw(st.lists(st.integers(0, 4), min_size=min_rank, max_size=3)))
    prepended = draw(st.integers(0, 2))
    counts = draw(st.tuples(*(st.integers(1, 3) for _ in range(prepended + len(local)))))
    return local, prepended, counts


@st.composite
def whole_worlds(draw, min_rank=0):
    """All shards of a grid over a numbered array, some of them cut into flat ranges; and the array."""
    local, prepended, counts = draw(grids(min_rank))
    shape = tuple(n * c for n, c in zip((1,) * prepended + local, counts, strict=True))
    whole = torch.arange(int(np.prod(shape))).reshape(shape)
    shards = []
    for cell in np.ndindex(*counts):
        offsets = [(axis, i, c) for axis, (i, c) in enumerate(zip(cell, counts, strict=True))]
        index = tuple(
            i if axis < prepended else slice(i * local[axis - prepended], (i + 1) * local[axis - prepended])
            for axis, i in enumerate(cell)
        )
        data = whole[index]
        if not draw(st.booleans()):
            shards.append(ShardedTensor.from_rank_offsets("w", data, *offsets, prepend_axis_num=prepended))
            continue
        buffer = data.contiguous().reshape(-1).clone()
        for low, high in draw(fst.flat_splits(buffer.numel(), 3)):
            shards.append(
                ShardedTensor.from_rank_offsets_flat(
                    "w", buffer[low:high], local, *offsets,
                    flattened_range=slice(low, high), prepend_axis_num=prepended,
                )
            )  # fmt: skip
    return shards, whole


@given(grids(), st.data())
def test_m1_from_rank_offsets_is_that_of_specs(case, data):
    local, prepended, counts = case
    cell = [data.draw(st.integers(0, c - 1)) for c in counts]
    every = [(axis, i, c) for axis, (i, c) in enumerate(zip(cell, counts, strict=True))]
    offsets = data.draw(st.permutations([triple for triple in every if triple[2] > 1 or data.draw(st.booleans())]))
    replica = data.draw(st.sampled_from([0, 1, (0, 2)]))
    ours = ShardedTensor.from_rank_offsets(
        "w", torch.zeros(local), *offsets, replica_id=replica, prepend_axis_num=prepended
    )
    spec = from_rank_offsets("w", "float32", local, *offsets, replica_id=replica, prepend_axes=prepended)
    assert ours.spec == spec
    assert ours.has_regular_grid
    if all(local):
        assert ours.local_chunk_offset_in_global() == tuple(cell)
    assert ours.max_allowed_chunks() == spec.box.shape


@given(whole_worlds())
def test_m1_shards_tile_flat_ones_too(case):
    shards, whole = case
    laws.check_tiles(World([[shard.spec for shard in shards]]))
    for shard in shards:
        laws.check_fragments(shard.spec, shard.data.numpy(), whole.numpy())
        expected = whole[shard.global_slice()].reshape(-1)
        part = shard.flattened_range or slice(None)
        assert torch.equal(expected[part], shard.data.reshape(-1))


@given(whole_worlds(min_rank=1), st.data())
def test_m2_narrow_commutes_with_data(case, data):
    shards, whole = case
    ndim = len(shards[0].local_shape)
    axis = data.draw(st.integers(0, ndim - 1))
    dim = axis - data.draw(st.sampled_from([0, ndim]))
    extent, global_axis = shards[0].local_shape[axis], axis + shards[0].prepend_axis_num
    start = data.draw(st.integers(0, extent))
    length = data.draw(st.integers(0, extent - start))
    keep = [i for i in range(whole.shape[global_axis]) if start <= i % extent < start + length]
    small = whole.index_select(global_axis, torch.tensor(keep, dtype=torch.int64)).numpy()
    found = []
    for shard in shards:
        parts = shard.narrow(dim, start, length)
        event(f"flat: {shard.flattened_range is not None}, parts: {min(len(parts), 3)}")
        assert len(parts) == 1 or shard.flattened_range is not None
        coordinate = np.indices(shard.local_shape)[axis].reshape(-1)[shard.flattened_range or slice(None)]
        survivors = shard.data.reshape(-1)[(coordinate >= start) & (coordinate < start + length)]
        assert torch.equal(torch.cat([p.data.reshape(-1) for p in parts] or [survivors[:0]]), survivors)
        for part in parts:
            laws.check_fragments(part.spec, part.data.numpy(), small)
            assert part.data.untyped_storage()._cdata == shard.data.untyped_storage()._cdata
        found += [part.spec for part in parts]
    if found:
        laws.check_tiles(World([found]))


@st.composite
def flat_narrowings(draw):
    """A flat shard, one of its axes, and the range of it that is kept."""
    array = ArraySpec("w", draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)), "int8")
    low, high = sorted(draw(st.integers(0, array.box.size)) for _ in range(2))
    axis = draw(st.integers(0, len(array.shape) - 1))
    start = draw(st.integers(0, array.shape[axis]))
    return ShardSpec(array, array.box, 0, (low, high)), axis, start, draw(st.integers(0, array.shape[axis] - start))


@given(flat_narrowings())
@example((ShardSpec(ArraySpec("w", (2, 3), "int8"), Box((0, 0), (2, 3)), 0, (1, 6)), 1, 1, 1))
def test_m2_runs_of_a_narrowed_flat_shard_are_what_narrow_says(case):
    runs = narrow_runs(*case)
    assert tuple(joined(run.shard.flat for run in runs)) == tuple(shard.flat for shard in narrow(*case))
    assert all(one.stop < other.start for one, other in pairwise(runs))
    assert all(run.shard.size == run.stop - run.start for run in runs)


@st.composite
def fields(draw):
    """Fields of a shard: mostly possible ones, with a fault in some."""
    sizes, fault = st.integers(0, 4), draw(st.booleans())
    local = draw(st.lists(sizes, max_size=3))
    prepended = draw(st.integers(0, 2))
    counts = draw(st.tuples(*(st.integers(1, 3) for _ in range(prepended + len(local)))))
    whole = [n * c for n, c in zip([1] * prepended + local, counts, strict=True)]
    offset = [draw(st.integers(0, c - 1)) * n for n, c in zip([1] * prepended + local, counts, strict=True)]
    found = [local, whole, offset, draw(st.none() | st.just(list(counts)))]
    if fault:
        victim = found[draw(st.integers(0, 2))]
        victim[draw(st.integers(0, len(victim))) :] = draw(st.lists(st.integers(-2, 5), max_size=2))
    part = draw(st.none() | st.builds(slice, st.integers(-1, 5), st.integers(0, 8)))
    return *(value if value is None else tuple(value) for value in found), prepended, part


def attempt(function):
    """Return what `function` returns, or the error of ours that it raises."""
    try:
        return function()
    except CheckpointError as error:
        return error


@given(fields())
def test_m3_any_fields_make_a_shard_in_its_array_or_our_exception(case):
    local, whole, offset, counts, prepended, part = case
    shard = attempt(
        lambda: ShardedTensor(
            "w", None, torch.int8, local, whole, offset, counts, prepend_axis_num=prepended, flattened_range=part
        )
    )
    event(type(shard).__name__)
    if isinstance(shard, CheckpointError):
        assert shard.key == "w"
        return
    assert Box.from_shape(whole).contains(shard.spec.box)
    shard.init_data("cpu", torch.zeros)
    assert shard.data.numel() == shard.spec.size
    assert len(shard.global_slice()) == len(whole)


@given(
    fst.keys() | st.text(),
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 99)), max_size=3),
    st.sampled_from([0, (0, 1)]),
)
@example("a/shard_0_1/b_c", [(1, 2)], 0)
def test_m4_unique_keys_round_trip(key, axes, replica):
    offset, shape = tuple(o for o, _ in axes), tuple(n for _, n in axes)
    thing = ShardedObject(key, None, shape, offset, replica)
    assert ShardedObject.empty_from_unique_key(thing.unique_key, replica) == thing


@given(fst.keys(), fst.keys(), *(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=2),) * 2)
def test_m4_unique_keys_are_unique(key, other, axes, others):
    one, two = (
        ShardedObject(k, None, tuple(n for _, n in a), tuple(o for o, _ in a))
        for k, a in ((key, axes), (other, others))
    )
    assert (one.unique_key == two.unique_key) is (one == two)


def chunks_along(dim, count):
    """Return functions that cut a tensor into chunks along `dim`, and glue them."""

    def build(key, tensor, replica_id, flattened_range):
        return [
            ShardedTensor.from_rank_offsets(f"{key}.{i}", part, replica_id=replica_id)
            for i, part in enumerate(torch.chunk(tensor, count, dim))
        ]

    return build, lambda loaded: torch.cat(loaded, dim)


def transposed(key, tensor, replica_id, flattened_range):
    return {"t": ShardedTensor.from_rank_offsets(key, tensor.T)}


@st.composite
def factories(draw):
    data = torch.arange(12).reshape(draw(st.sampled_from([(3, 4), (12, 1), (1, 12)])))
    build, merge = draw(
        st.sampled_from([*(chunks_along(d, n) for d in (0, 1) for n in (1, 2, 3)), (transposed, lambda x: x["t"].T)])
    )
    return ShardedTensorFactory(draw(fst.keys()), data, build, merge)


TREES = st.recursive(
    factories() | st.integers() | st.just(()) | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=8,
)
STATES = st.lists(TREES, max_size=3) | st.dictionaries(st.text(max_size=3), TREES, max_size=3)


def skeleton(tree):
    """Return the factories of a tree at their places; lists with other leaves become dicts by position."""
    if isinstance(tree, ShardedTensorFactory):
        return tree
    if not isinstance(tree, dict | list):
        return None
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found = {k: part for k, child in pairs if (part := skeleton(child)) is not None}
    if isinstance(tree, list) and found and len(found) == len(tree):
        return list(found.values())
    return found or None


def loaded(tree):
    """Return what a load makes of a state dict: its own copies."""
    return map_leaves(lambda leaf: leaf.data.clone() if isinstance(leaf, ShardedTensor) else leaf, tree)


def unwrapped(tree):
    return map_leaves(lambda leaf: leaf.data if isinstance(leaf, ShardedTensorFactory) else leaf, tree)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or one == other


def containers(tree):
    """Return the containers of a tree, by path, down to the factories."""
    found = {(): tree}
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for place, child in pairs:
        if isinstance(child, dict | list):
            found |= {(place, *path): node for path, node in containers(child).items()}
    return found


@given(STATES)
def test_m5_merges_are_the_inverse_of_factories(state):
    parts = skeleton(state)
    event(f"factories: {parts is not None}")
    values = unwrapped(state)
    assert same(merged(loaded(built(state)), parts if parts is not None else {}), values)


@given(STATES)
def test_m5_in_place_is_pure_in_the_same_containers(state):
    parts, expected, values = skeleton(state), built(state), unwrapped(state)
    before = containers(state)
    apply_factories(state)
    assert same(loaded(state), loaded(expected))
    after = containers(state)
    assert all(after[path] is node for path, node in before.items())
    found = loaded(state)
    kept = {path: node for path, node in containers(found).items() if path in before}
    assert apply_factory_merges(found, parts if parts is not None else {}) is found
    assert same(found, values)
    assert all(containers(found)[path] is node for path, node in kept.items())


PLAIN = st.recursive(
    st.integers(0, 3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


LISTS, DICTS = st.lists(PLAIN, max_size=3), st.dictionaries(st.sampled_from("abc"), PLAIN, max_size=3)


@given(st.tuples(LISTS, LISTS) | st.tuples(DICTS, DICTS))
def test_m5_assigning_makes_equal_and_leaves_the_source(case):
    target, source = case
    before, nodes = copy.deepcopy(source), containers(target)
    kinds = {path: type(node) for path, node in nodes.items()}
    assign_in_place(target, source)
    assert target == source == before
    for path, node in containers(target).items():
        chain = [path[:i] for i in range(len(path) + 1)]
        if all(kinds.get(p) is type(containers(target)[p]) for p in chain):
            assert node is nodes[path]


@given(whole_worlds())
def test_m6_pieces_for_dcp_are_the_shard_and_views_of_it(case):
    shards, whole = case
    boxes = []
    for shard in shards:
        value = CheckpointableShardedTensor.from_sh_ten(shard)
        items = value.__create_write_items__("name", value)
        chunks = value.__create_chunk_list__()
        assert [item.tensor_data.chunk for item in items] == chunks
        for item in items:
            view = value.__get_tensor_shard__(item.index)
            box = Box.from_shape(item.tensor_data.chunk.sizes, item.tensor_data.chunk.offsets)
            boxes.append(box)
            assert tuple(item.tensor_data.size) == tuple(whole.shape)
            assert torch.equal(view, whole[box.slices])
            if view.numel():
                assert view.untyped_storage()._cdata == shard.data.untyped_storage()._cdata
    assert (model.counts(tuple(whole.shape), boxes) == 1).all()
    assert boxes
