"""The connections between ranks, several of which are threads of this process that meet in one store."""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

dist = pytest.importorskip("torch.distributed")

from functional_ckpt.errors import CheckpointError, RankFailedError  # noqa: E402
from functional_ckpt.torch.group import presence  # noqa: E402
from functional_ckpt.torch.group.board import Board  # noqa: E402
from functional_ckpt.torch.group.lane import Call, Lane  # noqa: E402

SOON_S = 20.0


class World:
    """Ranks of one process: each has a board and lanes of its own."""

    def __init__(self, size):
        store = dist.HashStore()
        self.boards = [Board(store, "test") for _ in range(size)]
        self.lanes = [self.lane(rank, "save") for rank in range(size)]

    def lane(self, rank, name, **more):
        return Lane(self.boards[rank], rank, tuple(range(len(self.boards))), name, None, **more)

    def run(self, act, ranks=None):
        """Call `act(rank)` for each rank at the same time; return what each returned or raised."""
        ranks = range(len(self.lanes)) if ranks is None else ranks

        def run(rank):
            try:
                return act(rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self.lanes)) as pool:
            return list(pool.map(run, ranks))

    def gather(self, rank, what="save", text=b"", timeout_s=SOON_S, **more):
        return Call(self.lanes[rank], what, timeout_s, **more).all_gather(text)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_all_texts_reach_all_ranks(size):
    world = World(size)
    texts = [b"x" * 10**rank if rank < 7 else b"" for rank in range(size)]
    for _ in range(2):
        assert world.run(lambda rank: world.gather(rank, text=texts[rank])) == [texts] * size


def test_large_messages_pass_one_another():
    world = World(2)
    sent = [np.random.default_rng(rank).integers(0, 256, 20_000_000, np.uint8) for rank in range(2)]
    found = world.run(lambda r: Call(world.lanes[r], "save", SOON_S).transfer(1 - r, [sent[r].data], 1 - r))
    assert all(np.array_equal(found[rank], sent[1 - rank]) for rank in range(2))


def test_ranks_that_call_different_things_are_told_at_once():
    world = World(3)
    for error in world.run(lambda rank: world.gather(rank, "load of 'b'" if rank == 1 else "save of 'a'")):
        assert isinstance(error, RankFailedError)
        assert "rank 0: save of 'a'; rank 1: load of 'b'; rank 2: save of 'a'" in str(error)
    assert world.run(lambda rank: world.gather(rank, text=b"x")) == [[b"x"] * 3] * 3


def test_a_rank_that_does_not_come_is_named_within_the_timeout():
    """It has said where it is, and then hangs: nobody waits for it more than once."""
    world = World(3)
    world.lanes[2].wires(0, SOON_S)
    for error in world.run(lambda rank: world.gather(rank, timeout_s=1.0), range(2)):
        assert isinstance(error, RankFailedError)
        assert error.rank == (2,)


def test_timeouts_may_differ():
    world = World(2)
    for step in range(3):
        found = world.run(lambda rank, step=step: world.gather(rank, text=b"x", timeout_s=SOON_S + rank * step))
        assert found == [[b"x"] * 2] * 2


def test_a_call_that_is_over_is_left_and_the_next_one_begins_anew():
    world = World(2)
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(world.gather, 0, is_over=is_over.is_set)
        time.sleep(0.3)
        is_over.set()
        with pytest.raises(RankFailedError, match="is over"):
            left.result(SOON_S)
    assert world.run(lambda rank: world.gather(rank, text=b"x")) == [[b"x"] * 2] * 2


def test_who_comes_to_the_next_call_before_another_has_left_the_last_one_is_not_lost():
    """Rank 0 has ended the first call well, rank 1 gives it up: both come to the second one."""
    world = World(2)
    calls = [Call(world.lanes[rank], "first", SOON_S) for rank in range(2)]
    assert world.run(lambda rank: calls[rank].all_gather(b"x")) == [[b"x"] * 2] * 2
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(world.gather, 0, "second", b"y")
        time.sleep(0.3)
        world.lanes[1].give_up(1, "first", ConnectionError("the last step failed here only"))
        assert world.gather(1, "second", b"y") == [b"y"] * 2
        assert second.result(SOON_S) == [b"y"] * 2


def test_a_late_rank_finds_that_the_only_call_was_given_up():
    world = World(2)
    lanes = [world.lane(rank, "once", is_once=True) for rank in range(2)]
    with pytest.raises(RankFailedError):
        Call(lanes[0], "save", 0.5).all_gather(b"")
    began = time.monotonic()
    with pytest.raises(RankFailedError, match="given up"):
        Call(lanes[1], "save", 600.0).all_gather(b"")
    assert time.monotonic() - began < 300  # half of what it would wait


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_comes_to_a_later_step_too_late_raises(size):
    """Its peers are gone; what they have sent before does not count."""
    world, late = World(size), size - 1
    calls = [Call(world.lanes[rank], "save", 600.0 if rank == late else 1.0) for rank in range(size)]
    assert world.run(lambda rank: calls[rank].all_gather(b"")) == [[b""] * size] * size
    assert all(isinstance(e, RankFailedError) for e in world.run(lambda r: calls[r].all_gather(b""), range(late)))
    with pytest.raises(RankFailedError):
        calls[late].all_gather(b"")


def test_two_threads_of_a_rank_take_turns():
    world = World(2)

    def save(rank, what):
        call = Call(world.lanes[rank], what, SOON_S)
        found = []
        with world.lanes[rank].turn:
            for _ in range(20):
                found.append(call.all_gather(what.encode()))
                time.sleep(0.005 * rank)  # the other thread of this rank, but not of the other one, would come between
        return found

    with ThreadPoolExecutor(4) as pool:
        first = [pool.submit(save, rank, "a") for rank in range(2)]
        time.sleep(0.05)
        second = [pool.submit(save, rank, "b") for rank in range(2)]
        assert [f.result(60) for f in first] == [[[b"a", b"a"]] * 20] * 2
        assert [f.result(60) for f in second] == [[[b"b", b"b"]] * 20] * 2


def test_a_stranger_is_sent_away():
    import json

    world = World(2)
    world.lanes[0].wires(0, SOON_S)
    address = json.loads(world.boards[0].read("save/0/address/0", SOON_S))
    for said in (struct.pack("!16sI", b"guess", 1), b"GET / HTTP/1.1\r\n\r\n and so on", b""):
        with socket.create_connection((address["places"][0], address["port"]), 10) as stranger:
            stranger.sendall(said)
    silent = socket.create_connection((address["places"][0], address["port"]), 10)
    assert world.run(lambda rank: world.gather(rank, text=b"x")) == [[b"x"] * 2] * 2
    silent.close()


STORE = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store_host():
    """Yield a store in a process of its own, and that process."""
    from datetime import timedelta

    process = subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    port = int(process.stdout.readline())
    yield dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=600)), process
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize("what", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_hangs_or_dies_is_not_waited_for(store_host, what):
    store, process = store_host
    lane = Lane(Board(store, "test"), 0, (0, 1), "save", "127.0.0.1")
    lane.begin(SOON_S)
    process.send_signal(what)
    if what == signal.SIGKILL:
        process.wait()
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="the store of the process group"):
        Call(lane, "save", 1.0).all_gather(b"")
    assert time.monotonic() - began < 300  # half of what the store itself would wait


def test_a_forked_child_does_not_hold_the_connections_open():
    """A rank that dies is missed at once, though a process that it has forked lives on."""
    world = World(2)
    assert world.run(lambda rank: world.gather(rank, text=b"x")) == [[b"x"] * 2] * 2
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    try:
        world.lanes[1].hang_up()
        began = time.monotonic()
        with pytest.raises(RankFailedError) as caught:
            world.gather(0, timeout_s=600)
        assert caught.value.rank == (1,)
        assert time.monotonic() - began < 300  # half of what it would wait
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


DIES = """
import sys
import torch.distributed as dist
from functional_ckpt.torch.group.board import Board
from functional_ckpt.torch.group.lane import Call, Lane
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
assert Call(Lane(Board(store, "test"), 1, (0, 1), "save", None), "save", 60.0).all_gather(b"y") == [b"x", b"y"]
print("met", flush=True)
sys.stdin.read()
"""


def test_a_rank_that_dies_before_it_has_connected_is_not_waited_for(store_host):
    """As when it dies between two saves in the background, each of which has connections of its own."""
    store, _ = store_host
    board = Board(store, "test")
    other = subprocess.Popen(
        [sys.executable, "-c", DIES, str(store.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert Call(Lane(board, 0, (0, 1), "save", None), "save", 60.0).all_gather(b"x") == [b"x", b"y"]
        assert other.stdout.readline() == "met\n"
        other.kill()
        other.wait()
        began = time.monotonic()
        with pytest.raises(RankFailedError, match="the process of rank 1 has ended") as caught:
            Call(Lane(board, 0, (0, 1), "save 2", None), "save 2", 600.0).all_gather(b"x")
        assert caught.value.rank == (1,)
        assert time.monotonic() - began < 300  # half of what it would wait


def test_a_forked_child_does_not_keep_the_presence_of_its_rank():
    world = World(2)
    assert world.run(lambda rank: world.gather(rank, text=b"x")) == [[b"x"] * 2] * 2
    told, tells = os.pipe()
    child = os.fork()
    if not child:
        os.write(tells, bytes([len(presence._LISTENERS)]))
        os._exit(0)
    os.waitpid(child, 0)
    # Ranks that are threads of one process announce at the same time, and share one port.
    assert (len(presence._LISTENERS), os.read(told, 1)) == (1, b"\0")
    os.close(told)
    os.close(tells)
