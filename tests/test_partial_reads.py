"""Reads of parts of chunks: what is fetched, what is checked, and what bad files and disks do to them."""

import os
import shutil
import subprocess
import sys
import threading
import time
from errno import EIO
from itertools import pairwise

import numpy as np
import pytest

from functional_ckpt import (
    ArraySpec,
    Box,
    LayoutPolicy,
    LoadPolicy,
    LocalShards,
    SavePolicy,
    ShardSpec,
    load,
    open_checkpoint,
    save,
    verify,
)
from functional_ckpt.errors import CorruptionError, StorageError
from functional_ckpt.plan.layout import Layout
from functional_ckpt.plan.load import plan_load
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.store import zarr
from functional_ckpt.store.base import Capabilities
from functional_ckpt.store.buffer import HostBuffer
from functional_ckpt.store.encoding import digest
from functional_ckpt.store.files import FileStore
from functional_ckpt.store.fill import read_plan
from functional_ckpt.store.whole import WholeStore
from functional_ckpt.testing.simulate import run_ranks

CODED = SavePolicy(layout=LayoutPolicy(codecs=(("", ("zstd",)),)), durability="none")


def part_of(array, low, high):
    """Return what to load for rows ``[low, high)`` of the array "w"."""
    spec = ArraySpec("w", array.shape, str(array.dtype))
    return {"w": ShardSpec(spec, Box((low, *(0 for _ in array.shape[1:])), (high, *array.shape[1:])))}


@pytest.mark.parametrize("rows", [16, 2**15])
def test_an_older_encoded_chunk_is_never_taken_for_the_newer(rows, tmp_path):
    old, new = (np.arange(rows * 8).reshape(rows, 8) + step for step in (0, 1))
    save({"w": old}, tmp_path / "old", policy=CODED)
    save({"w": new}, tmp_path / "new", policy=CODED)
    shutil.copy(tmp_path / "old/w/c.0.0", tmp_path / "new/w/c.0.0")
    with pytest.raises(CorruptionError, match=r"c\.0\.0"):
        load(part_of(new, 0, 3), tmp_path / "new")
    with pytest.raises(CorruptionError, match=r"c\.0\.0"):
        open_checkpoint(tmp_path / "new")["w"][3]
    loaded = load(part_of(new, 0, 3), tmp_path / "new", policy=LoadPolicy(verify="none"))
    assert loaded["w"].tolist() == old[:3].tolist()


ROWS = np.arange(512 * 4096, dtype="f4").reshape(512, 4096)  # of 16 KiB each, 8 MiB in one chunk
W = ArraySpec("w", ROWS.shape, "float32")


@pytest.fixture
def saved(tmp_path):
    save({"w": ROWS}, tmp_path / "a", policy=SavePolicy(durability="none"))
    return tmp_path / "a"


@pytest.fixture
def fetched(monkeypatch):
    """The calls that read files, each as its bytes, but for the one byte that asks what is cached."""
    found, real = [], os.preadv

    def preadv(file, buffers, offset, flags=0):
        count = real(file, buffers, offset, flags)
        found.extend([count] if not flags else [])
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    return found


@pytest.mark.parametrize(("box", "calls", "read"), [
    (Box((100, 0), (300, 4096)), 1, 200 * 16384),
    (Box((100, 1024), (300, 3072)), 200, 200 * 8192),
    (Box((100, 0), (300, 3073)), 1, 200 * 16384 - 1023 * 4),  # what lies between is less than a page
    (Box((0, 8), (512, 9)), 512, 512 * 4),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_fetched_is_about_what_is_wanted(box, calls, read, dtype, saved, fetched):
    spec = ArraySpec("w", ROWS.shape, dtype)
    loaded = load({"w": ShardSpec(spec, box)}, saved, policy=LoadPolicy(cast="any"))
    np.testing.assert_array_equal(loaded["w"], ROWS[box.slices])
    assert (len(fetched), sum(fetched)) == (calls, read)
    fetched.clear()
    np.testing.assert_array_equal(open_checkpoint(saved)["w"][box.slices], ROWS[box.slices])
    assert (len(fetched), sum(fetched)) == (calls, read)


def test_short_rows_are_read_as_what_spans_them_a_block_at_a_time(tmp_path, fetched):
    narrow = np.arange(2**22, dtype="f4").reshape(-1, 8)
    save({"w": narrow}, tmp_path / "a", policy=SavePolicy(durability="none"))
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "a")["w"][:, 2:4], narrow[:, 2:4])
    assert len(fetched) < 10
    assert sum(fetched) <= narrow.nbytes
    assert max(fetched) <= 2**22


def test_a_file_that_is_cut_while_it_is_read_does_not_end_the_process(saved):
    code = """
import os, sys, numpy as np, functional_ckpt as f
from functional_ckpt.store.buffer import HostBuffer
path, real = sys.argv[1], HostBuffer.put
def put(self, *arguments):
    os.truncate(path + "/w/c.0.0", 0)
    real(self, *arguments)
HostBuffer.put = put
spec = f.ArraySpec("w", (512, 4096), "float64")
try:
    f.load({"w": f.ShardSpec(spec, f.Box((1, 0), (512, 4096)))}, path, policy=f.LoadPolicy(cast="any"))
except f.errors.CorruptionError as error:
    print(error.key, error.chunk)
"""
    done = subprocess.run([sys.executable, "-c", code, saved], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "w c.0.0\n"), done.stderr


@pytest.fixture
def bad_block(monkeypatch):
    """Let every read of a chunk's file that wants bytes from its middle fail as on a bad disk."""
    real = os.preadv

    def broken(file):
        return os.readlink(f"/proc/self/fd/{file}").endswith("/w/c.0.0")

    def preadv(file, buffers, offset, flags=0):
        if broken(file) and offset <= 2**20 < offset + sum(map(len, buffers)):
            raise OSError(EIO, os.strerror(EIO))
        return real(file, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    read = os.read
    monkeypatch.setattr(os, "read", lambda file, n: preadv(file, [bytearray(n)], 0) if broken(file) else read(file, n))


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux to tell which file a descriptor is")
@pytest.mark.parametrize("policy", [SavePolicy(durability="none"), CODED], ids=["plain", "zstd"])
def test_bad_blocks_are_an_error_that_names_the_chunk(policy, tmp_path, bad_block, problems_of):
    random = np.random.default_rng(0).integers(0, 2**32, ROWS.shape, "u4").view("f4")
    save({"v": ROWS, "w": random}, tmp_path / "a", policy=policy)
    like = {"v": np.zeros_like(ROWS), "w": np.zeros_like(ROWS)}
    for call in (
        lambda: load(like, tmp_path / "a"),
        lambda: load(part_of(random, 0, 200), tmp_path / "a", policy=LoadPolicy(strict="ignore")),
        lambda: load({"w": ShardSpec(W, Box((0, 0), (512, 9)))}, tmp_path / "a", policy=LoadPolicy(strict="ignore")),
        lambda: open_checkpoint(tmp_path / "a")["w"][...],
        lambda: open_checkpoint(tmp_path / "a")["w"][:100],
    ):
        (problem,) = problems_of(call)
        assert type(problem) is StorageError
        assert (problem.key, problem.chunk) == ("w", "c.0.0")
        assert "Input/output error" in str(problem)
    report = verify(tmp_path / "a")
    assert [(p.key, p.chunk, type(p)) for p in report.problems] == [("w", "c.0.0", StorageError)]


def test_what_no_codec_understands_names_the_chunk(tmp_path, problems_of):
    save({"w": ROWS}, tmp_path / "a", policy=CODED)
    (tmp_path / "a/w/c.0.0").write_bytes(b"x" * 100)
    (problem,) = problems_of(lambda: open_checkpoint(tmp_path / "a")["w"][...])
    assert (problem.key, problem.chunk, problem.offset) == ("w", "c.0.0", (0, 0))


@pytest.fixture
def at_once(monkeypatch):
    """How many chunks are encoded or decoded at once at most, while there are threads for eight."""
    lock, now, most = threading.Lock(), [0], [0]

    def counted(real):
        def call(*arguments):
            with lock:
                now[0] += 1
                most[0] = max(now[0], most[0])
            time.sleep(0.02)  # until the other threads have begun
            try:
                return real(*arguments)
            finally:
                now[0] -= 1

        return call

    monkeypatch.setattr("functional_ckpt.store.work.thread_count", lambda: 8)
    for name in ("decode_chunk", "encode_chunk"):
        monkeypatch.setattr(f"functional_ckpt.store.zarr.{name}", counted(getattr(zarr, name)))
    return most


@pytest.mark.parametrize("faces", [[0, 512], [0, 256, 512], [0, 255, 511, 512]], ids=["one", "exclusive", "owned"])
def test_a_budget_counts_what_encoding_and_decoding_take(faces, tmp_path, at_once):
    """Of a chunk with codecs there are its elements, what they are encoded to, and a copy that TensorStore makes."""
    layout = LayoutPolicy(target_chunk_nbytes=2**20, min_chunk_nbytes=2**20, codecs=(("", ("zstd",)),))
    budget, ranks = 7 * 2**20, min(2, len(faces) - 1)
    boxes = [Box((low, 0), (high, 4096)) for low, high in pairwise(faces)]

    def leaf(rank):
        mine = boxes[rank : rank + 1] if rank == 0 else boxes[rank:]
        return LocalShards([ShardSpec(W, box) for box in mine], [ROWS[box.slices].copy() for box in mine])

    def saving(group):
        policy = SavePolicy(layout=layout, budget_nbytes=budget, durability="none")
        save({"w": leaf(group.rank)}, tmp_path / "a", policy=policy, process_group=group)

    def loading(group):
        policy = LoadPolicy(read_once=True, budget_nbytes=budget)
        return load({"w": leaf(group.rank)}, tmp_path / "a", policy=policy, process_group=group)

    for call in (saving, loading):
        at_once[0] = 0
        run_ranks(ranks, call)
        assert 1 <= at_once[0] <= 2 * ranks
    at_once[0] = 0
    load({"w": np.zeros_like(ROWS)}, tmp_path / "a", policy=LoadPolicy(budget_nbytes=budget))
    assert 1 <= at_once[0] <= 2


@pytest.mark.parametrize("codecs", [(), ("zstd",)])
def test_chunks_at_every_edge_are_verified_without_their_padding(codecs, tmp_path):
    layout = LayoutPolicy(target_chunk_nbytes=48, min_chunk_nbytes=0, codecs=(("", codecs),))
    state = {str(shape): np.ones(shape, "f4") for shape in [(2, 30), (30,), (15, 2), (5, 5, 5), ()]}
    spec = ArraySpec("cut", (4, 8), "float32")  # into chunks of four rows and three columns
    shards = [ShardSpec(spec, Box((0, low), (4, high))) for low, high in ((0, 3), (3, 8))]
    state["cut"] = LocalShards(shards, [np.ones(shard.box.shape, "f4") for shard in shards])
    save(state, tmp_path / "a", policy=SavePolicy(layout=layout, durability="none"))
    assert verify(tmp_path / "a").ok


@pytest.mark.parametrize("verify", ["covered", "none"])
@pytest.mark.parametrize("nbytes", [0, 3, 23, 25, None])
def test_a_small_chunk_that_changes_its_size_after_the_look_at_it_is_corrupt(verify, nbytes, tmp_path, monkeypatch):
    save({"w": np.arange(6, dtype="f4")}, tmp_path / "a", policy=SavePolicy(durability="none"))
    monkeypatch.setattr("functional_ckpt.run.loading.check_needed", lambda *_: [])
    if nbytes is None:
        (tmp_path / "a/w/c.0").unlink()
    else:
        os.truncate(tmp_path / "a/w/c.0", nbytes)
    into = np.full(6, -1, "f4")
    with pytest.raises(CorruptionError, match=r"key 'w'.*c\.0"):
        load({"w": into}, tmp_path / "a", policy=LoadPolicy(verify=verify))
    assert set(into) == {-1}


@pytest.mark.parametrize("policy", [SavePolicy(durability="none"), CODED], ids=["plain", "zstd"])
def test_each_chunk_is_looked_at_once(policy, tmp_path, monkeypatch):
    state = {f"w{n}": np.arange(6, dtype="f4") for n in range(9)}
    save(state, tmp_path / "a", policy=policy)
    looks, real = [], FileStore.nbytes_of
    monkeypatch.setattr(FileStore, "nbytes_of", lambda self, name: looks.append(name) or real(self, name))
    load({key: np.zeros(6, "f4") for key in state}, tmp_path / "a")
    assert sorted(looks) == [f"{key}/c.0" for key in state]


class Answers(WholeStore):
    """A store that answers each read with one object, whatever its limit."""

    url = "answers://"
    capabilities = Capabilities(shared_chunks=False, rename=False, shared=True, sized=False)

    def __init__(self, data):
        self.data = data

    def read(self, name, limit=0):
        return self.data


@pytest.mark.parametrize("verify", ["covered", "full", "none"])
def test_what_a_store_returns_has_the_right_size_or_is_corrupt(verify):
    values, spec = np.arange(4, dtype="i4"), ArraySpec("w", (4,), "int32")
    stored = {"w": ArrayEntry(spec, Layout("exclusive", (4,), (), "int32"), digest(values))}
    data = values.tobytes()

    def read(answer):
        into = np.zeros(4, "i4")
        read_plan(plan_load(stored, [ShardSpec(spec, spec.box)]), [HostBuffer(into)], Answers(answer), 2**20, verify)
        return into.tolist()

    for answer in (data, bytearray(data), memoryview(data)):
        assert read(answer) == [0, 1, 2, 3]
    for answer in (data[:-1], data + b"1", data + b"1234", b"", None):
        with pytest.raises(CorruptionError, match=r"key 'w', chunk c\.0"):
            read(answer)
