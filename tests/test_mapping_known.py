"""What is remembered of sharded tensors is what their fields say."""

import pytest

torch = pytest.importorskip("torch")

from functional_ckpt.errors import CheckpointError  # noqa: E402
from functional_ckpt.spec.grid import shard_at  # noqa: E402
from tests.test_mapping import plain  # noqa: E402


@pytest.mark.parametrize("changes", [
    {"key": "v"}, {"dtype": torch.int8}, {"local_shape": (1, 4)}, {"global_shape": (8, 4)}, {"global_offset": (4, 0)},
    {"axis_fragmentations": (6, 1)}, {"axis_fragmentations": None}, {"replica_id": 1}, {"replica_id": (0, 1)},
    {"prepend_axis_num": 1, "local_shape": (4,)}, {"flattened_range": slice(1, 3)}, {"flattened_range": slice(1, None)},
    {"global_shape": (6.0, 4)}, {"local_shape": (2.0, 4)}, {"global_offset": (2.0, 0)}, {"key": None},
    {"axis_fragmentations": (3.0, 1)}, {"replica_id": "x"}, {"flattened_range": slice(1.0, 3)}, {"dtype": "any"},
], ids=str)  # fmt: skip
def test_what_is_known_of_a_shard_is_of_all_its_fields(changes):
    """Specs are remembered: whatever was described before, a shard's spec, or its error, is the same."""

    def described():
        tensor = plain()
        for name, value in changes.items():
            setattr(tensor, name, value)
        try:
            return tensor.spec
        except CheckpointError as error:
            return type(error), str(error)

    shard_at.cache_clear()
    fresh = described()
    assert fresh != plain().spec
    for like in (plain(), plain(flattened_range=slice(1, 3)), plain(replica_id=(0,), axis_fragmentations=None)):
        like.spec  # noqa: B018 - to have it known
        assert described() == described() == fresh
