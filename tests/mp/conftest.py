"""Pools of ranks, started once."""

import pytest

pytest.importorskip("torch")

from tests.mp.launch import Ranks


@pytest.fixture(scope="session")
def four():
    """Four ranks."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two():
    """Two ranks."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()
