"""What stock zarr-python reads of a checkpoint in an object store, through s3fs and through obstore."""

import numpy as np
import pytest

from functional_ckpt import save

zarr = pytest.importorskip("zarr")


def check(store):
    group = zarr.open_group(store, mode="r")
    assert dict(group.attrs)["run"] == 7
    assert np.array_equal(group["model.w"][:], np.arange(12, dtype="f4").reshape(3, 4))
    assert sorted(group.array_keys()) == ["bias", "model.w"]


@pytest.fixture
def saved(server, url):
    if server.name == "google":
        pytest.skip("the small server speaks as much of Google's API as our store asks for, and these ask for more")
    state = {"model": {"w": np.arange(12, dtype="f4").reshape(3, 4)}, "bias": np.ones(3), "step": 3}
    save(state, url, policy=server.saving(), attributes={"run": 7})
    return url


def test_s3fs(saved, server):
    pytest.importorskip("s3fs")
    options = {"key": "test:tester", "secret": "testing", "endpoint_url": server.proxy.url}
    check(zarr.storage.FsspecStore.from_url(saved, storage_options=options))


def test_obstore(saved, server):
    store = pytest.importorskip("obstore.store")
    found = store.S3Store.from_url(
        saved, endpoint=server.proxy.url, access_key_id="test:tester", secret_access_key="testing",
        region="us-east-1", client_options={"allow_http": True},
    )  # fmt: skip
    check(zarr.storage.ObjectStore(found, read_only=True))
