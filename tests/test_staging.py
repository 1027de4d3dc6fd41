"""Copies of the state for saves in the background: what they reuse, keep and give back."""

import contextlib
import ctypes
import gc
import os
import sys
import threading
import weakref
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

import functional_ckpt
from functional_ckpt import LayoutPolicy, SavePolicy, async_save, open_checkpoint, release_staging
from functional_ckpt.errors import PolicyError, SpecError
from functional_ckpt.run.pending import wait_for_all
from functional_ckpt.store import staging
from functional_ckpt.store.buffer import WHOLE, HostBuffer
from functional_ckpt.store.files import FileStore
from functional_ckpt.store.pool import StagingPool, host_memory, the_pool
from functional_ckpt.store.staging import staged
from functional_ckpt.testing.simulate import run_ranks

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_size_t
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
CHUNK = 2**18
NBYTES = 4 * CHUNK + 64
FAST = SavePolicy(durability="none", layout=LayoutPolicy(target_chunk_nbytes=CHUNK))
FOUR = {"w": (4, CHUNK), "b": (3,)}


@pytest.fixture(autouse=True)
def _empty_pool():
    wait_for_all()
    release_staging()


def full(value):
    return {key: np.full(shape, value, "u1") for key, shape in FOUR.items()}


@contextlib.contextmanager
def held_at(number):
    """Let `number` files be written, and the others when the result is set; it also tells when that is reached."""
    create, count, reached, go_on = FileStore.create, iter(range(10**6)), threading.Event(), threading.Event()

    def held(*arguments, **options):
        if next(count) >= number:
            reached.set()
            assert go_on.wait(60)
        return create(*arguments, **options)

    with patch.object(FileStore, "create", held):
        try:
            yield reached, go_on
        finally:
            go_on.set()
            wait_for_all()


def counting(calls):
    def allocate(nbytes):
        calls.append(nbytes)
        return host_memory(nbytes)

    return allocate


def test_from_the_second_save_on_no_memory_is_new(tmp_path):
    calls = []
    with patch.object(staging, "host_memory", counting(calls)):
        for step in range(3):
            async_save(full(step), tmp_path / str(step), policy=FAST).result()
    assert calls == [NBYTES]
    assert the_pool().nbytes == NBYTES
    for step in range(3):
        assert set(np.unique(open_checkpoint(tmp_path / str(step))["w"][...])) == {step}


def full_disk(*_):
    raise OSError(28, "No space left")


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_a_save_that_is_not_published_gives_its_memory_back(how, tmp_path):
    with held_at(2) as (reached, go_on):
        pending = async_save(full(1), tmp_path / "a", policy=FAST)
        assert reached.wait(60)
        if how == "fails":
            with patch.object(FileStore, "_open", full_disk):
                go_on.set()
                wait_for_all()
        pending.cancel()
        go_on.set()
        with pytest.raises((functional_ckpt.errors.CheckpointError, OSError)) as error:
            pending.result()
    assert error  # kept, with its traceback
    assert the_pool().used_nbytes == 0
    assert the_pool().nbytes == NBYTES


def test_chunks_are_free_one_by_one_as_they_are_written(tmp_path):
    """One thread writes: two files are one of the header and the first chunk; the second chunk is in use."""
    with patch("functional_ckpt.store.work.thread_count", lambda: 1), held_at(4) as (reached, _):
        async_save({"w": full(1)["w"]}, tmp_path / "a", policy=FAST)
        assert reached.wait(60)
        used = the_pool().used_nbytes
    assert used in (CHUNK, 2 * CHUNK)
    assert the_pool().used_nbytes == 0


def test_the_next_save_takes_what_is_written(tmp_path):
    calls = []
    queue = SavePolicy(durability="none", layout=FAST.layout, in_flight="queue")
    one_thread = patch("functional_ckpt.store.work.thread_count", lambda: 1)
    with one_thread, held_at(4) as (reached, _), patch.object(staging, "host_memory", counting(calls)):
        async_save({"w": full(1)["w"]}, tmp_path / "a", policy=queue)
        assert reached.wait(60)
        second = async_save({"w": full(2)["w"][:2].copy()}, tmp_path / "b", policy=queue)
    second.result()
    assert calls == [4 * CHUNK]
    for name, value in (("a", 1), ("b", 2)):
        assert set(np.unique(open_checkpoint(tmp_path / name)["w"][...])) == {value}


def test_memory_is_released_while_a_save_writes_from_it(tmp_path):
    with held_at(2) as (reached, _):
        pending = async_save(full(1), tmp_path / "a", policy=FAST)
        assert reached.wait(60)
        assert release_staging() == NBYTES
        assert the_pool().nbytes == 0
        more = [np.full(4 * CHUNK, 7, "u1") for _ in range(3)]
    pending.result()
    assert the_pool().nbytes == 0
    assert set(np.unique(open_checkpoint(tmp_path / "a")["w"][...])) == {1}
    del more


@pytest.mark.parametrize(("keep", "kept"), [(0, 0), (CHUNK, 0), (NBYTES, NBYTES), (None, NBYTES)])
def test_a_policy_says_how_much_is_kept(keep, kept, tmp_path):
    policy = SavePolicy(durability="none", staging_nbytes=keep)
    for step in range(2):
        async_save(full(step), tmp_path / str(step), policy=policy).result()
    assert the_pool().nbytes == kept
    with pytest.raises(PolicyError, match="staging_nbytes"):
        SavePolicy(staging_nbytes=-1)


def test_many_saves_of_less_give_back_the_rest(tmp_path):
    async_save(full(1), tmp_path / "large", policy=FAST).result()
    for step in range(9):
        async_save({"b": np.ones(3)}, tmp_path / str(step), policy=FAST).result()
    assert the_pool().nbytes == 64


def test_a_forked_child_has_no_part_in_it(tmp_path):
    """Else each page would be copied when the parent writes to it again, as long as a data loader's process lives."""
    async_save(full(1), tmp_path / "a", policy=FAST).result()
    [slab] = the_pool()._slabs
    address = slab.address
    assert is_mapped(address)
    child = os.fork()
    if not child:
        ok = not is_mapped(address) and the_pool().nbytes == 0  # though `slab` is still there
        try:
            async_save(full(2), tmp_path / "b", policy=FAST).result(30)
        finally:
            os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    async_save(full(3), tmp_path / "c", policy=FAST).result()
    assert [int(open_checkpoint(tmp_path / name)["w"][3, 0]) for name in "abc"] == [1, 2, 3]


def test_what_a_forked_child_lets_go_of_is_mapped_by_others_by_then():
    """The child has not the pages; at their address it soon has other ones, which must stay."""
    memory = host_memory(8 * CHUNK)
    address, nbytes = memory.__array_interface__["data"][0], memory.nbytes
    told = weakref.finalize(memory, print)
    child = os.fork()
    if not child:
        code = 2
        try:
            private, at_that_place = 0x22, 0x100000
            where = libc.mmap(ctypes.c_void_p(address), nbytes, 3, private | at_that_place, -1, 0)
            assert where == address
            del memory
            gc.collect()
            code = 0 if is_mapped(address) and told.alive else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    told.detach()
    del memory
    assert not is_mapped(address)


def is_mapped(address):
    ends = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(low, 16) <= address < int(high, 16) for low, high in ends)


def test_without_memory_nothing_is_saved(tmp_path):
    with (
        patch("functional_ckpt.store.pool.mmap.mmap", side_effect=OSError(12, "Cannot allocate memory")),
        pytest.raises(MemoryError, match=r"no memory for a copy of \d+ bytes"),
    ):
        async_save(full(1), tmp_path / "a", policy=FAST)
    assert not list(tmp_path.iterdir())


def test_a_rank_gives_its_copy_back_when_another_cannot_copy(tmp_path):
    kept = []

    def run(gather):
        mine = np.full(NBYTES if gather.rank else 7, gather.rank, "u1")
        with pytest.raises(functional_ckpt.errors.RankFailedError, match="no room") as error:
            async_save({f"w{gather.rank}": functional_ckpt.PerRank(mine)}, tmp_path / "a", policy=FAST,
                       process_group=gather)  # fmt: skip
        kept.append(error)

    def refusing(nbytes):
        if nbytes < NBYTES:
            raise MemoryError("no room")
        return host_memory(nbytes)

    with patch.object(staging, "host_memory", refusing):
        run_ranks(2, run)
    assert len(kept) == 2
    assert the_pool().used_nbytes == 0


# ---- Without a copy ------------------------------------------------------------------------------

NO_COPY = SavePolicy(durability="none", layout=FAST.layout, staging="none")


def test_without_a_copy_the_state_itself_is_written(tmp_path):
    state = full(1)
    assert async_save(state, tmp_path / "a", policy=NO_COPY).result().nbytes == 4 * CHUNK + 3
    assert the_pool().nbytes == 0
    found = open_checkpoint(tmp_path / "a")
    assert [np.unique(found[key][...]).tolist() for key in state] == [[1], [1]]


def test_who_breaks_the_promise_saves_what_is_there_later(tmp_path):
    """The danger that the documentation names: it is the caller who must wait."""
    state = full(1)
    with held_at(0) as (reached, _):
        pending = async_save(state, tmp_path / "a", policy=NO_COPY)
        assert reached.wait(60)
        state["w"][3] = 9
    pending.result()
    assert set(np.unique(open_checkpoint(tmp_path / "a")["w"][3])) == {9}


# ---- What is asked for, and by whom -------------------------------------------------------------


def test_a_copy_is_handed_out_once():
    pool = StagingPool()
    [copy] = staged([HostBuffer(np.arange(4))], [4], pool)
    first = copy.get((2,), 2, WHOLE)
    assert copy.get((2,), 0, WHOLE).tolist() == [0, 1]
    with pytest.raises(SpecError, match="asked for more than was planned"):
        copy.get((2,), 0, WHOLE)
    assert first.tolist() == [2, 3]
    assert pool.used_nbytes > 0
    del first
    assert pool.used_nbytes == 0


@pytest.mark.parametrize("form", [(0,), (), (1,), (3, 0, 2), (2, 70_000), (70_000, 2), (1, 1, 70_001)])
@pytest.mark.parametrize("dtype", ["u1", ">f4", "c16"])
def test_copies_of_any_form(form, dtype):
    array = np.arange(np.prod(form, dtype=int)).astype(dtype).reshape(form)
    for each in (array, array.T, np.asarray(array)[::-1] if form else array):
        [copy] = staged([HostBuffer(each)], [each.size + 1], StagingPool())
        found = copy.get(each.shape, 0, WHOLE)
        assert found.dtype.isnative
        np.testing.assert_array_equal(found, each)


def test_threads_share_the_pool():
    pool, wrong = StagingPool(), []

    def work(value):
        for turn in range(150):
            copies = staged([HostBuffer(np.full(size, value, "u1")) for size in (100, 70_000, 5)], [9**9] * 3, pool)
            got = [copy.get((size,), 0, WHOLE) for copy, size in zip(copies, (100, 70_000, 5), strict=True)]
            wrong.extend(array for array in got if not (array == value).all())
            if turn % 40 == value:
                pool.release()

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
    assert pool.used_nbytes == 0


def test_one_thread_at_a_time_takes_from_the_pool():
    pool, inside, go_on = StagingPool(), threading.Event(), threading.Event()

    def allocate(nbytes):
        inside.set()
        assert go_on.wait(60)
        return host_memory(nbytes)

    first = threading.Thread(target=pool.take, args=([64], allocate))
    second = threading.Thread(target=pool.take, args=([64],))
    first.start()
    assert inside.wait(60)
    second.start()
    second.join(0.2)
    waited = second.is_alive()
    go_on.set()
    first.join()
    second.join()
    assert waited
