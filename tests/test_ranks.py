"""Several simulated ranks: who writes what, values that differ by rank, and failing together."""

import time

import attrs
import numpy as np
import pytest

import functional_ckpt
from functional_ckpt import (
    Box,
    LayoutPolicy,
    LoadPolicy,
    LocalShards,
    PerRank,
    SavePolicy,
    async_save,
    load,
    open_checkpoint,
    save,
)
from functional_ckpt.errors import CheckpointError, RankFailedError, SaveCancelledError
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.sharding import ShardSpec, from_rank_offsets
from functional_ckpt.testing.simulate import run_ranks, try_ranks

GRID = np.arange(96, dtype="f4").reshape(12, 8)


def rows(size, rank, shape=GRID.shape):
    cut = [shape[0] * r // size for r in range(size + 1)]
    return Box((cut[rank], 0), (cut[rank + 1], shape[1]))


def columns(size, rank, shape=GRID.shape):
    cut = [shape[1] * r // size for r in range(size + 1)]
    return Box((0, cut[rank]), (shape[0], cut[rank + 1]))


POLICIES = {
    "exclusive": LayoutPolicy(min_chunk_nbytes=0),
    "shared": LayoutPolicy(shared_chunk_nbytes=64),
    "shared zstd": LayoutPolicy(shared_chunk_nbytes=64, codecs=(("", ("zstd",)),)),
    "owned": LayoutPolicy(target_chunk_nbytes=64),
    "owned zstd": LayoutPolicy(target_chunk_nbytes=64, codecs=(("", ("zstd",)),)),
    "one chunk": LayoutPolicy(),
}


@pytest.mark.parametrize("layout", POLICIES)
@pytest.mark.parametrize("commit", ["rename", "marker"])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (4, 3), (5, 2)])
def test_rows_to_columns(layout, commit, before, after, tmp_path, piece, gather_only):
    policy = SavePolicy(layout=POLICIES[layout], commit=commit, durability="none", replicas="declared")

    def saving(gather):
        state = {"w": piece(GRID, rows(before, gather.rank)), "step": 7}
        group = gather_only(gather) if "shared" in layout else gather
        return save(state, tmp_path / "a", policy=policy, process_group=group)

    manifests = run_ranks(before, saving)
    ownership = "exclusive" if before == 1 else layout.replace("one chunk", "owned").split()[0]
    assert {entry.layout.ownership for entry in manifests[0].arrays} == {ownership}
    assert all(m == manifests[0] for m in manifests)
    assert functional_ckpt.verify(tmp_path / "a").ok

    def loading(gather):
        like = {"w": ShardSpec(ArraySpec("w", (12, 8), "float32"), columns(after, gather.rank)), "step": 0}
        return load(like, tmp_path / "a", process_group=gather)

    for rank, loaded in enumerate(run_ranks(after, loading)):
        np.testing.assert_array_equal(loaded["w"], GRID[columns(after, rank).slices])
        assert loaded["step"] == 7
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert not [p for p in (tmp_path / "a").rglob("*") if p.name.startswith(".") or p.name.endswith(".__lock")]


def test_the_checkpoint_does_not_know_who_wrote_it(tmp_path, fast, piece, tree_bytes):
    boxes = [rows(3, r) for r in range(3)]
    seen = []
    for name, order in (("a", (0, 1, 2)), ("b", (2, 0, 1))):
        states = [{"w": piece(GRID, boxes[i]), "copy": np.arange(9)} for i in order]
        run_ranks(
            3, lambda g, states=states, name=name: save(states[g.rank], tmp_path / name, policy=fast, process_group=g)
        )
        seen.append(tree_bytes(tmp_path / name))
        seen[-1].pop("provenance.json")
    assert seen[0] == seen[1]


def test_every_rank_writes_its_share_of_copies(tmp_path, fast):
    state = {f"w{i}": np.full(100, i) for i in range(40)}
    run_ranks(4, lambda g: save(state, tmp_path / "a", policy=fast, process_group=g))
    import json

    ranks = json.loads((tmp_path / "a/provenance.json").read_text())["ranks"]
    assert sum(r["nbytes"] for r in ranks) == 40 * 800
    assert all(r["arrays"] for r in ranks)


# Values that differ by rank


def per_rank_state(rank):
    return {"rng": PerRank({"seed": np.full(rank + 1, rank), "epoch": (rank, 1), "none": {}}), "step": 3}


@pytest.fixture
def three(tmp_path, fast):
    """The path of a checkpoint that three ranks have saved."""
    run_ranks(3, lambda g: save(per_rank_state(g.rank), tmp_path / "a", policy=fast, process_group=g))
    return tmp_path / "a"


def test_per_rank_values_return_to_their_ranks(three, same):
    def loading(gather):
        return load(per_rank_state(gather.rank), three, process_group=gather)

    for rank, loaded in enumerate(run_ranks(3, loading)):
        same(loaded, per_rank_state(rank))
    opened = open_checkpoint(three).state()
    same(opened["rng"][2], per_rank_state(2)["rng"].value)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_per_rank_error(three, size, problems_of):
    def loading(gather):
        return problems_of(load, per_rank_state(gather.rank), three, process_group=gather)

    for problems in run_ranks(size, loading):
        assert [(type(p).__name__, p.key) for p in problems] == [("PerRankError", "rng")] * len(problems)
        assert (problems[0].expected, problems[0].found) == ("3 ranks", "1 rank" if size == 1 else f"{size} ranks")


@pytest.mark.parametrize("size", [1, 2, 5])
def test_per_rank_first(three, size, same):
    policy = LoadPolicy(per_rank="first")
    for loaded in run_ranks(size, lambda g: load(per_rank_state(0), three, policy=policy, process_group=g)):
        same(loaded, per_rank_state(0))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_per_rank_by_a_function(three, size):
    def deal(values, rank, ranks):
        assert ranks == size
        return [v["seed"].tolist() for v in values], rank

    policy = LoadPolicy(per_rank=deal)
    for rank, loaded in enumerate(
        run_ranks(size, lambda g: load(per_rank_state(0), three, policy=policy, process_group=g))
    ):
        assert loaded["rng"].value == ([[0], [1, 1], [2, 2, 2]], rank)


def test_plain_values_and_tensors_must_agree_unless_trusted(tmp_path, fast, problems_of):
    def state(rank):
        return {"lr": 0.1 * rank, "w": np.full(3, rank), "ok": np.ones(2)}

    def saving(gather):
        return problems_of(save, state(gather.rank), tmp_path / "a", policy=fast, process_group=gather)

    for problems in run_ranks(3, saving):
        assert {(type(p).__name__, p.key, p.rank) for p in problems} == {
            ("ReplicaError", key, (0, r)) for key in ("lr", "w") for r in (1, 2)
        }
    assert list(tmp_path.iterdir()) == []
    policy = attrs.evolve(fast, replicated="trust")
    run_ranks(3, lambda g: save(state(g.rank), tmp_path / "a", policy=policy, process_group=g))
    loaded = open_checkpoint(tmp_path / "a").state()
    assert loaded["lr"] == 0.0
    assert len(set(loaded["w"])) == 1


# Failing together


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    "phase",
    [
        "write",
        "publish",
        "done",
    ],
)
def test_a_rank_that_raises_makes_every_rank_raise(phase, failing, tmp_path, fast):
    def fail(progress):
        if progress.phase == phase:
            raise KeyError("my callback")

    def saving(gather):
        report = fail if gather.rank == failing else None
        return save({"w": np.ones(5)}, tmp_path / "a", policy=fast, process_group=gather, progress=report)

    outcomes = try_ranks(2, saving)
    if phase == "done":  # published: a callback cannot undo that, and is not a failed save
        assert (tmp_path / "a").exists()
        return
    for outcome in outcomes:  # told, not waited for
        assert isinstance(outcome, CheckpointError), outcome
        assert outcome.rank == failing
        assert "my callback" in str(outcome)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_whose_disk_is_full_fails_all(failing, tmp_path, fast, monkeypatch):
    import errno

    from functional_ckpt.store.files import FileStore

    real = FileStore.create

    def create(self, name, parts, nbytes):
        if name.startswith(f"p.rank{failing}/c"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, name, parts, nbytes)

    monkeypatch.setattr(FileStore, "create", create)

    def saving(gather):
        return save({"p": PerRank(np.ones(5))}, tmp_path / "a", policy=fast, process_group=gather)

    for outcome in try_ranks(2, saving):
        assert type(outcome).__name__ == "StorageError"
        assert outcome.rank == failing
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_rank_that_dies_is_missed_by_the_others(after, tmp_path, fast):
    """Rank 1 dies before its n-th exchange."""

    class Dying:
        def __init__(self, gather):
            self.gather, self.left = gather, after
            self.rank, self.size = gather.rank, gather.size

        def all_gather(self, value):
            if not self.left:
                raise SystemExit("killed")
            self.left -= 1
            return self.gather.all_gather(value)

    def saving(gather):
        group = Dying(gather) if gather.rank == 1 else gather
        return save({"w": np.ones(5)}, tmp_path / "a", policy=fast, process_group=group)

    outcomes = try_ranks(3, saving, timeout_s=20)
    assert isinstance(outcomes[0], RankFailedError)
    assert isinstance(outcomes[2], RankFailedError)
    functional_ckpt.sweep(tmp_path)  # rank 2 may still have been writing when rank 0 cleaned up
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_the_ranks_do_not_share(tmp_path, fast):
    """As on two machines: what rank 1 finds under its path is another directory."""

    def saving(gather):
        path = tmp_path / ("elsewhere/a" if gather.rank == 1 else "a")
        return save({"w": np.ones(3)}, path, policy=fast, process_group=gather)

    for outcome in try_ranks(3, saving):
        assert type(outcome).__name__ == "PathNotSharedError"
        assert outcome.rank == 1
    assert list(tmp_path.iterdir()) == []


def test_loading_different_checkpoints_under_one_path(tmp_path, fast):
    for rank in range(2):
        save({"w": np.full(3, rank)}, tmp_path / str(rank), policy=fast)

    outcomes = try_ranks(2, lambda g: load({"w": np.zeros(3, int)}, tmp_path / str(g.rank), process_group=g))
    assert all("different checkpoints" in str(o) for o in outcomes)


def test_memory_is_not_shared_by_ranks(fast):
    for outcome in try_ranks(2, lambda g: save({"w": np.ones(3)}, "memory://ranks", policy=fast, process_group=g)):
        assert isinstance(outcome, CheckpointError)
    assert not functional_ckpt.sweep("memory://ranks")


@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_cancelled_by_one_rank_is_published_by_none(commit, tmp_path, fast):
    policy = attrs.evolve(fast, commit=commit)

    def saving(gather):
        pending = []

        def cancel(progress):
            if gather.rank == 1 and progress.phase == "publish":
                while not pending:
                    time.sleep(0.001)
                pending[0].cancel()

        pending.append(
            async_save({"w": np.ones(3)}, tmp_path / "a", policy=policy, process_group=gather, progress=cancel)
        )
        return pending[0].result(20)

    outcomes = try_ranks(2, saving)
    assert all(isinstance(o, SaveCancelledError) for o in outcomes), outcomes
    assert not (tmp_path / "a/zarr.json").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"policy": SavePolicy(layout=LayoutPolicy(codecs={"": "zstd"}))}, "policies"),
        ({"policy": SavePolicy(layout=LayoutPolicy(target_chunk_nbytes=64))}, "policies"),
        ({"overwrite": True}, "policies"),
        ({"attributes": {"run": "b"}}, "attributes"),
    ],
)
def test_ranks_that_do_not_want_the_same(options, named, tmp_path):
    def saving(gather):
        mine = {"attributes": {"run": "a"}, **(options if gather.rank == 1 else {})}
        return save({"w": GRID}, tmp_path / "a", process_group=gather, **mine)

    for outcome in try_ranks(2, saving):
        assert named in str(outcome)
        assert outcome.rank == (0, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_cannot_even_look(tmp_path, fast, monkeypatch):
    save({"w": GRID}, tmp_path / "a", policy=fast)

    def loading(gather):
        path = tmp_path / ("x" * 300 if gather.rank == 1 else "a")
        return load({"w": np.zeros_like(GRID)}, path, process_group=gather, policy=LoadPolicy(timeout_s=20))

    for outcome in try_ranks(2, loading):  # told, not waited for
        assert isinstance(outcome, CheckpointError)
        assert outcome.rank == 1
        assert "File name too long" in str(outcome)


def test_copies_of_another_shape_are_named_as_such(tmp_path, fast):
    """Their digests differ as well, which would say less."""

    def saving(gather):
        return save({"w": np.ones(3 + gather.rank)}, tmp_path / "a", policy=fast, process_group=gather)

    for outcome in try_ranks(2, saving):
        assert type(outcome).__name__ == "ShapeError"
        assert outcome.rank == (0, 1)


def test_values_and_shapes_that_differ_are_reported_together(tmp_path, fast):
    def saving(gather):
        state = {"w": np.ones(3 + gather.rank), "lr": gather.rank}
        return save(state, tmp_path / "a", policy=fast, process_group=gather)

    for outcome in try_ranks(2, saving):
        assert sorted((type(e).__name__, e.key) for e in outcome.exceptions) == [
            ("ReplicaError", "lr"),
            ("ShapeError", "w"),
        ]


@pytest.mark.parametrize(("smallest", "ownership"), [(0, "exclusive"), (2**22, "owned")])
def test_shards_of_a_declared_grid(smallest, ownership, tmp_path):
    """Each rank plans chunks of its own alone; too small for that, the ranks gather who holds what."""
    layout = LayoutPolicy(min_chunk_nbytes=smallest)
    policy = SavePolicy(layout=layout, replicas="declared", durability="none")

    def saving(gather):
        shard = from_rank_offsets("w", "float32", (3, 8), (0, gather.rank, 4))
        return save(
            {"w": LocalShards(shard, GRID[shard.box.slices])}, tmp_path / "a", policy=policy, process_group=gather
        )

    (entry,) = run_ranks(4, saving)[0].arrays
    assert entry.layout.ownership == ownership
    np.testing.assert_array_equal(functional_ckpt.open_checkpoint(tmp_path / "a")["w"][...], GRID)
