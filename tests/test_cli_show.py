"""`show KEY`: what an array holds, of every data type, with one block of it in memory at a time."""

import json
import logging
import time
import tracemalloc

import numpy as np
import pytest

import functional_ckpt as fc
from functional_ckpt.cli import content, facts, main, tables
from functional_ckpt.cli.screen import Screen
from functional_ckpt.show import bar
from functional_ckpt.spec.array import DTYPES
from functional_ckpt.store.encoding import numpy_dtype

FAST = fc.SavePolicy(durability="none")


def show(capsys, path, *words, status=0):
    assert main(["show", str(path), *words]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def show_json(capsys, path, *words):
    return json.loads(show(capsys, path, *words, "--json"))


@pytest.fixture
def stored(tmp_path):
    """Save one array and return its path."""

    def save(values, **layout):
        policy = fc.SavePolicy(durability="none", layout=fc.LayoutPolicy(**layout))
        fc.save({"w": values}, tmp_path / "c", policy=policy)
        return tmp_path / "c"

    return save


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_data_type_is_summed_up_as_numpy_would(capsys, stored, dtype):
    values = (np.arange(35) % 7 - 2 * (not dtype.startswith(("u", "bool", "float8_e8")))).reshape(5, 7)
    values = values.astype("f8").astype(numpy_dtype(dtype))
    found = show_json(capsys, stored(values, target_chunk_nbytes=14), "w")
    wide = values.astype("c16" if dtype.startswith("complex") else "f8")
    finite = wide[np.isfinite(wide)]
    summary = found["summary"]
    assert summary["finite"] == finite.size
    assert summary["nan"] == np.isnan(wide).sum()
    assert summary["zeros"] == (finite == 0).sum()
    assert summary["std"] == pytest.approx(finite.std())
    if dtype.startswith("complex"):
        assert (summary["min"], summary["max"], found["histogram"]) == (None, None, None)
        assert summary["mean"] == pytest.approx([finite.mean().real, finite.mean().imag])
        return
    assert (summary["min"], summary["max"]) == (finite.min(), finite.max())
    assert summary["mean"] == pytest.approx(finite.mean())
    assert sum(found["histogram"]["counts"]) == finite.size
    assert len(found["corner"]) == 4


def test_what_is_not_finite_is_told_apart(capsys, stored):
    path = stored(np.array([1.0, np.nan, np.inf, -np.inf, 3.0, 0.0]))
    summary = show_json(capsys, path, "w")["summary"]
    assert [summary[name] for name in ("finite", "not_finite", "nan", "inf", "zeros")] == [3, 3, 1, 2, 1]
    assert "1 zero, 3 not finite (1 NaN, 2 infinite)" in show(capsys, path, "w")


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        (np.array([2**62 + 1, 2**62 + 1, 2**62 + 3]), [2, 0, 1]),  # as floats they are one number
        (np.array([2**64 - 1, 2**64 - 2], "u8"), [1, 1]),
        (np.array([True, False, True]), [1, 2]),
        (np.array([-128, 127], "i1"), [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
        (np.array([-1e308, 1e308]), [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]),  # their difference is no float
        (np.array([0.0, 5e-324]), [2, 0, 0, 0, 0, 0, 0, 0, 0, 0]),  # nor is half of it
        (np.array([7.5, 7.5]), [2]),
        (np.array(3.5, "f4"), [1]),
        (np.array([np.nan]), None),
        (np.zeros((0, 3)), None),
    ],
)
def test_histogram(capsys, stored, values, counts):
    path = stored(values)
    found = show_json(capsys, path, "w")["histogram"]
    assert (found and found["counts"]) == counts
    show(capsys, path, "w")


@pytest.mark.parametrize("width", [44, 60, 80, None])
def test_a_bar_of_a_histogram_is_on_the_line_of_its_count(stored, width):
    found = facts.leaf(fc.open_checkpoint(stored(np.linspace(-0.123, 12345.6, 1000))), "w")
    lines = tables.leaf(Screen(width, False, True), found)
    rows = [line for line in lines if " to " in line]
    assert len(rows) == 10
    assert all(line.endswith("█") and len(line) <= (width or 99) for line in rows)


def test_large_numbers_overflow_to_nothing(capsys, stored):
    summary = show_json(capsys, stored(np.array([1.7e308, 1.7e308])), "w")["summary"]
    assert (summary["min"], summary["mean"], summary["std"]) == (1.7e308, None, None)


def test_moments_are_joined_without_loss(capsys, stored):
    values = 1e9 + np.random.default_rng(0).normal(size=10_000)
    summary = show_json(capsys, stored(values, target_chunk_nbytes=800), "w")["summary"]
    assert summary["std"] == pytest.approx(values.std(), rel=1e-6)


@pytest.mark.parametrize("codecs", [(), (("", ("zstd",)),)])
def test_one_block_is_in_memory_at_a_time(capsys, stored, monkeypatch, codecs):
    monkeypatch.setattr(content, "_BLOCK_NBYTES", 2**18)
    monkeypatch.setattr(content, "_STEP_ELEMENTS", 2**14)
    large = 2**24 if not codecs else 2**18  # a plain chunk is read in parts; an encoded one only whole
    path = stored(np.zeros((2**22,), "f4"), target_chunk_nbytes=large, codecs=codecs)
    show(capsys, path, "w")
    tracemalloc.start()
    try:
        show(capsys, path, "w")
        assert tracemalloc.get_traced_memory()[1] < 2**22  # of 16 MiB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("index", "shape"),
    [("0", (3, 4)), (":, 1", (2, 4)), ("1, ::2, -1", (2,)), ("..., ::-1", (2, 3, 4)), ("0,0,0", ()), ("5:", (0, 3, 4))],
)
def test_a_slice_is_what_numpy_gives(capsys, stored, index, shape):
    values = np.arange(24.0).reshape(2, 3, 4)
    path = stored(values)
    found = show_json(capsys, path, "w", "--slice", index)
    assert tuple(found["slice"]["shape"]) == shape
    assert found["slice"]["values"] == values[content.parse_index(index)].tolist()
    assert "slice" in show(capsys, path, "w", f"--slice={index}")


def test_a_slice_for_people_has_a_table_for_each_pair_of_axes(capsys, stored):
    out = show(capsys, stored(np.arange(8).reshape(2, 2, 2)), "w", "--slice", "...")
    told = " ".join(out[out.index("slice") :].split())
    assert told == "slice shape [2, 2, 2] [0, :, :] 0 1 2 3 [1, :, :] 4 5 6 7"


def test_a_slice_that_cannot_be_shown_says_why(capsys, stored):
    path = stored(np.zeros((200, 200)))
    assert "at most 10000 elements" in show(capsys, path, "w", "--slice", "...", status=1)
    assert "out of bounds" in show(capsys, path, "w", "--slice", "200", status=1)
    for wrong in ("a", "1.5", "::0", "1:2:3:4", ""):
        with pytest.raises(SystemExit) as ended:
            main(["show", str(path), "w", "--slice", wrong])
        assert ended.value.code == 2


def test_a_slice_with_a_step_reads_no_large_region(capsys, stored, monkeypatch):
    monkeypatch.setattr(content, "_BLOCK_NBYTES", 1000)
    path = stored(np.zeros(1000))
    assert "from 8000 bytes" in show(capsys, path, "w", "--slice", "::100", status=1)
    assert "from 7920 bytes" in show(capsys, path, "w", "--slice", "990:0:-100", status=1)
    show(capsys, path, "w", "--slice", "0:100:50")


def test_a_long_text_is_shown_and_an_object_is_not_unpickled(capsys, tmp_path):
    fc.save({"text": "x" * 70_000}, tmp_path / "c", policy=FAST)
    assert show_json(capsys, tmp_path / "c", "text")["value"] == "x" * 70_000
    assert "xxx" in show(capsys, tmp_path / "c", "text")


def test_damage_is_told(capsys, stored):
    path = stored(np.arange(100.0))
    chunk = path / "w/c.0"
    chunk.write_bytes(b"\1" + chunk.read_bytes()[1:])
    assert "stored bytes differ from what was saved" in show(capsys, path, "w", status=1)


def test_show_array_for_people(capsys, stored):
    out = show(capsys, stored(np.ones((5, 3), "f2"), codecs=(("", ("zstd:3", "crc32c")),)), "w")
    assert "codecs     zstd:3, crc32c" in out
    assert "chunks     1 of [5, 3], grid [1, 1], exclusive" in out
    assert "values     min 1, max 1, mean 1, std 0\n" in out


def test_reading_a_large_array_is_shown(stored, caplog, monkeypatch):
    monkeypatch.setattr(bar, "_LONG_S", 0.05)
    path = stored(np.zeros(1000))

    def slow(array):
        time.sleep(0.2)
        yield np.zeros(1000)

    monkeypatch.setattr(content, "_blocks", slow)
    with caplog.at_level(logging.INFO, "functional_ckpt"):
        assert main(["show", str(path), "w"]) == 0
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "reading 'w': read, 15.6 KiB to do"
    assert "15.6 KiB, " in lines[1]
