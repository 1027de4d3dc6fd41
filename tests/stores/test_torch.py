"""DCP's storage over an object store."""

import pytest

from functional_ckpt import verify

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
