"""Which steps stay: the laws of retention, for every rule and every run."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from functional_ckpt.errors import PolicyError
from functional_ckpt.plan.retention import (
    STEP,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLast,
    StepInfo,
    best_of,
    metrics_of,
    needs_metrics,
    step_attributes,
    steps_to_remove,
)

METRICS = st.dictionaries(st.sampled_from(["loss", "acc"]), st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf]))
INFOS = st.builds(StepInfo, st.integers(0, 60), st.just(""), metrics=METRICS, pinned=st.booleans())
RUNS = st.lists(INFOS, unique_by=lambda info: info.step, max_size=12)
RULES = st.one_of(
    st.builds(KeepLast, st.integers(1, 4)),
    st.builds(KeepEvery, st.integers(1, 25)),
    st.builds(KeepBest, st.sampled_from(["loss", "acc", "none"]), st.integers(1, 3), st.sampled_from(["min", "max"])),
)
KEEPS = st.lists(RULES, min_size=1, max_size=3).map(lambda rules: rules[0] if len(rules) == 1 else joined(rules))


def joined(rules):
    whole = rules[0]
    for rule in rules[1:]:
        whole = whole | rule
    return whole


@given(RUNS, KEEPS)
def test_the_latest_step_and_pinned_ones_never_go(run, keep):
    gone = steps_to_remove(run, keep)
    assert gone == tuple(sorted(set(gone)))
    assert {*gone} <= {info.step for info in run if not info.pinned}
    if run:
        assert max(info.step for info in run) not in gone


@given(RUNS, KEEPS, st.randoms())
def test_the_order_in_which_steps_are_told_does_not_count(run, keep, random):
    mixed = [*run]
    random.shuffle(mixed)
    assert steps_to_remove(mixed, keep) == steps_to_remove(run, keep)


@given(RUNS, KEEPS, st.data())
def test_a_removal_that_was_cut_short_is_done_again_and_takes_the_rest(run, keep, data):
    gone = steps_to_remove(run, keep)
    done = gone[: data.draw(st.integers(0, len(gone)))]
    left = [info for info in run if info.step not in done]
    assert steps_to_remove(left, keep) == gone[len(done) :]


@given(RUNS, st.lists(RULES, min_size=1, max_size=3))
def test_of_rules_joined_each_keeps_what_it_keeps_alone(run, rules):
    alone = [{*steps_to_remove(run, rule)} for rule in rules]
    assert {*steps_to_remove(run, joined(rules))} == set.intersection(*alone)


@given(KEEPS, KEEPS, KEEPS)
def test_joining_is_associative(a, b, c):
    assert (a | b) | c == a | (b | c) == KeepAny(((a | b) | c).rules)


@given(RUNS, KEEPS)
def test_a_run_that_removes_after_each_save_keeps_what_the_rules_would_keep_of_all(run, keep):
    """What went early is nothing that the rules would keep in the end, whatever the order of steps."""
    left = []
    for info in run:
        left.append(info)
        gone = steps_to_remove(left, keep)
        left = [i for i in left if i.step not in gone]
    assert {*keep.kept(sorted(run, key=lambda info: info.step))} <= {info.step for info in left}


@given(RUNS, st.integers(1, 4))
def test_the_last_ones_are_kept(run, n):
    left = sorted(info.step for info in run if info.step not in steps_to_remove(run, KeepLast(n)))
    assert left[-n:] == sorted(info.step for info in run)[-n:]
    assert len([s for s in left if s not in {i.step for i in run if i.pinned}]) <= n


@given(st.sets(st.integers(0, 10)), st.integers(1, 20))
def test_every_multiple_is_kept_and_nothing_between_but_the_latest(multiples, n):
    run = [StepInfo(m * n, "") for m in multiples] + [StepInfo(m * n + 1, "") for m in multiples if n > 1]
    left = {info.step for info in run} - {*steps_to_remove(run, KeepEvery(n))}
    assert {m * n for m in multiples} <= left


@given(RUNS, st.sampled_from(["min", "max"]))
@example([StepInfo(1, "", metrics={"loss": math.nan}), StepInfo(2, "")], "min")
def test_the_best_has_no_better(run, mode):
    found = best_of(run, "loss", mode)
    values = {i.step: i.metrics["loss"] for i in run if not math.isnan(i.metrics.get("loss", math.nan))}
    if not values:
        assert found is None
        return
    assert values[found] == (min if mode == "min" else max)(values.values())
    assert found == max(step for step, value in values.items() if value == values[found])
    assert found not in steps_to_remove(run, KeepBest("loss", 1, mode))


@given(st.dictionaries(st.text(), st.floats()))
def test_metrics_come_back(metrics):
    found = metrics_of(step_attributes(3, metrics))
    assert {n: repr(v) for n, v in found.items()} == {n: repr(v) for n, v in metrics.items()}


@pytest.mark.parametrize("metrics", [{"a": "low"}, {"a": b"1"}, {"a": None}, {"a": 10**400}, {3: 0.5}, [("a", 1)]])
def test_metrics_that_are_no_numbers_by_name_are_refused(metrics):
    with pytest.raises(PolicyError, match="metric"):
        step_attributes(3, metrics)


def test_what_no_save_has_written_hides_no_metric():
    assert metrics_of({STEP: {"step": 3, "metrics": {"a": 1, "b": "low", "c": [], "d": "inf"}}}) == {
        "a": 1,
        "d": math.inf,
    }


def test_a_rule_needs_metrics_if_it_looks_at_them():
    assert [needs_metrics(keep) for keep in (None, KeepLast(1), KeepEvery(2), KeepBest("a"))] == [False] * 3 + [True]
    with pytest.raises(PolicyError, match="KeepBest does not accept this metric"):
        KeepBest(3)
