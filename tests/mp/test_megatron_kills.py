"""A GPT of megatron-core that is killed while it saves and resumes under another layout: its losses are the same.

Few kills; `python -m tests.soak.megatron --kills 30` has more.
"""

import warnings

import pytest

pytest.importorskip("torch")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Transformer Engine and Apex are not there
    pytest.importorskip("megatron.core.models.gpt", reason="megatron-core is not installed")

from tests.soak.megatron import soak

pytestmark = pytest.mark.mp

KILLS = 4


def test_losses_are_those_of_a_run_that_was_never_killed():
    seen, problems = soak(KILLS, seed=3)
    assert problems == []
    assert seen["kill"] == KILLS
