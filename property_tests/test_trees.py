"""E: trees come apart and together again."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from functional_ckpt.errors import DuplicateKeyError, SpecError
from functional_ckpt.spec.tree import (
    DictKey,
    flatten,
    is_node,
    key_of,
    map_leaves,
    unflatten,
)
from functional_ckpt.testing import strategies as fst

TREES = fst.state_trees(wild=True)
NODES = st.lists(TREES, min_size=1, max_size=3) | st.dictionaries(
    fst.text_keys(wild=True), TREES, min_size=1, max_size=3
)


def same(a, b):
    """Equality that looks into trees, compares arrays by bits and tells 1 from True."""
    if is_node(a) and is_node(b):
        items_a = list(enumerate(a)) if isinstance(a, list) else list(a.items())
        items_b = list(enumerate(b)) if isinstance(b, list) else list(b.items())
        pairs = list(zip(items_a, items_b, strict=False))
        return len(items_a) == len(items_b) and all(
            ka == kb and type(ka) is type(kb) and same(va, vb) for (ka, va), (kb, vb) in pairs
        )
    return a is b or (type(a) is type(b) and not isinstance(a, np.ndarray) and a == b)


@given(TREES)
@example({})
@example([])
@example({"a": {}, 0: [], None: {}})
@example({True: 1, "": [[]]})
@example(OrderedDict(a=1))
def test_e1_unflatten_inverts_flatten(tree):
    leaves = flatten(tree)
    event(f"leaves: {min(len(leaves), 5)}")
    assert same(unflatten(leaves), tree)


@given(TREES, st.randoms(use_true_random=False))
def test_e1_leaves_may_come_in_any_order(tree, random):
    leaves = list(flatten(tree))
    random.shuffle(leaves)
    shuffled = dict(flatten(unflatten(leaves)))
    assert shuffled.keys() == dict(flatten(tree)).keys()
    assert all(shuffled[path] is leaf for path, leaf in leaves)


@given(TREES)
def test_e1_paths_are_different_and_lead_to_their_leaves(tree):
    leaves = flatten(tree)
    assert len(dict(leaves)) == len(leaves)
    for path, leaf in leaves:
        node = tree
        for item in path:
            node = node[item.value if isinstance(item, DictKey) else item]
        assert node is leaf


@given(fst.state_trees())
def test_e1_tame_trees_have_different_keys(tree):
    keys = [key_of(path) for path, _ in flatten(tree)]
    assert len(set(keys)) == len(keys)


@given(TREES)
def test_e2_map_leaves_visits_each_leaf_once_and_keeps_the_containers(tree):
    seen = []
    mapped = map_leaves(lambda path, leaf: (seen.append((path, leaf)), leaf)[1], tree)
    assert [path for path, _ in seen] == [path for path, _ in flatten(tree)]
    assert all(a is b for (_, a), (_, b) in zip(seen, flatten(tree), strict=True))
    assert same(mapped, tree)
    assert mapped is not tree or not is_node(tree)


@given(NODES, st.data())
def test_paths_that_contradict_each_other_are_refused(tree, data):
    leaves = flatten(tree)
    path, leaf = data.draw(st.sampled_from(leaves))
    with pytest.raises(DuplicateKeyError, match="occurs twice"):
        unflatten((*leaves, (path, leaf)))
    for order in (1, -1):
        with pytest.raises(DuplicateKeyError, match="both a leaf and a container"):
            unflatten((*leaves, ((*path, "below"), leaf))[::order])
        with pytest.raises(DuplicateKeyError, match="both a list and a dict"):
            unflatten(((("a", 0), leaf), (("a", "b"), leaf))[::order])


@given(st.integers(0, 4), st.integers(1, 4))
def test_a_list_with_a_hole_is_refused(before, skipped):
    places = [*range(before), before + skipped]
    with pytest.raises(SpecError, match="lacks a position"):
        unflatten([((i,), "x") for i in places])


def test_a_container_within_itself_is_refused():
    tree = {"a": []}
    tree["a"].append(tree)
    with pytest.raises(SpecError, match="contains itself"):
        flatten(tree)
