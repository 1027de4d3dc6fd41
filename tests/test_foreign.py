"""What other programs wrote is told by its name, with the way from there to here."""

import json

import numpy as np
import pytest

from functional_ckpt import load, open_checkpoint, read_manifest, save, verify
from functional_ckpt.cli import main
from functional_ckpt.errors import NotACheckpointError


def safetensors(path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def check(path, problems_of, found, remedy, command="ls"):
    for function in (open_checkpoint, verify, read_manifest, lambda p: load({}, p)):
        (problem,) = problems_of(function, path)
        assert type(problem).__name__ == "NotACheckpointError"
        assert problem.path == str(path)
        assert found in f"{problem.what} {problem.found}"
        assert remedy in problem.remedy
    assert main([command, str(path)]) == 2


@pytest.mark.filterwarnings("ignore")
def test_torch(tmp_path, problems_of):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    from functional_ckpt.torch.megatron.serialization import load_common_state_dict

    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name in ("a.pt", "old.pt"):
        check(tmp_path / name, problems_of, "torch.save", "torch.load")
    check(tmp_path / "dcp", problems_of, "DCP", "torch.distributed.checkpoint.load")
    with pytest.raises(NotACheckpointError, match=r"DCP.*torch\.distributed\.checkpoint\.load"):
        load_common_state_dict(tmp_path / "dcp")
    (tmp_path / "dcp/.metadata").unlink()  # not finished
    check(tmp_path / "dcp", problems_of, "DCP", "torch.distributed.checkpoint.load")
    (tmp_path / "weights").mkdir()
    (tmp_path / "a.pt").rename(tmp_path / "weights/pytorch_model.bin")
    check(tmp_path / "weights", problems_of, "torch.save", "torch.load")


def test_safetensors(tmp_path, problems_of):
    safetensors(tmp_path / "model.safetensors")
    check(tmp_path / "model.safetensors", problems_of, "safetensors", "load_file")
    check(tmp_path, problems_of, "safetensors", "load_file")


def test_numpy(tmp_path, problems_of):
    np.save(tmp_path / "a.npy", np.ones(2))
    np.savez(tmp_path / "b.npz", w=np.ones(2))
    for name in ("a.npy", "b.npz"):
        check(tmp_path / name, problems_of, "numpy", "numpy.load")


def test_megatron(tmp_path, problems_of):
    one = tmp_path / "iter_0000100"
    one.mkdir()
    for name in (".metadata", "common.pt", "__0_0.distcp"):
        (one / name).write_bytes(b"x")
    (one / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    check(one, problems_of, "Megatron-LM", "dist_checkpointing")
    (one / "metadata.json").unlink()
    check(one, problems_of, "Megatron-LM", "dist_checkpointing")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    check(tmp_path, problems_of, "directory of checkpoints of Megatron-LM", "one iteration")
    (one / "metadata.json").write_text('{"sharded_backend": "functional_ckpt"}')  # ours, whose root never came
    (one / "common.pt").unlink()
    (problem,) = problems_of(open_checkpoint, one)
    assert "Megatron" not in str(problem)


@pytest.mark.parametrize("names", [["_CHECKPOINT_METADATA", "default/d/0"], ["manifest.ocdbt", "_METADATA"]])
def test_orbax(names, tmp_path, problems_of):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"{}")
    check(tmp_path, problems_of, "Orbax", "orbax.checkpoint")


@pytest.mark.parametrize("version", [2, 3])
def test_zarr(version, tmp_path, problems_of):
    zarr = pytest.importorskip("zarr")
    zarr.open_group(tmp_path / "a", mode="w", zarr_format=version).create_array("x", shape=(2,), dtype="f4")
    check(tmp_path / "a", problems_of, "Zarr", "zarr")
    check(tmp_path / "a/x", problems_of, "Zarr", "zarr")


def test_a_directory_of_checkpoints(tmp_path, problems_of, fast):
    for step in (100, 200):
        save({"w": np.ones(2)}, tmp_path / f"step_{step}", policy=fast)
    check(tmp_path, problems_of, "step_100, step_200", "one of them", "show")


def test_files_of_no_format(tmp_path, problems_of):
    (tmp_path / "notes.txt").write_text("x")
    check(tmp_path, problems_of, "other files: notes.txt", "path")
    check(tmp_path / "notes.txt", problems_of, "a file", "path")
    check(tmp_path / "nothing", problems_of, "nothing", "path")


def test_a_save_that_did_not_finish(tmp_path, problems_of, fast):
    save({"w": np.ones(2)}, tmp_path / "a", policy=fast)
    for name in ("zarr.json", "manifest.json", "provenance.json", "w/zarr.json"):
        (tmp_path / "a" / name).unlink()
        check(tmp_path / "a", problems_of, "did not finish", "sweep")
