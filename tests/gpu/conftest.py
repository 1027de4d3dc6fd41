"""Tests on a CUDA device, for ``tox -e gpu``: nothing else collects this folder."""

import gc

import pytest
import torch

import functional_ckpt as fc
from functional_ckpt.run.pending import wait_for_all


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture(autouse=True)
def _clean():
    """Begin with an empty pool and an idle device."""
    wait_for_all()
    fc.release_staging()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@pytest.fixture(params=["the default stream", "another stream"])
def stream(request):
    """Let the test run on a stream."""
    if request.param == "the default stream":
        yield torch.cuda.default_stream()
    else:
        with torch.cuda.stream(torch.cuda.Stream()) as _:
            yield torch.cuda.current_stream()
