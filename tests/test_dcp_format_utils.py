"""DCP's own converters, `torch.distributed.checkpoint.format_utils`, where our storage is installed."""

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
    torch_save_to_dcp,
)

import functional_ckpt as fc
from functional_ckpt import LoadPolicy
from functional_ckpt.torch import install

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Thing:
    """A class that somebody has to trust."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is Thing and self.value == other.value

    __hash__ = None


def training():
    """What a program saves: nested, with tensors in lists, keys with dots, and values of many kinds."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).bfloat16()
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3, dtype=torch.bfloat16)).sum().backward()
    adam.step()
    return {
        "model": model.state_dict(),
        "optimizer": adam.state_dict(),
        "loops": {"epoch": 3, "done": [1, 2.5, None], "sizes": (torch.Size([2]), torch.bfloat16)},
        "seen": [torch.arange(3), {"a.b": torch.tensor(2.0)}],
        "nothing": torch.zeros(0, 3),
    }


@pytest.fixture
def saved(tmp_path):
    """A file of `torch.save`, and what it holds."""
    state = training()
    torch.save(state, tmp_path / "model.pt")
    return tmp_path / "model.pt", state


def plain(tree):
    """DCP gives ordered dicts as dicts, and int keys as text."""
    if isinstance(tree, dict | OrderedDict):
        return {str(key): plain(value) for key, value in tree.items()}
    return [plain(each) for each in tree] if isinstance(tree, list) else tree


def test_a_file_becomes_a_checkpoint_of_ours_and_a_file_again(saved, tmp_path, same):
    file, state = saved
    with install():
        torch_save_to_dcp(file, tmp_path / "there")
        dcp_to_torch_save(tmp_path / "there", tmp_path / "back.pt")
    assert fc.verify(tmp_path / "there").ok
    same(plain(torch.load(tmp_path / "back.pt")), plain(state))
    found = fc.open_checkpoint(tmp_path / "there").state("torch")
    same(found["model"]["0.weight"], state["model"]["0.weight"])


def test_the_folder_may_hold_files_of_others_and_an_earlier_checkpoint(saved, tmp_path, tree_bytes):
    file, _ = saved
    there = tmp_path / "there"
    (there / "logs").mkdir(parents=True)
    (there / "meta.pt").write_bytes(b"theirs")
    (there / "logs" / "a.txt").write_text("theirs")
    for state in (torch.load(file), {"w": torch.ones(3)}):
        torch.save(state, tmp_path / "next.pt")
        with install():
            torch_save_to_dcp(tmp_path / "next.pt", there)
            dcp_to_torch_save(there, tmp_path / "back.pt")
    assert torch.load(tmp_path / "back.pt")["w"].tolist() == [1.0] * 3
    assert list(fc.open_checkpoint(there)) == ["w"]
    found = tree_bytes(there)
    assert (found["meta.pt"], found["logs/a.txt"]) == (b"theirs", b"theirs")


def test_what_dcp_wrote_itself_becomes_a_file_too(saved, tmp_path, same):
    file, state = saved
    torch_save_to_dcp(file, tmp_path / "there")
    with install():
        dcp_to_torch_save(tmp_path / "there", tmp_path / "back.pt")
    same(plain(torch.load(tmp_path / "back.pt")), plain(state))


def test_a_class_has_to_be_trusted_on_the_way_out(tmp_path):
    torch.save({"w": torch.ones(2), "thing": Thing(3)}, tmp_path / "model.pt")
    with install():
        torch_save_to_dcp(tmp_path / "model.pt", tmp_path / "there")
        with pytest.raises(BaseException, match=r"Thing in 'thing'.*LoadPolicy\(safe_globals="):
            dcp_to_torch_save(tmp_path / "there", tmp_path / "back.pt")
    with install(load_policy=LoadPolicy(safe_globals=[Thing])):
        dcp_to_torch_save(tmp_path / "there", tmp_path / "back.pt")
    assert torch.load(tmp_path / "back.pt", weights_only=False)["thing"] == Thing(3)


def test_files_of_torch_save_are_loaded_by_the_reader_that_a_program_passes(tmp_path):
    """`BroadcastingTorchSaveReader` is DCP's own, and stays it."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        torch.save({"model": {"w": torch.arange(4.0), "b": torch.ones(2)}}, tmp_path / "model.pt")
        state = {"model": {"w": torch.zeros(4), "b": torch.zeros(2)}}
        with install():
            reader, planner = BroadcastingTorchSaveReader(), DynamicMetaLoadPlanner()
            dcp.load(state, storage_reader=reader, planner=planner, checkpoint_id=tmp_path / "model.pt")
            dcp.save(state, checkpoint_id=tmp_path / "there")
    finally:
        torch.distributed.destroy_process_group()
    assert state["model"]["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert fc.open_checkpoint(tmp_path / "there")["model.b"][:].tolist() == [1.0] * 2


def test_format_utils_may_be_imported_after_install(saved, tmp_path):
    """Its names are bound when it is imported; a program may do that late, or only once the storage is undone."""
    code = f"""
import warnings; warnings.simplefilter("ignore")
import torch.distributed.checkpoint as dcp
from functional_ckpt.torch import install
before = dcp.FileSystemWriter
with install():
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
    torch_save_to_dcp({str(saved[0])!r}, {str(tmp_path / "ours")!r})
    dcp_to_torch_save({str(tmp_path / "ours")!r}, {str(tmp_path / "back.pt")!r})
torch_save_to_dcp({str(saved[0])!r}, {str(tmp_path / "stock")!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert fc.verify(tmp_path / "ours").ok
    assert sorted(path.name for path in Path(tmp_path, "stock").iterdir()) == [".metadata", "__0_0.distcp"]
