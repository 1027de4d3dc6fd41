"""The pool itself: a hang is a failure with stacks, and not the end of the pool."""

import time

import pytest

from tests.mp import launch

pytestmark = pytest.mark.mp


def sleep_here():
    time.sleep(60)


def test_a_hang_shows_where_it_hangs_and_the_pool_recovers():
    pytest.importorskip("torch")
    ranks = launch.Ranks(1)
    try:
        ranks.run(launch.rank)
        with pytest.raises(AssertionError, match="hang after") as caught:
            ranks.run(sleep_here, limit_s=0.5)
        assert "in sleep_here" in str(caught.value)
        assert ranks.run(launch.rank) == [0]
    finally:
        ranks.close()


def fail_here():
    raise ValueError("on purpose")


def test_errors_of_children_are_reported(two):
    with pytest.raises(AssertionError, match="on purpose") as caught:
        two.run(fail_here)
    assert "in fail_here" in str(caught.value)
    assert "rank 1" in str(caught.value)
