"""Reads of parts of chunks: what is fetched, what is checked, and what bad files and disks do to them."""

import shutil

import numpy as np
import pytest

from functional_ckpt import ArraySpec, Box, LayoutPolicy, LoadPolicy, SavePolicy, ShardSpec, load, open_checkpoint, save
from functional_ckpt.errors import CorruptionError

CODED = SavePolicy(layout=LayoutPolicy(codecs=(("", ("zstd",)),)), durability="none")


def part_of(array, low, high):
    """Return what to load for rows ``[low, high)`` of the array "w"."""
    spec = ArraySpec("w", array.shape, str(array.dtype))
    return {"w": ShardSpec(spec, Box((low, *(0 for _ in array.shape[1:])), (high, *array.shape[1:])))}


@pytest.mark.parametrize("rows", [16, 2**15])
def test_an_older_encoded_chunk_is_never_taken_for_the_newer(rows, tmp_path):
    old, new = (np.arange(rows * 8).reshape(rows, 8) + step for step in (0, 1))
    save({"w": old}, tmp_path / "old", policy=CODED)
    save({"w": new}, tmp_path / "new", policy=CODED)
    shutil.copy(tmp_path / "old/w/c.0.0", tmp_path / "new/w/c.0.0")
    with pytest.raises(CorruptionError, match=r"c\.0\.0"):
        load(part_of(new, 0, 3), tmp_path / "new")
    with pytest.raises(CorruptionError, match=r"c\.0\.0"):
        open_checkpoint(tmp_path / "new")["w"][3]
    loaded = load(part_of(new, 0, 3), tmp_path / "new", policy=LoadPolicy(verify="none"))
    assert loaded["w"].tolist() == old[:3].tolist()
