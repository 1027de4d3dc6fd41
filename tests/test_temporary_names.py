"""What stands beside a checkpoint while it is saved is no checkpoint to programs that look for names of theirs."""

import re

import numpy as np
import pytest

import functional_ckpt as fc
from functional_ckpt.store.temporary import claim_name, working_name
from functional_ckpt.torch.megatron.strategies.removal import remove_arrays
from tests.effects import REAL, watched

# As torchtitan, Lightning, transformers, Accelerate, Megatron and hand-written loops look for their checkpoints.
PATTERNS = [
    r"step-(\d+)",
    r"epoch=",
    r"\.ckpt",
    r"^checkpoint-(\d+)$",
    r"checkpoint",
    r"iter_(\d+)",
    r"([0-9]+)",
    "last",
]
NAMES = ["step-400", "epoch=3-step=40.ckpt", "checkpoint-400", "checkpoint_4", "iter_0000400", "last.ckpt", "é 7\udcff"]


def names_beside(root, final, work):
    """Return every name that stands in `root` at any moment of `work`, but the final one."""
    seen = set()

    def look(call):
        found = call.do()
        seen.update(REAL["listdir"](root))
        return found

    with watched(root, look):
        work()
    return seen - {final}


@pytest.mark.parametrize("name", NAMES)
def test_no_program_takes_a_save_under_way_for_a_checkpoint(tmp_path, name):
    """A save, an overwrite and a removal of arrays; without it, torchtitan's keep_latest_k deletes the newest step."""
    state, path = {"w": np.ones(3), "v": np.ones(3)}, tmp_path / name
    for work in (
        lambda: fc.save(state, path),
        lambda: fc.save(state, path, overwrite=True),
        lambda: remove_arrays(path, ["v"]),
    ):
        seen = names_beside(tmp_path, name, work)
        assert len(seen) >= 2  # a directory and a claim
        assert [(each, pattern) for each in seen for pattern in PATTERNS if re.search(pattern, each)] == []
        assert not [each for each in seen if name in each]


def test_names_tell_checkpoints_and_saves_apart():
    names = [f(save, name) for name in ("a", "b") for save in ("a" * 16, "b" * 16)
             for f in (lambda s, n: working_name(n, s), claim_name)]  # fmt: skip
    assert len(set(names)) == 8
    assert working_name("n" * 255, "a" * 16) != working_name("n" * 254, "a" * 16)
    assert (
        max(map(len, names)) == len(working_name("n" * 255, "a" * 16)) < 64
    )  # a name may be as long as the system allows
