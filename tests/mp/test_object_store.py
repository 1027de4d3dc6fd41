"""Four ranks that train save to an object store in the background, and resume from it under another layout."""

import os

import pytest

from functional_ckpt import async_save, load, save, verify
from tests.mp import launch
from tests.stores.conftest import server, upstream, url  # noqa: F401 - fixtures

pytestmark = pytest.mark.mp


def train(place, saving, loading):
    """Train some steps, saving in the background; resume from the last one; return whether it is what it was."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ.update(AWS_ACCESS_KEY_ID="test:tester", AWS_SECRET_ACCESS_KEY="testing")
    os.environ.update(TENSORSTORE_GCS_HTTP_URL=saving.store.endpoint, GOOGLE_AUTH_TOKEN_FOR_TESTING="token")
    model = torch.nn.Linear(32, 48, bias=False)
    weight = distribute_tensor(torch.arange(48.0 * 32).reshape(48, 32), launch.mesh(4), [Shard(0)], src_data_rank=None)
    model.weight = torch.nn.Parameter(weight)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    pending = []
    for step in range(3):
        model.weight.grad = distribute_tensor(torch.full((48, 32), step + 1.0), launch.mesh(4), [Shard(0)],
                                              src_data_rank=None)  # fmt: skip
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        pending.append(async_save(state, f"{place}/step-{step}", policy=saving))
        pending[-1].result()
    columns = distribute_tensor(torch.zeros(48, 32), launch.mesh(4), [Shard(1)], src_data_rank=None)
    loaded = load({"model": {"weight": columns}, "step": 0}, f"{place}/step-2", policy=loading)
    same = torch.equal(loaded["model"]["weight"].full_tensor(), model.weight.full_tensor())
    save(loaded, f"{place}/again", policy=saving)
    return same, loaded["step"]


def test_four_ranks_train_and_resume(server, url, four):  # noqa: F811
    place = url.rpartition("/")[0]
    limit_s = 600  # a loaded machine, and a slow server
    found = four.run(train, place, server.saving(), server.loading(strict="ignore"), limit_s=limit_s)
    assert found == [(True, 2)] * 4
    assert verify(f"{place}/step-1", store=server.access()).ok
