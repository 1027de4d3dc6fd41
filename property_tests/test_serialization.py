"""Laws of saving and loading sharded leaves: any cut loads what any other saved, flat or not."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from functional_ckpt.torch.megatron.mapping import ShardedTensor  # noqa: E402
from functional_ckpt.torch.megatron.state_tree import NOTHING, joined, picked, with_lists  # noqa: E402
from functional_ckpt.torch.megatron.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy  # noqa: E402

NUMBER = itertools.count()


@st.composite
def shardings(draw, whole):
    """Return shards that tile a tensor: slabs along an axis, each flat and cut anywhere, or not."""
    axis = draw(st.integers(0, whole.dim() - 1))
    extent = whole.shape[axis]
    cuts = [0, *sorted(draw(st.sets(st.integers(1, extent - 1), max_size=3)) if extent > 1 else []), extent]
    shards = []
    for low, high in itertools.pairwise(cuts):
        offset = [0] * whole.dim()
        offset[axis] = low
        part = whole.narrow(axis, low, high - low)
        ranges = [None]
        if draw(st.booleans()):
            at = sorted(draw(st.lists(st.integers(0, part.numel()), max_size=3)))
            ranges = [slice(a, b) for a, b in itertools.pairwise([0, *at, part.numel()])]
        shards += [
            ShardedTensor(
                "w", (part if r is None else part.reshape(-1)[r]).clone(), whole.dtype, tuple(part.shape),
                tuple(whole.shape), tuple(offset), None, flattened_range=r,
            )
            for r in ranges
        ]  # fmt: skip
    return shards


@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_f1_any_cut_loads_what_any_other_saved(data, shape):
    """F1."""
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    source, target = data.draw(shardings(whole)), data.draw(shardings(whole))
    path = f"memory://f1-{next(NUMBER)}"
    ZarrSaveShardedStrategy().save({"any": source}, path)
    want = [shard.data.clone() for shard in target]
    for shard in target:
        shard.data.fill_(-1)
    found = ZarrLoadShardedStrategy().load([target], path)[0]
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


trees = st.recursive(
    st.integers(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.sampled_from("abc"), children, max_size=3),
    max_leaves=8,
)


@given(trees.filter(lambda tree: isinstance(tree, dict | list)), st.integers(2, 4))
def test_f2_a_tree_is_the_join_of_its_parts(tree, modulus):
    """F2."""
    parts = [picked(lambda leaf: leaf % modulus != 0, tree, empty=True), picked(lambda leaf: leaf % modulus == 0, tree)]
    parts = [part for part in parts if part is not NOTHING]
    whole = joined(*parts) if len(parts) == 2 else parts[0]
    assert with_lists(whole, tree) == tree
