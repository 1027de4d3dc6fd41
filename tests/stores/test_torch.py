"""torch over an object store: DCP's storage, and what the Megatron-shaped functions refuse."""

import pytest

from functional_ckpt import verify
from functional_ckpt.errors import PolicyError

torch = pytest.importorskip("torch")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_saves_and_loads(server, url):
    import torch.distributed.checkpoint as dcp

    from functional_ckpt.torch.dcp.storage_writer import ZarrStorageReader, ZarrStorageWriter

    state = {"w": torch.arange(12.0).reshape(3, 4), "step": 3}
    dcp.save(state, storage_writer=ZarrStorageWriter(url, policy=server.saving()), no_dist=True)
    loaded = {"w": torch.zeros(3, 4), "step": 0}
    dcp.load(loaded, storage_reader=ZarrStorageReader(url, policy=server.loading()), no_dist=True)
    assert torch.equal(loaded["w"], state["w"])
    assert loaded["step"] == 3
    assert verify(url, store=server.access()).ok


def test_what_needs_a_directory_is_refused_before_anything_is_written(server, url):
    from functional_ckpt.torch.megatron import serialization
    from functional_ckpt.torch.megatron.mapping import ShardedTensor

    server.proxy.reset()
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}
    with pytest.raises(PolicyError, match="a path or file:// URL"):
        serialization.save(state, url)
    assert not server.proxy.requests
