"""Committed checkpoints: what an earlier version wrote loads forever, and what is saved today is the same bytes.

``python tests/test_golden.py`` writes those that are missing. An existing one is never rewritten: a change of
the format gets a new directory and an ADR.
"""

import shutil
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath
from uuid import UUID

import ml_dtypes
import numpy as np
import pytest

from functional_ckpt import LayoutPolicy, PerRank, SavePolicy, load, open_checkpoint, save, verify
from functional_ckpt.spec.array import DTYPES
from functional_ckpt.spec.tree import map_leaves
from functional_ckpt.store.encoding import numpy_dtype
from functional_ckpt.testing.simulate import run_ranks

GOLDEN = Path(__file__).parent / "golden"


def tree_state(_rank):
    tied = np.arange(12, dtype="f4").reshape(3, 4)
    return {
        "model": {
            "embed.weight": tied,
            "head": tied,
            "W": np.arange(3) - 1,
            "w": np.float32(2.5),
            "ü/x": np.array([[1 + 2j]]),
        },
        "optim": {"state": {0: {"step": np.array(7.0), "exp_avg": np.linspace(0, 1, 5).astype("f2")}}, "empty": {}},
        "zero": np.zeros((2, 0, 3), "i1"),
        "list": [np.array([True, False]), [np.uint64(2**64 - 1), None]],
    }


def values_state(_rank):
    return {
        "plain": [None, True, 0, -(2**70), 0.1, "text \u2028 ü", ""],
        "floats": [float("nan"), float("inf"), float("-inf"), -0.0, 5e-324],
        "tagged": [(1, (2.5, None)), b"\x00\xff", 1 - 2j, {1, 2}, frozenset({"a"}), range(0, 9, 2)],
        "dicts": ({1: "int", None: "none", (1, 2): "tuple"}, {"~tuple": 1}, Counter({3: 2}), OrderedDict(b=1, a=2)),
        "keys": {"a.b": 1, "": 2, 5: 3, "~": 4},
    }


def data_state(_rank):
    """What version 1.1 has added to the values."""
    east = timezone(timedelta(hours=5, minutes=30), "east")
    return {
        "numpy": [
            (np.float32(2.5), np.bool_(True), np.str_("ü"), np.bytes_(b"\0a"), np.datetime64("2020-01-02", "D")),
            (np.arange(3, dtype=">i2"), np.ones((1, 2), ml_dtypes.bfloat16), np.array(["a", "bc"]), np.zeros((0, 2))),
            np.timedelta64(3, "s"),
        ],
        "times": (
            datetime(2020, 1, 2, 3, 4, 5, 6, fold=1), datetime(2020, 1, 2, tzinfo=UTC), date(2020, 1, 2),
            time(3, 4, tzinfo=east), timedelta(days=-1, microseconds=5), east,
        ),
        "others": [
            Decimal("-1.50"), UUID(int=2**100 + 1), PurePosixPath("/a/b"), PureWindowsPath("c:/a"), bytearray(b"\0"),
            slice(1, None, 2), deque([1, (2,)], 5), (defaultdict(list, {1: [2]}),), range(0, 2**70, 2**68),
        ],
        "long": "text \u2028 " * 6000,
    }  # fmt: skip


def dtypes_state(_rank):
    return {
        name: (np.arange(9 * numpy_dtype(name).itemsize, dtype="u1") % 2).view(numpy_dtype(name)) for name in DTYPES
    }


def bits_state(_rank):
    return {"bf": np.arange(-3, 4).astype(ml_dtypes.bfloat16), "f8": np.arange(4).astype(ml_dtypes.float8_e4m3fn)}


def codecs_state(_rank):
    return {name: np.tile(np.arange(5, dtype="i4"), 20).reshape(10, 10) for name in ("zstd", "gzip", "blosc", "crc32c")}


def ranks_state(rank):
    return {"rng": PerRank({"seed": np.arange(rank + 2), "epoch": rank}), "copy": np.arange(4), "step": 3}


def policy(**layout):
    return SavePolicy(layout=LayoutPolicy(min_chunk_nbytes=0, **layout), durability="none")


CODECS = tuple((name, (name,)) for name in ("zstd", "gzip", "blosc", "crc32c"))
CASES = {
    # name: (state of a rank, ranks, policy, attributes)
    "tree": (tree_state, 1, policy(target_chunk_nbytes=20), {"run": "golden", "n": [1, 2.5, None]}),
    "values": (values_state, 1, policy(), None),
    "data": (data_state, 1, policy(), None),
    "dtypes": (dtypes_state, 1, policy(), None),
    "bits": (bits_state, 1, policy(extended_dtypes="bits"), None),
    "codecs": (codecs_state, 1, policy(target_chunk_nbytes=120, codecs=CODECS), None),
    "ranks": (ranks_state, 3, policy(), None),
}


VERSIONS = {"data": "1.1"}


def golden(name):
    """Return where the checkpoint lies, below the version of the format that first had all of it."""
    return GOLDEN / VERSIONS.get(name, "1.0") / name


def write(name, path):
    state, size, rules, attributes = CASES[name]
    run_ranks(size, lambda g: save(state(g.rank), path, policy=rules, attributes=attributes, process_group=g))
    (path / "provenance.json").unlink()  # clocks and versions


def blank(state):
    """The tree to load into: arrays of zeros, and None for every value."""
    if isinstance(state, PerRank):
        return PerRank(blank(state.value))
    return map_leaves(lambda _, x: blank(x) if isinstance(x, PerRank) else _zeros(x), state)


def _zeros(leaf):
    return np.zeros_like(leaf)[()] if isinstance(leaf, np.ndarray | np.generic) and leaf.shape else _scalar(leaf)


def _scalar(leaf):
    if isinstance(leaf, np.generic):
        return type(leaf)(0)
    return np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else None


@pytest.mark.parametrize("name", CASES)
def test_loads_forever(name, same):
    state, size, _, attributes = CASES[name]

    def loading(gather):
        return load(blank(state(gather.rank)), golden(name), process_group=gather)

    for rank, loaded in enumerate(run_ranks(size, loading)):
        same(loaded, state(rank))
    assert dict(open_checkpoint(golden(name)).attributes) == (attributes or {})
    assert verify(golden(name)).ok


@pytest.mark.parametrize("name", CASES)
def test_saving_today_gives_the_same_bytes(name, tmp_path, tree_bytes):
    write(name, tmp_path / "a")
    written, old = tree_bytes(tmp_path / "a"), tree_bytes(golden(name))
    assert written.keys() == old.keys()
    compressed = {key for key in old if name == "codecs" and "/c." in key and not key.startswith("crc32c/")}
    for key in old.keys() - compressed:  # a compressor may choose its bytes
        assert written[key] == old[key], key


def test_tied_leaves_of_a_golden_checkpoint():
    state = open_checkpoint(golden("tree")).state()
    assert state["model"]["embed.weight"] is state["model"]["head"]


if __name__ == "__main__":
    for case in CASES:
        if not (golden(case)).exists():
            write(case, golden(case))
    shutil.rmtree(GOLDEN / "__pycache__", ignore_errors=True)
