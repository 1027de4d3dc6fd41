"""A run killed at each of its effects: the long form of what `tests/test_manager_kills.py` does at some."""

from tests.test_manager_kills import check_kills


def test_a_run_that_is_killed_at_each_effect_goes_on(tmp_path):
    check_kills(tmp_path, 1)
