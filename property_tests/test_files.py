"""F: a checkpoint has few files on any number of ranks, and nothing moves between ranks that need not."""

from math import prod

import attrs
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from benchmarks import files as table
from benchmarks.files_states import MODELS, RANKS, zero
from functional_ckpt.plan.ladder import array_plans, layout_of_faces
from functional_ckpt.plan.layout import LayoutPolicy
from functional_ckpt.plan.local import local_array_plans
from functional_ckpt.plan.save import plan_save
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.testing import strategies as fst

MIB = 2**20


@st.composite
def states(draw):
    """Arrays, the faces of their shards, and a policy under which they may be too many files."""
    arrays, faces = [], []
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 300), max_size=3).map(tuple))
        copies = draw(st.integers(1, 3))
        cut = tuple(draw(st.integers(0, max(n - 1, 0))) if prod(shape) else 0 for n in shape)
        dtype = draw(fst.dtypes())
        arrays += [ArraySpec(f"{number}.{copy}", shape, dtype) for copy in range(copies)]
        faces += [cut] * copies
    target = draw(st.integers(1, 2**12))
    least = draw(st.integers(0, target // 2) | st.integers(0, 2 * target))
    few = draw(st.just(0) | st.integers(0, 500))
    return arrays, faces, LayoutPolicy(target_chunk_nbytes=target, min_chunk_nbytes=least, few_files=few)


def plans_of(state, **rules):
    plans, problems = array_plans(*state, **rules)
    assert not problems
    return plans


def files_of(plans):
    """Chunks, and the metadata of each array."""
    return sum(1 + array.grid.size for array in plans)


def bound_of(arrays, policy):
    nbytes = sum(array.nbytes for array in arrays)
    return max(policy.few_files, 2 * nbytes // policy.target_chunk_nbytes + 2 * len(arrays))


def kept(arrays, faces, policy, least=0):
    """Each array by itself: with a chunk for every shard that reaches the minimum, and for none below `least`."""
    return [layout_of_faces(array, cut, policy, least_joined=least) for array, cut in zip(arrays, faces, strict=True)]


def sizes_of(policy):
    """Sizes up to which chunks may be joined."""
    half = max(policy.min_chunk_nbytes, -(-policy.target_chunk_nbytes // 2))
    doubled = [max(policy.min_chunk_nbytes, 0.5) * 2**n for n in range(1, 64)]
    return [0, *(int(size) for size in doubled if size < half), half]


#: Its shards end one row and one column before the array does: chunks of whole shards stay small on the average.
RAGGED = ([ArraySpec("w", (101, 101), "int8")], [(100, 100)], LayoutPolicy(target_chunk_nbytes=10**4, few_files=0))
#: 11 rows of 3 bytes, of which a divisor would give chunks far below the target.
PRIME = (
    [ArraySpec("w", (22, 3), "int8")],
    [(11, 0)],
    LayoutPolicy(target_chunk_nbytes=30, min_chunk_nbytes=2, few_files=0),
)


@given(states())
@example((*RAGGED[:2], attrs.evolve(RAGGED[2], min_chunk_nbytes=0)))
@example(PRIME)
def test_f1_files_are_bounded_by_bytes_and_arrays(state):
    plans = plans_of(state)
    assert files_of(plans) <= bound_of(state[0], state[2])


@given(states())
def test_f2_nothing_is_joined_where_files_are_few(state):
    arrays, _, policy = state
    alone = kept(*state)
    layouts = [array.layout for array in plans_of(state)]
    files = sum(1 + attrs.evolve(plan, layout=layout).grid.size
                for plan, layout in zip(plans_of(state), alone, strict=True))  # fmt: skip
    event(f"few: {files <= bound_of(arrays, policy)}")
    assert (layouts == alone) == (files <= bound_of(arrays, policy) or alone == kept(*state, sizes_of(policy)[-1]))


@given(states())
def test_f3_chunks_are_joined_only_until_files_are_few(state):
    """The layout is that of the first size that suffices."""
    arrays, faces, policy = state
    plans = plans_of(state)
    for size in sizes_of(policy):
        layouts = kept(arrays, faces, policy, size)
        found = [attrs.evolve(plan, layout=layout) for plan, layout in zip(plans, layouts, strict=True)]
        if files_of(found) <= bound_of(arrays, policy):
            break
    assert [plan.layout for plan in plans] == layouts


@given(states(), st.integers(1, 2**12))
def test_f4_joined_chunks_are_whole_shards_up_to_the_target(state, least):
    arrays, faces, policy = state
    target = policy.target_chunk_nbytes
    least = min(least, max(policy.min_chunk_nbytes, -(-target // 2)))
    for array, cut, layout in zip(arrays, faces, kept(arrays, faces, policy, least), strict=True):
        nbytes = prod(layout.chunk) * array.itemsize
        if layout.ownership == "exclusive":
            assert all(not face or face % extent == 0 for face, extent in zip(cut, layout.chunk, strict=True))
            continue
        free = layout_of_faces(attrs.evolve(array, key=""), [0] * len(cut), policy).chunk
        whole = all(c == n or (f and c % f == 0) for c, f, n in zip(layout.chunk, cut, array.shape, strict=True))
        event(f"joined: {layout.chunk != free}")
        assert layout.chunk == free or (whole and min(least, array.nbytes) <= nbytes <= target)


@given(states(), st.integers(0, 500))
def test_f5_where_ranks_cannot_exchange_nothing_is_joined(state, few):
    arrays, faces, policy = state
    other = attrs.evolve(policy, few_files=few)
    assert plans_of(state, owned_ok=False) == plans_of((arrays, faces, other), owned_ok=False)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_f6_files_of_large_states_are_bounded_on_any_number_of_ranks(model):
    bound = table.bound_of(model)
    for layout, placed in table.PLACED.items():
        for ranks in RANKS:
            files = table.file_count(local_array_plans(placed(model, ranks), LayoutPolicy()))
            assert files <= bound, (layout, ranks)
    # Flat ranges are gathered, which takes longer.
    for ranks in RANKS[::2]:
        files = table.file_count(plan_save(zero(model, ranks), LayoutPolicy()).arrays)
        assert files <= bound, ranks


def test_f6_without_joining_files_multiply_with_ranks():
    model = next(model for model in MODELS if model.name == "dense 70B")
    plans = local_array_plans(table.PLACED["FSDP2"](model, 512), table.KEPT)
    assert table.file_count(plans) > 5 * table.bound_of(model)
