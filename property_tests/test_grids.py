"""G: blocks of cells that ranks hold are a sharding if each cell has as many copies as any other."""

import numpy as np
from hypothesis import event, example, given
from hypothesis import strategies as st

from functional_ckpt.spec.box import Box
from functional_ckpt.spec.grid import Block, sharding_of_blocks
from functional_ckpt.testing import model
from functional_ckpt.testing import strategies as fst

RULES = st.sampled_from(["declared", "elect"])
GRIDS = st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple)


def box_of(block):
    return Box(block.start, block.stop)


@st.composite
def held_blocks(draw):
    """A grid and the block of each rank: copies of tilings, in any order, and maybe one that is not as it should be."""
    grid = draw(GRIDS)
    tilings = [draw(fst.guillotine_tilings(grid, 3)) for _ in range(draw(st.integers(1, 3)))]
    blocks = [Block(box.start, box.stop, (copy,)) for copy, boxes in enumerate(tilings) for box in boxes]
    if draw(st.booleans()):
        at = draw(st.integers(0, len(blocks) - 1))
        box = draw(st.just(box_of(blocks[at])) | fst.boxes(grid, empty=False))
        blocks[at : at + draw(st.integers(0, 1))] = [Block(box.start, box.stop, (draw(st.integers(0, 2)), 0))]
    return grid, draw(st.permutations(blocks))


@given(held_blocks(), RULES)
@example(((2,), [Block((0,), (1,), (0,)), Block((0,), (1,), (1,))]), "elect")
@example(((2,), [Block((0,), (2,), (1,)), Block((0,), (2,), (2,))]), "declared")
@example(((2,), [Block((0,), (1,), (0,)), Block((1,), (2,), (1,))]), "declared")
@example(((2,), [Block((0,), (2,), (-1,)), Block((0,), (2,), (0,))]), "declared")
@example(((2,), [Block((0,), (2,), (-1,)), Block((0,), (2,), (0,))]), "elect")
def test_blocks_are_a_sharding_if_every_cell_has_as_many_copies(case, rule):
    grid, blocks = case
    copies = model.counts(grid, [box_of(block) for block in blocks])
    mains = model.counts(grid, [box_of(block) for block in blocks if not any(block.replica_id)])
    valid = copies.min() == copies.max() and (rule == "elect" or (mains == 1).all())
    found = sharding_of_blocks(grid, blocks, rule)
    event(f"valid: {bool(valid)}")
    assert (found is not None) == valid
    if found is None:
        return
    assert (found.copies, found.mesh.shape) == (copies.max(), (*grid, copies.max()))
    told = np.reshape(found.mesh.ranks, found.mesh.shape)
    for cell in np.ndindex(*grid):
        assert told[cell].tolist() == holders(blocks, Box.from_shape((1,) * len(grid), cell), rule)


def holders(blocks, cell, rule):
    """Return the ranks that hold a cell, in the order of its copies: a declared main one first."""
    ranks = [rank for rank, block in enumerate(blocks) if box_of(block).contains(cell)]
    return sorted(ranks, key=lambda r: (rule == "declared" and any(blocks[r].replica_id), blocks[r].replica_id, r))
