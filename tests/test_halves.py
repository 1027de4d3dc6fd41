"""The common and the sharded half of a checkpoint: never of two saves, whatever is killed when, and never in the way.

A save as Megatron makes it (``common.pt`` in place, then the strategy, then ``metadata.json`` in place), and our own,
over a checkpoint that is there, killed after each of its effects.
"""

import argparse
import os
import shutil
import warnings

import pytest

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402

import functional_ckpt  # noqa: E402
from functional_ckpt.errors import (  # noqa: E402
    AlreadyExistsError,
    CheckpointError,
    CorruptionError,
    NotACheckpointError,
    ObjectCodecError,
    ReplacedError,
)
from functional_ckpt.store import directories  # noqa: E402
from functional_ckpt.store.commit import begin  # noqa: E402
from functional_ckpt.torch.dcp.storage_writer import ZarrStorageReader  # noqa: E402
from functional_ckpt.torch.megatron import halves  # noqa: E402
from functional_ckpt.torch.megatron.mapping import ShardedTensor  # noqa: E402
from functional_ckpt.torch.megatron.serialization import (  # noqa: E402
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_tensors_metadata,
    save,
)
from functional_ckpt.torch.megatron.strategies import zarr  # noqa: E402
from functional_ckpt.torch.megatron.strategies.common_file import TorchLoadCommonStrategy  # noqa: E402
from functional_ckpt.torch.megatron.strategies.zarr import (  # noqa: E402
    ZarrLoadShardedStrategy,
    ZarrSaveShardedStrategy,
)
from tests.disk import Cut, files_below, is_aside  # noqa: E402
from tests.halves import (  # noqa: E402
    CASES,
    FAST,
    ONLY,
    STEP,
    check_case,
    halves_of,
    left_by_victims,
    megatron_loads,
    megatron_saves,
    ours_loads,
    ours_saves,
    tensor,
    wanted,
    write_in_place,
)
from tests.places import run_save  # noqa: E402
from tests.test_power_cuts import can_be_swept, logged  # noqa: E402


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    root = tmp_path_factory.mktemp("left")
    return root, left_by_victims(root, STEP)


@pytest.mark.parametrize("case", CASES)
def test_killed_at_some_effects(case, left):
    """`tox -e soak` kills at every one."""
    root, last = left
    check_case(case, root, last[case])


# --- where directories cannot be exchanged ---


def removed_first(place, mode, durability):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halves, "_can_be_exchanged", lambda _: False)
        assert halves.commit_over(place / "a") == "marker"
    run_save(place, "marker", durability)


def broken(logged, dropped=()):
    """Yield the moments at which a power cut leaves neither checkpoint nor what the next save clears."""
    log, old, new = logged
    for count in range(len(log.steps) + 1):
        for image in Cut(log, count, dropped).images():
            there = files_below(image, "a")
            found = {name: data for name, data in there.items() if not is_aside(name)}
            if found not in (old, new) and not can_be_swept(there):
                yield count, there


def test_a_power_cut_leaves_what_the_next_save_clears():
    found = logged("overwrite", "fsync", removed_first)
    assert next(broken(found), None) is None
    needless = [found[0].steps[at] for at in found[0].syncs() if next(broken(found, {at}), None) is None]
    assert needless == []


def test_where_directories_are_exchanged(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    assert halves._can_be_exchanged(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]
    monkeypatch.chdir(tmp_path / "a")
    assert not halves._can_be_exchanged(tmp_path / "a")

    def cannot(*_):
        raise functional_ckpt.errors.StorageError("two directories could not be exchanged")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(directories, "exchange_paths", cannot)
    assert not halves._can_be_exchanged(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]


# --- what is bound ---


@pytest.mark.parametrize("saves", [megatron_saves, ours_saves])
def test_halves_of_two_saves_do_not_load(saves, tmp_path):
    for step in (1, 2):
        (tmp_path / str(step)).mkdir()
        saves(tmp_path / str(step), step)
    name = "common.pt" if saves is megatron_saves else ".common"
    shutil.rmtree(tmp_path / "2" / name, ignore_errors=True)
    copy = shutil.copytree if name == ".common" else shutil.copy
    copy(tmp_path / "1" / name, tmp_path / "2" / name)
    for loads in (megatron_loads, ours_loads, load_common_state_dict, load_tensors_metadata):
        with pytest.raises(CorruptionError, match="not the one that was saved with the tensors"):
            loads(tmp_path / "2")
    assert halves_of(functional_ckpt.load(plain(), tmp_path / "2", policy=ONLY) | {"rng": [2]}) == 2
    saves(tmp_path / "2", 3)
    assert ours_loads(tmp_path / "2") == megatron_loads(tmp_path / "2") == (3, 3)


def plain():
    return {"w": torch.zeros(5, 3, dtype=torch.int64), "bias": torch.zeros(7, dtype=torch.int64)}


@pytest.mark.parametrize("text", [None, "", '{"sharded_ba'])
@pytest.mark.parametrize("saves", [megatron_saves, ours_saves])
def test_a_whole_checkpoint_needs_no_metadata_file(saves, text, tmp_path):
    """Killed before it was written, or by Megatron while it was."""
    saves(tmp_path, 1)
    (tmp_path / "metadata.json").unlink()
    if text is not None:
        (tmp_path / "metadata.json").write_text(text)
    assert ours_loads(tmp_path) == (1, 1)
    saves(tmp_path, 2)
    assert ours_loads(tmp_path) == megatron_loads(tmp_path) == (2, 2)


@pytest.mark.parametrize("first", [megatron_saves, ours_saves])
@pytest.mark.parametrize("then", [megatron_saves, ours_saves])
def test_a_common_half_of_the_other_layout_does_not_stay(first, then, tmp_path):
    first(tmp_path, 1)
    then(tmp_path, 2)
    assert (tmp_path / "common.pt").exists() is (then is megatron_saves)
    assert (tmp_path / ".common" / "zarr.json").exists() is (then is ours_saves)
    (tmp_path / "metadata.json").unlink()
    assert ours_loads(tmp_path) == (2, 2)


@pytest.mark.parametrize("saves", [megatron_saves, ours_saves])
def test_checkpoints_of_before_load(saves, tmp_path, monkeypatch):
    """Their roots bind nothing."""
    monkeypatch.setattr(zarr, "attributes_for", lambda *_: None)
    saves(tmp_path, 1)
    assert dict(functional_ckpt.open_checkpoint(tmp_path).attributes) == {}
    assert ours_loads(tmp_path) == megatron_loads(tmp_path) == (1, 1)
    (tmp_path / "metadata.json").unlink()
    with pytest.raises(NotACheckpointError, match="not a distributed checkpoint"):
        ours_loads(tmp_path)
    monkeypatch.undo()
    saves(tmp_path, 2)
    assert ours_loads(tmp_path) == megatron_loads(tmp_path) == (2, 2)


def test_a_checkpoint_of_another_format_stays(tmp_path):
    text = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    (tmp_path / "metadata.json").write_text(text)
    with pytest.raises(AlreadyExistsError, match="another format"):
        ours_saves(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["metadata.json"]
    assert (tmp_path / "metadata.json").read_text() == text


def test_over_another_format_there_is_none_until_the_end(tmp_path):
    """Megatron has written its common.pt by then: what metadata.json names would load with it."""
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    strategy = ZarrSaveShardedStrategy(policy=FAST, common_file="common.pt")
    with pytest.raises(CheckpointError, match="no data to save"):
        strategy.save({"w": ShardedTensor("w", None, torch.float32, (2,), (2,), (0,), None)}, tmp_path)
    strategy.save({"w": tensor("w", torch.ones(2))}, tmp_path)
    assert not (tmp_path / "metadata.json").exists()


def test_what_a_killed_save_leaves_is_called_so(tmp_path):
    """Megatron's common.pt is there, and what Megatron loads is not."""
    write_in_place(tmp_path / "common.pt", b"PK")
    _, claim = begin(tmp_path, "marker", False, ["w"])
    claim.drop()
    for read in (ours_loads, functional_ckpt.open_checkpoint):
        with pytest.raises(NotACheckpointError, match="the save did not finish"):
            read(tmp_path)


def test_a_save_that_is_refused_loses_nothing(tmp_path):
    ours_saves(tmp_path, 1)
    bad = ShardedTensor("w", torch.ones(2), torch.float32, (2,), (4,), (0,), None)  # half of it is nowhere
    with pytest.raises(CheckpointError, match="'w'"):
        save({"w": bad, "step": 2}, tmp_path)
    assert ours_loads(tmp_path) == megatron_loads(tmp_path) == (1, 1)
    (tmp_path / "w2").mkdir()
    (tmp_path / "w2" / "mine.txt").touch()
    with pytest.raises(AlreadyExistsError, match="w2"):
        ZarrSaveShardedStrategy(policy=FAST).save({"w2": tensor("w2", torch.ones(2))}, tmp_path)
    assert ours_loads(tmp_path) == (1, 1)


def test_one_that_is_replaced_while_its_halves_are_read(tmp_path, monkeypatch):
    ours_saves(tmp_path, 1)
    real = ZarrLoadShardedStrategy.load

    def late(self, wanted, path):
        ours_saves(tmp_path, 2)
        return real(self, wanted, path)

    monkeypatch.setattr(ZarrLoadShardedStrategy, "load", late)
    with pytest.raises(ReplacedError, match="while its halves were loaded"):
        load(wanted(), tmp_path)


# --- one format ---


@pytest.mark.parametrize("saves", [megatron_saves, ours_saves])
def test_who_reads_the_tensors_reads_what_either_saves(saves, tmp_path):
    saves(tmp_path, 4)
    assert halves_of(functional_ckpt.load(plain(), tmp_path, policy=ONLY) | {"rng": [4]}) == 4
    through_dcp = plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.load(through_dcp, storage_reader=ZarrStorageReader(tmp_path))
    assert halves_of(through_dcp | {"rng": [4]}) == 4
    assert {*load_plain_tensors(tmp_path)} == {"w", "bias", "only.4"}


def test_objects_in_the_common_file_are_built_if_they_are_harmless(tmp_path):
    saved = {"step": 1, "args": argparse.Namespace(lr=0.5), "seen": {1, 2}, "trusted": Trusted()}
    megatron_saves(tmp_path, 1, common=saved)
    with pytest.raises(ObjectCodecError, match="Trusted"):
        load_common_state_dict(tmp_path)
    found = load({}, tmp_path, common_strategy=TorchLoadCommonStrategy(safe_globals=[Trusted]))
    assert (found["args"].lr, found["seen"], type(found["trusted"])) == (0.5, {1, 2}, Trusted)


class Trusted:
    pass
