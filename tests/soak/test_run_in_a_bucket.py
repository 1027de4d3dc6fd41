"""`examples/train_resume.py` in an object store: killed on four ranks, resumed on two, compared with a run on disk."""

import pytest

from functional_ckpt import verify
from functional_ckpt.store.steps import find_steps, step_path
from tests.soak.resume import TOLERANCE, World
from tests.stores.conftest import server, upstream, url  # noqa: F401 - fixtures

pytest.importorskip("torch")
STEPS = 12


def test_a_killed_run_resumes_from_a_bucket(server, url, tmp_path):  # noqa: F811
    whole = World(tmp_path / "whole", 4, STEPS)
    assert whole.finish() == [0] * 4, whole.log.read_text()
    root = url.rpartition("/")[0]
    first = World(root, 4, STEPS)
    first.wait_for(8)
    for rank in first.ranks:
        rank.kill()
    first.finish()
    done = first.losses()
    second = World(root, 2, STEPS)
    assert second.finish() == [0] * 2, second.log.read_text()
    resumed = second.losses()
    assert min(resumed) > 1, "it began anew"
    assert {**done, **resumed}.keys() == whole.losses().keys() == {*range(1, STEPS + 1)}
    for step, loss in {**done, **resumed}.items():
        assert abs(loss - whole.losses()[step]) < TOLERANCE, step
    steps = find_steps(root)
    assert STEPS in steps
    assert all(verify(step_path(root, step)).ok for step in steps)
