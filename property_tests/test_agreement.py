"""A: ranks come to one plan by few words, and remembering one changes nothing but the time it takes."""

from collections import Counter
from unittest.mock import patch

import attrs
import numpy as np
from hypothesis import assume, event, example, given, settings
from hypothesis import strategies as st

import functional_ckpt
from functional_ckpt import api
from functional_ckpt.errors import CheckpointError
from functional_ckpt.plan.agreement import Basis, is_plannable_alone, propose
from functional_ckpt.plan.layout import LayoutPolicy
from functional_ckpt.plan.state import ArrayLeaf, LocalState
from functional_ckpt.run import planning
from functional_ckpt.run.capture import Captured
from functional_ckpt.run.leaves import LocalShards, PerRank
from functional_ckpt.run.policy import SavePolicy
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.sharding import ShardSpec, World
from functional_ckpt.store.buffer import HostBuffer
from functional_ckpt.testing import model
from functional_ckpt.testing import strategies as fst
from functional_ckpt.testing.simulate import run_ranks, try_ranks
from property_tests.memories import ByRank
from property_tests.test_roundtrip import directory, tree_bytes

BLANK = HostBuffer(np.empty(0, np.uint8))
# Each example saves and loads several times.
FEWER = settings(max_examples=settings.default.max_examples // 3)


def proposals_of(world, replicas="declared"):
    """Return what each rank says of its shards, every key alike on all of them."""
    keys = {shard.key: shard.array for held in world.ranks for shard in held}
    leaves = tuple(ArrayLeaf(spec, (key,)) for key, spec in sorted(keys.items()))
    states = [LocalState(tuple(leaf for leaf in leaves if any(s.key == leaf.key for s in held)), held)
              for held in world.ranks]  # fmt: skip
    return [propose(basis_of(state, rank, world.size, replicas), LocalState(), LocalState(), 2**30)
            for rank, state in enumerate(states)]  # fmt: skip


def basis_of(state, rank, size, replicas):
    layout = LayoutPolicy(min_chunk_nbytes=0, target_chunk_nbytes=1)  # no shard is too small for a chunk of its own
    return Basis(rank, size, True, True, layout, replicas, state.structure(), LocalState(), ())


def excess(world, keys_of):
    """Return what the folds of all ranks add up to, less what they should for the grids of `keys_of`."""
    (whole,) = proposals_of(World([[shard for held in keys_of.ranks for shard in held]]))
    return (sum(proposal.fold for proposal in proposals_of(world)) - whole.whole) % 2**64


@given(fst.regular_worlds(max_arrays=3))
def test_the_folds_of_complete_grids_add_up(world):
    assert excess(world, world) == 0


@given(fst.regular_worlds(max_arrays=3), st.sampled_from(["dropped", "doubled", "moved", "all dropped"]), st.data())
def test_the_folds_of_grids_with_one_fault_do_not(world, fault, data):
    mains = [(r, at) for r, held in enumerate(world.ranks) for at, shard in enumerate(held) if shard.is_main]
    rank, at = data.draw(st.sampled_from(mains))
    shard = world.ranks[rank][at]
    others = [box for box in cells(shard) if box != shard.box]
    held = [[*shards] for shards in world.ranks]
    if fault == "doubled":
        held[data.draw(st.integers(0, world.size - 1))].append(shard)
    elif fault == "all dropped":
        held = [[s for s in shards if s.key != shard.key or not s.is_main] for shards in held]
    elif fault == "dropped" or others:
        del held[rank][at]
    if fault == "moved":
        assume(others)
        held[rank].append(attrs.evolve(shard, box=data.draw(st.sampled_from(others))))
    assert excess(World(held), world) != 0


def cells(shard):
    """Return the boxes of all cells of a shard's grid."""
    return [
        Box.from_shape(shard.box.shape, [i * n for i, n in zip(index, shard.box.shape, strict=True)])
        for index in np.ndindex(*shard.grid)
    ]


@given(fst.regular_worlds())
def test_ranks_plan_alone_only_if_specs_are_alike_and_folds_add_up(world):
    one, other = proposals_of(World([world.ranks[0]] * 2))
    right, wrong = attrs.evolve(one, fold=one.whole - 1), attrs.evolve(other, fold=1)
    assert is_plannable_alone([right, wrong])
    assert not is_plannable_alone([right, attrs.evolve(wrong, fold=2)])
    assert not is_plannable_alone([right, attrs.evolve(wrong, is_alone=False)])
    assert not is_plannable_alone([right, attrs.evolve(wrong, alike=wrong.alike[::-1])])


@FEWER
@given(fst.placed_arrays(), fst.moving_policies(), st.sampled_from(["elect", "declared"]))
def test_planning_alone_and_gathering_come_to_one_plan(placed, policy, rule):
    """What ranks agree on is the same whether leaves say how all ranks hold them, or only what is here."""
    policy = attrs.evolve(policy, replicas=rule, budget_nbytes=3 * 96)
    ranks = max(max(item.sharding.mesh.ranks) for item in placed) + 1
    mixed = any(set(item.sharding.mesh.ranks) != set(range(ranks)) for item in placed)
    with directory() as path, fresh_memory(), Counted() as calls:
        alone = run_ranks(ranks, lambda gather: planned(placed, path, policy, gather, True))
        asked = Counter(calls)
        together = run_ranks(ranks, lambda gather: planned(placed, path, policy, gather, False))
    event(f"planned: {sorted(asked)}, some ranks off a mesh: {mixed}")
    assert asked["plan_save"] == 0
    assert calls["plan_local_save"] == ranks
    assert calls["plan_save"] == ranks
    for one, other in zip(alone, together, strict=True):
        assert one.arrays == other.arrays
        assert one.mine == other.mine
        assert one.state.values == other.state.values


def planned(placed, path, policy, gather, tell):
    """Plan the save of placed arrays; with `tell` their leaves say how all ranks hold them."""
    leaves = tuple(ArrayLeaf(item.array, (item.key,), sharding=item.sharding if tell else None) for item in placed)
    parts = [[part.shard for part in item.sharding.parts(item.array, gather.rank)] for item in placed]
    counts = tuple(map(len, parts))
    shards = () if tell else tuple(shard for held in parts for shard in held)
    common = LocalState(leaves, shards)
    captured = Captured(common, LocalState(), (BLANK,) * sum(counts), counts)
    return planning.Planner(path, policy, gather, api._PLANS).agree(lambda: captured)[0]


def fresh_memory():
    """Forget all plans while it lasts, as a new process would."""
    return patch.object(api, "_PLANS", planning.PlanMemory())


class Counted:
    """Count the calls of both planners."""

    def __enter__(self):
        self.calls = Counter()
        self.patches = [patch.object(planning, name, self.watched(name)) for name in ("plan_save", "plan_local_save")]
        for each in self.patches:
            each.start()
        return self.calls

    def __exit__(self, *problem):
        for each in self.patches:
            each.stop()

    def watched(self, name):
        plan = getattr(planning, name)

        def call(*arguments, **options):
            self.calls[name] += 1
            return plan(*arguments, **options)

        return call


@attrs.frozen
class Facts:
    """What one of three ranks saves: its rows of `w`, a copy, a tie, a value, a value of its own; and how."""

    start: int
    stop: int
    extent: int = 12
    dtype: str = "int32"
    replica: int = 0
    key: str = "w"
    nested: bool = False
    tied: bool = False
    step: int = 0
    copy: int = 0
    own: int = 3
    grid: tuple[int, ...] | None = None
    min_chunk: int = 2**20
    target: int = 16
    replicas: str = "elect"
    replicated: str = "check"
    budget: int = 2**20

    @property
    def state(self):
        spec = ArraySpec(self.key, (self.extent,), self.dtype)
        shard = ShardSpec(spec, Box((self.start,), (self.stop,)), self.replica, None, self.grid)
        rows = LocalShards(shard, model.positions(spec)[self.start : self.stop].copy())
        copy = np.arange(4, dtype="int16") + self.copy
        return {
            **({"in": {self.key: rows}} if self.nested else {f"in.{self.key}": rows}),
            "copy": copy,
            "other": copy if self.tied else copy.copy(),
            "step": self.step,
            "rng": PerRank({"state": np.arange(self.own), "seed": self.start}),
        }

    @property
    def policy(self):
        layout = LayoutPolicy(target_chunk_nbytes=self.target, min_chunk_nbytes=self.min_chunk)
        return SavePolicy(layout=layout, replicas=self.replicas, replicated=self.replicated, durability="none",
                          budget_nbytes=self.budget)  # fmt: skip


#: What may change on one rank; most of it leaves the ranks in disagreement.
CHANGES = {
    "extent": [13],
    "dtype": ["uint32", "int16"],
    "start": [0, 3],
    "stop": [5, 9],
    "replica": [1],
    "key": ["v"],
    "nested": [True],
    "tied": [True],
    "step": [1, 2],
    "copy": [1],
    "own": [5],
    "grid": [(3,), None],
    "min_chunk": [0, 2**20],
    "target": [8],
    "replicas": ["declared"],
    "replicated": ["trust"],
    "budget": [47, 48, 50],
}
GRID = tuple(Facts(i, i + 4, grid=(3,), replicas="declared", min_chunk=0) for i in (0, 4, 8))
ROWS = tuple(Facts(lo, hi) for lo, hi in ((0, 5), (5, 6), (6, 12)))


@st.composite
def worlds_of_facts(draw):
    """What three ranks save: one of two valid worlds, changed on one rank, or on all."""
    world = draw(st.sampled_from([ROWS, GRID]))
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from([*CHANGES]))
        change = {name: draw(st.sampled_from(CHANGES[name]))}
        ranks = draw(st.sampled_from([(0, 1, 2), (0,), (1,), (2,), (0, 1, 2)]))
        world = tuple(attrs.evolve(f, **change) if r in ranks and is_valid(f, change) else f
                      for r, f in enumerate(world))  # fmt: skip
    return world


def is_valid(facts, change):
    try:
        return attrs.evolve(facts, **change).state is not None
    except CheckpointError:
        return False


class Memories(ByRank):
    """Memories of three ranks, through which worlds are saved one after the other."""

    def outcome(self, world):
        """Save, and return the bytes on disk, or what the ranks raised."""

        def save(gather):
            self.here.rank, facts = gather.rank, world[gather.rank]
            return functional_ckpt.save(facts.state, path, policy=facts.policy, process_group=gather)

        with directory() as path, patch.object(api, "_PLANS", self):
            found = try_ranks(3, save)
            raised = [type(each).__name__ + str(each) for each in found if isinstance(each, BaseException)]
            return raised or tree_bytes(path)


@FEWER
@given(st.lists(st.tuples(worlds_of_facts(), st.sets(st.integers(0, 2), max_size=2)), min_size=2, max_size=4))
@example([(GRID, set()), (GRID, {1}), (GRID, set())])
@example([(ROWS, set()), (tuple(attrs.evolve(f, step=7) for f in ROWS), set())])
def test_remembered_plans_change_nothing(saves):
    """Whatever ranks have saved before, and whoever of them has forgotten it, a save does what a first save does."""
    memories = Memories()
    for world, forgetful in saves:
        for rank in forgetful:
            memories.forget(rank)
        expected = Memories().outcome(world)
        event("refused" if isinstance(expected, list) else "saved")
        assert memories.outcome(world) == expected
        assert isinstance(expected, dict) or len(expected) == 3


@FEWER
@given(st.sampled_from([ROWS, GRID]), st.sampled_from([*CHANGES]), st.integers(0, 2), st.data())
def test_a_change_on_any_one_rank_is_noticed(world, name, rank, data):
    """After a save that all remember, one that differs on one rank does what it would do as the first."""
    change = {name: data.draw(st.sampled_from(CHANGES[name]))}
    assume(is_valid(world[rank], change) and getattr(world[rank], name) != change[name])
    other = tuple(attrs.evolve(f, **change) if r == rank else f for r, f in enumerate(world))
    memories = Memories()
    before = memories.outcome(world)
    assert isinstance(before, dict)
    changed = memories.outcome(other)
    event(f"{name}: {'refused' if isinstance(changed, list) else 'saved'}")
    assert changed == Memories().outcome(other)
    assert memories.outcome(world) == before
