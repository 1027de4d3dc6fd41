"""Pools of ranks, started once."""

import pytest

from tests.mp.launch import Ranks


@pytest.fixture(scope="session")
def four():
    """Four ranks."""
    pytest.importorskip("torch")
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two():
    """Two ranks."""
    pytest.importorskip("torch")
    ranks = Ranks(2)
    yield ranks
    ranks.close()
