# ruff: noqa: E402 - each part of a page has the imports that it needs
# --8<-- [start:tiles]
from hypothesis import given

from functional_ckpt import ArraySpec, Box, ShardSpec
from functional_ckpt.testing import laws
from functional_ckpt.testing import strategies as fst


def my_shards(shape, ranks):
    """The sharding under test: rows dealt out in blocks, the last ones short."""
    step = -(-shape[0] // ranks)
    array = ArraySpec("w", shape, "float32")
    for rank in range(ranks):
        low, high = min(rank * step, shape[0]), min((rank + 1) * step, shape[0])
        start = (low, *(0 for _ in shape[1:]))
        yield rank, [ShardSpec(array, Box(start, (high, *shape[1:])))]


@given(fst.shapes(min_rank=1), fst.meshes(max_axes=1))
def test_rows_tile_the_array(shape, mesh):
    laws.check_tiles(dict(my_shards(shape, ranks=sum(mesh))))


test_rows_tile_the_array()
# --8<-- [end:tiles]

# --8<-- [start:problem]
w = ArraySpec("w", (4, 2), "float32")
try:
    first, second = Box((0, 0), (2, 2)), Box((3, 0), (4, 2))
    laws.check_tiles({0: [ShardSpec(w, first)], 1: [ShardSpec(w, second)]})
except AssertionError as error:
    print(error)
# --8<-- [end:problem]

# --8<-- [start:ranks]
import numpy as np

import functional_ckpt
from functional_ckpt import LocalShards
from functional_ckpt.testing.simulate import run_ranks

held = dict(my_shards((5, 2), ranks=3))
whole = np.arange(10, dtype="float32").reshape(5, 2)


def save(group):
    (shard,) = held[group.rank]
    rows = slice(shard.box.start[0], shard.box.stop[0])
    state = {"w": LocalShards(shard, whole[rows])}
    functional_ckpt.save(state, "checkpoint", process_group=group)


run_ranks(3, save)
assert np.array_equal(functional_ckpt.open_checkpoint("checkpoint")["w"][:], whole)
# --8<-- [end:ranks]
