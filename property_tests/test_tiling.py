"""T: shardings tile, the checker of tilings is exact, and placements are DTensor's."""

from itertools import product

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.placement import Replicate, Shard, StridedShard, from_placements
from functional_ckpt.spec.sharding import World
from functional_ckpt.spec.tiling import (
    check_tiling,
    chunked_sizes,
    find_overlap,
    first_gap,
)
from functional_ckpt.testing import laws, model
from functional_ckpt.testing import strategies as fst
from functional_ckpt.testing.regions import balanced_sizes, grid_boxes


@st.composite
def tiled_shapes(draw, min_side=0):
    shape = draw(fst.shapes(min_side=min_side))
    return shape, list(draw(fst.tilings(shape)))


@st.composite
def untidy_boxes(draw):
    """Boxes that need not tile anything."""
    shape = draw(fst.shapes(max_rank=3, max_side=5))
    return shape, draw(st.lists(fst.boxes(shape), max_size=6))


@given(tiled_shapes())
def test_t1_tilings_tile(case):
    shape, boxes = case
    assert (model.counts(shape, boxes) == 1).all()
    assert check_tiling(Box.from_shape(shape), boxes) == (None, None)


@given(fst.array_specs("w").flatmap(fst.shardings))
def test_t1_shardings_tile_and_have_one_main_replica(world):
    laws.check_tiles(world)
    laws.check_main_replicas(world)


@given(fst.worlds())
def test_t1_worlds_tile(world):
    laws.check_tiles(world)


@given(tiled_shapes(min_side=1), st.data())
def test_t2_a_missing_box_is_found(case, data):
    shape, boxes = case
    lost = data.draw(st.sampled_from([box for box in boxes if box.size]))
    rest = [box for box in boxes if box is not lost]
    gap = first_gap(Box.from_shape(shape), rest)
    assert gap is not None
    assert gap.size
    assert lost.contains(gap)
    assert check_tiling(Box.from_shape(shape), rest) == (None, gap)


@given(tiled_shapes(min_side=1), st.data())
def test_t2_a_doubled_box_is_found(case, data):
    shape, boxes = case
    at = data.draw(st.sampled_from([i for i, box in enumerate(boxes) if box.size]))
    where = data.draw(st.integers(0, len(boxes)))
    doubled = [*boxes[:where], boxes[at], *boxes[where:]]
    pair, gap = check_tiling(Box.from_shape(shape), doubled)
    assert gap is None
    assert pair is not None
    assert pair[0] < pair[1]
    assert doubled[pair[0]] == doubled[pair[1]] == boxes[at]


@given(untidy_boxes())
@example(((), [Box((), ()), Box((), ())]))
@example(((), []))
@example(((2, 2), [Box((0, 0), (2, 1)), Box((0, 0), (1, 2))]))
def test_t2_the_checker_is_the_count_model(case):
    shape, boxes = case
    counts = model.counts(shape, boxes)
    pair, gap = find_overlap(boxes), first_gap(Box.from_shape(shape), boxes)
    event(f"overlap {pair is not None}, gap {gap is not None}")
    assert (pair is None) == (not (counts > 1).any())
    if pair is not None:
        assert pair[0] < pair[1]
        assert boxes[pair[0]].intersect(boxes[pair[1]]) is not None
    assert (gap is None) == (not (counts == 0).any())
    if gap is not None:
        assert gap.size
        assert not counts[gap.slices].any()


@given(st.integers(0, 40), st.integers(1, 12))
def test_t3_splits_add_up(extent, parts):
    for rule in (chunked_sizes, balanced_sizes):
        sizes = rule(extent, parts)
        assert len(sizes) == parts
        assert sum(sizes) == extent
        assert all(size >= 0 for size in sizes)
        assert list(sizes) == sorted(sizes, reverse=True)
    assert max(balanced_sizes(extent, parts)) - min(balanced_sizes(extent, parts)) <= 1


@given(fst.regular_shards())
def test_t3_rank_offsets_are_the_grid(grid):
    array = grid[0].array
    sizes = [(n // parts,) * parts for n, parts in zip(array.shape, grid[0].grid, strict=True)]
    assert [shard.box for shard in grid] == list(grid_boxes(sizes))
    assert {shard.array for shard in grid} == {array}


@st.composite
def placed(draw):
    array = ArraySpec("w", draw(fst.shapes(max_rank=3, max_side=9)), "int8")
    mesh = draw(fst.meshes())
    return array, mesh, draw(fst.placements(mesh, len(array.shape)))


UNEVEN = (ArraySpec("w", (5,), "int8"), (3, 2), (StridedShard(0, 2), Shard(0)))
STRIDED_AND_EMPTY = (ArraySpec("w", (0, 3), "int8"), (2,), (StridedShard(1, 2),))


@given(placed())
@example(UNEVEN)
@example(STRIDED_AND_EMPTY)
def test_t3_placements_place_what_dtensor_computes(case):
    array, mesh, how = case
    torch_utils = pytest.importorskip("torch.distributed.tensor._utils")
    theirs = to_torch(how)
    for coordinate in product(*map(range, mesh)):
        shape, offset = torch_utils._compute_local_shape_and_global_offset(array.shape, mesh, list(coordinate), theirs)
        ours = from_placements(array, mesh, coordinate, how)
        if 0 in shape:
            assert [part.shard.size for part in ours] == [0]
            continue
        assert (model.counts(shape, [part.local for part in ours]) == 1).all()
        assert ours[0].shard.box.start == offset
        event("strided" if len(ours) > 1 else "one box")


@given(placed())
@example(UNEVEN)
def test_t3_placements_place_what_dtensor_sends(case):
    """Let torch cut a real tensor mesh axis by mesh axis, and compare the data."""
    array, mesh, how = case
    torch = pytest.importorskip("torch")
    whole = model.positions(ArraySpec("w", array.shape, "int32"))
    for coordinate in product(*map(range, mesh)):
        local = torch.from_numpy(whole)
        for size, index, placement in zip(mesh, coordinate, to_torch(how), strict=True):
            if not placement.is_replicate():
                parts, _ = placement._split_tensor(local, size, with_padding=False)
                local = parts[index]
        for part in from_placements(array, mesh, coordinate, how):
            expected = whole[part.shard.box.slices]
            assert (local.numpy()[part.local.slices] == expected).all()
        sizes = [part.local.size for part in from_placements(array, mesh, coordinate, how)]
        assert sum(sizes) == local.numel()


@given(placed(), st.data())
def test_t3_a_negative_axis_counts_from_the_end(case, data):
    array, mesh, how = case
    ndim = len(array.shape)
    flipped = tuple(
        p if isinstance(p, Replicate) or data.draw(st.booleans())
        else Shard(p.dim - ndim) if isinstance(p, Shard) else StridedShard(p.dim - ndim, p.split_factor)
        for p in how
    )  # fmt: skip
    coordinate = (0,) * len(mesh)
    assert from_placements(array, mesh, coordinate, flipped) == from_placements(array, mesh, coordinate, how)


@given(placed(), st.data())
def test_t3_replica_ids_tell_copies_apart(case, data):
    array, mesh, how = case
    coordinates = list(product(*map(range, mesh)))
    order = data.draw(st.permutations(coordinates))
    ranks = [tuple(p.shard for p in from_placements(array, mesh, c, how)) for c in order]
    laws.check_tiles(World(ranks))
    laws.check_main_replicas(World(ranks))


def to_torch(how):
    from torch.distributed.tensor import placement_types as theirs

    return [
        theirs.Replicate() if isinstance(p, Replicate)
        else theirs.Shard(p.dim) if isinstance(p, Shard)
        else theirs._StridedShard(p.dim, split_factor=p.split_factor)
        for p in how
    ]  # fmt: skip
