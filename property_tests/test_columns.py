"""C: tables of integers say the same as the values that they stand for, row by row."""

import subprocess
import sys
from itertools import product
from math import gcd, prod
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import assume, event, example, given
from hypothesis import strategies as st

from functional_ckpt.plan.layout import ArrayPlan, Layout
from functional_ckpt.plan.pieces import cut_at_chunks, pieces_of, row_order
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.columns import Columns, Ints, mix, ravelled, to_column
from functional_ckpt.spec.flat import flat_boxes, flat_rows
from functional_ckpt.spec.mesh import Mesh
from functional_ckpt.spec.placement import Shard, StridedShard, axis_spans, from_placements
from functional_ckpt.spec.sharding import Sharding, ShardSpec, World, fragments, relabelled
from functional_ckpt.spec.split import common_face, is_even, split_of
from functional_ckpt.spec.table import ShardTable, key_hashes, padded, padded_shapes, unpadded
from functional_ckpt.spec.tiling import check_tiling, surely_tiled
from functional_ckpt.testing import strategies as fst


@attrs.frozen(eq=False)
class Pairs(Columns):
    """Two numbers a row."""

    x: Ints = attrs.field(converter=to_column)
    y: Ints = attrs.field(converter=to_column)


@attrs.frozen(eq=False)
class Others(Columns):
    """The same columns by another name."""

    x: Ints = attrs.field(converter=to_column)
    y: Ints = attrs.field(converter=to_column)


INTS = st.integers(-(2**63), 2**63 - 1)
TABLES = st.lists(st.tuples(INTS, INTS), max_size=6)


def table_of(rows, kind=Pairs):
    return kind([x for x, _ in rows], [y for _, y in rows])


@given(TABLES, TABLES)
def test_columns_compare_and_hash_as_tuples_of_rows(one, other):
    assert (table_of(one) == table_of(other)) == (one == other)
    assert table_of(one) != table_of(one, Others)
    assert hash(table_of(one)) == hash(table_of(list(one)))
    assert len(table_of(one)) == len(one)


@given(st.lists(TABLES, min_size=1, max_size=3), st.data())
def test_columns_join_and_take_as_lists_of_rows(tables, data):
    joined = [row for table in tables for row in table]
    assert Pairs.joined([table_of(table) for table in tables]) == table_of(joined)
    rows = data.draw(st.lists(st.integers(0, len(joined) - 1))) if joined else []
    taken = table_of(joined).take(np.array(rows, np.int64))
    assert taken == table_of([joined[i] for i in rows])
    mask = [data.draw(st.booleans()) for _ in joined]
    assert table_of(joined).take(np.array(mask, bool)) == table_of([r for r, m in zip(joined, mask, strict=True) if m])
    assert not any(column.flags.writeable for column in (taken.x, taken.y))


@given(fst.shapes(min_side=1, min_rank=1), st.data())
def test_ravelled_is_numpys(shape, data):
    cells = st.tuples(*(st.integers(0, n - 1) for n in shape))
    index = data.draw(st.lists(cells, max_size=4))
    rows = np.array(index, np.int64).reshape(len(index), len(shape))
    found = ravelled(rows, np.tile(shape, (len(index), 1)))
    assert found.tolist() == [int(np.ravel_multi_index(i, shape)) for i in index]


def splitmix(state):
    """One step of splitmix64, on Python's integers."""
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


@given(st.lists(st.tuples(INTS, INTS, INTS), max_size=5), st.integers(1, 3))
def test_mix_is_splitmix_of_each_row(rows, width):
    found = mix(*np.array(rows, np.int64).reshape(len(rows), 3).T[:width])
    for row, hashed in zip(rows, found.tolist(), strict=True):
        state = 0
        for word in row[:width]:
            state = splitmix(state ^ (word % 2**64))
        assert hashed == state


MIXED = """
import numpy as np
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.columns import mix
from functional_ckpt.spec.table import key_hashes
print(mix(np.arange(99), np.arange(99)[::-1]).tolist(), key_hashes([ArraySpec(k, (), "int8") for k in "abc\\u00e9"]))
"""


def test_hashes_are_the_same_in_every_process():
    root = Path(__file__).parents[1]
    texts = {
        subprocess.run([sys.executable, "-c", MIXED], cwd=root, env={"PYTHONHASHSEED": seed}, capture_output=True,
                       check=True).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    here = mix(np.arange(99), np.arange(99)[::-1]).tolist()
    arrays = [ArraySpec(key, (), "int8") for key in "abcé"]
    assert texts == {f"{here} {key_hashes(arrays)}\n".encode()}


@given(st.lists(fst.shapes(max_side=5), max_size=4), st.data())
def test_flat_rows_are_the_flat_boxes_of_each_row(shapes, data):
    ndim = max(map(len, shapes), default=1) or 1
    extents = padded(shapes, ndim, 1)
    ranges = [sorted(data.draw(st.integers(0, prod(shape))) for _ in range(2)) for shape in shapes]
    row, start, stop, run = flat_rows(extents, *np.array(ranges, np.int64).reshape(len(shapes), 2).T)
    found = zip(row.tolist(), map(tuple, start.tolist()), map(tuple, stop.tolist()), run.tolist(), strict=True)
    expected = []
    for number, (shape, (low, high)) in enumerate(zip(extents.tolist(), ranges, strict=True)):
        begin = 0
        for box in flat_boxes(shape, low, high):
            expected.append((number, box.start, box.stop, begin))
            begin += box.size
    assert list(found) == expected


@st.composite
def many_tilings(draw):
    """Shapes of several arrays of one rank, and boxes with cells of each: a tiling, maybe spoilt."""
    ndim = draw(st.integers(1, 3))
    shapes, boxes, kinds = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(fst.shapes(ndim, 6, min_rank=ndim))
        kind = draw(st.sampled_from(["guillotine", "grid", "grid", "spoilt"]))
        tiling = draw({"guillotine": fst.guillotine_tilings(shape)}.get(kind, fst.grid_tilings(shape)))
        live = [box for box in tiling if box.size]
        if kind == "spoilt" and live:
            at = draw(st.integers(0, len(live) - 1))
            live[at : at + 1] = draw(st.sampled_from([[], [live[at]] * 2, [draw(fst.boxes(shape, empty=False))]]))
        shapes.append(shape)
        boxes.append([live[i] for i in draw(st.permutations(range(len(live))))])
        kinds.append(kind)
    return shapes, boxes, kinds


#: Five boxes around a middle one: no straight cut takes them apart.
WHEEL = [Box((0, 0), (1, 2)), Box((0, 2), (2, 3)), Box((2, 1), (3, 3)), Box((1, 0), (3, 1)), Box((1, 1), (2, 2))]


@given(many_tilings())
@example(([(3, 3), (4, 4)], [WHEEL, [Box((0, 0), (4, 4))]], ["wheel", "grid"]))
@example(([(2**31, 2**30)], [[Box((0, 0), (2**31, 1)), Box((0, 1), (2**31, 2**30))]], ["grid"]))
@example(([(2**60,)] * 5, [[Box((0,), (7,)), Box((7,), (2**60,))]] * 5, ["grid"] * 5))
def test_surely_tiled_proves_tilings_and_finds_all_that_cut_cleanly(case):
    shapes, boxes, kinds = case
    ndim = len(shapes[0])
    numbers = np.repeat(np.arange(len(shapes)), [len(b) for b in boxes])
    ends = [
        np.array([getattr(box, end) for b in boxes for box in b], np.int64).reshape(len(numbers), ndim)
        for end in ("start", "stop")
    ]
    found = surely_tiled(np.array(shapes, np.int64), numbers, *ends).tolist()
    for shape, mine, kind, tiled in zip(shapes, boxes, kinds, found, strict=True):
        is_tiling = check_tiling(Box.from_shape(shape), mine) == (None, None)
        event(f"{kind}: {tiled}, {is_tiling}")
        assert is_tiling or not tiled
        assert tiled or not is_tiling or kind in ("wheel", "spoilt")


@given(fst.worlds(max_arrays=4))
def test_tables_are_the_shards_of_all_ranks(world):
    table, conflicts = ShardTable.of_world(world)
    assert conflicts == ()
    shards = [(rank, at, shard) for rank, held in enumerate(world.ranks) for at, shard in enumerate(held)]
    assert len(table.rows) == len(shards)
    for row, (rank, at, shard) in enumerate(shards):
        assert (table.rows.rank[row], table.rows.shard[row]) == (rank, at)
        assert bool(table.rows.main[row]) == shard.is_main
        found = table.shard(row)
        assert (found.array, found.identity, found.replica_id) == (shard.array, shard.identity, shard.replica_id)
    for own, held in ((table, [each[-1] for each in shards]), *((ShardTable.of(3, h), h) for h in world.ranks)):
        assert own.arrays == tuple(sorted({shard.array for shard in held}, key=lambda array: array.key))
        assert own.replicas == tuple(sorted({shard.replica_id for shard in held}))


@given(fst.worlds(max_arrays=4), st.data())
def test_a_table_without_arrays_is_that_of_the_others(world, data):
    keys = sorted(world.by_key())
    gone = data.draw(st.sets(st.sampled_from(keys))) if keys else set()
    kept = World([[s for s in shards if s.key not in gone] for shards in world.ranks])
    found, expected = ShardTable.of_world(world)[0].without(gone), ShardTable.of_world(kept)[0]
    assert found.arrays == expected.arrays
    assert [found.shard(i) for i in range(len(found.rows))] == [expected.shard(i) for i in range(len(expected.rows))]
    assert found.shapes.tolist() == expected.shapes.tolist()


@given(fst.worlds(max_arrays=4))
def test_cells_number_all_arrays_row_major(world):
    table, _ = ShardTable.of_world(world)
    first, begins = 0, {}
    for spec in table.arrays:
        begins[spec.key], first = first, first + prod(spec.shape)
    for row, cell in enumerate(table.cells.tolist()):
        shard = table.shard(row)
        if shard.box.size:
            offset = int(np.ravel_multi_index(shard.box.start, shard.array.shape)) if shard.array.shape else 0
            assert cell == begins[shard.key] + offset


@given(fst.worlds(), st.data())
def test_two_descriptions_of_one_array_are_a_conflict_that_names_both_ranks(world, data):
    shards = [(rank, s) for rank, held in enumerate(world.ranks) for s in held]
    assume(shards)
    shard = data.draw(st.sampled_from([s for _, s in shards]))
    other = attrs.evolve(shard.array, dtype="int8" if shard.array.dtype != "int8" else "uint8")
    table, (conflict,) = ShardTable.of_world(World([*world.ranks, [ShardSpec(other, shard.box)]]))
    lowest = min(rank for rank, s in shards if s.key == shard.key)
    assert attrs.astuple(conflict, recurse=False) == (lowest, shard.array, world.size, other)
    assert [spec.key for spec in table.arrays] == sorted({s.key for _, s in shards} - {shard.key})


@given(st.lists(fst.shapes(), max_size=5), st.integers(4, 5), st.integers(0, 1))
def test_padding_in_front_is_undone(ends, ndim, fill):
    rows = padded(ends, ndim, fill)
    assert rows.shape == (len(ends), ndim)
    for row, end in zip(rows, ends, strict=True):
        assert row.tolist() == [*[fill] * (ndim - len(end)), *end]
        assert unpadded(row * 0, row, len(end)) == Box.from_shape(end)


@given(fst.worlds(), st.data())
def test_pieces_are_the_fragments_cut_at_chunks(world, data):
    table, _ = ShardTable.of_world(world)
    chosen = np.array([i for i in range(len(table.rows)) if data.draw(st.booleans())], np.int64)
    pieces = pieces_of(table, chosen)
    places_of = [(int(table.rows.rank[i]), int(table.rows.shard[i])) for i in chosen]
    expected = [
        (table.shard(int(i)).key, rank, at, f.run, f.box)
        for i, (rank, at) in zip(chosen, places_of, strict=True)
        for f in fragments(table.shard(int(i)))
        if f.box.size
    ]
    live = pieces.take(pieces.sizes > 0)
    assert sorted(described(table.arrays, live)) == sorted(expected)
    chunks = [tuple(data.draw(st.integers(1, max(n, 1))) for n in spec.shape) for spec in table.arrays]
    plans = [ArrayPlan(s, Layout("owned", c, (), s.dtype)) for s, c in zip(table.arrays, chunks, strict=True)]
    ndim = pieces.start.shape[1]
    cut = cut_at_chunks(live, table.shapes, padded(chunks, ndim, 1))
    found = sorted(zip(described(table.arrays, cut), cut.chunk.tolist(), strict=True))
    assert found == sorted(
        ((key, rank, at, run, common), grid.position(index))
        for key, rank, at, run, box in expected
        for grid in [next(plan.grid for plan in plans if plan.spec.key == key)]
        for index in grid.touched(box)
        if (common := grid.box(index).intersect(box)) is not None
    )
    assert row_order(cut, padded_shapes(table.arrays, ndim)).tolist() == list(range(len(cut)))
    keys = list(zip(cut.array.tolist(), cut.chunk.tolist(), map(tuple, cut.start.tolist()), strict=True))
    assert keys == sorted(keys)


def described(arrays, pieces):
    """Return the rows of `pieces` as key, rank, shard, run and box."""
    columns = (pieces.array, pieces.source, pieces.shard, pieces.run, pieces.start, pieces.stop)
    return [
        (arrays[array].key, rank, at, run, unpadded(np.array(start), np.array(stop), len(arrays[array].shape)))
        for array, rank, at, run, start, stop in zip(*(column.tolist() for column in columns), strict=True)
    ]


@st.composite
def cut_axes(draw):
    """How mesh axes cut one axis, and extents that may be asked about together."""
    cuts = draw(st.lists(st.tuples(st.sampled_from([1, 1, 2, 3]), st.integers(1, 4)), max_size=3).map(tuple))
    if len(cuts) == 2 and draw(st.booleans()):  # as FSDP over tensor parallelism makes them
        cuts = ((cuts[1][1], cuts[0][1]), (1, cuts[1][1]))
    ways = prod(size for _, size in cuts)
    even = [n for n in (*range(1, 25), *(ways * k for k in range(1, 5))) if is_even(n, cuts)]
    if even and draw(st.booleans()):
        return cuts, draw(st.lists(st.sampled_from(even), min_size=1, max_size=4))
    return cuts, [draw(st.integers(1, 30))] * draw(st.integers(1, 3))


def intervals(extent, cuts):
    """Return the intervals of an axis in order, each with its place, by brute force."""
    sizes = [size for _, size in cuts]
    found = [
        (low, high, place)
        for place, index in enumerate(product(*map(range, sizes)))
        for low, high in axis_spans(extent, cuts, index)
    ]
    return sorted(found)


@given(cut_axes(), st.data())
def test_a_split_answers_as_its_list_of_intervals(case, data):
    cuts, extents = case
    split = split_of(np.array(extents, np.int64), cuts)
    event(f"{type(split).__name__}, {'woven' if len(cuts) == 2 and cuts[0][0] > 1 else 'plain'}")
    lists = [intervals(n, cuts) for n in extents]
    check_intervals(split, lists)
    check_held(split, lists, prod(size for _, size in cuts))
    for _ in range(3):
        low = [data.draw(st.integers(0, n - 1)) for n in extents]
        high = [data.draw(st.integers(lo + 1, n)) for lo, n in zip(low, extents, strict=True)]
        check_windows(split, lists, low, high)
    rows = np.array(data.draw(st.lists(st.integers(0, len(extents) - 1), min_size=1, max_size=4)))
    check_intervals(split.at(rows), [lists[row] for row in rows.tolist()])


@pytest.mark.parametrize("cuts", [((1, 5),), ((1, 2), (1, 3)), ((3, 2), (1, 3)), ((2, 3), (1, 2)), ((2, 2), (1, 3))])
@pytest.mark.parametrize("extent", [12, 13, 30])
def test_a_split_answers_for_every_window(cuts, extent):
    split, lists = split_of(np.array([extent]), cuts), [intervals(extent, cuts)]
    check_intervals(split, lists)
    check_held(split, lists, prod(size for _, size in cuts))
    for low in range(extent):
        for high in range(low + 1, extent + 1):
            check_windows(split, lists, [low], [high])


def check_intervals(split, lists):
    for k in range(max(map(len, lists))):
        numbers = np.array([min(k, len(found) - 1) for found in lists])
        expected = [found[number] for found, number in zip(lists, numbers.tolist(), strict=True)]
        start, stop = split.bounds(numbers)
        assert list(zip(start, stop, split.places(numbers), strict=True)) == expected


def check_held(split, lists, places):
    for place in range(places):
        held = [np.broadcast_to(numbers, len(lists)).tolist() for numbers in split.held(place)]
        for row, found in enumerate(lists):
            mine = [number for number, (_, _, at) in enumerate(found) if at == place]
            assert [numbers[row] for numbers in held if numbers[row] >= 0] == mine


def check_windows(split, lists, low, high):
    first, last = (ends.tolist() for ends in split.touched(np.array(low), np.array(high)))
    counts, nth = split.largest(np.array(low), np.array(high))
    for row, found in enumerate(lists):
        sizes = [min(stop, high[row]) - max(start, low[row]) for start, stop, _ in found]
        assert list(range(first[row], last[row])) == [i for i, size in enumerate(sizes) if size > 0]
        rivals = [i for i, size in enumerate(sizes) if size == max(sizes)]
        assert counts[row] == len(rivals)
        picked = [int(nth(np.minimum(k, counts - 1))[row]) for k in range(len(rivals))]
        assert picked == rivals


@given(cut_axes())
def test_the_common_face_divides_every_face_between_intervals(case):
    cuts, extents = case
    for extent in extents:
        faces = [low for low, _, _ in intervals(extent, cuts)]
        assert common_face(extent, cuts) == gcd(*faces)


@given(cut_axes())
def test_even_axes_have_intervals_of_one_length(case):
    cuts, extents = case
    for extent in extents:
        lengths = [high - low for low, high, _ in intervals(extent, cuts)]
        assert sum(lengths) == extent
        if is_even(extent, cuts):
            assert set(lengths[:-1]) <= {lengths[0]}
            assert lengths[-1] <= lengths[0]


@given(fst.placed_arrays(), st.data())
def test_a_sharding_says_what_the_placements_do(placed, data):
    for item in placed:
        mesh, array = item.sharding.mesh, item.array
        for rank in range(max(mesh.ranks) + 2):
            parts = from_placements(array, mesh.shape, mesh.coordinate(rank), item.sharding.placements)
            assert item.sharding.parts(array, rank) == parts
        assert [mesh.coordinate(rank) for rank in mesh.ranks] == list(np.ndindex(*mesh.shape))
        held = [p.shard.identity for rank in mesh.ranks for p in item.sharding.parts(array, rank) if p.shard.size]
        assert all(held.count(identity) == item.sharding.copies for identity in held)
        members = data.draw(st.permutations(range(max(mesh.ranks) + 1)))
        moved = relabelled(item.sharding, tuple(members))
        assert [members[rank] for rank in moved.mesh.ranks] == list(mesh.ranks)


def test_woven_places_in_one_small_picture():
    """Tensor parallelism (the inner mesh axis) cuts into thirds, FSDP each third into halves."""
    lines = Sharding(Mesh((2, 3), range(6)), (StridedShard(0, 3), Shard(0)))
    starts = [lines.parts(ArraySpec("w", (12,), "int8"), rank)[0].shard.box.start[0] for rank in range(6)]
    assert starts == [0, 4, 8, 2, 6, 10]
