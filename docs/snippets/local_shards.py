# ruff: noqa: E402 - each part of a page has the imports that it needs
# --8<-- [start:state]
import numpy as np

import functional_ckpt
from functional_ckpt import ArraySpec, Box, LocalShards, ShardSpec

w = ArraySpec("w", (8, 6), "float32")


def rows(rank, size):
    """The state of a rank that holds a block of rows."""
    box = Box((8 * rank // size, 0), (8 * (rank + 1) // size, 6))
    return {"w": LocalShards(ShardSpec(w, box), np.full(box.shape, rank, "float32"))}


# --8<-- [end:state]


# --8<-- [start:save]
from functional_ckpt.testing.simulate import run_ranks


def save(group):
    state = rows(group.rank, group.size)
    functional_ckpt.save(state, "checkpoint", process_group=group)


run_ranks(3, save)
print(functional_ckpt.open_checkpoint("checkpoint")["w"][:, 0])
# --8<-- [end:save]


# --8<-- [start:once]
from functional_ckpt import LoadPolicy


def load(group):
    like = rows(group.rank, group.size)  # what is to be filled
    policy = LoadPolicy(read_once=True)
    return functional_ckpt.load(like, "checkpoint", policy=policy, process_group=group)


first, second = (state["w"].data[0] for state in run_ranks(2, load))
assert np.array_equal(second[:, 0], [1, 2, 2, 2])
# --8<-- [end:once]
assert np.array_equal(first[:, 0], [0, 0, 1, 1])
