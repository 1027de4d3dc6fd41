"""X: errors travel between ranks unchanged, and a fault in a world is named."""

import pickle

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from functional_ckpt import errors
from functional_ckpt.errors import (
    AlreadyExistsError,
    CheckpointError,
    CheckpointErrors,
    CorruptionError,
    GapError,
    KeyMismatchError,
    OverlapError,
    ProblemError,
    raise_problems,
)
from functional_ckpt.plan.layout import LayoutPolicy
from functional_ckpt.plan.save import plan_save
from functional_ckpt.spec.sharding import World
from functional_ckpt.testing import strategies as fst

PROBLEMS = [
    kind
    for name in errors.__all__
    if isinstance(kind := getattr(errors, name), type) and issubclass(kind, ProblemError)
]
FIELDS = ("what", "key", "rank", "shape", "offset", "expected", "found", "remedy", "path", "chunk")
# Drawing groups of problems takes long, and what these laws look at depends on few of their properties.
FEWER = settings(max_examples=settings.default.max_examples // 3)


@st.composite
def problems(draw):
    ints = st.none() | st.lists(st.integers(), max_size=3).map(tuple)
    anything = st.none() | st.text(max_size=5) | st.integers() | ints
    text = st.none() | st.text(max_size=9)
    facts = {
        "rank": st.none() | st.integers(0, 9) | ints,
        "shape": ints,
        "offset": ints,
        "expected": anything,
        "found": anything,
        "remedy": text,
        "path": text,
        "chunk": text,
    }
    kind, what = draw(st.sampled_from(PROBLEMS)), draw(st.text(min_size=1, max_size=9))
    problem = kind(what, draw(st.none() | st.text(max_size=5)), **draw(st.fixed_dictionaries(facts)))
    for note in draw(st.lists(st.text(max_size=5), max_size=2)):
        problem.add_note(note)
    return problem


GROUPS = st.builds(CheckpointErrors, st.text(min_size=1, max_size=9), st.lists(problems(), min_size=1, max_size=3))


def fields(error):
    if isinstance(error, CheckpointErrors):
        return [error.message, *(fields(e) for e in error.exceptions)]
    notes = getattr(error, "__notes__", [])
    return [type(error), notes, *(getattr(error, name) for name in FIELDS)]


def test_the_scan_finds_the_classes():
    assert len(PROBLEMS) > 15
    public = {n for n in dir(errors) if isinstance(getattr(errors, n), type) and n.endswith("Error")}
    assert public <= {*errors.__all__}


def check_travels(error):
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        other = pickle.loads(pickle.dumps(error, protocol))
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert repr(other) == repr(error)
        assert fields(other) == fields(error)


@pytest.mark.parametrize("kind", PROBLEMS, ids=lambda kind: kind.__name__)
def test_x3_every_class_pickles_to_an_equal_error(kind):
    facts = {"rank": (0, 1), "shape": (2, 3), "offset": (4, 5), "expected": "c", "found": {"d": 6}, "remedy": "e"}
    check_travels(kind("a", "b", path="p", chunk="c.0", **facts))
    check_travels(kind("a"))


@given(problems())
def test_x3_errors_pickle_to_equal_ones(error):
    check_travels(error)


@FEWER
@given(GROUPS)
def test_x3_groups_pickle_to_equal_ones(group):
    other = pickle.loads(pickle.dumps(group))
    assert type(other) is CheckpointErrors
    assert str(other) == str(group)
    assert fields(other) == fields(group)


@given(problems())
def test_x3_the_text_says_every_field(error):
    text = str(error)
    assert text.startswith(error.what)
    for name in ("path", "key", "chunk", "rank", "shape", "offset", "expected", "found"):
        value = getattr(error, name)
        if value is not None:
            assert f"{name} {value!r}" in text if name == "key" else f"{name} {value}" in text
    assert text.endswith(error.remedy or "")
    assert isinstance(error, CheckpointError)


@FEWER
@given(st.lists(problems() | GROUPS, max_size=4))
@example([AlreadyExistsError("a", "")] * 3 + [AlreadyExistsError("a", "", chunk="")])
def test_all_problems_are_raised_at_once(several):
    flat = [p for e in several for p in (e.exceptions if isinstance(e, CheckpointErrors) else [e])]
    if not flat:
        raise_problems(several)
        return
    with pytest.raises(CheckpointError) as caught:
        raise_problems(several)
    if len(flat) == 1:
        assert caught.value is flat[0]
    else:
        assert list(caught.value.exceptions) == flat
        text = squeezed(caught.value)
        # Of many problems of one kind the first are told and the others counted; of every kind one is told.
        assert "...and" in text or all(squeezed(problem) in text for problem in flat)
        assert all(squeezed(f"{type(problem).__name__}: {problem.what}") in text for problem in flat)


def squeezed(text):
    """Return `text` without white space: a line of a problem is indented when it stands in a group."""
    return "".join(str(text).split())


@FEWER
@given(GROUPS)
def test_groups_split_into_groups_of_their_type(group):
    kind = type(group.exceptions[0])
    match, rest = group.split(kind)
    assert type(match) is CheckpointErrors
    assert rest is None or type(rest) is CheckpointErrors


def faults(key="w"):
    full = fst.array_specs(key, fst.shapes(min_side=1))
    return full.flatmap(fst.shardings).flatmap(fst.corruptions)


def found_in(world):
    """Return the problems of a world that has some."""
    with pytest.raises(CheckpointError) as caught:
        # Many worlds do not fit into chunks so: of an array with a fault that is not told.
        plan_save(world, LayoutPolicy(), "declared", shared_ok=False, owned_ok=False)
    error = caught.value
    return list(error.exceptions) if isinstance(error, CheckpointErrors) else [error]


@given(faults())
def test_x1_a_single_fault_is_named(fault):
    found = found_in(fault.world)
    matching = [e for e in found if type(e) is fault.error and e.key == fault.key]
    assert matching
    assert fault.rank is None or any(fault.rank in e.rank for e in matching)
    assert all(e.key == fault.key for e in found)
    if fault.error is OverlapError:
        # What lies in a wrong place is missing from the right one; both are told.
        assert [type(e) for e in found] == [OverlapError, GapError]


@given(faults("a"), faults("b"))
def test_x1_two_faults_are_named_at_once(one, other):
    size = max(one.world.size, other.world.size)
    ranks = [[s for w in (one.world, other.world) if r < w.size for s in w.ranks[r]] for r in range(size)]
    found = found_in(World(ranks))
    assert {(one.error, "a"), (other.error, "b")} <= {(type(e), e.key) for e in found}


@FEWER
@given(st.lists(problems(), min_size=2, max_size=60))
def test_the_text_of_many_problems_is_bounded_and_counts_them_all(many):
    with pytest.raises(CheckpointErrors) as caught:
        raise_problems(many)
    head, *lines = caught.value.message.split("\n  ")
    assert head == f"{len(many)} problems:"
    assert len(lines) <= 21
    told = [line for line in lines if not line.startswith("... and ")]
    counted = [int(line.split()[2].replace(",", "")) for line in lines if line.startswith("... and ")]
    assert len(told) + sum(counted) == len(many)
    assert len(caught.value.exceptions) == len(many)


def test_thirty_thousand_lost_chunks_are_told_in_a_page():
    lost = [
        CorruptionError(
            "a stored chunk is missing", f"layers.{i // 3000}", shape=(3000,), offset=(i,), chunk=f"c.{i % 3000}"
        )
        for i in range(30_000)
    ]
    with pytest.raises(CheckpointErrors) as caught:
        raise_problems([*lost, KeyMismatchError("the checkpoint has no such key", "x" * 100_000)])
    text = str(caught.value)
    assert len(text) < 10_000
    assert "... and 2,999 more of key 'layers.0'" in text
    assert "KeyMismatchError: the checkpoint has no such key: key 'xxx" in text
    assert len(caught.value.exceptions) == 30_001
