"""A save over a checkpoint in Megatron's layout, killed at every one of its effects."""

import pytest

pytest.importorskip("torch")

from tests.halves import CASES, check_case, left_by_victims


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    root = tmp_path_factory.mktemp("left")
    return root, left_by_victims(root, 1)


@pytest.mark.parametrize("case", CASES)
def test_killed_at_each_effect(case, left):
    root, last = left
    check_case(case, root, last[case])
