"""What ranks hold besides shards: copies, values, values by rank, other keys on other ranks, tied weights."""

import numpy as np
import pytest

import functional_ckpt as fc
from tests.mp import launch

pytestmark = pytest.mark.mp

SOON = fc.SavePolicy(timeout_s=launch.NEVER_S)


def save(state_of, path, policy=SOON, **options):
    """Save what `state_of(rank)` returns, and return the manifest's text."""
    return fc.save(state_of(launch.rank()), path, policy=policy, **options).to_json()


def load(like_of, path, policy=None):
    """Return what `like_of(rank)` is loaded with."""
    return fc.load(like_of(launch.rank()), path, policy=policy or fc.LoadPolicy(timeout_s=launch.NEVER_S))


def errors(outcomes):
    """Return the errors of all ranks, which must have raised alike."""
    assert all(isinstance(o.error, fc.errors.CheckpointError) for o in outcomes), [o.text for o in outcomes]
    assert len({str(o.error) for o in outcomes}) == 1
    return [o.error for o in outcomes]


def replicated(rank):
    import torch

    state = {"w": launch.values(6, 4), "n": np.arange(5), "step": torch.tensor(3.0), "z": torch.zeros(0, 2)}
    return {"model": state, "lr": 0.1, "betas": (0.9, 0.95), "names": ["a", None, True], "deep": [{1: b"x"}]}


def test_copies_are_written_once_and_the_world_leaves_no_trace(four, two, tmp_path):
    texts = [
        *four.run(save, replicated, tmp_path / "4"),
        *two.run(save, replicated, tmp_path / "2"),
        fc.save(replicated(0), tmp_path / "1").to_json(),
    ]
    assert len(set(texts)) == 1
    files = {str(f.relative_to(tmp_path / "4")): f.read_bytes() for f in (tmp_path / "4").rglob("*") if f.is_file()}
    alone = {str(f.relative_to(tmp_path / "1")): f.read_bytes() for f in (tmp_path / "1").rglob("*") if f.is_file()}
    assert files.pop("provenance.json") != alone.pop("provenance.json")
    assert files == alone


def test_copies_are_loaded_by_any_number_of_ranks(four, two, tmp_path):
    import torch

    four.run(save, replicated, tmp_path / "a")
    for found in [*two.run(load, replicated, tmp_path / "a"), fc.load(replicated(0), tmp_path / "a")]:
        assert found.pop("betas") == (0.9, 0.95)
        assert found["deep"] == [{1: b"x"}]
        assert torch.equal(found["model"]["w"], launch.values(6, 4))


def sharded_rows(rank):
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = launch.mesh(dist.get_world_size())
    whole = launch.values(4, 3)
    return {"w": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None), "b": launch.values(2)}


def test_chunks_of_one_size_give_one_manifest(four, two, tmp_path):
    """Rows shared by 2 or 4 ranks end in the same shared chunks, hence in the same bytes."""
    assert len({*four.run(save, sharded_rows, tmp_path / "4"), *two.run(save, sharded_rows, tmp_path / "2")}) == 1


def unequal_copies(rank):
    return {"same": np.ones(3), "model": {"w": np.full(3, 1.0 if rank != 2 else 2.0)}}


def unequal_values(rank):
    return {"same": 1, "sched": {"step": 7 if rank < 3 else 8}}


@pytest.mark.parametrize(("state", "key", "ranks"), [(unequal_copies, "model.w", (0, 2)),
                                                     (unequal_values, "sched.step", (0, 3))])  # fmt: skip
def test_unequal_copies_are_refused(four, tmp_path, state, key, ranks):
    for error in errors(four.outcomes(save, state, tmp_path / "a")):
        assert isinstance(error, fc.errors.ReplicaError)
        assert (error.key, error.rank) == (key, ranks)
        assert key in str(error)
        assert str(ranks) in str(error)
    assert not list(tmp_path.iterdir())


def test_unequal_copies_may_be_trusted(four, tmp_path):
    trust = fc.SavePolicy(replicated="trust", timeout_s=30)
    four.run(save, unequal_copies, tmp_path / "a", trust)
    four.run(save, unequal_values, tmp_path / "b", trust)
    assert fc.open_checkpoint(tmp_path / "a")["model.w"][0] in (1.0, 2.0)
    assert fc.open_checkpoint(tmp_path / "b").tree()["sched"]["step"] == 7
    assert fc.verify(tmp_path / "a").ok


def both_kinds(rank):
    return {"x": np.ones(2) if rank else 1.0}


def other_shape(rank):
    return {"ok": np.ones(1), "w": np.ones(3 if rank == 3 else 2)}


def other_dtype(rank):
    return {"ok": np.ones(1), "w": np.ones(2, "f4" if rank == 3 else "f8")}


def other_global_shape(rank):
    import torch
    from torch.distributed.tensor import DTensor, Shard

    return {"w": DTensor.from_local(torch.ones(2, 3), launch.mesh(4), [Shard(0)], run_check=False,
                                    shape=(8 if rank < 3 else 9, 3), stride=(3, 1))}  # fmt: skip


@pytest.mark.parametrize(
    ("state", "kind", "facts"),
    [
        (other_shape, fc.errors.ShapeError, ["'w'", "(0, 3)", "(2,)", "(3,)"]),
        (other_dtype, fc.errors.DTypeError, ["'w'", "(0, 3)", "float32", "float64"]),
        (other_global_shape, fc.errors.SpecError, ["'w'", "(0, 3)", "(8, 3)", "(9, 3)"]),
        (both_kinds, fc.errors.DuplicateKeyError, ["'x'"]),
    ],
)
def test_disagreement_names_key_and_ranks(four, tmp_path, state, kind, facts):
    for error in errors(four.outcomes(save, state, tmp_path / "a")):
        found = error.exceptions if isinstance(error, ExceptionGroup) else [error]
        assert any(isinstance(e, kind) for e in found), error
        assert all(fact in str(error) for fact in facts), error
    assert not list(tmp_path.iterdir())


def disagreeing_attributes(rank):
    return {"rank": rank}


def save_attributes(path):
    fc.save({"w": np.ones(2)}, path, policy=SOON, attributes=disagreeing_attributes(launch.rank()))


def test_attributes_must_agree(four, tmp_path):
    for error in errors(four.outcomes(save_attributes, tmp_path / "a")):
        assert "attributes" in str(error)


def by_rank(rank):
    import torch

    rng = {"seed": 100 + rank, "state": torch.full((3,), rank), "words": [np.arange(rank + 1)]}
    return {"w": np.arange(4.0), "rng": fc.PerRank(rng)}


def like_by_rank(rank):
    import torch

    rng = {"seed": None, "state": torch.zeros(3, dtype=torch.int64), "words": [np.zeros(rank + 1, int)]}
    return {"w": np.zeros(4), "rng": fc.PerRank(rng)}


def like_of_first(rank):
    return like_by_rank(0)


def by_rank_is_back():
    return {"w": np.zeros(4), "rng": fc.PerRank({"seed": 0})}


def seeds(rank):
    return {"seed": fc.PerRank(100 + rank), "w": np.ones(1)}


def test_values_by_rank_return_to_their_ranks(four, tmp_path):
    four.run(save, by_rank, tmp_path / "a")
    for rank, found in enumerate(four.run(load, like_by_rank, tmp_path / "a")):
        value = found["rng"].value
        assert value["seed"] == 100 + rank
        assert value["state"].tolist() == [rank] * 3
        assert value["words"][0].tolist() == list(range(rank + 1))


def test_values_by_rank_meet_another_world(four, two, tmp_path):
    four.run(save, by_rank, tmp_path / "a")
    four.run(save, seeds, tmp_path / "b")
    for error in errors(two.outcomes(load, like_of_first, tmp_path / "a")):
        found = error.exceptions if isinstance(error, ExceptionGroup) else [error]
        assert all(isinstance(e, fc.errors.PerRankError) for e in found)
        assert "4 ranks" in str(error)
        assert "2 ranks" in str(error)
    first = fc.LoadPolicy(per_rank="first")
    for found in two.run(load, like_of_first, tmp_path / "a", first):
        assert found["rng"].value["seed"] == 100
    dealt = two.run(load, seeds, tmp_path / "b", fc.LoadPolicy(per_rank=deal))
    assert [found["seed"].value for found in dealt] == [[100, 102], [101, 103]]


def deal(values, rank, size):
    return [value.value if isinstance(value, fc.PerRank) else value for value in values[rank::size]]


def pipeline(rank):
    """Two stages of two ranks each, with layers of their own; rank 3 holds a key that nobody else knows."""
    stage = rank // 2
    layers = {f"layer{n}": {"w": launch.values(3, 2, seed=n)} for n in (2 * stage, 2 * stage + 1)}
    return {"model": layers, "step": 5, **({"tail": {"lr": 0.5, "w": np.arange(3)}} if rank == 3 else {})}


def like_pipeline(rank):
    import torch

    state = pipeline(rank)
    for layer in state["model"].values():
        layer["w"] = torch.zeros_like(layer["w"])
    return state


def whole_pipeline(rank):
    import torch

    model = {f"layer{n}": {"w": torch.zeros(3, 2)} for n in range(4)}
    return {"model": model, "step": 0, "tail": {"lr": 0, "w": np.zeros(3, int)}}


def test_ranks_may_hold_different_keys(four, two, tmp_path):
    import torch

    four.run(save, pipeline, tmp_path / "a")
    for rank, found in enumerate(four.run(load, like_pipeline, tmp_path / "a")):
        for key, layer in pipeline(rank)["model"].items():
            assert torch.equal(found["model"][key]["w"], layer["w"])
    for found in two.run(load, whole_pipeline, tmp_path / "a"):
        assert torch.equal(found["model"]["layer3"]["w"], launch.values(3, 2, seed=3))
        assert found["tail"]["lr"] == 0.5
    assert sorted(fc.open_checkpoint(tmp_path / "a").tree()["model"]) == [f"layer{n}" for n in range(4)]


def empty_handed(rank):
    return pipeline(rank) if rank else {}


def test_a_rank_may_hold_nothing(four, tmp_path):
    four.run(save, empty_handed, tmp_path / "a")
    assert fc.verify(tmp_path / "a").ok
    assert sorted(fc.open_checkpoint(tmp_path / "a").tree()["model"]) == [f"layer{n}" for n in range(4)]


def test_a_rank_that_holds_nothing_loads_nothing(four, tmp_path):
    four.run(save, empty_handed, tmp_path / "a")
    assert four.run(load, empty_handed, tmp_path / "a")[0] == {}


def nothing(rank):
    return {}


def test_all_ranks_may_hold_nothing(four, tmp_path):
    four.run(save, nothing, tmp_path / "a")
    assert four.run(load, nothing, tmp_path / "a") == [{}] * 4


def tied(rank):
    from torch.distributed.tensor import Shard, distribute_tensor

    weight = distribute_tensor(launch.values(5, 2), launch.mesh(4), [Shard(0)], src_data_rank=None)
    plain = launch.values(3)
    return {"embed": weight, "head": weight.detach(), "a": plain, "b": plain.view(3)}


def save_and_load_tied(path):
    manifest = fc.save(tied(0), path, policy=SOON)
    like = tied(0)
    like["embed"].to_local().zero_()
    like["a"].zero_()
    found = fc.load(like, path)
    for key, tensor in tied(0).items():
        launch.same(found[key], tensor, key)
    if like["embed"].to_local().numel():
        assert found["embed"].to_local().data_ptr() == found["head"].to_local().data_ptr()
    return sorted((alias.key, alias.target) for alias in manifest.aliases)


def test_tied_weights_are_stored_once(four, tmp_path):
    assert four.run(save_and_load_tied, tmp_path / "a")[0] == [("b", "a"), ("head", "embed")]


def tied_on_one_rank(rank):
    plain = launch.values(3)
    return {"a": plain, "b": plain if rank == 1 else plain.clone()}


def test_a_tie_on_one_rank_is_no_tie(four, tmp_path):
    four.run(save, tied_on_one_rank, tmp_path / "a")
    assert not fc.read_manifest(tmp_path / "a").aliases


def optimizer_of_frozen(rank):
    return {"lr": 0.1, "w": np.ones(2), "extra": None}


def missing_on_one(rank):
    return {**optimizer_of_frozen(rank), **({"other": np.ones(1)} if rank == 2 else {})}


def wrong_shape_on_one(rank):
    return {**optimizer_of_frozen(rank), "w": np.ones(3 if rank == 1 else 2)}


@pytest.mark.parametrize(
    ("like", "kind", "facts"),
    [(missing_on_one, fc.errors.KeyMismatchError, ["'other'", "rank 2"]),
     (wrong_shape_on_one, fc.errors.ShapeError, ["'w'", "rank 1"])],
)  # fmt: skip
def test_a_load_that_fails_on_one_rank_fails_on_all(four, tmp_path, like, kind, facts):
    four.run(save, optimizer_of_frozen, tmp_path / "a")
    for error in errors(four.outcomes(load, like, tmp_path / "a")):
        assert isinstance(error, kind)
        assert all(fact in str(error) for fact in facts), error


def load_elsewhere(path):
    return load(optimizer_of_frozen, path / ("there" if launch.rank() == 3 else "here") / "a")


def test_ranks_that_load_different_checkpoints_are_told(four, tmp_path):
    """As where a path is another directory on another machine."""
    four.run(save, optimizer_of_frozen, tmp_path / "here/a")
    for error in errors(four.outcomes(load_elsewhere, tmp_path)):
        assert isinstance(error, fc.errors.NotACheckpointError)
        assert "rank 3" in str(error)
    four.run(save, seeds, tmp_path / "there/a")
    for outcome in four.outcomes(load_elsewhere, tmp_path):
        assert "different checkpoints" in str(outcome.error)


def load_another(path):
    return load(optimizer_of_frozen, path / ("b" if launch.rank() == 3 else "a"))


def test_ranks_that_call_different_things_are_told_what_each_calls(four, tmp_path):
    four.run(save, optimizer_of_frozen, tmp_path / "a")
    for number in range(8):  # a rank that comes late finds that the others have given up
        for outcome in four.outcomes(load_another, tmp_path, limit_s=25):  # less than the wait for a rank
            assert isinstance(outcome.error, fc.errors.CheckpointError), (number, outcome)
            assert "'b'" in str(outcome.error), (number, outcome)


def spoil(path):
    file = path / "w" / "c.0"
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)


def test_a_flipped_bit_is_found_by_all_ranks(four, tmp_path):
    four.run(save, optimizer_of_frozen, tmp_path / "a")
    spoil(tmp_path / "a")
    for outcome in four.outcomes(load, optimizer_of_frozen, tmp_path / "a"):
        assert isinstance(outcome.error, fc.errors.CorruptionError)
        assert "'w'" in str(outcome.error)


def stage(rank):
    return {**sharded_rows(rank), f"stage{rank}": {"step": 1, "mean": np.ones(3), "rng": fc.PerRank(rank)}}


def test_equal_values_under_other_keys_are_all_saved_every_time(two, tmp_path):
    for number in range(3):
        two.run(save, stage, tmp_path / str(number))
        found = fc.open_checkpoint(tmp_path / str(number)).tree()
        assert [found[f"stage{rank}"]["step"] for rank in range(2)] == [1, 1]
        assert [found[f"stage{rank}"]["mean"].shape for rank in range(2)] == [(3,), (3,)]
