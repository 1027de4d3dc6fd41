"""Laws of saving and loading sharded leaves: any cut loads what any other saved, flat or not."""

import itertools
import pickle

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from functional_ckpt.errors import CheckpointError  # noqa: E402
from functional_ckpt.run.comm import Gather  # noqa: E402
from functional_ckpt.testing.simulate import try_ranks  # noqa: E402
from functional_ckpt.torch.megatron import validation  # noqa: E402
from functional_ckpt.torch.megatron.mapping import ShardedObject, ShardedTensor  # noqa: E402
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


def half(place, main=True, dtype=torch.int8, key="w", obj=None):
    """Return the state of a rank: half a tensor, and an object of which some copy is here."""
    tensor = ShardedTensor.from_rank_offsets(key, torch.zeros(2, dtype=dtype), (0, place, 2), replica_id=int(not main))
    return [tensor] if obj is None else [tensor, ShardedObject("o", 0, (1,), (0,), replica_id=obj)]


#: Both halves, one twice, no main copy, another data type, another key, an object with one, two and no main copies.
HALVES = [half(0), half(1), half(1, False), half(1, dtype=torch.int16), half(1, key="v"), half(0, obj=0),
          half(1, obj=1), half(1, obj=0)]  # fmt: skip


@attrs.frozen
class Listening:
    """A group that keeps what its rank tells the others."""

    inner: Gather
    told: list

    rank = property(lambda self: self.inner.rank)
    size = property(lambda self: self.inner.size)

    def all_gather(self, value):
        self.told.append(pickle.dumps(value))
        return self.inner.all_gather(value)


def outcome_of_check(world, clear):
    """Return what the check of a world says on each rank, whether it failed, and whether specs travelled."""
    if clear:
        validation._CHECKED.clear()
    told = []
    found = try_ranks(
        len(world), lambda g: validation.validate_sharding_integrity(HALVES[world[g.rank]], Listening(g, told))
    )
    return (
        [repr(each) for each in found],
        isinstance(found[0], CheckpointError),
        any(b"ShardTable" in text for text in told),
    )


WORLDS = st.tuples(st.tuples(*[st.integers(0, len(HALVES) - 1)] * 2), st.sampled_from([None, None, 0, 1]))


@given(st.lists(WORLDS, min_size=2, max_size=5))
@example([((0, 1), None), ((0, 2), None)])  # rank 0 has seen its part of a whole tensor before
@example([((0, 1), None), ((0, 1), 1), ((0, 1), None)])  # one rank has forgotten what it checked
@example([((0, 1), None), ((0, 6), None)])  # a copy of an object that is not the main one
@example([((0, 1), None), ((1, 0), None), ((5, 6), None), ((5, 7), None), ((5, 6), None)])
def test_f3_a_check_says_the_same_whatever_was_checked_before(worlds):
    """F3, and specs travel only if another world was checked last, or a rank has forgotten it."""
    alone = {world: outcome_of_check(world, clear=True)[:2] for world, _ in worlds}
    validation._CHECKED.clear()
    last = None
    for world, forgetful in worlds:
        last = None if validation._CHECKED.pop(forgetful, None) else last
        *found, travelled = outcome_of_check(world, clear=False)
        held = tuple(1 if number == 6 else number for number in world)  # of objects only main copies count
        assert (tuple(found), travelled) == (alone[world], held != last)
        last = last if found[1] else held
