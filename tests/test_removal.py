"""Tensors removed from a committed checkpoint, by the prefix of their keys: all of them or none, and nothing else."""

import errno
import warnings

import pytest

torch = pytest.importorskip("torch")

import functional_ckpt  # noqa: E402
from functional_ckpt.store import files  # noqa: E402
from functional_ckpt.torch.megatron.mapping import ShardedTensor  # noqa: E402
from functional_ckpt.torch.megatron.serialization import (  # noqa: E402
    load,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)
from functional_ckpt.torch.megatron.strategies import removal  # noqa: E402
from tests.effects import Refusal, watched  # noqa: E402

W = torch.arange(24.0).reshape(6, 4)
tensor = ShardedTensor.from_rank_offsets


@pytest.mark.parametrize("prefix", ["layers", "m/", "w1.up", ""])
def test_tensors_of_any_prefix_are_removed(tmp_path, prefix):
    path = tmp_path / "a"
    save({"w": {"any": tensor("layers", W), "up": tensor("w1.up", W), "m": tensor("m/x", W)}, "step": 3}, path)
    (path / "notes.txt").write_text("kept")
    keys = {*load_tensors_metadata(path)}
    remove_sharded_tensors(path, prefix)
    assert {*load_tensors_metadata(path)} == {key for key in keys if not key.startswith(prefix)}
    assert functional_ckpt.verify(path).ok
    assert (path / "notes.txt").read_text() == "kept"
    assert load({}, path)["step"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_stays_is_brought_to_storage_before_it_takes_the_place(tmp_path, monkeypatch):
    """The links lie in new directories, which a power cut would empty."""
    save({"w": tensor("w", W), "v": tensor("v", W)}, tmp_path / "a")
    done = []
    for name in ("sync_file_system", "sync_directory"):
        real = getattr(files, name)
        monkeypatch.setattr(files, name, lambda path, real=real, name=name: (done.append(name), real(path)))
    remove_sharded_tensors(tmp_path / "a", "w")
    assert done == ["sync_file_system"]


# Stored under "tail": the others are names of it.
TIES = {
    "head": "a other tail",
    "a": "head other tail",
    "o": "a head tail",
    "": "",
    "tail": "a head other",
}


@pytest.mark.parametrize("codecs", [(), (("", ("zstd",)),)], ids=["plain", "codecs"])
@pytest.mark.parametrize("prefix", TIES)
def test_a_name_of_a_tied_tensor_is_removed_and_the_others_stay(tmp_path, prefix, codecs):
    path = tmp_path / "A"
    weight = torch.randn(6, 4)
    layout = functional_ckpt.LayoutPolicy(target_chunk_nbytes=32, min_chunk_nbytes=0, codecs=codecs)
    names = ("tail", "a", "head", "other")
    functional_ckpt.save(
        dict.fromkeys(names, weight) | {"z": torch.ones(2)}, path, policy=functional_ckpt.SavePolicy(layout=layout)
    )
    remove_sharded_tensors(path, prefix)
    left = TIES[prefix].split()
    opened = functional_ckpt.open_checkpoint(path)
    assert [key for key in opened if key != "z"] == left
    assert all(torch.equal(opened[key].torch(), weight) for key in left)
    loaded = opened.state()
    assert len({id(loaded[key]) for key in left}) == min(1, len(left))
    assert len(functional_ckpt.read_manifest(path).aliases) == max(0, len(left) - 1)
    assert functional_ckpt.verify(path).ok
    for name in left:  # so that each is a stored one in turn, and the last goes with its bytes
        remove_sharded_tensors(path, name)
        assert functional_ckpt.verify(path).ok
    assert {item.name for item in path.iterdir() if item.is_dir()} <= {"z"}


@pytest.mark.parametrize("how", ["once", "onwards", "after"])
def test_refused_calls(how, tmp_path):
    """The caller is told truly whether the tensor is removed, whatever the system refuses; only by our errors."""
    for at in range(1, 10**6, 7):
        path = tmp_path / str(at) / "a"
        save({"w": tensor("w", W), "v": tensor("v", W)}, path)
        refusal, failed = Refusal(at, how, errno.EIO), False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", functional_ckpt.errors.CheckpointWarning)
            try:
                with watched(path.parent, refusal):
                    remove_sharded_tensors(path, "w")
            except functional_ckpt.errors.CheckpointError:
                failed = True
        assert list(functional_ckpt.open_checkpoint(path)) == (["v", "w"] if failed else ["v"]), refusal.refused
        assert functional_ckpt.verify(path).ok
        functional_ckpt.sweep(path.parent)
        assert [p.name for p in path.parent.iterdir()] == ["a"]
        if refusal.refused is None:
            break
    assert at > 30, "the calls are no longer seen"


def test_a_checkpoint_that_is_saved_meanwhile_stays(tmp_path, monkeypatch):
    def meanwhile(*arguments, real=removal.root_metadata):
        monkeypatch.undo()
        functional_ckpt.save({"w": W * 2}, tmp_path / "a", overwrite=True)
        return real(*arguments)

    functional_ckpt.save({"w": W, "v": W + 1}, tmp_path / "a")
    monkeypatch.setattr(removal, "root_metadata", meanwhile)
    with pytest.raises(functional_ckpt.errors.AlreadyExistsError, match="meanwhile"):
        removal.remove_arrays(tmp_path / "a", ["v"])
    assert torch.equal(functional_ckpt.open_checkpoint(tmp_path / "a")["w"].torch(), W * 2)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
