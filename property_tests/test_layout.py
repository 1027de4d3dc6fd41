"""L: no exclusive chunk has two writers, none could be larger, and only boxes, type and policy decide."""

from math import prod

import attrs
import numpy as np
import pytest
from hypothesis import Phase, event, example, find, given, settings
from hypothesis import strategies as st

from functional_ckpt.errors import LayoutError
from functional_ckpt.plan.ladder import choose_layout, exclusive_chunk
from functional_ckpt.plan.layout import ChunkGrid, Layout, LayoutPolicy, subdivide
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.sharding import fragments
from functional_ckpt.testing import laws, model
from functional_ckpt.testing import strategies as fst


@st.composite
def written_arrays(draw):
    """An array and the boxes in which a valid world writes it."""
    array = draw(fst.array_specs("w", fst.shapes(3, 12)))
    if draw(st.booleans()):
        # Nothing but a tiling: more boxes to an example than whole worlds have.
        return array, [box for box in draw(fst.tilings(array.shape)) if box.size]
    world = draw(fst.shardings(array))
    return array, sorted({f.box for shards in world.ranks for s in shards for f in fragments(s)})


FACES_AT_4_AND_10 = (ArraySpec("w", (12,), "int8"), [Box((0,), (4,)), Box((4,), (10,)), Box((10,), (12,))])


@given(written_arrays())
@example(FACES_AT_4_AND_10)
def test_l1_an_exclusive_chunk_has_one_writer(case):
    array, boxes = case
    chunk, faced = exclusive_chunk(array.shape, boxes)
    event(f"chunks: {min(ChunkGrid(array.shape, chunk).size, 9)}")
    laws.check_layout(array, boxes, LayoutPolicy(), Layout("exclusive", chunk, (), array.dtype))
    edges = model.edges(array.shape, boxes)
    assert faced == tuple(any(0 < at < n for at in e) for e, n in zip(edges, array.shape, strict=True))


@given(written_arrays())
@example(FACES_AT_4_AND_10)
def test_l2_an_exclusive_chunk_is_as_large_as_can_be(case):
    array, boxes = case
    chunk, _ = exclusive_chunk(array.shape, boxes)
    for axis, extent in enumerate(array.shape):
        for larger in range(chunk[axis] + 1, extent + 1):
            grown = Layout("exclusive", (*chunk[:axis], larger, *chunk[axis + 1 :]), (), array.dtype)
            with pytest.raises(AssertionError, match="is touched by"):
                laws.check_layout(array, boxes, LayoutPolicy(), grown)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=4),
    st.sampled_from([1, 2, 8, 16]),
    st.integers(1, 2000),
    st.integers(0, 500),
)
@example([(1, False), (40, False)], 8, 64, 0)
@example([(1, True), (40, True)], 8, 64, 500)
def test_l3_subdividing_keeps_faces_and_bounds_bytes(axes, itemsize, target, least):
    chunk, faced = tuple(n for n, _ in axes), tuple(face for _, face in axes)
    split = subdivide(chunk, faced, itemsize, target, least)
    nbytes = prod(split) * itemsize
    assert all(1 <= c <= n for c, n in zip(split, chunk, strict=True))
    assert all(n % c == 0 for c, n, face in zip(split, chunk, faced, strict=True) if face)
    if prod(chunk) * itemsize <= target:
        assert split == chunk
    if nbytes > max(target, itemsize):
        # Too large only where the next smaller divisor would make slivers.
        axis = next(i for i, c in enumerate(split) if c > 1)
        assert faced[axis]
        below = max(d for d in range(1, split[axis]) if chunk[axis] % d == 0)
        assert nbytes // split[axis] * below < least
    cut = [axis for axis, (c, n) in enumerate(zip(split, chunk, strict=True)) if c < n]
    # Only leading axes are cut, so that a piece of a C-order array is one run of bytes.
    assert all(split[axis] == 1 for axis in range(cut[-1] if cut else 0))
    if cut:
        # Not smaller than need be: the next coarser cut would give too large a chunk.
        event(f"cut: {'at a divisor' if faced[cut[-1]] else 'evenly'}")
        n, c = chunk[cut[-1]], split[cut[-1]]
        pieces = -(-n // c) - 1
        coarser = min(d for d in range(c + 1, n + 1) if n % d == 0) if faced[cut[-1]] else -(-n // pieces)
        assert nbytes // c * coarser > target


@given(written_arrays(), fst.layout_policies(), st.booleans())
def test_l3_chosen_layouts_obey_their_policy(case, policy, owned_ok):
    array, boxes = case
    layout = choose_layout(array, boxes, policy, owned_ok=owned_ok)
    event(f"ownership: {layout.ownership}")
    laws.check_layout(array, boxes, policy, layout)
    assert layout.codecs == policy.codecs_of(array.key)
    assert model.numpy_dtype(layout.stored).itemsize == array.itemsize
    nbytes = prod(layout.chunk) * array.itemsize
    if layout.ownership == "exclusive" and nbytes > max(policy.target_chunk_nbytes, array.itemsize):
        event("larger than the target")
        extent = next(c for c in layout.chunk if c > 1)
        below = max(d for d in range(1, extent) if extent % d == 0)
        assert nbytes // extent * below < max(policy.min_chunk_nbytes, -(-policy.target_chunk_nbytes // 2))
    plain = np.dtype(layout.stored) if policy.extended_dtypes == "bits" else None
    assert plain is not None or layout.stored == array.dtype


@given(written_arrays(), fst.layout_policies(), st.booleans(), st.booleans())
def test_l4_chunks_have_several_writers_only_when_allowed_and_needed(case, policy, shared_ok, owned_ok):
    """Of files that are too many `test_files.py` tells."""
    array, boxes = case
    policy = attrs.evolve(policy, few_files=2**20)
    chunk, faced = exclusive_chunk(array.shape, boxes)
    small = any(faced) and prod(chunk) * array.itemsize < policy.min_chunk_nbytes
    if small and not (shared_ok or owned_ok):
        with pytest.raises(LayoutError, match="'w'"):
            choose_layout(array, boxes, policy, shared_ok, owned_ok)
        return
    ownership = "exclusive" if not small else "owned" if owned_ok else "shared"
    assert choose_layout(array, boxes, policy, shared_ok, owned_ok).ownership == ownership


@given(written_arrays(), fst.layout_policies(), st.randoms(use_true_random=False))
def test_l5_only_the_set_of_boxes_decides(case, policy, random):
    array, boxes = case
    nothing = [Box.from_shape((0,) * len(array.shape))] if array.shape else []
    shuffled = [*boxes, *boxes[:2], *nothing]
    random.shuffle(shuffled)
    assert choose_layout(array, shuffled, policy) == choose_layout(array, boxes, policy)


@pytest.mark.parametrize("ownership", ["exclusive", "owned", "shared"])
def test_the_strategies_reach_every_ownership(ownership):
    cases = st.tuples(written_arrays(), fst.layout_policies(), st.just(True), st.booleans())
    quick = settings(max_examples=5000, phases=[Phase.generate], database=None)
    find(cases, lambda case: choose_layout(*case[0], *case[1:]).ownership == ownership, settings=quick)


@st.composite
def grids(draw):
    shape = draw(fst.shapes(max_rank=3, max_side=7))
    return ChunkGrid(shape, tuple(draw(st.integers(1, max(n, 1))) for n in shape))


@given(grids())
def test_chunks_tile_the_array_in_row_major_order(grid):
    indices = list(np.ndindex(*grid.counts))
    assert len(indices) == grid.size
    assert [grid.position(index) for index in indices] == list(range(grid.size))
    boxes = [grid.box(index) for index in indices]
    assert (model.counts(grid.shape, boxes) == 1).all()
    assert boxes == sorted(boxes)


@given(grids(), st.data())
def test_touched_chunks_are_those_with_a_common_cell(grid, data):
    box = data.draw(fst.boxes(grid.shape))
    expected = [i for i in np.ndindex(*grid.counts) if grid.box(i).intersect(box) is not None]
    assert list(grid.touched(box)) == expected


@given(fst.layout_policies(), st.text("ab.", max_size=4))
@example(LayoutPolicy(codecs={".": (), "a": "crc32c"}), "a")
def test_the_longest_matching_prefix_names_the_codecs(policy, key):
    stems = {prefix: prefix.rstrip(".") for prefix, _ in policy.codecs}
    fitting = [prefix for prefix, stem in stems.items() if not stem or f"{key}.".startswith(f"{stem}.")]
    longest = max((stems[prefix] for prefix in fitting), key=len, default=None)
    candidates = [names for prefix, names in policy.codecs if prefix.rstrip(".") == longest] or [()]
    assert policy.codecs_of(key) in candidates


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=3))
def test_a_chunk_is_found_by_its_number(axes):
    grid = ChunkGrid(tuple(n for n, _ in axes), tuple(c for _, c in axes))
    indices = list(grid.touched(Box.from_shape(grid.shape)))
    assert [grid.index(position) for position in range(grid.size)] == indices
    assert [grid.position(index) for index in indices] == list(range(grid.size))
