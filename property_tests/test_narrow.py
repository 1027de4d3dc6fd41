"""N: narrowing specs is narrowing data, as if every rank narrowed its own."""

import attrs
import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from functional_ckpt.errors import ShapeError
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.sharding import ShardSpec, World, narrow
from functional_ckpt.testing import laws, model
from functional_ckpt.testing import strategies as fst
from functional_ckpt.testing.regions import grid_boxes


@st.composite
def narrowings(draw):
    """A grid, regular along `axis`, maybe flat-split, and the range of each local extent that is kept."""
    others = draw(fst.shapes(max_rank=2, max_side=4, min_side=1))
    axis = len(others) - draw(st.integers(0, len(others)))
    extent, parts = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    sizes = [fractions(n, draw(st.integers(1, 2))) for n in others]
    sizes.insert(axis, (extent,) * parts)
    array = ArraySpec("w", tuple(map(sum, sizes)), "int32")
    start = draw(st.integers(0, extent))
    stop = extent - draw(st.integers(0, extent - start))
    length = stop - start
    shards = []
    for box in grid_boxes(sizes):
        flat = draw(fst.flat_splits(box.size, 3)) if draw(st.booleans()) else (None,)
        shards += [ShardSpec(array, box, 0, part) for part in dict.fromkeys(flat)]
    return shards, axis, start, length


def fractions(extent, parts):
    return tuple(map(len, np.array_split(range(extent), parts)))


def narrowed(array, extent, axis, start, length):
    """Keep elements [start, start + length) of each run of `extent` elements along `axis`."""
    keep = [i for i in range(array.shape[axis]) if start <= i % extent < start + length]
    return array.take(keep, axis)


@given(narrowings())
@example(([ShardSpec(ArraySpec("w", (2, 3), "int32"), Box((0, 0), (2, 3)), 0, (1, 6))], 1, 1, 1))
def test_n1_narrow_commutes_with_data(case):
    shards, axis, start, length = case
    whole = model.positions(shards[0].array)
    small = narrowed(whole, shards[0].box.shape[axis], axis, start, length)
    for shard in shards:
        # Every cell of the buffer, with its coordinate along the axis, before and after.
        coordinate = np.indices(shard.box.shape)[axis]
        if shard.flat is not None:
            coordinate = coordinate.reshape(-1)[slice(*shard.flat)]
        kept = model.view(shard, whole)[(coordinate >= start) & (coordinate < start + length)]
        found = [model.view(part, small).reshape(-1) for part in narrow(shard, axis, start, length)]
        event(f"flat: {shard.flat is not None}, parts: {len(found)}, some: {0 < kept.size < shard.size}")
        assert np.concatenate([*found, []]).tolist() == kept.reshape(-1).tolist()
        assert all(part.array.shape == small.shape for part in narrow(shard, axis, start, length))


@given(narrowings())
def test_n2_narrowed_tilings_tile(case):
    shards, axis, start, length = case
    parts = [part for shard in shards for part in narrow(shard, axis, start, length)]
    laws.check_tiles(World([parts]))


@given(narrowings(), st.data())
def test_n2_narrowing_twice_is_narrowing_once(case, data):
    shards, axis, start, length = case
    inner = data.draw(st.integers(0, length))
    count = data.draw(st.integers(0, length - inner))
    for shard in [shard for shard in shards if shard.flat is None and length]:
        (once,) = narrow(shard, axis, start, length)
        assert narrow(once, axis, inner, count) == narrow(shard, axis, start + inner, count)


@given(narrowings())
def test_n1_what_survives_of_a_flat_shard_is_one_range(case):
    """The cells that are kept stay in their order, and nothing comes to lie between them."""
    shards, axis, start, length = case
    for shard in [shard for shard in shards if shard.flat is not None]:
        parts = narrow(shard, axis, start, length)
        assert len(parts) <= 1
        assert all(part.size for part in parts)


@given(narrowings())
def test_ranges_outside_the_shard_are_refused(case):
    shards, axis, start, _ = case
    extent = shards[0].box.shape[axis]
    for bad in [(axis, start, extent - start + 1), (axis, -1, 1), (shards[0].box.ndim, 0, 0), (axis, 0, -1)]:
        with pytest.raises(ShapeError):
            narrow(shards[0], *bad)


@given(narrowings(), st.integers(1, 4), st.integers(1, 3))
@example(([ShardSpec(ArraySpec("w", (6,), "int8"), Box((0,), (3,)))], 0, 0, 1), 1, 1)
def test_an_irregular_grid_is_refused(case, shift, more):
    """Neither an extent nor an offset that is no multiple of the local extent can be scaled with it."""
    shards, axis, start, length = case
    shard = next(shard for shard in shards if shard.flat is None or shard.size)
    extent = shard.box.shape[axis]

    def lying(at, size):
        shape, begin = (tuple(n if i == axis else old for i, old in enumerate(each))
                        for n, each in ((size, shard.array.shape), (at, shard.box.start)))  # fmt: skip
        array = attrs.evolve(shard.array, shape=shape)
        return attrs.evolve(shard, array=array, box=Box.from_shape(shard.box.shape, begin))

    for bad in (lying(shift, (more + 4) * extent), lying(0, more * extent + shift)):
        if bad.box.start[axis] % extent or bad.array.shape[axis] % extent:
            with pytest.raises(ShapeError, match="regular grid"):
                narrow(bad, axis, start, length)
