"""Pieces that move over gloo: the same messages as in the simulator, and what fails while they travel."""

import errno
import json
import os
import pickle
import signal
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest

import functional_ckpt as fc
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.sharding import ShardSpec
from functional_ckpt.testing.simulate import run_ranks
from tests.mp import launch
from tests.mp.test_state import errors

pytestmark = pytest.mark.mp

SPEC = ArraySpec("w", (64, 24), "int32")
WHOLE = np.arange(64 * 24, dtype="int32").reshape(64, 24)
#: Two rows a chunk, and a rank assembles one or two chunks at a time.
LAYOUT = fc.LayoutPolicy(target_chunk_nbytes=2 * 24 * 4, min_chunk_nbytes=2**20)
TIMEOUT_S = 4
POLICY = fc.SavePolicy(layout=LAYOUT, durability="none", budget_nbytes=3 * 400, timeout_s=launch.NEVER_S)
IMPATIENT = fc.SavePolicy(layout=LAYOUT, durability="none", budget_nbytes=3 * 400, timeout_s=TIMEOUT_S)


def held(box, replica=0, flat=None):
    values = np.ascontiguousarray(WHOLE[box.slices])
    shard = ShardSpec(SPEC, box, replica, flat)
    return shard, values if flat is None else values.reshape(-1)[slice(*flat)]


def leaf(*shards):
    return {"w": fc.LocalShards(*zip(*shards, strict=True))} if shards else {}


def columns(rank, size):
    """Equal columns: all pieces of a chunk are rivals."""
    wide = 24 // size
    return leaf(held(Box((0, rank * wide), (64, rank * wide + wide))))


def flat(rank, size):
    """Ranges of the flattened array that end anywhere, dealt in another order than the ranks'."""
    cuts = [0, *(i * 64 * 24 // size + 7 * i for i in range(1, size)), 64 * 24]
    at = (rank * 3 + 1) % size if size != 3 else rank
    return leaf(held(SPEC.box, 0, (cuts[at], cuts[at + 1])))


def copies(rank, size):
    """Rows in two copies, from rank 1 on; rank 0 has none. And a plain array that all ranks have."""
    state = {"plain": np.arange(9), "step": 3}
    if rank == 0:
        return state
    rows = np.linspace(0, 64, size, dtype=int).tolist()
    mine, other = rank - 1, rank % (size - 1)
    shards = [held(Box((rows[mine], 0), (rows[mine + 1], 24)))]
    if other != mine:
        shards.append(held(Box((rows[other], 0), (rows[other + 1], 24)), 1))
    return {**state, **leaf(*shards)}


WORLDS = {"columns": columns, "flat": flat, "copies": copies}


def save(name, path, policy=POLICY):
    fc.save(WORLDS[name](launch.rank(), world_size()), path, policy=policy)


def world_size():
    import torch.distributed as dist

    return dist.get_world_size()


def files(path):
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != "provenance.json"
    }


def traffic(path):
    ranks = json.loads((path / "provenance.json").read_text())["ranks"]
    return [(rank["messages"], rank["moved_nbytes"], rank["nbytes"]) for rank in ranks]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", WORLDS)
def test_gloo_and_the_simulator_send_the_same(two, four, tmp_path, name, size):
    """Messages, bytes and files are those of the plan, whatever carries them."""
    {2: two, 4: four}[size].run(save, name, tmp_path / "gloo")

    def simulated(gather):
        state = WORLDS[name](gather.rank, size)
        return fc.save(state, tmp_path / "simulated", policy=POLICY, process_group=gather)

    run_ranks(size, simulated)
    assert traffic(tmp_path / "gloo") == traffic(tmp_path / "simulated")
    assert files(tmp_path / "gloo") == files(tmp_path / "simulated")
    assert fc.open_checkpoint(tmp_path / "gloo")["w"][...].tolist() == WHOLE.tolist()
    moved = sum(nbytes for _, nbytes, _ in traffic(tmp_path / "gloo"))
    if name == "columns":
        assert moved == WHOLE.nbytes * (size - 1) // size
        assert sum(messages for messages, _, _ in traffic(tmp_path / "gloo")) > size * (size - 1)  # several waves


def save_and_load(path):
    """Save columns, load rows, in many small waves."""
    rank, size = launch.rank(), world_size()
    save("columns", path)
    box = Box((rank * 64 // size, 0), ((rank + 1) * 64 // size, 24))
    like = fc.LocalShards(ShardSpec(SPEC, box), np.zeros(box.shape, "int32"))
    fc.load({"w": like}, path)
    np.testing.assert_array_equal(like.data[0], WHOLE[box.slices])


def test_large_messages_both_ways(two, tmp_path):
    """Messages that no buffer of the system holds do not block one another."""
    two.run(large, tmp_path / "a", limit_s=50)
    assert fc.verify(tmp_path / "a").ok


def large(path):
    rank = launch.rank()
    spec = ArraySpec("w", (2048, 4096), "float32")
    box = Box((0, rank * 2048), (2048, rank * 2048 + 2048))
    state = {"w": fc.LocalShards(ShardSpec(spec, box), np.full(box.shape, rank, "f4"))}
    layout = fc.LayoutPolicy(target_chunk_nbytes=2**25, min_chunk_nbytes=2**30)
    fc.save(state, path, policy=fc.SavePolicy(layout=layout, durability="none", timeout_s=20))


def test_columns_become_rows(four, tmp_path):
    four.run(save_and_load, tmp_path / "a")


@contextmanager
def at_swap(rank, number, act):
    """On this rank only, call `act` before message number `number`; yield what was sent before."""
    from functional_ckpt.torch.group.link import TorchGather

    swap, swaps = TorchGather.swap, []

    def acting(self, *arguments):
        swaps.append(arguments)
        if len(swaps) == number:
            act()
        return swap(self, *arguments)

    with ExitStack() as stack:
        if launch.rank() == rank:
            stack.enter_context(patch.object(TorchGather, "swap", acting))
        yield


@pytest.fixture
def told(tmp_path_factory):
    """Where ranks tell that they are through."""
    return tmp_path_factory.mktemp("told")


def exit_now():
    os._exit(1)


def kill_now():
    os.kill(os.getpid(), signal.SIGKILL)


def interrupted_exchange(path, rank, number, act, policy, told):
    """Save a first time, so that connections exist; something happens to a rank within the second save."""
    save("columns", path.with_name("before"), policy)
    with at_swap(rank, number, act), launch.telling(told):
        save("columns", path, policy)


def check_left(tmp_path, four):
    """Nothing was published, and the next save works."""
    fc.sweep(tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["before"]
    four.run(save, "columns", tmp_path / "a")
    assert fc.verify(tmp_path / "a").ok


@pytest.mark.parametrize(("rank", "number", "act"), [(3, 1, exit_now), (2, 8, kill_now), (0, 8, kill_now)])
def test_a_rank_that_dies_in_the_exchange_fails_the_save_on_all(four, tmp_path, told, rank, number, act):
    outcomes = four.outcomes(interrupted_exchange, tmp_path / "a", rank, number, act, IMPATIENT, told)
    assert [outcome.dead for outcome in outcomes] == [r == rank for r in range(4)]
    for outcome in outcomes:
        if outcome.rank != rank:
            assert isinstance(outcome.error, fc.errors.RankFailedError), outcome
    assert not (tmp_path / "a").exists()
    check_left(tmp_path, four)


def test_a_rank_that_hangs_in_the_exchange_fails_the_save_on_all(four, tmp_path, told):
    hang_now = partial(launch.outwait, told, 3)
    outcomes = four.outcomes(interrupted_exchange, tmp_path / "a", 2, 8, hang_now, IMPATIENT, told)
    assert (told / "all").exists()  # the others gave up while it still hung
    for outcome in outcomes:
        assert isinstance(outcome.error, fc.errors.RankFailedError), outcome
    assert not (tmp_path / "a").exists()
    check_left(tmp_path, four)


def failing_buffer(path, rank, after):
    from functional_ckpt.store.buffer import HostBuffer

    get, calls = HostBuffer.get, []

    def failing(self, *arguments):
        calls.append(arguments)
        if len(calls) > after:
            raise RuntimeError("the device is gone")
        return get(self, *arguments)

    with ExitStack() as stack:
        if launch.rank() == rank:
            stack.enter_context(patch.object(HostBuffer, "get", failing))
        save("columns", path)


def full_disk(path, rank, after):
    from functional_ckpt.store.files import FileStore

    create, calls = FileStore.create, []

    def failing(self, name, *arguments):
        calls.append(name)
        if "/c" in name and sum("/c" in each for each in calls) > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(self, name, *arguments)

    with ExitStack() as stack:
        if launch.rank() == rank:
            stack.enter_context(patch.object(FileStore, "create", failing))
        save("columns", path)


@pytest.mark.parametrize(
    ("job", "after", "kind", "text"),
    [
        (failing_buffer, 0, fc.errors.RankFailedError, "the device is gone"),
        (failing_buffer, 9, fc.errors.RankFailedError, "the device is gone"),
        (full_disk, 2, fc.errors.StorageError, "No space left"),
    ],
)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_fails_in_a_later_wave_is_named_by_all_at_once(four, tmp_path, rank, job, after, kind, text):
    four.run(save, "columns", tmp_path / "before")
    outcomes = four.outcomes(job, tmp_path / "a", rank, after)
    for error in errors(outcomes):
        assert isinstance(error, kind)
        assert error.rank == rank
        assert text in str(error)
    assert [item.name for item in tmp_path.iterdir()] == ["before"]
    four.run(save, "columns", tmp_path / "a")
    assert fc.verify(tmp_path / "a").ok


def small_budget(path, rank, budget):
    policy = fc.SavePolicy(layout=LAYOUT, timeout_s=20, budget_nbytes=budget if launch.rank() == rank else 2**30)
    save("columns", path, policy)


def test_a_budget_too_small_on_one_rank_is_refused_by_all(four, tmp_path):
    for error in errors(four.outcomes(small_budget, tmp_path / "a", 2, 3 * 192 - 1)):
        assert isinstance(error, fc.errors.PolicyError)
        assert (error.key, error.expected) == ("w", "at least 576 bytes")
    assert not list(tmp_path.iterdir())
    four.run(small_budget, tmp_path / "a", 2, 3 * 192)


class Watched:
    """A group that notes how much every rank tells the others."""

    def __init__(self, gather):
        self.gather, self.told = gather, []
        self.rank, self.size, self.swap = gather.rank, gather.size, gather.swap
        self.members = gather.members

    def all_gather(self, value):
        self.told.append(len(pickle.dumps(value)))
        return self.gather.all_gather(value)


def distributed(leaves):
    """Return DTensors, cut and copied in every way that one mesh knows, most too small for chunks of their own."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    ways = [[Shard(0), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Shard(1)], [Replicate(), Replicate()]]
    mesh = launch.mesh(2, 2)
    return {
        f"w{i}": distribute_tensor(launch.values(8 + i % 5, 6, seed=i), mesh, ways[i % 4], src_data_rank=None)
        for i in range(leaves)
    }


def plan_distributed(path, leaves):
    """Save DTensors twice; return sizes of what was told, and the calls of both planners, of each save."""
    from functional_ckpt.run import planning
    from functional_ckpt.torch.group.link import torch_gather

    state, calls, found = distributed(leaves), Counter(), []
    with ExitStack() as stack:
        for name in ("plan_save", "plan_local_save"):
            plan = getattr(planning, name)
            counting = counted(plan, calls)
            stack.enter_context(patch.object(planning, name, counting))
        for number in range(2):
            calls.clear()
            group = Watched(torch_gather(None, 20.0, "sync"))
            fc.save({**state, "step": number}, path / str(number), policy=POLICY, process_group=group)
            found.append((group.told, dict(calls)))
    return found


def counted(function, calls):
    def call(*arguments, **options):
        calls[function.__name__] += 1
        return function(*arguments, **options)

    return call


def test_distributed_tensors_are_planned_without_gathering_once(four, tmp_path):
    found = {leaves: four.run(plan_distributed, tmp_path / str(leaves), leaves) for leaves in (4, 200)}
    for leaves, by_rank in found.items():
        for first, second in by_rank:
            assert first[1] == {"plan_local_save": 1}
            assert second[1] == {}
            assert first[0][0] < 4096
            assert len(first[0]) == len(second[0])
        for number in range(2):
            path = tmp_path / str(leaves) / str(number)
            assert fc.open_checkpoint(path).state()["step"] == number
            assert fc.verify(path).ok
    assert found[4][0][0][0][0] == found[200][0][0][0][0]  # not one byte more for more leaves
    ownerships = {entry.layout.ownership for entry in fc.read_manifest(tmp_path / "4" / "0").arrays}
    assert ownerships == {"owned", "exclusive"}
