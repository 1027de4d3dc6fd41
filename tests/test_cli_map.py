"""`map`: how an array was cut, and which rank wrote which chunk, as far as provenance tells."""

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

import functional_ckpt as fc
from functional_ckpt.cli import chart, main
from functional_ckpt.cli.drawing import COLOURS, colour
from functional_ckpt.cli.screen import Screen
from functional_ckpt.plan.writers import writers_from
from functional_ckpt.run.comm import GatherOnly
from functional_ckpt.testing.simulate import run_ranks

SVG = "{http://www.w3.org/2000/svg}"
LAYOUT = fc.LayoutPolicy(min_chunk_nbytes=64, target_chunk_nbytes=256)
POLICY = fc.SavePolicy(durability="none", layout=LAYOUT)


@pytest.fixture
def checkpoint(tmp_path, piece):
    """Four ranks hold blocks of `w`, rows of `e` and slivers of `v`; `one` is a copy, `none` is empty."""
    w, v, e = np.arange(256.0).reshape(16, 16), np.arange(40.0), np.zeros((8, 4, 4))

    def save(gather):
        r = gather.rank
        block = fc.Box((r // 2 * 8, r % 2 * 8), (r // 2 * 8 + 8, r % 2 * 8 + 8))
        state = {
            "w": piece(w, block), "v": piece(v, fc.Box((r * 10 - (r > 0),), (r * 10 + 9 + (r == 3),))),
            "e": piece(e, fc.Box((r * 2, 0, 0), (r * 2 + 2, 4, 4))),
            "one": np.ones(3), "none": np.zeros((0, 2)), "x": 1,
        }  # fmt: skip
        fc.save(state, tmp_path / "c", policy=POLICY, process_group=gather)

    run_ranks(4, save)
    return tmp_path / "c"


def run(capsys, *words):
    status = main(["map", *map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys, *words):
    return json.loads(run(capsys, *words, "--json")[1])


W = """\
w
  array      float64 [16, 16], 2.0 KiB
  cut into   4 x 2 chunks of [4, 8]
  ownership  exclusive: each chunk was written by the rank that held all of it
  writers    rank 0: 2 chunks, 512 B
             rank 1: 2 chunks, 512 B
             rank 2: 2 chunks, 512 B
             rank 3: 2 chunks, 512 B

axis 0 down, axis 1 across
   0 1
   0 1
   2 3
   2 3
"""


def test_the_map_shows_who_wrote_which_chunk(capsys, checkpoint):
    assert run(capsys, checkpoint, "w")[:2] == (0, W)


def test_json_has_every_chunk(capsys, checkpoint):
    found = run_json(capsys, checkpoint, "w")
    manifest = fc.read_manifest(checkpoint)
    entry = manifest.by_key["w"]
    assert (found["grid"], found["chunk"], found["writers_known"]) == ([4, 2], [4, 8], True)
    assert [chunk["digest"] for chunk in found["chunks"]] == [entry.digest(i).hex() for i in range(8)]
    for chunk in found["chunks"]:
        assert chunk["rank"] == chunk["offset"][0] // 8 * 2 + chunk["offset"][1] // 8
        assert chunk["stored_nbytes"] == chunk["nbytes"] == 256
        assert (checkpoint / "w" / chunk["name"]).is_file()


def test_writers_are_those_that_put_the_chunks_there(capsys, checkpoint):
    """Of an owned array too, whose pieces have moved; and of a copy, of which one rank writes all."""
    for key in ("v", "e", "one"):
        found = run_json(capsys, checkpoint, key)
        ranks = json.loads((checkpoint / "provenance.json").read_text())["ranks"]
        assert found["writers_known"]
        assert {chunk["rank"] for chunk in found["chunks"]} == {
            r for r, each in enumerate(ranks) if key in each["arrays"]
        }
    assert run_json(capsys, checkpoint, "v")["ownership"] == "owned"
    assert [chunk["rank"] for chunk in run_json(capsys, checkpoint, "e")["chunks"]] == [0, 1, 2, 3]


def test_arrays_of_every_shape_have_a_map_and_a_figure(capsys, checkpoint, tmp_path):
    fc.save({"scalar": np.float32(1), "long": np.zeros(10_000, "i1")}, tmp_path / "d", policy=POLICY)
    for path, key in [
        *((checkpoint, k) for k in ("w", "v", "e", "one", "none")),
        *((tmp_path / "d", k) for k in ("scalar", "long")),
    ]:
        status, out, _ = run(capsys, path, key)
        assert status == 0
        assert max(map(len, out.splitlines())) < 200
        ElementTree.fromstring(run(capsys, path, key, "--svg")[1])
    assert "no elements" in run(capsys, checkpoint, "none")[1]


def test_the_figure_has_the_colours_of_the_ranks(capsys, checkpoint, tmp_path):
    assert run(capsys, checkpoint, "w", "--svg", tmp_path / "w.svg")[:2] == (0, "")
    figure = ElementTree.parse(tmp_path / "w.svg").getroot()
    tips = [
        (each.get("fill"), each.find(f"{SVG}title").text)
        for each in figure.iter(f"{SVG}rect")
        if each.find(f"{SVG}title") is not None
    ]
    assert [fill for fill, _ in tips] == [COLOURS[rank] for rank in (0, 1, 0, 1, 2, 3, 2, 3)]
    assert tips[1][1].startswith("c.0.1, rank 1, 256 B, ")
    assert len({colour(rank) for rank in range(64)}) == 64


def test_a_key_cannot_break_the_figure(capsys, tmp_path):
    key = "<script>&\"'\x1b[2J"
    fc.save({key: np.ones(2)}, tmp_path / "c", policy=POLICY)
    out = run(capsys, tmp_path / "c", key, "--svg")[1]
    assert "<script>" not in out
    assert "\x1b" not in out
    assert ElementTree.fromstring(out).find(f"{SVG}title").text.startswith("<script>&\"'\\x1b[2J")


def test_a_large_grid_is_shown_in_part(capsys, tmp_path):
    layout = fc.LayoutPolicy(min_chunk_nbytes=0, target_chunk_nbytes=8)
    fc.save({"w": np.zeros((70, 1, 90))}, tmp_path / "c", policy=fc.SavePolicy(durability="none", layout=layout))
    out = run(capsys, tmp_path / "c", "w")[1]
    assert "axis 0 down, axis 2 across; the first 40 x 60 chunks" in out
    assert len(out.splitlines()) < 60
    found = run_json(capsys, tmp_path / "c", "w")
    narrow = chart.chart_lines(Screen(40), found)
    assert max(map(len, narrow)) <= 40 + 20  # the caption is one line
    assert narrow[-1].strip() == " ".join("0" * 18)


def test_what_was_not_noted_is_said_to_be_unknown(capsys, checkpoint, tmp_path, piece):
    path = checkpoint / "provenance.json"
    told = json.loads(path.read_text())
    del told["writers"]  # as of an older version
    path.write_text(json.dumps(told))
    out = run(capsys, checkpoint, "w")[1]
    assert "4 ranks; which of them wrote which chunk was not noted" in out
    assert out.splitlines()[-1].split() == ["?", "?"]
    assert run_json(capsys, checkpoint, "one")["writers_known"]  # a single writer is known all the same
    path.unlink()
    assert "not known: provenance.json does not tell" in run(capsys, checkpoint, "w")[1]
    assert all(chunk["rank"] is None for chunk in run_json(capsys, checkpoint, "w")["chunks"])
    ElementTree.fromstring(run(capsys, checkpoint, "w", "--svg")[1])


def test_of_shared_chunks_no_single_writer_is_claimed(capsys, tmp_path, piece):
    whole = np.arange(400.0)

    def save(gather):
        edges = (0, 77, 400)
        state = {"w": piece(whole, fc.Box((edges[gather.rank],), (edges[gather.rank + 1],)))}
        layout = fc.LayoutPolicy(min_chunk_nbytes=10_000, shared_chunk_nbytes=800)
        policy = fc.SavePolicy(durability="none", layout=layout)
        fc.save(state, tmp_path / "c", policy=policy, process_group=GatherOnly(gather))

    run_ranks(2, save)
    found = run_json(capsys, tmp_path / "c", "w")
    assert (found["ownership"], found["writers_known"]) == ("shared", False)
    assert "several ranks wrote parts" in run(capsys, tmp_path / "c", "w")[1]


@pytest.mark.parametrize(
    "told",
    [None, 7, [], {}, {"ranks": 3}, {"ranks": [1]}, {"writers": []}, {"writers": {"w": 3}}, {"writers": {"w": [[0]]}},
     {"writers": {"w": [["a", 4]]}}, {"writers": {"w": [[0, 3]]}}, {"writers": {"w": [[0, -1], [0, 5]]}},
     {"writers": {"w": [[0, 2**70]]}}, {"writers": {"w": [[True, 4]]}}],
)  # fmt: skip
def test_provenance_may_hold_anything(told):
    assert writers_from(told, "w", 4) is None


def test_keys_without_an_array_end_with_1(capsys, checkpoint):
    assert "plain value" in run(capsys, checkpoint, "x")[2]
    status, out, err = run(capsys, checkpoint, "ww")
    assert (status, out) == (1, "")
    assert re.search("no such key.*Did you mean 'w'", err)
