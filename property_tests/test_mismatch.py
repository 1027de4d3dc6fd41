"""W: keys that only one side has are told in few words, and a renaming that is named does what it says."""

import re

from hypothesis import example, given
from hypothesis import strategies as st

from functional_ckpt import LoadPolicy
from functional_ckpt.errors import PolicyError
from functional_ckpt.plan.manifest import Manifest, ValueEntry
from functional_ckpt.plan.mismatch import missing_problems, split_by_prefix, unexpected_problems
from functional_ckpt.run.wanted import WantedKeys

PARTS = st.sampled_from(["module", "_orig_mod", "model", "a", "b", "0", "1", "weight", "state"])
KEYS = st.frozensets(st.lists(PARTS, min_size=1, max_size=4).map(".".join), max_size=12)
NAMED = re.compile(r"Pass (LoadPolicy\(.*\)), which finds (every key|(\d+) of them)")


@given(KEYS, KEYS)
@example(frozenset(["module.a", "module.b"]), frozenset(["a", "b"]))
@example(frozenset(["a._orig_mod.weight", "b._orig_mod.weight"]), frozenset(["a.weight", "b.weight"]))
@example(frozenset(["a.weight", "b.weight"]), frozenset(["a.weight", "0.weight"]))
@example(frozenset(["a", "b"]), frozenset(["model.a", "b"]))
def test_a_renaming_that_is_named_finds_what_it_says(wanted, stored):
    missing = sorted(wanted - stored)
    problems = missing_problems(missing, wanted & stored, stored, (), False)
    assert len(problems) == (len(missing) if len(missing) <= 4 else 1)
    for match in filter(None, (NAMED.search(str(problem)) for problem in problems)):
        policy = eval(match[1], {"LoadPolicy": LoadPolicy})
        found = [key for key in missing if policy.stored_key(key) in stored - wanted]
        assert len(found) == int(match[3] or len(missing)) > 0
        assert all(policy.stored_key(key) in stored for key in wanted & stored)


@given(KEYS.filter(bool), st.sampled_from(["module", "_orig_mod", "net.module"]), st.booleans())
@example(frozenset(["module.state.0.module", "state"]), "module", False)
def test_a_prefix_that_one_side_has_is_found_out(keys, prefix, is_wanted):
    longer = frozenset(f"{prefix}.{key}" for key in keys)
    wanted, stored = (longer, keys) if is_wanted else (keys, longer)
    if wanted & stored:
        return
    problems = missing_problems(sorted(wanted), (), stored, (), False)
    assert all("which finds every key" in str(problem) for problem in problems)


@given(KEYS.filter(bool), st.sampled_from(["module", "_orig_mod"]), st.sampled_from(["aaa", "ema", "zzz"]))
@example(frozenset(["0.weight"]), "module", "ema")
def test_a_renaming_leads_to_the_keys_of_the_same_name_and_not_to_a_copy_of_them(keys, prefix, copy):
    wanted = frozenset(f"model.{prefix}.{key}" for key in keys)
    stored = frozenset(f"{name}.{key}" for name in ("model", copy) for key in keys)
    if wanted & stored:
        return
    for problem in missing_problems(sorted(wanted), (), stored, (), False):
        named = f"{{'model.{prefix}': 'model'}}"
        assert str(problem).endswith(f"Pass LoadPolicy(rename={named}), which finds every key")


@given(KEYS.filter(bool))
def test_all_renamings_that_are_as_good_are_named(keys):
    wanted, stored = (frozenset(f"{name}.{key}" for key in keys for name in names) for names in (["net"], ["ema", "x"]))
    for problem in missing_problems(sorted(wanted), (), stored, (), False):
        assert "'net': 'ema'" in str(problem)
        assert "'net': 'x'" in str(problem)


@given(st.integers(9, 5000), st.text("abc.", max_size=30), st.booleans())
def test_many_keys_are_few_words(count, prefix, below):
    keys = [f"{prefix}.{n}" for n in range(count)]
    empty = [prefix] if below else []
    for problems in (missing_problems(keys, (), ["x"], empty, False), unexpected_problems(keys, empty)):
        assert len(problems) == 1
        assert f"{count}" in str(problems[0]) or f"{count - 3} more" in str(problems[0])
        assert len(str(problems[0])) < 800


@given(KEYS, KEYS)
def test_split_by_prefix(keys, names):
    below, others = split_by_prefix(keys, names)
    assert sorted([*others, *(key for group in below.values() for key in group)]) == sorted(keys)
    assert all(f"{key}.".startswith(f"{name}.") for name, group in below.items() for key in group)
    assert not any(f"{key}.".startswith(f"{name}.") for key in others for name in names)


@given(
    st.lists(KEYS, min_size=1, max_size=3),
    KEYS,
    st.lists(PARTS | KEYS.map(lambda keys: min(keys, default="")), max_size=3),
)
def test_a_prefix_is_refused_exactly_if_no_key_of_any_rank_has_it(asked, stored, prefixes):
    manifest = Manifest((), tuple(ValueEntry(key, "1") for key in sorted(stored)))
    policy = LoadPolicy(keys=prefixes, rename=dict.fromkeys(prefixes, "x"), strict="ignore")
    ranks = [WantedKeys(manifest, policy) for _ in asked]
    selected = {key for keys, rank in zip(asked, ranks, strict=True) for key in keys if rank.selects(key)}
    told = [rank.summary() for rank in ranks]
    everybody = [key for keys in asked for key in keys]
    idle = {p for p in prefixes if not any(f"{key}.".startswith(f"{p}.") or not p for key in everybody)}
    for rank in ranks:
        found = rank.problems(told)
        assert all(isinstance(problem, PolicyError) for problem in found)
        assert {problem.key for problem in found} - {None} == idle
        assert [str(problem) for problem in found] == [str(problem) for problem in ranks[0].problems(told)]
        assert bool(found) or bool(selected)
