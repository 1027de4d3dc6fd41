"""F: a checkpoint has few files on any number of ranks, and nothing moves between ranks that need not."""

from math import prod

import attrs
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from benchmarks import files_states as table
from benchmarks.files_states import MODELS, RANKS, zero
from functional_ckpt.plan.ladder import array_plans, layout_of_faces
from functional_ckpt.plan.layout import ArrayPlan, LayoutPolicy
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
        shape = draw(st.lists(st.integers(1, 300) | st.sampled_from([64, 256, 0]), min_size=1, max_size=3).map(tuple))
        copies = draw(st.integers(1, 3))
        cut = tuple(min(draw(st.integers(0, 30)), n - 1) if prod(shape) else 0 for n in shape)
        dtype = draw(fst.dtypes())
        arrays += [ArraySpec(f"{number}.{copy}", shape, dtype) for copy in range(copies)]
        faces += [cut] * copies
    target = draw(st.sampled_from([2**8, 2**12, 2**16]) | st.integers(1, 2**16))
    least = draw(st.sampled_from([0, 1, 16]) | st.sampled_from([0, 2]) | st.integers(0, 2 * target))
    few = draw(st.sampled_from([0, 1, 50]) | st.just(0) | st.integers(0, 500))
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
    layouts = [layout_of_faces(array, cut, policy, least_kept=least) for array, cut in zip(arrays, faces, strict=True)]
    return [ArrayPlan(array, layout) for array, layout in zip(arrays, layouts, strict=True)]


def mean_nbytes(plan):
    """Bytes of a chunk, on the average."""
    return plan.spec.nbytes // plan.grid.size if plan.spec.nbytes else 0


#: Its shards end one row and one column before the array does: chunks of whole shards stay small on the average.
RAGGED = ([ArraySpec("w", (101, 101), "int8")], [(100, 100)], LayoutPolicy(target_chunk_nbytes=10**4, few_files=0))
#: 11 rows of 3 bytes, of which a divisor would give chunks far below the target.
PRIME = (
    [ArraySpec("w", (22, 3), "int8")],
    [(11, 0)],
    LayoutPolicy(target_chunk_nbytes=30, min_chunk_nbytes=2, few_files=0),
)
#: Its shard is cut along the free axis, and so is the one column that the array has more.
RAGGED_AND_LARGE = (
    [ArraySpec("w", (66, 20), "bool")],
    [(0, 19)],
    LayoutPolicy(target_chunk_nbytes=256, min_chunk_nbytes=0, few_files=0),
)
#: 9 files, and no more are allowed: two for each array, and one for the bytes.
JUST_FEW = (
    [ArraySpec("a", (2,), "bool"), *(ArraySpec(key, (6,), "uint64") for key in "bcd")],
    [(1,), (0,), (0,), (0,)],
    LayoutPolicy(target_chunk_nbytes=256, min_chunk_nbytes=0, few_files=0),
)
#: Of the two that are cut, joining the chunks of one is enough.
ONE_OF_TWO = (
    [ArraySpec("a", (52, 63), "bool"), ArraySpec("b", (2,), "bool"), ArraySpec("c", (57,), "bool")],
    [(0, 0), (1,), (4,)],
    LayoutPolicy(target_chunk_nbytes=256, min_chunk_nbytes=0, few_files=0),
)
#: Of two that are alike both are joined, which is enough: 9 files, two for each array and one for the bytes.
TWO_ALIKE = (
    [ArraySpec(key, (extent,), "bool") for key, extent in (("a", 2), ("b", 2), ("c", 8), ("d", 128))],
    [(1,), (1,), (4,), (0,)],
    LayoutPolicy(target_chunk_nbytes=256, min_chunk_nbytes=0, few_files=0),
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
    are_few = files_of(alone) <= bound_of(arrays, policy)
    event(f"few: {are_few}")
    assert [*plans_of(state)] == alone or not are_few


@given(states())
@example(JUST_FEW)
@example(ONE_OF_TWO)
@example(TWO_ALIKE)
def test_f3_the_smallest_chunks_are_joined_and_only_until_files_are_few(state):
    """The layouts are those of the first size that suffices."""
    arrays, _, policy = state
    sizes = sorted({0, *(mean_nbytes(plan) + 1 for plan in kept(*state))})
    sufficing = (found for size in sizes if files_of(found := kept(*state, size)) <= bound_of(arrays, policy))
    assert [*plans_of(state)] == next(sufficing)


@given(states(), st.sampled_from([2**8, 2**12, 2**16]) | st.integers(1, 2**18))
@example(RAGGED, 2**12)
@example(PRIME, 2**12)
@example(RAGGED_AND_LARGE, 2**8)
def test_f4_joined_chunks_are_whole_shards_that_fill_the_target(state, least):
    arrays, faces, policy = state
    target, half = policy.target_chunk_nbytes, -(-policy.target_chunk_nbytes // 2)
    for plan, alone, cut in zip(kept(arrays, faces, policy, least), kept(arrays, faces, policy), faces, strict=True):
        shard = prod(face or n for face, n in zip(cut, plan.spec.shape, strict=True)) * plan.spec.itemsize
        if mean_nbytes(alone) >= least or not any(cut) or shard < policy.min_chunk_nbytes:
            assert plan == alone
            continue
        chunk = plan.layout.chunk
        aligned = all(c == n or (f and c % f == 0) for c, f, n in zip(chunk, cut, plan.spec.shape, strict=True))
        event(f"{plan.layout.ownership}, aligned: {aligned}")
        assert (plan.grid.size - 1) * half <= plan.spec.nbytes
        if plan.layout.ownership == "owned":
            assert aligned or plan.layout.chunk == layout_of_faces(plan.spec, [0] * len(cut), policy).chunk
            assert plan.layout.chunk_nbytes <= max(target, plan.spec.itemsize)
        else:
            assert all(not face or face % extent == 0 for face, extent in zip(cut, chunk, strict=True))
        # The rest of a ragged axis may hold little: the pieces of a large shard are then too many, and ranks exchange.
        ragged = any(face and n % face for face, n in zip(cut, plan.spec.shape, strict=True))
        if sum(map(bool, cut)) == 1 and (2 * shard <= target or not ragged):
            assert plan.layout.ownership == ("owned" if 2 * shard <= target else "exclusive")
            assert aligned or plan.layout.ownership == "exclusive"


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
    assert table.file_count(plan_save(zero(model, 512), LayoutPolicy()).arrays) <= bound


def test_f6_without_joining_files_multiply_with_ranks():
    model = next(model for model in MODELS if model.name == "dense 70B")
    plans = local_array_plans(table.PLACED["FSDP2"](model, 512), table.KEPT)
    assert table.file_count(plans) > 5 * table.bound_of(model)
