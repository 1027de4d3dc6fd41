"""Leaves that share one memory: what several ranks must hold alike for an array to be stored once."""

import numpy as np

from functional_ckpt import Box, save
from functional_ckpt.testing.simulate import run_ranks

GRID = np.arange(32, dtype="f4").reshape(4, 8)
HALVES = (Box((0, 0), (2, 8)), Box((2, 0), (4, 8)))


def test_a_tie_on_one_rank_only_is_no_tie(tmp_path, fast):
    def saving(gather):
        w = np.arange(3)
        state = {"a": w, "b": w if gather.rank else w.copy()}
        return save(state, tmp_path / "a", policy=fast, process_group=gather)

    assert run_ranks(2, saving)[0].aliases == ()


def test_a_tie_to_a_key_that_more_ranks_hold_is_no_tie(tmp_path, fast, piece, problems_of):
    """Rank 0 ties its half of `a` to `b`: the other half of `b` is nobody's, though `a` has one."""
    top, bottom = (piece(GRID, box) for box in HALVES)

    def saving(gather):
        state = {"a": top, "b": top} if gather.rank == 0 else {"a": bottom}
        return problems_of(save, state, tmp_path / "a", policy=fast, process_group=gather)

    for problems in run_ranks(2, saving):
        assert {(type(problem).__name__, problem.key) for problem in problems} == {("GapError", "b")}


def test_a_tie_that_all_holders_have_is_one(tmp_path, fast, piece):
    top, bottom = (piece(GRID, box) for box in HALVES)

    def saving(gather):
        half = bottom if gather.rank else top
        return save({"a": half, "b": half}, tmp_path / "a", policy=fast, process_group=gather)

    assert [(alias.key, alias.target) for alias in run_ranks(2, saving)[0].aliases] == [("b", "a")]
