"""`LoadPolicy.read_once`: each stored chunk is read by one rank and handed to all that want a piece of it."""

from collections import Counter

import numpy as np
import pytest

from functional_ckpt import ArraySpec, Box, LayoutPolicy, LoadPolicy, SavePolicy, ShardSpec, load, save
from functional_ckpt.errors import CheckpointError, CorruptionError, PolicyError, SpecError
from functional_ckpt.store.files import FileStore
from functional_ckpt.testing.simulate import run_ranks, try_ranks

RANDOM = np.random.default_rng(0)
STATE = {f"w{i}": RANDOM.normal(size=(50, 40)).astype("f4") for i in range(5)} | {"step": 3}
LAYOUT = LayoutPolicy(target_chunk_nbytes=1000)
LARGEST = 960  # bytes of a chunk of six rows


@pytest.fixture
def saved(tmp_path):
    save(STATE, tmp_path / "a", policy=SavePolicy(layout=LAYOUT, durability="none"))
    return tmp_path / "a"


@pytest.fixture
def reads(monkeypatch):
    """The names of the chunk files that are read, each time they are."""
    found = []
    for name in ("read", "scan", "read_into", "read_ranges"):
        real = getattr(FileStore, name)
        monkeypatch.setattr(FileStore, name, lambda self, n, *a, real=real: (found.append(n), real(self, n, *a))[1])
    return found


def wanted(rank):
    """Everything of some arrays, overlapping rows of one, overlapping flat ranges of another."""
    spec = [ArraySpec(key, (50, 40), "float32") for key in ("w0", "w1")]
    like = {key: np.zeros_like(value) for key, value in STATE.items()} | {"step": 0}
    like["w0"] = ShardSpec(spec[0], Box((rank * 10, 0), (rank * 10 + 20, 40)))
    like["w1"] = ShardSpec(spec[1], spec[1].box, 0, (rank * 100, rank * 100 + 700))
    return like


def check(loaded, rank):
    np.testing.assert_array_equal(loaded["w0"], STATE["w0"][rank * 10 : rank * 10 + 20])
    np.testing.assert_array_equal(loaded["w1"], STATE["w1"].reshape(-1)[rank * 100 : rank * 100 + 700])
    for key in ("w2", "w3", "w4"):
        np.testing.assert_array_equal(loaded[key], STATE[key])
    assert loaded["step"] == 3


@pytest.mark.parametrize("budget", [2**30, 3 * LARGEST], ids=["one wave", "many waves"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_chunk_is_read_once(ranks, budget, saved, reads):
    policy = LoadPolicy(read_once=True, budget_nbytes=budget)
    for rank, loaded in enumerate(
        run_ranks(ranks, lambda g: load(wanted(g.rank), saved, process_group=g, policy=policy))
    ):
        check(loaded, rank)
    counts = Counter(name for name in reads if "/c." in name)
    assert set(counts.values()) == {1}
    reads.clear()
    run_ranks(ranks, lambda g: load(wanted(g.rank), saved, process_group=g))
    plain = Counter(name for name in reads if "/c." in name)
    assert plain.keys() == counts.keys()
    assert max(plain.values()) >= ranks


def test_data_types_and_shapes_change_on_the_way(saved):
    like = {"w2": np.full((60, 30), 7.0)}
    policy = LoadPolicy(read_once=True, cast="any", allow_shape_mismatch=True, keys="w2")
    for loaded in run_ranks(3, lambda g: load({"w2": like["w2"].copy()}, saved, process_group=g, policy=policy)):
        np.testing.assert_array_equal(loaded["w2"][:50], STATE["w2"][:, :30].astype("f8"))
        assert not loaded["w2"][50:].any()


def test_a_budget_below_three_chunks_is_refused_with_what_works(saved):
    policy = LoadPolicy(read_once=True, budget_nbytes=3 * LARGEST - 1)
    for outcome in try_ranks(2, lambda g: load(wanted(g.rank), saved, process_group=g, policy=policy)):
        assert isinstance(outcome, PolicyError)
        assert str(3 * LARGEST) in str(outcome)


def test_damage_is_everybodys_error(saved):
    chunk = saved / "w3/c.0.0"
    chunk.write_bytes(b"\xff" + chunk.read_bytes()[1:])
    policy = LoadPolicy(read_once=True, budget_nbytes=3 * LARGEST)
    for outcome in try_ranks(3, lambda g: load(wanted(g.rank), saved, process_group=g, policy=policy)):
        assert isinstance(outcome, CorruptionError)
        assert (outcome.key, outcome.chunk) == ("w3", "c.0.0")


def test_a_rank_that_cannot_take_its_pieces_fails_all(saved, monkeypatch):
    from functional_ckpt.store.buffer import HostBuffer

    real = HostBuffer.put

    def put(self, *arguments):
        if self.array.size == 1000:  # rank 1's
            raise OSError(5, "broken")
        real(self, *arguments)

    def loading(gather):
        like = {"w2": np.zeros((50, 40), "f4")}
        if gather.rank == 1:
            like["w2"] = ShardSpec(ArraySpec("w2", (50, 40), "float32"), Box((0, 0), (25, 40)))
        policy = LoadPolicy(read_once=True, strict="ignore", budget_nbytes=3 * LARGEST)
        return load(like, saved, process_group=gather, policy=policy)

    monkeypatch.setattr(HostBuffer, "put", put)
    for outcome in try_ranks(3, loading, timeout_s=20):
        assert isinstance(outcome, CheckpointError)
        assert "broken" in str(outcome)
        assert outcome.rank == 1


def test_ranks_must_agree_to_read_once(saved):
    def loading(gather):
        policy = LoadPolicy(read_once=gather.rank == 0)
        return load(wanted(gather.rank), saved, process_group=gather, policy=policy)

    for outcome in try_ranks(2, loading):
        assert isinstance(outcome, SpecError)


def test_a_group_that_only_gathers_reads_what_each_rank_needs(saved, gather_only, reads):
    policy = LoadPolicy(read_once=True)
    outcomes = run_ranks(2, lambda g: load(wanted(g.rank), saved, process_group=gather_only(g), policy=policy))
    for rank, loaded in enumerate(outcomes):
        check(loaded, rank)
    assert max(Counter(name for name in reads if "/c." in name).values()) >= 2
