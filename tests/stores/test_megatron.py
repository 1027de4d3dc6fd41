"""The Megatron-shaped functions over an object store: both halves, in the background too, and saves that meet."""

import io
import json
import re

import pytest

from functional_ckpt import LoadPolicy, SavePolicy, verify
from functional_ckpt.errors import AlreadyExistsError, CheckpointError, NotACheckpointError, PolicyError, StorageError
from functional_ckpt.store.opening import open_store
from tests.stores.test_savers import _at

torch = pytest.importorskip("torch")

from functional_ckpt.torch.megatron import serialization  # noqa: E402
from functional_ckpt.torch.megatron.core import check_is_distributed_checkpoint  # noqa: E402
from functional_ckpt.torch.megatron.mapping import ShardedObject, ShardedTensor  # noqa: E402
from functional_ckpt.torch.megatron.strategies.common_file import TorchLoadCommonStrategy  # noqa: E402
from functional_ckpt.torch.megatron.strategies.zarr import (  # noqa: E402
    ZarrLoadCommonStrategy,
    ZarrLoadShardedStrategy,
    ZarrSaveCommonStrategy,
    ZarrSaveShardedStrategy,
)


def state(number):
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.arange(12.0).reshape(3, 4) + number),
        "rng": ShardedObject("rng", b"state %d" % number, (1,), (0,)),
        "mask": torch.full((3,), number),
        "step": number,
    }


def savers(server):
    policy = SavePolicy(store=server.access())
    return {
        "sharded_strategy": ZarrSaveShardedStrategy(policy=policy),
        "common_strategy": ZarrSaveCommonStrategy(policy=policy),
    }


def loaders(server):
    return {
        "sharded_strategy": ZarrLoadShardedStrategy(policy=LoadPolicy(store=server.access())),
        "common_strategy": ZarrLoadCommonStrategy(store=server.access()),
    }


def number_of(server, url):
    """Return the number of the state that is stored there, which is whole."""
    server.proxy.reset()
    loaded = serialization.load(state(0), url, **loaders(server))
    number = loaded["step"]
    wanted = state(number)
    assert torch.equal(loaded["w"], wanted["w"].data)
    assert loaded["rng"] == wanted["rng"].data
    assert torch.equal(loaded["mask"], wanted["mask"])
    assert verify(url, store=server.access()).ok
    return number


@pytest.mark.parametrize("in_background", [False, True])
def test_both_halves_are_saved_and_loaded(server, url, in_background):
    request = serialization.save(state(3), url, async_sharded_save=in_background, content_metadata={"a": 1},
                                 **savers(server))  # fmt: skip
    if in_background:
        request.execute_sync()
    assert number_of(server, url) == 3
    assert check_is_distributed_checkpoint(url)
    assert serialization.load_content_metadata(url) == {"a": 1}
    assert list(serialization.load_tensors_metadata(url)) == ["w"]
    assert {*serialization.load_sharded_metadata(url)} == {"w", state(0)["rng"].unique_key}
    assert torch.equal(serialization.load_plain_tensors(url)["w"], state(3)["w"].data)
    assert not [name for name in open_store(url).names() if "claim" in name]


def test_the_server_is_named_by_the_strategies_alone(server, url, monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    serialization.save(state(3), url, **savers(server))
    assert number_of(server, url) == 3


def test_a_committed_checkpoint_stays(server, url):
    serialization.save(state(3), url, **savers(server))
    before = sorted(open_store(url).names())
    for again in (state(4), {"v": ShardedTensor.from_rank_offsets("v", torch.ones(2))}):
        server.proxy.reset()
        with pytest.raises(AlreadyExistsError, match="one for each step"):
            serialization.save(again, url, **savers(server))
        assert not [request for request in server.proxy.requests if request.method in ("PUT", "DELETE")]
    with pytest.raises(PolicyError, match="save it under another path"):
        serialization.remove_sharded_tensors(url, "w")
    assert sorted(open_store(url).names()) == before
    assert number_of(server, url) == 3


def test_a_directory_of_another_format_stays(server, url):
    store = open_store(url)
    store.publish("metadata.json", json.dumps({"sharded_backend": "torch_dist"}).encode())
    with pytest.raises(AlreadyExistsError, match="another format"):
        serialization.save(state(3), url, **savers(server))
    assert list(store.names()) == ["metadata.json"]


def test_what_is_no_checkpoint_is_told(server, url):
    with pytest.raises(NotACheckpointError, match="not a distributed checkpoint"):
        serialization.load(state(0), url, **loaders(server))


@pytest.mark.parametrize("ending", ["/.common/zarr.json", "/w/c.0.0", "/step-1/zarr.json"])
def test_a_save_that_failed_is_replaced_by_the_next(server, url, ending):
    server.proxy.reset(lambda r: "403" if r.method == "PUT" and r.path.endswith(ending) else None)
    with pytest.raises(StorageError):
        serialization.save(state(3), url, **savers(server))
    server.proxy.reset()
    with pytest.raises(CheckpointError):
        serialization.load(state(0), url, **loaders(server))
    serialization.save(state(4), url, **savers(server))
    assert number_of(server, url) == 4
    assert not [name for name in open_store(url).names() if "claim" in name]


def _others_common_half(server, url):
    """Return what replaces the common half at `url` by that of another save."""
    ZarrSaveCommonStrategy(policy=SavePolicy(store=server.access())).save_common({"step": 9}, url + "-other")
    theirs = open_store(url + "-other/.common", access=server.access())

    def replace():
        mine = open_store(url + "/.common", access=server.access())
        mine.delete(sorted(mine.names()))
        for name in theirs.names():
            mine.publish(name, theirs.read(name))

    return replace


@pytest.mark.parametrize("moment", ["common saved", "looked at", "claimed"])
def test_the_halves_of_two_saves_are_never_taken_for_one(server, url, moment):
    """The common half of another save comes before ours is looked at, while it is, and between that and our claim."""
    replace = _others_common_half(server, url)
    place = "/" + url.partition("://")[2]
    moments = {
        "common saved": ("GET", place + "/common.pt"),  # the first to be looked at
        "looked at": ("GET", place + "/.objects/manifest.json"),  # the last
        "claimed": ("PUT", place + "/.~.claim"),
    }
    method, path = moments[moment]
    replaced, saved = [], []

    def fault(request):
        if request.method == "DELETE" and request.path.startswith(place + "/.common/"):
            saved.append(request)  # the claim of the common half, after its root
        name = re.sub("[a-p]{16}", "~", request.path)
        if saved and not replaced and (request.method, name) == (method, path):
            replaced.append(request)
            replace()

    server.proxy.reset(fault)
    with pytest.raises(AlreadyExistsError, match="another save into this directory"):
        serialization.save(state(3), url, **savers(server))
    assert replaced
    server.proxy.reset()
    assert open_store(url).read("zarr.json") is None


def test_a_live_save_is_left_alone(server, url):
    found = []

    def other():
        try:
            serialization.save(state(4), url, **savers(server))
        except CheckpointError as error:
            found.append(error)

    assert _at(server, "/w/c.0.0", other) == []
    serialization.save(state(3), url, **savers(server))
    assert [type(error) for error in found] == [AlreadyExistsError]
    assert "another save to this path" in str(found[0])
    assert number_of(server, url) == 3


def test_megatrons_own_common_file_is_read(server, url):
    data = io.BytesIO()
    torch.save({"step": 5}, data)
    store = open_store(url)
    store.publish("common.pt", data.getvalue())
    policy = SavePolicy(store=server.access())
    leaves = {name: leaf for name, leaf in state(5).items() if name in ("w", "rng")}
    ZarrSaveShardedStrategy(policy=policy, common_file="common.pt").save(leaves, url)
    assert TorchLoadCommonStrategy(store=server.access()).load_common(url) == {"step": 5}
    loaded = serialization.load(leaves, url, sharded_strategy=loaders(server)["sharded_strategy"])
    assert loaded["step"] == 5
    assert torch.equal(loaded["w"], state(5)["w"].data)
