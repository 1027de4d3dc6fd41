"""What all ranks hold makes one state, the same for every rank, or a problem that names who disagrees."""

import pickle

import attrs
from hypothesis import example, given
from hypothesis import strategies as st

from functional_ckpt.errors import DuplicateKeyError, ReplicaError
from functional_ckpt.plan.manifest import ValueEntry
from functional_ckpt.plan.record import canonical
from functional_ckpt.plan.state import ArrayLeaf, LocalState, content_problems, merge_structures, with_values
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.tree import flatten, key_of, unflatten
from functional_ckpt.store.values import decode_text, encode_value
from functional_ckpt.testing import strategies as fst

DICTS = st.recursive(
    st.integers() | st.lists(st.integers(), max_size=2),
    lambda trees: st.dictionaries(fst.text_keys() | st.integers(0, 9), trees, max_size=3),
    max_leaves=8,
).map(lambda tree: {"a": tree})


@st.composite
def dealt(draw):
    """A state, and what each of several ranks holds of it: some keys of each dict, all keys together."""
    tree = draw(DICTS)
    ranks = draw(st.integers(1, 3))
    holders = {path: draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for path in places(tree, ())}
    return tree, [pruned(tree, (), holders, rank) for rank in range(ranks)]


def places(node, path):
    """Return the paths of all entries of dicts that have a dict or a leaf in them."""
    if not isinstance(node, dict):
        return []
    inner = [(item, child) for item, child in node.items()]
    return [(*path, item) for item, _ in inner] + [p for item, child in inner for p in places(child, (*path, item))]


def pruned(node, path, holders, rank):
    if not isinstance(node, dict):
        return node
    kept = ((item, child) for item, child in node.items() if rank in holders[(*path, item)])
    return {item: pruned(child, (*path, item), holders, rank) for item, child in kept}


def local_state(tree):
    return LocalState(values=tuple(value_entry(path, leaf) for path, leaf in flatten(tree)))


def merge_all(states, *rule):
    """Merge states of ranks 0, 1, ..."""
    parts = list(enumerate(states))
    structure, problems = merge_structures(parts)
    return with_values(structure, parts), (*problems, *content_problems(parts, *rule))


def value_entry(path, leaf):
    return ValueEntry(key_of(path), canonical(encode_value(leaf)), path)


def held(trees):
    """Return the leaves that any rank holds, placed in one tree."""
    found = {}
    for tree in trees:
        found.update(dict(flatten(tree)))
    inner = {path[:i] for path in found for i in range(len(path))}
    return unflatten((path, leaf) for path, leaf in found.items() if path not in inner)


@given(dealt())
@example(({"a": {"b": 1}}, [{"a": {"b": 1}}, {"a": {}}, {}]))
def test_what_ranks_hold_of_a_tree_makes_the_tree(case):
    """A rank that holds nothing of a dict has an empty one there, which says nothing about the others'."""
    _, parts = case
    merged, problems = merge_all(map(local_state, parts))
    assert problems == ()
    values = [(value.path, decode_text(value.key, value.text)) for value in merged.values]
    assert unflatten(values) == held(parts)


@given(dealt(), st.data())
def test_the_order_of_ranks_does_not_matter(case, data):
    _, parts = case
    states = [local_state(part) for part in parts]
    shuffled = data.draw(st.permutations(states))
    assert merge_all(states)[0].values == merge_all(shuffled)[0].values


@given(dealt(), st.data())
def test_values_that_differ_are_refused_unless_trusted(case, data):
    tree, _ = case
    whole = local_state(tree)
    at = data.draw(st.integers(0, len(whole.values) - 1))
    other = attrs.evolve(whole.values[at], text='"other"')
    changed = attrs.evolve(whole, values=(*whole.values[:at], other, *whole.values[at + 1 :]))
    _, problems = merge_all([whole, whole, changed])
    assert [(type(p), p.key, p.rank) for p in problems] == [(ReplicaError, other.key, (0, 2))]
    merged, problems = merge_all([whole, changed], "trust")
    assert problems == ()
    assert merged.values == merge_all([whole])[0].values


@given(st.dictionaries(fst.text_keys(), DICTS, min_size=1).map(lambda tree: {"a": tree}))
def test_a_leaf_of_one_rank_that_is_a_dict_of_another_is_refused(tree):
    for ranks in ([tree, {"a": 3}], [{"a": 3}, tree]):
        _, problems = merge_all(map(local_state, ranks))
        assert [(type(p)) for p in problems] == [DuplicateKeyError]


def spec(key):
    return ArraySpec(key, (2,), "int8")


@given(st.lists(st.sampled_from("abcd"), min_size=2, unique=True), st.integers(1, 3))
def test_keys_tied_on_every_rank_are_stored_once(keys, ranks):
    first, *others = sorted(keys)
    leaves = [ArrayLeaf(spec(first), (first,)), *(ArrayLeaf(spec(key), (key,), None, first) for key in others)]
    tied = LocalState(arrays=tuple(leaves))
    merged, problems = merge_all([tied] * ranks)
    assert problems == ()
    assert [leaf.key for leaf in merged.leaves] == [first]
    assert [(alias.key, alias.target) for alias in merged.aliases] == [(key, first) for key in others]
    # A tie that one rank does not have is no tie.
    loose = LocalState(arrays=tuple(attrs.evolve(leaf, tied_to=None) for leaf in leaves))
    merged, _ = merge_all([tied] * ranks + [loose])
    assert [leaf.key for leaf in merged.leaves] == sorted(keys)
    assert merged.aliases == ()


@given(dealt())
def test_states_travel_between_ranks(case):
    _, parts = case
    for state in map(local_state, parts):
        assert pickle.loads(pickle.dumps(state)) == state
