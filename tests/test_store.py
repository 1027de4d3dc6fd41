"""What every store promises, and the threads that do its work."""

import threading

import numpy as np
import pytest

from functional_ckpt.errors import AlreadyExistsError, CorruptionError
from functional_ckpt.plan.layout import Layout
from functional_ckpt.store.chunk import create_chunk
from functional_ckpt.store.files import FileStore
from functional_ckpt.store.work import SMALL_NBYTES, Work, run_all
from functional_ckpt.store.zarr import MemoryStore

DATA = memoryview(b"abcdef")


@pytest.fixture(params=["file", "memory"])
def store(request, tmp_path):
    return FileStore(tmp_path) if request.param == "file" else MemoryStore(tmp_path.name)


def test_an_object_is_what_was_created(store):
    store.create("n/c.0", [DATA[:2], DATA[2:]], 8)
    into, parts, seen = bytearray(3), bytearray(4), []
    store.read_into("n/c.0", memoryview(into))
    store.read_ranges("n/c.0", [1, 4], 2, memoryview(parts))
    store.scan("n/c.0", 4, lambda block: seen.append(bytes(block)))
    assert store.read("n/c.0") == b"abcdef\0\0"
    assert (parts, seen) == (b"bcef", [b"abcd"])
    assert (store.nbytes_of("n/c.0"), into, list(store.names())) == (8, b"abc", ["n/c.0"])


@pytest.mark.parametrize("limit", [1, 5, 2**16, 2**16 + 1])
def test_an_object_is_read_whole_or_refused(store, limit):
    """Of a small one as many bytes are read as are expected, without a look at its size."""
    for nbytes in {0, limit - 1, limit, limit + 1}:
        data = bytes(range(1, 251)) * (nbytes // 250 + 1)
        store.create(f"n/{nbytes}", [memoryview(data)[:nbytes]], nbytes)
    for nbytes in {0, limit - 1, limit}:
        assert store.read(f"n/{nbytes}", limit) == (bytes(range(1, 251)) * (nbytes // 250 + 1))[:nbytes]
    with pytest.raises(CorruptionError, match="larger than any"):
        store.read(f"n/{limit + 1}", limit)


def test_what_is_not_there(store):
    assert store.read("n/c.0") is None
    assert store.nbytes_of("n/c.0") is None
    assert list(store.names()) == []


def test_nothing_is_replaced(store):
    store.create("n/c.0", [DATA], 6)
    with pytest.raises(AlreadyExistsError):
        store.create("n/c.0", [DATA[1:]], 6)
    store.publish("zarr.json", b"{}")
    with pytest.raises(AlreadyExistsError):
        store.publish("zarr.json", b"[]")
    assert (store.read("n/c.0"), store.read("zarr.json")) == (b"abcdef", b"{}")


def test_blocks_are_seen_in_order(store):
    seen, data = [], np.arange(3 * 2**20, dtype="u4")
    store.create("n/c.0", [data.view("u1").data], data.nbytes, lambda block: seen.append(bytes(block)))
    assert b"".join(seen) == data.tobytes()
    seen.clear()
    store.read_into("n/c.0", memoryview(bytearray(data.nbytes)), lambda block: seen.append(bytes(block)))
    assert b"".join(seen) == data.tobytes()
    seen.clear()
    store.scan("n/c.0", data.nbytes - 3, lambda block: seen.append(bytes(block)))
    assert b"".join(seen) == data.tobytes()[:-3]


def test_what_is_shorter_than_was_asked_for_is_corrupt(store):
    store.create("n/c.0", [DATA], 6)
    into = memoryview(bytearray(7))
    for call in (
        lambda: store.read_into("n/c.0", into),
        lambda: store.read_ranges("n/c.0", [0, 3], 3 + 1, memoryview(bytearray(8))),
        lambda: store.scan("n/c.0", 7, len),
    ):
        with pytest.raises(CorruptionError, match="too short"):
            call()


def test_an_edge_chunk_is_padded_with_zeros(store):
    layout, ones = Layout("exclusive", (4, 4), (), "uint8"), np.ones((3, 3), "u1")
    dirty = [np.full(16, 255, "u1") for _ in range(100)]  # where numpy takes its next arrays from
    del dirty
    create_chunk(store, "n/c.0", ones, layout)
    assert list(store.read("n/c.0")) == [1, 1, 1, 0] * 3 + [0] * 4


def test_deleting_leaves_the_others(store):
    for name in ("n/c.0", "n/c.1", "m/c.0"):
        store.create(name, [DATA], 6)
    store.delete(["n/c.0", "m/c.0", "never/was"])
    assert list(store.names()) == ["n/c.1"]


def large(call):
    return Work(SMALL_NBYTES, call, SMALL_NBYTES)


def test_an_interrupt_waits_for_the_threads(monkeypatch):
    """Nobody may write to the caller's memory after the call has returned."""
    monkeypatch.setattr("functional_ckpt.store.work.thread_count", lambda: 2)
    begun, done = threading.Event(), []

    def slow():
        begun.set()
        threading.Event().wait(0.2)
        done.append(True)

    def interrupted():
        begun.wait(5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all([Work(0, interrupted, 0), large(slow), large(slow)], 2**30)
    assert len(done) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("(drain)")]


def test_a_small_budget_takes_one_thread(monkeypatch):
    monkeypatch.setattr("functional_ckpt.store.work.thread_count", lambda: 4)
    threads = run_all([large(threading.get_ident) for _ in range(8)], SMALL_NBYTES)
    assert set(threads) == {threading.get_ident()}
