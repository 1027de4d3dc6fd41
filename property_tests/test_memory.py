"""M: what a process remembers changes nothing. Any states, one after the other, through one memory and through none."""

from unittest.mock import Mock, patch

import attrs
import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

import functional_ckpt
from functional_ckpt import api
from functional_ckpt.plan import agreement
from functional_ckpt.plan.agreement import Basis
from functional_ckpt.plan.fingerprint import fingerprint
from functional_ckpt.plan.layout import LayoutPolicy
from functional_ckpt.plan.manifest import ValueEntry
from functional_ckpt.plan.state import ArrayLeaf, CopyDigest, LocalState
from functional_ckpt.run.comm import GatherOnly
from functional_ckpt.run.leaves import LocalShards, PerRank
from functional_ckpt.run.planning import PlanMemory
from functional_ckpt.run.policy import SavePolicy
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.mesh import Mesh
from functional_ckpt.spec.placement import Replicate, Shard
from functional_ckpt.spec.sharding import Sharding, ShardSpec
from functional_ckpt.spec.tree import DictKey
from functional_ckpt.store.encoding import MANIFEST
from functional_ckpt.testing.simulate import try_ranks
from property_tests.memories import ByRank
from property_tests.test_roundtrip import directory, tree_bytes

try:
    import torch
except ImportError:
    torch = None

pytestmark = pytest.mark.filterwarnings("ignore:objects that are not plain values")
# Each example saves several times, on three ranks.
FEWER = settings(max_examples=settings.default.max_examples // 3)
FEWEST = settings(max_examples=settings.default.max_examples // 6)
RANKS = 3
ROWS = np.arange(12, dtype="int16")


@attrs.frozen
class Leaf:
    """A leaf under `key` on the ranks `holders`; `number` tells its contents, `turned` the order of what it is in."""

    key: str
    kind: str
    holders: tuple[int, ...] = (0, 1, 2)
    number: int = 0
    turned: bool = False

    def on(self, rank):
        """Return what `rank` holds; the shards of all holders make up one array."""
        if self.kind == "value":
            return self.number
        if self.kind == "empty":
            return [{}, [], 0][self.number % 3]
        if self.kind in COPIES:
            return COPIES[self.kind](np.arange(4, dtype="int32") + self.number)
        if self.kind == "own value":
            return PerRank({"seed": rank + self.number})
        if self.kind == "own copy":
            return PerRank([np.arange(3) + rank + self.number])
        if self.kind == "own shards":
            return PerRank(self._shards(0, 12, rank))
        if self.kind == "object":
            return [object, dict, Leaf][self.number % 3]
        place = self.holders.index(rank)
        cut = [0, *(4 * (i + 1) + (self.number % 3 if self.kind == "rows" else 0) for i in range(len(self.holders)))]
        return self._shards(cut[place], 12 if place + 1 == len(self.holders) else cut[place + 1], rank)

    def _shards(self, low, high, rank):
        spec = ArraySpec("", (12,), "int16")
        grid = (3,) if self.kind == "grid" and len(self.holders) == 3 else None
        middle = (low + high) // 2
        ends = [(low, high)] if grid else [(low, middle), (middle, high)]
        if self.kind == "flat":
            shards = [ShardSpec(spec, spec.box, 0, (a, b)) for a, b in ends]
        else:
            shards = [ShardSpec(spec, Box((a,), (b,)), 0, None, grid) for a, b in ends]
        shards = shards[::-1] if self.turned else shards
        cells = [slice(*shard.flat) if shard.flat else shard.box.slices for shard in shards]
        return LocalShards(shards, [(ROWS + rank + self.number)[region] for region in cells])


def tensor(array):
    """Return a torch tensor, or an array with other strides where there is no torch."""
    return torch.from_numpy(array) if torch else np.repeat(array, 2)[::2]


COPIES = {
    "copy": lambda array: array,
    "scalar": lambda array: array[1],
    "swapped": lambda array: array.astype(">i4"),
    "tensor": tensor,
}
OBJECTS = ("object",) if torch else ()
KINDS = ("value", "empty", *COPIES, *OBJECTS, "own value", "own copy", "own shards", "rows", "grid", "flat")
LEAVES = st.builds(
    Leaf,
    st.sampled_from(["a", "b", "c.d", "c.e"]),
    st.sampled_from(KINDS),
    st.sets(st.integers(0, RANKS - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks))),
    st.integers(0, 2),
    st.booleans(),
)


@attrs.frozen
class World:
    """What three ranks save together, and how; `tied` gives each rank's first copy a second name.

    With `exchange` pieces may travel; without, several ranks write parts of one chunk. Only the first `size` take part.
    """

    leaves: tuple[Leaf, ...]
    tied: tuple[bool, ...] = (False,) * RANKS
    policy: SavePolicy = SavePolicy(durability="none")
    attribute: int = 0
    exchange: bool = True
    size: int = RANKS

    def on(self, rank):
        leaves = [attrs.evolve(leaf, holders=tuple(r for r in leaf.holders if r < self.size)) for leaf in self.leaves]
        state = {leaf.key: leaf.on(rank) for leaf in leaves if rank in leaf.holders}
        copies = [value for value in state.values() if isinstance(value, np.ndarray)]
        if copies:
            state["second"] = copies[0] if self.tied[rank] else copies[0].copy()
        return state


POLICIES = st.builds(
    lambda target, least, codecs, replicas, replicated, commit, budget, consolidate: SavePolicy(
        layout=LayoutPolicy(target_chunk_nbytes=target, min_chunk_nbytes=least, codecs=codecs), replicas=replicas,
        replicated=replicated, commit=commit, budget_nbytes=budget, durability="none",
        object_codec="torch" if torch else None, consolidate=consolidate,
    ),
    st.sampled_from([4, 16, 2**20]),
    st.sampled_from([0, 2**20]),
    st.sampled_from([(), (), (("", ("crc32c",)),)]),
    st.sampled_from(["elect", "declared"]),
    st.sampled_from(["check", "trust"]),
    st.sampled_from(["rename", "marker"]),
    st.sampled_from([64, 2**20]),
    st.booleans(),
)  # fmt: skip
WORLDS = st.builds(
    World,
    st.lists(LEAVES, min_size=1, max_size=4, unique_by=lambda leaf: leaf.key).map(tuple),
    st.tuples(*[st.booleans()] * RANKS),
    POLICIES,
    st.integers(0, 1),
    st.booleans(),
    st.sampled_from([RANKS, 2]),
)


CHANGES = ("nothing", "number", "turned", "holders", "leaf", "tied", "policy", "exchange", "size", "world")


@st.composite
def histories(draw):
    """A world, and what becomes of it: the same once more, with one leaf another, with another policy..."""
    worlds = [draw(WORLDS)]
    for _ in range(draw(st.integers(1, 3))):
        before = worlds[draw(st.integers(0, len(worlds) - 1))]
        change = draw(
            st.sampled_from(["nothing", "number", "turned", "holders", "leaf", "tied", "policy", "exchange", "world"])
        )
        at = draw(st.integers(0, len(before.leaves) - 1))
        leaf = before.leaves[at]
        if change in ("number", "turned", "holders", "leaf"):
            other = draw(LEAVES)
            other = attrs.evolve(other, key=leaf.key) if change == "leaf" else attrs.evolve(
                leaf, **{change: getattr(other, change)})  # fmt: skip
            leaves = (*before.leaves[:at], other, *before.leaves[at + 1 :])
            worlds.append(attrs.evolve(before, leaves=leaves))
        elif change in ("tied", "policy", "exchange", "size"):
            worlds.append(attrs.evolve(before, **{change: getattr(draw(WORLDS), change)}))
        else:
            worlds.append(draw(WORLDS) if change == "world" else before)
    return worlds


class Memories(ByRank):
    """Memories of the ranks, through which worlds are saved one after the other."""

    def outcome(self, world):
        """Save, and return the bytes on disk, or what the ranks raised."""

        def save(gather):
            self.here.rank = gather.rank
            attributes = {"run": world.attribute}
            group = gather if world.exchange else GatherOnly(gather)
            return functional_ckpt.save(
                world.on(gather.rank), path, policy=world.policy, process_group=group, attributes=attributes
            )

        with directory() as path, patch.object(api, "_PLANS", self):
            found = try_ranks(world.size, save)
            raised = [f"{type(each).__name__} {each}" for each in found if isinstance(each, BaseException)]
            if raised:
                return raised
            assert functional_ckpt.verify(path).ok
            assert (path / MANIFEST).read_bytes() == found[0].to_json(), "what is remembered of the text is another's"
            return tree_bytes(path)


STAGES = World((Leaf("a", "value", (0,), 1), Leaf("b", "value", (1, 2), 1), Leaf("w", "rows")))
TWICE = World((Leaf("a", "copy", (0,)), Leaf("b", "copy", (1, 2)), Leaf("w", "grid")))
ROWS_MOVED = World((Leaf("w", "rows"),), policy=SavePolicy(layout=LayoutPolicy(target_chunk_nbytes=16)))
MINE = World((Leaf("a", "own shards", (1,)),))


@FEWEST
@given(histories(), st.lists(st.sets(st.integers(0, RANKS - 1), max_size=2), min_size=4, max_size=4))
@example([STAGES, STAGES], [set()] * 4)
@example([TWICE, TWICE], [set()] * 4)
@example([ROWS_MOVED, attrs.evolve(ROWS_MOVED, exchange=False)], [set()] * 4)
@example([MINE, attrs.evolve(MINE, leaves=(attrs.evolve(MINE.leaves[0], turned=True),))], [set()] * 4)
def test_a_memory_changes_nothing(worlds, forgotten):
    """The files are the same bytes, or the problems the same, whatever was saved before and whoever has forgotten."""
    memories = Memories()
    for world, ranks in zip(worlds, forgotten, strict=False):
        for rank in ranks:
            memories.forget(rank)
        expected = Memories().outcome(world)
        event("refused" if isinstance(expected, list) else "saved")
        assert memories.outcome(world) == expected


@FEWEST
@given(WORLDS)
@example(STAGES)
@example(MINE)
def test_the_second_save_holds_what_every_rank_has_told(world):
    """Each value, copy and shard that some rank holds is there, the second time too."""
    memories = Memories()
    for _ in range(2):
        with directory() as path, patch.object(api, "_PLANS", memories):

            def save(gather, path=path):
                memories.here.rank = gather.rank
                return functional_ckpt.save(world.on(gather.rank), path, policy=world.policy, process_group=gather)

            if any(isinstance(outcome, BaseException) for outcome in try_ranks(world.size, save)):
                return
            found = functional_ckpt.open_checkpoint(path)
            kept = {**{key: found[key][...].tolist() for key in found},
                    **{value.key: value.text for value in found.manifest.values}}  # fmt: skip
            for leaf in world.leaves:
                if min(leaf.holders) >= world.size:
                    continue
                if leaf.kind == "value":
                    assert kept[leaf.key] == str(leaf.number)
                elif leaf.kind == "copy":
                    assert kept[leaf.key] == [i + leaf.number for i in range(4)]
                for rank in (r for r in leaf.holders if r < world.size):
                    if leaf.kind == "own shards":
                        assert kept[f"{leaf.key}.rank{rank}"] == (ROWS + rank + leaf.number).tolist()
                    elif leaf.kind == "own copy":
                        assert kept[f"{leaf.key}.rank{rank}.0"] == [i + rank + leaf.number for i in range(3)]
                    elif leaf.kind == "own value":
                        assert kept[f"{leaf.key}.rank{rank}.seed"] == str(rank + leaf.number)


# What a fingerprint is made from: a field that it leaves out would be one that a remembered plan does not notice.

SPEC = ArraySpec("w", (4,), "int8")
STATE = LocalState((ArrayLeaf(SPEC, ("w",)),), (ShardSpec(SPEC, SPEC.box),), (ValueEntry("v", "1", ("v",)),))
BASIS = Basis(0, 2, True, True, LayoutPolicy(), "elect", STATE, LocalState(), (1,))
OTHERS = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    str: lambda value: f"{value}x",
    tuple: lambda value: (*value, *(value[:1] or (None,))),
    type(None): lambda _: 7,
    bytes: lambda value: value + b"x",
    Sharding: lambda _: None,
}


def variants(value):
    """Yield copies of `value` that differ in one place, however deep."""
    if type(value) in OTHERS:
        yield OTHERS[type(value)](value)
    if isinstance(value, tuple):
        yield from ((*value[:i], new, *value[i + 1 :]) for i, item in enumerate(value) for new in variants(item))
    if attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            for new in variants(getattr(value, field.name)):
                try:
                    yield attrs.evolve(value, **{field.name: new})
                except (TypeError, ValueError, AttributeError):
                    continue  # what its class refuses cannot be left out


@pytest.mark.parametrize("value", [
    BASIS, attrs.evolve(BASIS, common=STATE.contents()), CopyDigest(SPEC, b"x"),
    ArrayLeaf(SPEC, ("w",), sharding=Sharding(Mesh.line(2), (Shard(0),))),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_a_fingerprint_notices_a_change_in_any_field(value):
    found = [fingerprint(variant) for variant in variants(value)]
    assert len(found) > 3
    assert fingerprint(value) not in found


def test_the_digest_of_a_basis_notices_a_change_in_any_field():
    """It is made of two parts: no field may fall between them."""
    assert BASIS.common.arrays
    assert BASIS.common.shards
    digests = [variant.digest for variant in variants(BASIS)]
    assert len(digests) > 20
    assert BASIS.digest not in digests


def test_a_fingerprint_does_not_depend_on_what_is_one_object():
    mesh = Sharding(Mesh.line(2), (Shard(0),))
    other = Sharding(Mesh.line(2), (Shard(0),))
    assert fingerprint((mesh, mesh)) == fingerprint((mesh, other))
    assert fingerprint((mesh, mesh)) != fingerprint((mesh, Sharding(Mesh.line(2), (Replicate(),))))
    assert fingerprint((Replicate(),)) != fingerprint((Replicate(), Replicate()))
    text = "".join(["a", "b"])
    assert fingerprint((text, text)) == fingerprint(("ab", "".join(["a", "b"])))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text() | st.binary(),
                    lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=12), st.data())  # fmt: skip
def test_values_with_one_fingerprint_are_equal(one, data):
    other = data.draw(st.sampled_from([one, *variants(one)]))
    assert (fingerprint(one) == fingerprint(other)) == (repr(one) == repr(other))


@pytest.mark.parametrize("value", [1, True, 1.0, 0, False, 0.0, -0.0, None])
def test_keys_of_dicts_are_equal_if_their_fingerprints_are(value):
    """A plan is found by an equal basis, which brings its fingerprint along: Python takes True, 1 and 1.0 for equal."""
    for other in (1, True, 1.0, 0, False, 0.0, -0.0, None):
        same = fingerprint(DictKey(value)) == fingerprint(DictKey(other))
        assert (DictKey(value) == DictKey(other), len({DictKey(value), DictKey(other)}) == 1) == (same, same)


@given(WORLDS, st.integers(0, RANKS - 1))
def test_states_that_are_equal_have_one_fingerprint(world, rank):
    from functional_ckpt.run.capture import capture
    from functional_ckpt.testing.simulate import SimulatedGather, _Mail

    one, other = (
        capture(world.on(rank), SimulatedGather(rank, RANKS, _Mail(RANKS, 1.0)), world.policy, False, {}).common
        for _ in range(2)
    )
    assert one == other
    assert fingerprint(one) == fingerprint(other)
    assert all(a is b for a, b in zip(one.arrays, other.arrays, strict=True) if a.tied_to is None)
    assert all((variant == one) == (fingerprint(variant) == fingerprint(one)) for variant in variants(one))


def test_a_state_like_the_last_one_is_not_digested_again(tmp_path):
    state = {"a": {"w": np.arange(4), 1: np.arange(3)}, "own": PerRank(np.arange(2))}
    with (
        patch.object(api, "_PLANS", PlanMemory()),
        patch.object(agreement, "fingerprint", Mock(wraps=fingerprint)) as f,
    ):
        for step in range(3):
            f.reset_mock()
            functional_ckpt.save(state, tmp_path / str(step))
            digested = [value for call in f.call_args_list for value in call.args]
            assert any(isinstance(value, Basis) for value in digested) == (step == 0)


def test_what_has_no_equality_has_no_fingerprint():
    for value in (object(), {"a": 1}, [1], {1}, np.array([object()])):
        with pytest.raises(TypeError):
            fingerprint(value)


@given(WORLDS, st.integers(0, RANKS - 1))
def test_structure_and_contents_are_all_of_a_state(world, rank):
    """States that differ differ in one of them, so that one of the two digests tells."""
    from functional_ckpt.run.capture import capture
    from functional_ckpt.testing.simulate import SimulatedGather, _Mail

    group = SimulatedGather(rank, RANKS, _Mail(RANKS, 1.0))
    state = capture(world.on(rank), group, world.policy, False, {"run": world.attribute}).common
    for variant in variants(state):
        if None in (*variant.values, *variant.copies):
            continue
        same = (variant.structure(), variant.contents()) == (state.structure(), state.contents())
        assert same == (variant == state)
