"""`SavePolicy(foreign="keep")`: files of others in the directory of a checkpoint outlive its replacement."""

import errno
import os
import pickle
import socket

import numpy as np
import pytest

import functional_ckpt as fc
from functional_ckpt import SavePolicy, errors
from functional_ckpt.store.encoding import METADATA_TEXT
from tests.effects import REAL, watched

KEEP = SavePolicy(foreign="keep")


def value(path):
    return int(fc.open_checkpoint(path)["w"][0])


def save(path, number, overwrite=True, **options):
    fc.save({"w": np.full(3, number)}, path, overwrite=overwrite, policy=SavePolicy(foreign="keep", **options))


@pytest.fixture
def place(tmp_path):
    """A checkpoint with files of others in it."""
    save(tmp_path / "a", 1)
    (tmp_path / "a/logs/deep").mkdir(parents=True)
    (tmp_path / "a/logs/empty").mkdir(mode=0o700)
    (tmp_path / "a/meta.pt").write_bytes(b"theirs")
    (tmp_path / "a/logs/deep/x").write_text("x")
    (tmp_path / "a/w/note").write_text("note")
    os.symlink("meta.pt", tmp_path / "a/link")
    os.symlink("/nowhere", tmp_path / "a/broken")
    return tmp_path / "a"


def check(place):
    assert (place / "meta.pt").read_bytes() == b"theirs" == (place / "link").read_bytes()
    assert (place / "logs/deep/x").read_text() == "x"
    assert (place / "w/note").read_text() == "note"
    assert os.readlink(place / "broken") == "/nowhere"
    assert (place / "logs/empty").stat().st_mode & 0o777 == 0o700


def test_they_are_there_at_every_moment(place):
    def look(call):
        found = call.do()
        assert REAL["stat"](place / "meta.pt").st_size == 6
        assert REAL["stat"](place / "logs/deep/x").st_size == 1
        return found

    with watched(place.parent, look):
        save(place, 2)
    check(place)
    assert value(place) == 2
    assert fc.verify(place).ok


def test_by_default_they_are_refused_and_the_message_says_what_keeps_them(place):
    with pytest.raises(errors.AlreadyExistsError, match="foreign='keep'"):
        fc.save({"w": np.ones(3)}, place, overwrite=True)
    assert value(place) == 1


def test_a_directory_without_a_checkpoint_keeps_them_too(tmp_path):
    """All of Lightning's ranks make the directory first, and a killed run may have left its `meta.pt` there."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/meta.pt").write_text("theirs")
    save(tmp_path / "a", 1, overwrite=False)
    assert (value(tmp_path / "a"), (tmp_path / "a/meta.pt").read_text()) == (1, "theirs")
    with pytest.raises(errors.AlreadyExistsError, match="holds a checkpoint"):
        save(tmp_path / "a", 2, overwrite=False)


@pytest.mark.parametrize("name", ["w", "zarr.json", "manifest.json", "provenance.json", ".metadata"])
def test_names_that_the_checkpoint_needs_are_refused_before_anything_is_written(tmp_path, name):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_text("theirs")
    with pytest.raises(errors.AlreadyExistsError, match=f"names that the checkpoint needs.*{name}"):
        save(tmp_path / "a", 1)
    assert os.listdir(tmp_path / "a") == [name]
    assert (tmp_path / "a" / name).read_text() == "theirs"


def test_what_comes_at_the_last_moment_is_kept(place):
    """Between the look and the exchange, the owner adds a file, and replaces one as careful programs do."""

    def interfere(call):
        if call.name == "renameat2" and str(place) in map(str, call.paths):
            (place / "late").write_text("late")
            (place / "logs/late").write_text("late")
            (place / "new").write_bytes(b"newer!")
            REAL["rename"](place / "new", place / "meta.pt")
        return call.do()

    with watched(place.parent, interfere):
        save(place, 2)
    assert (place / "late").read_text() == (place / "logs/late").read_text() == "late"
    assert (place / "meta.pt").read_bytes() == b"newer!"
    assert value(place) == 2


def test_what_is_written_into_after_the_exchange_is_not_put_back(place):
    """A file has one content under both names; one that was replaced since is newer than ours."""

    def replace(call):
        found = call.do()
        if call.name == "renameat2" and str(place) in map(str, call.paths):
            (place.parent / "new").write_bytes(b"newer!")
            REAL["rename"](place.parent / "new", place / "meta.pt")
        return found

    with watched(place.parent, replace):
        save(place, 2)
    assert (place / "meta.pt").read_bytes() == b"newer!"


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK])
def test_where_nothing_can_be_linked_files_are_copied(place, code):
    def refuse(call):
        if call.name == "link" and not os.path.islink(call.paths[0]):
            raise OSError(code, "no")
        return call.do()

    with watched(place.parent, refuse):
        save(place, 2)
    check(place)
    assert (place / "meta.pt").stat().st_nlink == 1


def test_what_can_be_neither_linked_nor_copied_stops_the_save(place):
    pipe = socket.socket(socket.AF_UNIX)
    pipe.bind(str(place / "socket"))

    def refuse(call):
        if call.name == "link":
            raise OSError(errno.EPERM, "no")
        return call.do()

    with watched(place.parent, refuse), pytest.raises(errors.StorageError):
        save(place, 2)
    pipe.close()
    check(place)
    assert value(place) == 1
    assert os.listdir(place.parent) == ["a"]


def test_a_checkpoint_of_dcp_is_replaced_and_only_if_it_may_be(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/.metadata").write_bytes(pickle.dumps({}))
    for name in ("__0_0.distcp", "__1_0.distcp", "meta.pt", "mine.distcp"):
        (tmp_path / "a" / name).write_text("theirs")
    for refused in ({"overwrite": False}, {"policy": SavePolicy()}):
        with pytest.raises(errors.AlreadyExistsError):
            fc.save({"w": np.ones(3)}, tmp_path / "a", **{"policy": KEEP, "overwrite": True, **refused})
        assert len(os.listdir(tmp_path / "a")) == 5
    save(tmp_path / "a", 2)
    assert value(tmp_path / "a") == 2
    assert sorted(os.listdir(tmp_path / "a")) == [
        "manifest.json", "meta.pt", "mine.distcp", "provenance.json", "w", "zarr.json",
    ]  # fmt: skip


@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_a_metadata_file_is_text_and_part_of_the_checkpoint(tmp_path, commit):
    save(tmp_path / "a", 1, commit=commit, metadata_file=True)
    assert (tmp_path / "a/.metadata").read_bytes() == METADATA_TEXT
    assert fc.verify(tmp_path / "a").ok
    fc.save({"w": np.ones(3)}, tmp_path / "a", overwrite=True)  # nobody else's file is there
    assert not (tmp_path / "a/.metadata").exists()


def test_a_metadata_file_in_memory():
    save("memory://kept-metadata-file", 1, metadata_file=True, overwrite=False)
    assert value("memory://kept-metadata-file") == 1


def test_a_killed_marker_save_with_a_metadata_file_can_be_repeated(tmp_path):
    """All that it had written but the root; its claim is that of a dead process."""
    save(tmp_path / "a", 1, overwrite=False, commit="marker", metadata_file=True)
    (tmp_path / "a/zarr.json").rename(tmp_path / "a/zarr.json.new")
    save(tmp_path / "a", 2, overwrite=False, commit="marker", metadata_file=True)
    assert value(tmp_path / "a") == 2
