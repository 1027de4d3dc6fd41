"""`install`: DCP chooses our storage where a program passes only a path."""

import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, format_utils, hf_storage

import functional_ckpt as fc
from functional_ckpt import LoadPolicy, SavePolicy, errors
from functional_ckpt.store.encoding import METADATA_TEXT
from functional_ckpt.torch import INSTALLED_SAVE_POLICY, ZarrStorageWriter, install

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SAVES = {
    "checkpoint_id": lambda state, path: dcp.save(state, checkpoint_id=path),
    "a path object": lambda state, path: dcp.save(state, checkpoint_id=Path(path)),
    "file://": lambda state, path: dcp.save(state, checkpoint_id=f"file://{path}"),
    "FileSystemWriter": lambda state, path: dcp.save(state, storage_writer=dcp.FileSystemWriter(path)),
    "with options": lambda state, path: dcp.save(
        state, storage_writer=dcp.FileSystemWriter(path=Path(path), single_file_per_rank=True, thread_count=2)
    ),
    "async": lambda state, path: dcp.async_save(state, checkpoint_id=path).result(),
}
LOADS = {
    "checkpoint_id": lambda state, path: dcp.load(state, checkpoint_id=path),
    "file://": lambda state, path: dcp.load(state, checkpoint_id=f"file://{path}"),
    "FileSystemReader": lambda state, path: dcp.load(state, storage_reader=dcp.FileSystemReader(path=Path(path))),
}


def state(value=0.0):
    return {"w": torch.full((3,), value), "step": int(value)}


def loaded(path, load=LOADS["checkpoint_id"]):
    found = state()
    load(found, path)
    assert found["w"].tolist() == [found["step"]] * 3
    return found["step"]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "step-1")


@pytest.fixture
def group(tmp_path):
    """The group of one process that `async_save` asks for."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("save", SAVES)
def test_what_is_saved_is_a_checkpoint_of_ours(path, group, save, load):
    with install():
        SAVES[save](state(7.0), path)
        assert loaded(path, LOADS[load]) == 7
    assert fc.verify(path).ok
    assert fc.load({"w": torch.zeros(3)}, path, policy=LoadPolicy(strict="ignore"))["w"].tolist() == [7.0] * 3
    assert Path(path, ".metadata").read_bytes() == METADATA_TEXT  # torchtitan looks for it


def test_it_is_undone(path):
    """Also in modules of torch that are imported, and where saves go to another process."""
    names = ("FileSystemReader", "FileSystemWriter")
    before = [getattr(module, name) for module in (dcp, _storage_utils, format_utils) for name in names]
    with install():
        assert not {getattr(m, n) for m in (dcp, _storage_utils, format_utils) for n in names} & set(before)
    assert [getattr(module, name) for module in (dcp, _storage_utils, format_utils) for name in names] == before
    dcp.save(state(7.0), checkpoint_id=path)
    assert sorted(each.name for each in Path(path).iterdir()) == [".metadata", "__0_0.distcp"]


def test_as_a_switch_and_one_in_another():
    before = dcp.FileSystemWriter
    outer = install()
    inner = install(load_policy=LoadPolicy(cast="same_kind"))
    with pytest.raises(errors.SpecError, match="Undo the last one first"):
        outer.undo()
    inner.undo()
    inner.undo()  # done already
    assert dcp.FileSystemWriter is not before
    outer.undo()
    assert dcp.FileSystemWriter is before


@pytest.mark.parametrize("use_collectives", [True, False])
def test_what_dcp_has_saved_is_read_and_may_be_replaced(path, use_collectives):
    dcp.save(state(3.0), checkpoint_id=path, use_collectives=use_collectives)
    Path(path, "meta.pt").write_text("theirs")
    with install():
        for load in LOADS.values():
            assert loaded(path, load) == 3
        dcp.save(state(4.0), checkpoint_id=path)
        assert loaded(path) == 4
    assert not list(Path(path).glob("__*"))
    assert Path(path, "meta.pt").read_text() == "theirs"


def test_where_dcp_has_saved_over_ours_the_newer_is_read(path):
    with install():
        dcp.save(state(3.0), checkpoint_id=path)
    dcp.save(state(4.0), checkpoint_id=path)
    with install():
        assert loaded(path) == 4


def test_one_reader_may_read_both(tmp_path):
    dcp.save(state(3.0), checkpoint_id=tmp_path / "theirs")
    with install():
        dcp.save(state(4.0), checkpoint_id=tmp_path / "ours")
        reader = dcp.FileSystemReader(str(tmp_path / "theirs"))
        for name, value in (("theirs", 3), ("ours", 4), ("theirs", 3)):
            found = state()
            dcp.load(found, checkpoint_id=tmp_path / name, storage_reader=reader)
            assert found["step"] == value


def test_overwriting_can_be_refused(path):
    with install():
        dcp.save(state(1.0), checkpoint_id=path)
        with pytest.raises(BaseException, match="AlreadyExistsError"):
            dcp.save(state(2.0), storage_writer=dcp.FileSystemWriter(path, overwrite=False))
        assert loaded(path) == 1


def test_policies_are_used(path):
    policy = attrs.evolve(INSTALLED_SAVE_POLICY, metadata_file=False)
    with install(policy, LoadPolicy(cast="same_kind")):
        dcp.save({"w": torch.ones(3, dtype=torch.bfloat16)}, checkpoint_id=path)
        assert not Path(path, ".metadata").exists()
        found = {"w": torch.zeros(3)}
        dcp.load(found, checkpoint_id=path)
        assert found["w"].tolist() == [1.0] * 3
    with install(), pytest.raises(BaseException, match="CastError"):
        dcp.load(found, checkpoint_id=path)


@pytest.mark.parametrize(
    "options",
    [{"save_policy": LoadPolicy()}, {"load_policy": SavePolicy()}, {"load_policy": LoadPolicy(keys="w")}],
)
def test_policies_are_checked_before_anything_is_replaced(options):
    before = dcp.FileSystemWriter
    with pytest.raises(errors.PolicyError, match="install"):
        install(**options)
    assert dcp.FileSystemWriter is before


def test_options_that_no_writer_has_are_refused(path):
    with install(), pytest.raises(TypeError, match="threads"):
        dcp.FileSystemWriter(path, threads=3)


def test_classes_stand_in_for_those_of_dcp(path):
    """Programs ask `isinstance`, and derive; DCP's own derived classes stay what they are."""
    own = dcp.FileSystemWriter(path)
    with install():
        assert isinstance(own, dcp.FileSystemWriter)
        assert isinstance(dcp.FileSystemWriter(path), ZarrStorageWriter)

        class Mine(dcp.FileSystemWriter):
            pass

        dcp.save(state(5.0), storage_writer=Mine(path))
        assert loaded(path) == 5
        assert issubclass(hf_storage.HuggingFaceStorageWriter, dcp.FileSystemWriter)


def test_a_url_without_a_store_of_ours_is_left_to_dcp():
    with install():
        assert not dcp.FileSystemWriter.validate_checkpoint_id("hdfs://bucket/a")
        with pytest.raises(BaseException, match=r"hdfs|pyarrow|storage_writer"):
            dcp.save(state(1.0), checkpoint_id="hdfs://bucket/a")


def test_importing_functional_ckpt_installs_nothing():
    code = (
        "import torch.distributed.checkpoint as dcp; before = dcp.FileSystemWriter\n"
        "import functional_ckpt.torch.dcp.default_storage; print(dcp.FileSystemWriter is before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
