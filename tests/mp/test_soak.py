"""A short version of `tests/soak/soak.py`: ranks killed, failing and late at random effects."""

import pytest

from tests.soak.soak import soak

pytestmark = pytest.mark.mp

pytest.importorskip("torch")


def test_ranks_that_are_killed_lose_nothing_and_leave_nobody_behind():
    seen, problems = soak(kills=10, seconds=15, seed=17)
    assert not problems, "\n".join(problems)
    assert seen["kill"] > 0
