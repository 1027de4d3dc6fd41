"""Objects that are not plain values: saved by opt-in, loaded if their classes are allowed, natively and by DCP."""

import datetime
import enum
import json
import warnings
from collections import deque, namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import functional_ckpt as fc
from functional_ckpt import LoadPolicy, PerRank, SavePolicy, load, open_checkpoint, save
from functional_ckpt.errors import CheckpointWarning

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from functional_ckpt.torch.dcp.planner import StrictLoadPlanner, StrictSavePlanner  # noqa: E402 - they need torch
from functional_ckpt.torch.dcp.storage_writer import ZarrStorageReader, ZarrStorageWriter  # noqa: E402
from functional_ckpt.torch.megatron.serialization import load_common_state_dict  # noqa: E402
from functional_ckpt.torch.megatron.strategies.zarr import LOAD_POLICY  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
PLAIN = LoadPolicy()
TORCH = SavePolicy(object_codec="torch", durability="none")


@dataclass
class Config:
    """An object that is neither array nor plain."""

    depth: int
    name: str


class Colour(enum.Enum):
    """Members of it are objects too."""

    RED = 1


Point = namedtuple("Point", "x y")
OBJECTS = {"cfg": Config(3, "x"), "a": {"b": Colour.RED}, "p": Point(1, 2), "other": (torch.ones(1), Config(1, "y"))}
DATA = {
    "random state": np.random.get_state(),
    "numpy": (np.float32(2), np.datetime64("2020-01-01"), np.arange(3)),
    "collections": {"a": deque([1]), 2: frozenset({1})},
    "standard library": (datetime.timedelta(1), Path("a"), range(3), slice(1), b"x"),
}
NAMES = [f"{__name__}.{name}" for name in ("Colour", "Config", "Point")]
LINE = f"LoadPolicy(safe_globals=[{', '.join(NAMES)}])"


def by_functions(state, path):
    save(state, path, policy=TORCH)


def by_dcp(state, path):
    dcp.save(state, storage_writer=ZarrStorageWriter(path, policy=TORCH))


def loaded(state, path, policy=PLAIN):
    return load(state, path, policy=policy)


def loaded_by_dcp(state, path, policy=PLAIN):
    dcp.load(state, storage_reader=ZarrStorageReader(path, policy=policy))
    return state


def loaded_strictly(state, path, policy=PLAIN):
    dcp.load(state, storage_reader=ZarrStorageReader(path, policy=policy), planner=StrictLoadPlanner(policy))
    return state


def opened(_state, path, policy=PLAIN):
    return open_checkpoint(path).state("torch", policy.safe_globals)


SAVES = pytest.mark.parametrize("saves", [by_functions, by_dcp])
LOADS = pytest.mark.parametrize("loads", [loaded, loaded_by_dcp, loaded_strictly, opened])


def blank(w=None):
    return {"cfg": 0, "a": {"b": 0}, "p": 0, "other": 0, "w": torch.zeros(2) if w is None else w}


def message_of(function, *arguments):
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - DCP's is no Exception
        function(*arguments)
    failures = getattr(caught.value, "failures", None)
    return str(failures[0][0]) if failures else str(caught.value)


@SAVES
def test_saving_says_what_loading_will_need(saves, tmp_path):
    with pytest.warns(CheckpointWarning) as caught:
        saves({**OBJECTS, "w": torch.ones(2), "fine": (1, {2})}, tmp_path / "a")
    (warning,) = [str(each.message) for each in caught if each.category is CheckpointWarning]
    assert LINE in warning
    assert f"{NAMES[1]} in 'cfg', 'other'" in warning
    assert f"{NAMES[0]} in 'a.b'" in warning
    assert "fine" not in warning
    assert "\n" not in warning


@SAVES
@LOADS
@pytest.mark.filterwarnings("ignore:objects that are not plain")
def test_loading_names_all_objects_at_once_and_the_line_that_allows_them(saves, loads, tmp_path):
    saves({**OBJECTS, "w": torch.ones(2)}, tmp_path / "a")
    w = torch.zeros(2)
    message = message_of(loads, blank(w), tmp_path / "a")
    assert "4 objects need classes that are not allowed" in message
    for text in (LINE, f"{NAMES[1]} in 'cfg', 'other'", f"{NAMES[0]} in 'a.b'", f"{NAMES[2]} in 'p'"):
        assert text in message
    assert "\x1b" not in message
    assert not w.any()
    found = loads(blank(), tmp_path / "a", LoadPolicy(safe_globals=(Config, Colour, Point)))
    assert (found["cfg"], found["a"]["b"], found["p"]) == (OBJECTS["cfg"], Colour.RED, Point(1, 2))
    assert type(found["p"]) is Point
    found = loads(blank(), tmp_path / "a", LoadPolicy(safe_globals="trust"))
    assert (found["cfg"], found["other"][1], found["w"].tolist()) == (OBJECTS["cfg"], Config(1, "y"), [1.0, 1.0])


@pytest.mark.filterwarnings("ignore:objects that are not plain")
def test_many_keys_of_one_class_are_counted(tmp_path):
    by_functions({f"k{i}": Config(i, "") for i in range(9)}, tmp_path / "a")
    message = message_of(load, {f"k{i}": 0 for i in range(9)}, tmp_path / "a")
    assert f"{NAMES[1]} in 'k0', 'k1', 'k2', 'k3', 'k4' and 4 more" in message


@SAVES
@LOADS
def test_data_types_beside_tensors_need_no_trust(saves, loads, tmp_path):
    """A tensor in a tuple makes it an object."""
    value = (torch.ones(2), datetime.date(2020, 1, 2), Path("a"), frozenset({1}), range(3), slice(1, 2), deque([1]),
             np.float32(2), np.random.get_state()[2:], datetime.datetime(2020, 1, 1, fold=1))  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        saves({"v": value}, tmp_path / "a")
    found = loads({"v": 0}, tmp_path / "a")["v"]
    assert found[1:] == value[1:]
    assert (type(found[7]), found[9].fold) == (np.float32, 1)
    assert torch.equal(found[0], value[0])


@SAVES
@LOADS
@pytest.mark.parametrize("name", DATA)
def test_data_types_come_back(saves, loads, name, tmp_path, same):
    """The law of it is in property_tests/test_values.py."""
    value = DATA[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        saves({"v": (value,)}, tmp_path / "a")
    same(loads({"v": 0}, tmp_path / "a")["v"], (value,))


class OwnPickles(dcp.DefaultSavePlanner):
    """A planner that makes the bytes of objects itself, as anybody's may."""

    def transform_object(self, write_item, object):
        return super().transform_object(write_item, object)


@pytest.mark.filterwarnings("ignore:objects that are not plain")
def test_the_line_that_is_named_is_enough_for_numpys_own_pickles(tmp_path):
    value = (torch.ones(2), np.arange(3.0), np.float32(2))
    dcp.save({"v": value}, storage_writer=ZarrStorageWriter(tmp_path / "a"), planner=OwnPickles())
    message = message_of(load, {"v": 0}, tmp_path / "a")
    names = message.partition("safe_globals=[")[2].partition("]")[0].split(", ")
    found = [eval(name, {"numpy": np}) for name in names]
    back = load({"v": 0}, tmp_path / "a", policy=LoadPolicy(safe_globals=found))["v"]
    assert (back[1].tolist(), type(back[2])) == ([0.0, 1.0, 2.0], np.float32)


@pytest.mark.filterwarnings("ignore:objects that are not plain")
def test_the_default_classes_cannot_be_told_that_bytes_are_pointers(tmp_path):
    """A file may set the flags of numpy's data types: the interpreter then follows addresses from the file."""
    save({"v": (torch.ones(1), np.ones(2), np.float32(1), np.array(["a"]))}, tmp_path / "a", policy=TORCH)
    assert load({"v": 0}, tmp_path / "a")["v"][1].tolist() == [1.0, 1.0]
    dcp.save({"v": (torch.ones(1), np.ones(2))}, storage_writer=ZarrStorageWriter(tmp_path / "b"), planner=OwnPickles())
    for policy in (PLAIN, LOAD_POLICY):
        assert "numpy.dtype" in message_of(lambda: load({"v": 0}, tmp_path / "b", policy=policy))  # noqa: B023


@pytest.mark.filterwarnings("ignore:objects that are not plain")
def test_what_torch_cannot_build_from_classes_says_trust(tmp_path):
    value = (torch.ones(2), deque([1]))
    dcp.save({"v": value}, storage_writer=ZarrStorageWriter(tmp_path / "a"), planner=OwnPickles())
    message = message_of(lambda: load({"v": 0}, tmp_path / "a", policy=LoadPolicy(safe_globals=(deque,))))
    assert "\x1b" not in message
    assert "deque" in message
    assert "LoadPolicy(safe_globals='trust')" in message
    assert load({"v": 0}, tmp_path / "a", policy=LoadPolicy(safe_globals="trust"))["v"][1] == deque([1])


def test_without_opting_in_objects_are_refused(tmp_path, problems_of):
    (problem,) = problems_of(save, {"cfg": Config(3, "x")}, tmp_path / "a")
    assert (type(problem).__name__, problem.key) == ("UnsupportedLeafError", "cfg")
    assert "object_codec" in message_of(
        lambda: dcp.save({"v": Config(1, "")}, storage_writer=ZarrStorageWriter(tmp_path / "b", policy=SavePolicy()))
    )
    (problem,) = problems_of(save, {"f": lambda: 0}, tmp_path / "c", policy=TORCH)
    assert (type(problem).__name__, problem.key) == ("ObjectCodecError", "f")
    (problem,) = problems_of(save, {"t": (torch.ones(2), 3)}, tmp_path / "d")
    assert problem.key == "t"


@pytest.mark.parametrize("planner", [None, StrictSavePlanner()])
@pytest.mark.parametrize(
    "value", [PerRank(3), (1, PerRank(3)), PerRank(torch.ones(2))], ids=["whole", "inside", "tensor"]
)
def test_a_per_rank_through_dcp_is_refused_with_the_way_out(value, planner, tmp_path):
    for policy in (TORCH, SavePolicy()):
        writer = ZarrStorageWriter(tmp_path / "a", policy=policy)
        message = message_of(lambda: dcp.save({"rng": value}, storage_writer=writer, planner=planner))  # noqa: B023
        assert "UnsupportedLeafError" in message or "PerRank" in message
        assert "key 'rng'" in message
        assert "f'rng.{rank}'" in message
    assert list(tmp_path.iterdir()) == []


def test_a_per_rank_inside_an_object_is_refused(tmp_path, problems_of):
    (problem,) = problems_of(save, {"rng": (1, PerRank(2))}, tmp_path / "a", policy=TORCH)
    assert problem.key == "rng"
    assert "f'rng.{rank}'" in str(problem)


@SAVES
@LOADS
def test_values_too_long_for_the_manifest_are_arrays_of_their_text(saves, loads, tmp_path):
    state = {"long": ("x" * 70_000,), "array": (np.arange(20_000),), "short": ("x" * 1000,)}
    saves(state, tmp_path / "a")
    assert (tmp_path / "a" / "manifest.json").stat().st_size < 10_000
    manifest = fc.read_manifest(tmp_path / "a")
    assert [entry.codec for entry in manifest.arrays] == ["json", "json"]
    found = loads(dict.fromkeys(state, 0), tmp_path / "a")
    assert (found["long"], found["short"]) == (state["long"], state["short"])
    assert found["array"][0].tolist() == list(range(20_000))
    assert open_checkpoint(tmp_path / "a").tree()["long"] == state["long"]
    assert load_common_state_dict(tmp_path / "a")["long"] == state["long"]
    assert fc.verify(tmp_path / "a").ok


@pytest.mark.parametrize("value", [(1, 2.5), (np.float32(1),), "x" * 70_000])
def test_what_uses_nothing_new_is_called_by_the_old_version(value, tmp_path):
    save({"v": value}, tmp_path / "a")
    for name, place in (("manifest.json", lambda x: x), ("zarr.json", lambda x: x["attributes"]["functional_ckpt"])):
        found = place(json.loads((tmp_path / "a" / name).read_bytes()))
        assert found["version"] == ([1, 0] if value == (1, 2.5) else [1, 1])
    assert fc.verify(tmp_path / "a").ok
