"""How ranks come to a plan: by few words, once, and never by an old one. And plans of states too large to hold."""

import pickle
from collections import Counter
from functools import cache
from math import prod

import attrs
import numpy as np
import pytest

import functional_ckpt
from functional_ckpt import LayoutPolicy, LocalShards, PerRank, SavePolicy, api
from functional_ckpt.errors import CheckpointErrors, DTypeError, ReplicaError, ShapeError, SpecError
from functional_ckpt.plan.layout import LayoutPolicy as Layouts
from functional_ckpt.plan.local import local_array_plans, plan_local_save
from functional_ckpt.plan.state import ArrayLeaf, ChunkRows, GlobalState, build_manifest
from functional_ckpt.run import planning
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.mesh import Mesh
from functional_ckpt.spec.placement import Replicate, Shard
from functional_ckpt.spec.sharding import PlacedArray, Sharding, ShardSpec, from_rank_offsets
from functional_ckpt.testing.simulate import try_ranks
from property_tests.memories import ByRank

LOOSE = LayoutPolicy(min_chunk_nbytes=0)
GRID = SavePolicy(replicas="declared", layout=LOOSE, durability="none")
MIB = 2**20


class Watched:
    """A simulated rank's group that notes the size of everything it tells the others."""

    def __init__(self, inner):
        self.inner, self.rank, self.size, self.swap = inner, inner.rank, inner.size, inner.swap
        self.told = []

    def all_gather(self, value):
        self.told.append(len(pickle.dumps(value)))
        return self.inner.all_gather(value)


@pytest.fixture
def memory(monkeypatch):
    """What ranks remember, empty at first."""
    memory = ByRank()
    monkeypatch.setattr(api, "_PLANS", memory)
    return memory


@pytest.fixture
def calls(monkeypatch):
    """How often each planner was called, by all ranks together."""
    found = Counter()

    def counted(function):
        def call(*arguments, **options):
            found[function.__name__] += 1
            return function(*arguments, **options)

        return call

    for name in ("plan_save", "plan_local_save"):
        monkeypatch.setattr(planning, name, counted(getattr(planning, name)))
    return found


@pytest.fixture
def save(memory, tmp_path):
    """Save what `state_of(rank)` returns, at a new path each time; return path, outcomes and what was told."""

    def save(state_of, size=3, policy_of=lambda rank: GRID):
        path = tmp_path / str(len([*tmp_path.iterdir()]))
        told = [[] for _ in range(size)]

        def each(gather):
            memory.here.rank = gather.rank
            group = Watched(gather)
            told[gather.rank] = group.told
            policy = policy_of(gather.rank)
            return functional_ckpt.save(state_of(gather.rank), path, policy=policy, process_group=group)

        return path, try_ranks(size, each), told

    return save


def grid(leaves, size=3):
    """Return the states of ranks that hold cells of regular grids, copies, and a value."""

    def state(rank):
        cells = {
            f"w{i}": LocalShards(from_rank_offsets("", "int16", (2, 3), (0, rank, size)), np.full((2, 3), i, "int16"))
            for i in range(leaves)
        }
        return {**cells, "copy": np.arange(5), "step": 3}

    return state


def rows(shift=0, dtype="int16"):
    """Return the states of three ranks that hold rows of any number; the ends of rank 1 differ by `shift`."""

    def state(rank):
        start, stop = [(0, 3), (3, 4 + shift), (4 + shift, 9)][rank]
        spec = ArraySpec("", (9,), dtype)
        return {
            "w": LocalShards(ShardSpec(spec, Box((start,), (stop,))), np.arange(start, stop, dtype=dtype)),
            "step": 1,
        }

    return state


def manifests(outcomes):
    assert not [outcome for outcome in outcomes if isinstance(outcome, BaseException)], outcomes
    return outcomes


def test_grids_and_copies_are_planned_without_gathering(save, calls):
    told = {}
    for leaves in (2, 400):
        calls.clear()
        path, outcomes, told[leaves] = save(grid(leaves))
        assert len(manifests(outcomes)[0].arrays) == leaves + 1
        assert calls == {"plan_local_save": 3}
        assert functional_ckpt.verify(path).ok
    for few, many in zip(told[2], told[400], strict=True):
        assert abs(few[0] - many[0]) < 16  # a number has more or fewer digits
        assert many[0] < 4096
    assert [len(few) for few in told[2]] == [len(many) for many in told[400]]


def test_values_by_rank_travel_and_no_more(save, calls):
    """What only one rank has is told to all, the rest is not."""

    def state(rank):
        return {**grid(100)(rank), "rng": PerRank({"seed": rank, "state": np.arange(rank + 2)})}

    path, outcomes, told = save(state)
    manifests(outcomes)
    assert calls == {"plan_local_save": 3}
    assert all(sizes[0] < 8192 for sizes in told)
    saved = functional_ckpt.open_checkpoint(path)
    assert [saved[f"rng.rank{rank}.state"].shape for rank in range(3)] == [(2,), (3,), (4,)]


def test_other_worlds_are_gathered_once(save, calls):
    _, outcomes, first = save(rows())
    assert len(manifests(outcomes)) == 3
    assert calls == {"plan_save": 3}
    calls.clear()
    _, outcomes, second = save(rows())
    manifests(outcomes)
    assert not calls
    assert all(len(again) < len(before) for before, again in zip(first, second, strict=True))


@pytest.mark.parametrize("state", [grid(3), rows()])
def test_a_repeated_save_is_not_planned_and_has_the_values_of_now(save, calls, state):
    def at(step):
        return lambda rank: {**state(rank), "step": step, "copy": np.arange(5) + step, "lr": [0.1 * step]}

    manifests(save(at(0))[1])
    calls.clear()
    for step in (1, 2):
        path, outcomes, _ = save(at(step))
        manifests(outcomes)
        assert not calls
        found = functional_ckpt.open_checkpoint(path).state()
        assert (found["step"], found["lr"], found["copy"].tolist()) == (step, [0.1 * step], [*range(step, step + 5)])
        assert functional_ckpt.verify(path).ok


@pytest.mark.parametrize("rank", range(3))
def test_one_rank_that_has_forgotten_makes_all_plan_again(save, calls, memory, rank):
    manifests(save(rows())[1])
    memory.forget(rank)
    calls.clear()
    manifests(save(rows())[1])
    assert calls == {"plan_save": 3}
    calls.clear()
    manifests(save(rows())[1])
    assert not calls


def test_a_plan_that_was_made_before_is_known_after_another(save, calls):
    for shift in (0, 1, 0, 1):
        calls.clear()
        manifests(save(rows(shift))[1])
    # Rank 0 holds the same in both worlds, and remembers the last of them.
    assert calls == {"plan_save": 3}


def changed(rank, **change):
    return lambda r: attrs.evolve(GRID, **change) if r == rank else GRID


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("warm", [False, True], ids=["first save", "later save"])
@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("shape", ShapeError, "shape of an array"),
        ("dtype", DTypeError, "data type of an array"),
        ("value", ReplicaError, "different values under one key"),
        ("copy", ReplicaError, "different copies"),
        ("overlap", SpecError, "the same cells"),
        ("policy", SpecError, "different policies"),
        ("attributes", SpecError, "different attributes"),
    ],
)
def test_two_ranks_that_disagree_are_both_named(memory, tmp_path, rank, warm, name, kind, text):
    def save(path, spoilt):
        def each(gather):
            memory.here.rank = gather.rank
            state, policy, attributes = world(gather.rank, name if spoilt and gather.rank == rank else "")
            return functional_ckpt.save(state, path, policy=policy, process_group=gather, attributes=attributes)

        return try_ranks(3, each)

    if warm:
        manifests(save(tmp_path / "before", False))
    outcomes = save(tmp_path / "a", True)
    for outcome in outcomes:
        problems = outcome.exceptions if isinstance(outcome, CheckpointErrors) else (outcome,)
        found = [problem for problem in problems if isinstance(problem, kind) and text in str(problem)]
        assert found, outcome
        assert any(isinstance(problem.rank, tuple) and rank in problem.rank for problem in found)
        assert all(len(problem.rank) == 2 for problem in found)
    assert not (tmp_path / "a").exists()
    manifests(save(tmp_path / "b", False))


def world(rank, fault):
    """Return state, policy and attributes of one of three ranks, the faulty one or not."""
    state = {**rows(dtype="int32" if fault == "dtype" else "int16")(rank), "copy": np.arange(3)}
    if fault == "shape":
        spec = ArraySpec("", (10,), "int16")
        state["w"] = LocalShards(attrs.evolve(state["w"].shards[0], array=spec), state["w"].data)
    if fault == "overlap":
        box = Box((1,), (9,)) if rank != 1 else Box((2,), (5,))
        state["w"] = LocalShards(ShardSpec(ArraySpec("", (9,), "int16"), box), np.zeros(box.shape, "int16"))
    state["step"] += fault == "value"
    state["copy"][0] += fault == "copy"
    policy = attrs.evolve(GRID, layout=LayoutPolicy(min_chunk_nbytes=int(fault == "policy")))
    return state, policy, {"run": "b" if fault == "attributes" else "a"}


def test_a_new_budget_is_a_new_plan(save, calls):
    policy = attrs.evolve(GRID, layout=LayoutPolicy(target_chunk_nbytes=4, min_chunk_nbytes=MIB), replicas="elect")
    rank_1 = attrs.evolve(policy, budget_nbytes=12)
    manifests(save(rows(), policy_of=lambda rank: policy)[1])
    calls.clear()
    manifests(save(rows(), policy_of=lambda rank: rank_1 if rank == 1 else policy)[1])
    assert calls == {"plan_save": 3}
    calls.clear()
    manifests(save(rows(), policy_of=lambda rank: rank_1)[1])
    assert not calls  # the smallest budget is the same


LAYERS = {
    "q": (8192, 8192), "k": (1024, 8192), "v": (1024, 8192), "o": (8192, 8192), "gate": (28672, 8192),
    "up": (28672, 8192), "down": (8192, 28672), "norm1": (8192,), "norm2": (8192,),
}  # fmt: skip
OUTER = {"embed": (128256, 8192), "head": (128256, 8192), "norm": (8192,)}


@cache
def large_state():
    """Return the arrays of a 70-billion-parameter model in bfloat16 and its optimizer's moments in float32."""
    shapes = {f"layers.{i}.{name}": shape for i in range(80) for name, shape in LAYERS.items()} | OUTER
    kinds = (("model", "bfloat16"), ("exp_avg", "float32"), ("exp_avg_sq", "float32"))
    return [ArraySpec(f"{kind}.{key}", shape, dtype) for kind, dtype in kinds for key, shape in sorted(shapes.items())]


def fully_sharded(arrays, ranks):
    sharding = Sharding(Mesh.line(ranks), (Shard(0),))
    return [PlacedArray(array, sharding) for array in arrays]


@pytest.mark.parametrize("ranks", [8, 16, 128, 1024, 4096])
def test_files_of_a_large_state_are_few_at_any_world_size(ranks):
    arrays, policy = large_state(), Layouts()
    plans = local_array_plans(fully_sharded(arrays, ranks), policy)
    files = sum(plan.grid.size for plan in plans) + len(plans)  # chunks, and metadata of each array
    nbytes = sum(array.nbytes for array in arrays)
    assert 700e9 < nbytes < 710e9
    assert files <= nbytes / policy.min_chunk_nbytes + 2 * len(arrays)
    assert {plan.layout.ownership for plan in plans} >= ({"exclusive"} if ranks <= 16 else {"owned"})


def test_eight_ranks_write_all_of_a_large_state():
    arrays = large_state()
    items = fully_sharded(arrays, 8)
    written = [plan_local_save(rank, items, Layouts()).written_nbytes(rank) for rank in range(8)]
    assert sum(written) == sum(array.nbytes for array in arrays)
    assert max(written) < 1.1 * min(written)


@pytest.mark.parametrize("rank", [0, 77, 1023])
def test_a_rank_of_many_writes_about_its_share_in_few_messages(rank):
    arrays = large_state()
    plan = plan_local_save(rank, fully_sharded(arrays, 1024), Layouts())
    share = sum(array.nbytes for array in arrays) / 1024
    assert 0.5 * share < plan.written_nbytes(rank) < 2 * share
    leaving = plan.pieces.take((plan.pieces.source == rank) & (plan.pieces.target != rank))
    messages = len({*zip(leaving.wave.tolist(), leaving.target.tolist(), strict=True)})
    assert messages <= len(leaving)
    itemsizes = np.array([array.spec.itemsize for array in plan.arrays])
    assert (leaving.sizes * itemsizes[leaving.array]).sum() <= share * 1.01  # no more than it holds


#: Shards of 8 MiB are too small for chunks of their own: arrays fall into several owned chunks.
COARSE = Layouts(min_chunk_nbytes=2**24)


def manifest_nbytes(arrays, sharding):
    """Return the bytes of the manifest of a save of `arrays`, planned only."""
    plans = local_array_plans([PlacedArray(array, sharding) for array in arrays], COARSE)
    leaves = tuple(ArrayLeaf(plan.spec, tuple(plan.spec.key.split("."))) for plan in plans)
    counts = [plan.grid.size for plan in plans]
    number = np.repeat(np.arange(len(plans)), counts)
    chunk = np.concatenate([np.arange(count) for count in counts])
    chunks = ChunkRows(number, chunk, np.zeros((len(chunk), 2), np.int64))
    manifest = build_manifest(GlobalState(leaves, (), (), (), "{}"), plans, chunks)
    return len(manifest.to_json()), {plan.layout.ownership for plan in plans}


def test_manifests_of_owned_chunks_do_not_grow_with_the_world():
    """A fixed state that is too fine for chunks of its own on 8 ranks already."""
    arrays = [ArraySpec(f"layers.{i}.{name}", shape, "float32") for i in range(64)
              for name, shape in (("w", (8192, 2000)), ("v", (16384, 1000)), ("norm", (8192,)))]  # fmt: skip
    assert all(prod(array.shape) * 4 / 8 < COARSE.min_chunk_nbytes for array in arrays)
    few, few_rungs = manifest_nbytes(arrays, Sharding(Mesh.line(8), (Shard(0),)))
    many, many_rungs = manifest_nbytes(arrays, Sharding(Mesh((16, 256), range(4096)), (Replicate(), Shard(0))))
    most, most_rungs = manifest_nbytes(arrays, Sharding(Mesh.line(4096), (Shard(0),)))
    assert few_rungs == many_rungs == most_rungs == {"owned"}
    assert max(many, most) <= 1.05 * few


def test_ranks_of_one_process_keep_apart(save, calls):
    """Simulated ranks that hold the same do not take each other's plans."""
    state = {"w": np.arange(12), "step": 1}
    for _ in range(2):
        path, outcomes, _ = save(lambda rank: state, size=4)
        manifests(outcomes)
        assert functional_ckpt.verify(path).ok
    assert calls == {"plan_local_save": 4}


@pytest.mark.parametrize("ranks", [4, 8, 16, 32, 1024])
def test_files_are_few_for_arrays_of_middle_size_too(ranks):
    arrays = [ArraySpec(f"w{i}", (4096, 1024), "float32") for i in range(100)]
    sharding = Sharding(Mesh.line(ranks), (Shard(0),))
    plans = local_array_plans([PlacedArray(array, sharding) for array in arrays], Layouts())
    files = sum(plan.grid.size for plan in plans) + len(plans)
    assert files <= sum(array.nbytes for array in arrays) / Layouts().min_chunk_nbytes + 2 * len(arrays)
