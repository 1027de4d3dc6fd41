"""The digests by which copies are compared: of the elements where they lie, or of a few at a time."""

import tracemalloc
import weakref

import attrs
import numpy as np
import pytest

from functional_ckpt import SavePolicy
from functional_ckpt.run.capture import capture
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.store.buffer import HostBuffer
from functional_ckpt.store.encoding import digest, dtype_name
from functional_ckpt.store.execute import content_digest

MIB = 2**20
ARRAY = np.arange(3 * MIB, dtype="f8").reshape(3, 1024, 1024)
SPEC = ArraySpec("w", ARRAY.shape, "float64")
LAID = {
    "in order": ARRAY,
    "columns first": np.asfortranarray(ARRAY),
    "big-endian": ARRAY.astype(">f8"),
    "every other": np.repeat(ARRAY, 2, -1)[..., ::2],
}


class Device:
    """Memory that the host cannot address: what it hands out is a copy, and counted as long as somebody holds it."""

    def __init__(self, array):
        self.array, self.held, self.most, self.sent = array, 0, 0, 0

    def view(self, shape, run):
        return None

    def get(self, shape, run, region):
        copy = self.array.reshape(shape)[region].copy()
        self.held += copy.nbytes
        self.most, self.sent = max(self.most, self.held), self.sent + copy.nbytes
        weakref.finalize(copy, self.drop, copy.nbytes)
        return copy

    def drop(self, nbytes):
        self.held -= nbytes


@attrs.frozen
class OneOfTwo:
    """A group of which nothing is asked but how many it is."""

    rank: int = 0
    size: int = 2


def most_nbytes(function, *arguments):
    """Return what a call returns, and the most bytes that it allocated at one time."""
    tracemalloc.start()
    try:
        found = function(*arguments)
        return found, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", LAID)
def test_memory_of_the_host_is_digested_where_it_lies_or_in_blocks(name):
    found, most = most_nbytes(content_digest, HostBuffer(LAID[name]), SPEC, 2 * MIB)
    assert found == digest(ARRAY)
    # A block whose bytes change places, or which is put in order, is a copy.
    assert most < (MIB // 8 if name == "in order" else 5 * MIB)


@pytest.mark.parametrize("array", [ARRAY, ARRAY.reshape(-1), ARRAY.reshape(1, -1), ARRAY[:, :0], np.array(3.0)],
                         ids=["3 axes", "flat", "one row", "empty", "scalar"])  # fmt: skip
@pytest.mark.parametrize("budget", [2**40, 2 * MIB, 100_000, 1])
def test_memory_of_a_device_is_fetched_once_and_a_block_at_a_time(array, budget):
    array = array.reshape(-1)[:1000] if budget == 1 else array  # one element after the other
    device, spec = Device(array), ArraySpec("w", array.shape, dtype_name(array.dtype))
    assert content_digest(device, spec, budget) == digest(array)
    assert device.sent == array.nbytes
    assert device.most <= max(8, min(budget, 16 * MIB))


def test_the_check_of_copies_keeps_to_the_budget():
    """Not a copy of the model on each rank."""
    for array, limit in ((ARRAY, MIB), (LAID["columns first"], 6 * MIB)):
        policy = SavePolicy(budget_nbytes=2 * MIB)
        held, most = most_nbytes(capture, {"w": array}, OneOfTwo(), policy, False, None)
        assert held.common.copies[0].digest == digest(ARRAY)
        assert most < limit
