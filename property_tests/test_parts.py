"""Parts of plain chunks: the ranges fetched hold the part, nothing that is a page away from it, and block it whole."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from functional_ckpt.spec.box import Box
from functional_ckpt.store.part import blocks_of, ranges_of, read_part
from functional_ckpt.store.zarr import MemoryStore
from functional_ckpt.testing import model
from functional_ckpt.testing import strategies as fst

PAGES = st.sampled_from([1, 4, 16, 64, 4096])


@st.composite
def parts(draw):
    """Return the shape of a chunk, and a box of it that has cells."""
    shape = draw(fst.shapes(max_side=9).filter(lambda shape: 0 not in shape))
    return shape, draw(fst.boxes(shape, empty=False))


@given(parts(), st.sampled_from(["i1", "f4", "c16"]), PAGES)
@example(((4, 5, 6), Box((0, 1, 0), (4, 3, 6))), "f4", 16)
def test_what_is_read_is_the_part(case, dtype, page):
    shape, box = case
    values = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    store = MemoryStore("parts")
    store.delete(["c"])
    store.create("c", [np.ravel(values).view("u1").data], values.nbytes)
    ranges = ranges_of(shape, box, values.itemsize, page)
    found = read_part(store, "c", ranges, box.shape, values.dtype)
    assert found.tobytes() == values[box.slices].tobytes()


@given(parts(), PAGES)
def test_nothing_a_page_away_from_the_part_is_fetched(case, page):
    shape, box = case
    ranges = ranges_of(shape, box, 2, page)
    wanted = np.repeat((model.counts(shape, [box]) > 0).ravel(), 2)
    stop = 0
    for start in ranges.starts:
        assert stop <= start
        stop = start + ranges.nbytes
        inside = wanted[start:stop]
        assert len(inside) == ranges.nbytes
        assert inside[0]
        assert inside[-1]
        assert np.diff(np.flatnonzero(inside)).max(initial=1) - 1 < page
        wanted[start:stop] = False
    assert not wanted.any()
    # Rows that are shorter than a page are not read one by one.
    assert (len(ranges.starts) - 1) * (ranges.nbytes + page) < 2 * np.prod(shape, dtype=int) + page


@given(parts(), PAGES, st.integers(1, 300))
def test_blocks_are_the_part_in_order(case, page, limit):
    shape, box = case
    blocks = list(blocks_of(box, ranges_of(shape, box, 1, page), 1, limit))
    cells = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    assert model.counts(shape, blocks).tolist() == model.counts(shape, [box]).tolist()
    assert [cells[b.start] for b in blocks] == sorted(cells[b.start] for b in blocks)
    assert len(blocks) == 1 or max(b.size for b in blocks) < box.size
