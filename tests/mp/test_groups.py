"""Process groups as an argument: the default one, subgroups, ranks that belong to several."""

import pytest

import functional_ckpt as fc
from functional_ckpt.errors import SpecError
from tests.mp import launch

pytestmark = pytest.mark.mp


def uneven_groups(path):
    """Ranks 0 and 1 have made a group of their own before the whole world saves."""
    import torch.distributed as dist

    own = dist.new_group([0, 1])
    fc.save({"w": launch.values(4, 3)}, path, policy=fc.SavePolicy(timeout_s=10))
    if launch.rank() < 2:
        dist.destroy_process_group(own)


def test_ranks_may_belong_to_different_numbers_of_groups(four, tmp_path):
    four.run(uneven_groups, tmp_path / "a")
    assert fc.verify(tmp_path / "a").ok
