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
from functional_ckpt.plan.agreement import Basis, known_shardings, propose
from functional_ckpt.plan.layout import LayoutPolicy
from functional_ckpt.plan.local import plan_local_save
from functional_ckpt.plan.save import plan_save, restrict
from functional_ckpt.plan.state import ArrayLeaf, LocalState
from functional_ckpt.run import planning
from functional_ckpt.run.capture import Captured
from functional_ckpt.run.leaves import LocalShards, PerRank
from functional_ckpt.run.policy import SavePolicy
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.sharding import PlacedArray, ShardSpec, World
from functional_ckpt.store.buffer import HostBuffer
from functional_ckpt.testing import model
from functional_ckpt.testing import strategies as fst
from functional_ckpt.testing.simulate import run_ranks, try_ranks
from property_tests.memories import ByRank
from property_tests.test_roundtrip import directory, tree_bytes

BLANK = HostBuffer(np.empty(0, np.uint8))
# Each example saves and loads several times.
FEWER = settings(max_examples=settings.default.max_examples // 3)
FEWEST = settings(max_examples=settings.default.max_examples // 6)


def shardings_of(world, rule):
    """Return what each rank knows of how all hold their arrays, after each has told what `propose` says."""
    bases = []
    for rank, held in enumerate(world.ranks):
        keys = {shard.key: shard.array for shard in held}
        common = LocalState(tuple(ArrayLeaf(spec, (key,)) for key, spec in sorted(keys.items())), held)
        bases.append(Basis(rank, world.size, True, True, LayoutPolicy(), rule, common, LocalState(), ()))
    proposals = [propose(basis, LocalState(), LocalState(), 2**30) for basis in bases]
    found = [known_shardings(basis, proposals) for basis in bases]
    assert all(each == found[0] for each in found)
    return found[0]


def planned_alone(world, shardings, *rules):
    """Return the plans that ranks make of what they know."""
    arrays = {shard.key: shard.array for shard in world.ranks[0]}
    items = [PlacedArray(array, shardings[key]) for key, array in arrays.items()]
    return [plan_local_save(rank, items, *rules) for rank in range(world.size)]


def outcome_of(call):
    try:
        return call()
    except CheckpointError as error:
        return f"{type(error).__name__} {error}"


RULES = st.sampled_from(["declared", "elect"])
BUDGETS = st.sampled_from([3 * 96, 3 * 256, 2**30])
LAYOUTS = fst.layout_policies() | fst.moving_policies().map(lambda policy: policy.layout)


@given(fst.regular_worlds(max_arrays=3), LAYOUTS, RULES, st.booleans(), st.booleans(), BUDGETS)
def test_cells_of_grids_are_planned_alone_as_together(world, policy, rule, shared_ok, owned_ok, budget):
    """Also where pieces move, and where no main copy is declared."""
    rules = (policy, rule, shared_ok, owned_ok, budget)
    shardings = shardings_of(world, rule)
    if shardings is None:  # arrays of one kind, of which a rank holds different cells
        kinds = {shard.key: (shard.array.shape, shard.grid) for shard in world.ranks[0]}
        assert len({*kinds.values()}) < len(kinds)
        return
    together = outcome_of(lambda: plan_save(world, *rules))
    alone = outcome_of(lambda: planned_alone(world, shardings, *rules))
    if isinstance(together, str):
        assert isinstance(alone, str)
    else:
        event(f"ownerships: {sorted({array.layout.ownership for array in together.arrays})}")
        assert alone == [restrict(together, rank) for rank in range(world.size)]


FAULTS = st.sampled_from(["dropped", "doubled", "moved", "turned", "replica", "flat", "all dropped"])


@given(fst.regular_worlds(max_arrays=3), FAULTS, RULES, st.data())
def test_grids_with_a_fault_are_not_planned_alone_unless_they_are_whole(world, fault, rule, data):
    rank = data.draw(st.sampled_from([r for r, held in enumerate(world.ranks) if held]))
    at = data.draw(st.integers(0, len(world.ranks[rank]) - 1))
    shard, held = world.ranks[rank][at], [[*shards] for shards in world.ranks]
    if fault == "doubled":
        held[data.draw(st.integers(0, world.size - 1))].append(shard)
    elif fault == "all dropped":
        held = [[s for s in shards if s.key != shard.key or not s.is_main] for shards in held]
    elif fault == "turned":
        held[rank] = held[rank][::-1]
    elif fault == "dropped":
        del held[rank][at]
    else:
        change = {
            "moved": {"box": data.draw(st.sampled_from(cells(shard)))},
            "replica": {"replica_id": data.draw(st.integers(0, 2))},
            "flat": {"flat": (0, shard.box.size)},
        }[fault]
        held[rank][at] = attrs.evolve(shard, **change)
    world = World([sorted(shards, key=lambda s: s.key) for shards in held])  # by leaves, as they are described
    shardings = shardings_of(world, rule)
    together = outcome_of(lambda: plan_save(world, LayoutPolicy(), rule))
    event(f"{fault}: {'gathered' if shardings is None else 'alone'}")
    if shardings is not None:
        alone = planned_alone(world, shardings, LayoutPolicy(), rule)
        assert alone == [restrict(together, rank) for rank in range(world.size)]


def cells(shard):
    """Return the boxes of all cells of a shard's grid."""
    return [
        Box.from_shape(shard.box.shape, [i * n for i, n in zip(index, shard.box.shape, strict=True)])
        for index in np.ndindex(*shard.grid)
    ]


def test_ranks_plan_alone_only_if_they_describe_one_world():
    w = ArraySpec("w", (4,), "int8")
    common = [LocalState((ArrayLeaf(w, ("w",)),), (ShardSpec(w, Box((i,), (i + 2,))),)) for i in (0, 2)]
    bases = [Basis(r, 2, True, True, LayoutPolicy(), "elect", each, LocalState(), ()) for r, each in enumerate(common)]
    one, other = (propose(basis, LocalState(), LocalState(), 2**30) for basis in bases)
    assert known_shardings(bases[0], [one, other])["w"].mesh.ranks == (0, 1)
    assert known_shardings(bases[0], [one, attrs.evolve(other, blocks=None)]) is None
    assert known_shardings(bases[0], [one, attrs.evolve(other, alike=other.alike[::-1])]) is None


@FEWER
@given(fst.placed_arrays(), fst.moving_policies(), st.sampled_from(["elect", "declared"]))
def test_planning_alone_and_gathering_come_to_one_plan(placed, policy, rule):
    """What ranks agree on is the same whether each plans by itself or all gather what they hold."""
    policy = attrs.evolve(policy, replicas=rule, budget_nbytes=3 * 96)
    ranks = max(max(item.sharding.mesh.ranks) for item in placed) + 1
    mixed = any(set(item.sharding.mesh.ranks) != set(range(ranks)) for item in placed)
    with directory() as path, fresh_memory(), Counted() as calls:
        alone = run_ranks(ranks, lambda gather: planned(placed, path, policy, gather, True))
        asked = Counter(calls)
        with patch.object(planning, "known_shardings", lambda *_: None):
            together = run_ranks(ranks, lambda gather: planned(placed, path, policy, gather, False))
    event(f"planned: {sorted(asked)}, some ranks off a mesh: {mixed}")
    assert asked["plan_save"] == 0
    assert calls["plan_local_save"] == ranks
    assert calls["plan_save"] == ranks
    for one, other in zip(alone, together, strict=True):
        assert one.arrays == other.arrays
        assert one.mine == other.mine
        assert one.structure.values == other.structure.values


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


@FEWEST
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


@FEWEST
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
