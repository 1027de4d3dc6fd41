"""Ranks in one process hand pieces to one another: budgets, and failures in the middle of it."""

import errno
import json
import re
import threading

import attrs
import numpy as np
import pytest

import functional_ckpt
from functional_ckpt import LayoutPolicy, LocalShards, SavePolicy
from functional_ckpt.errors import PolicyError, RankFailedError, SpecError, StorageError
from functional_ckpt.run.progress import Tracker
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.sharding import ShardSpec
from functional_ckpt.store.buffer import HostBuffer
from functional_ckpt.store.commit import Site
from functional_ckpt.store.exchange import LocalExchange, Message, Traffic, deliver
from functional_ckpt.store.files import FileStore
from functional_ckpt.testing.simulate import run_ranks, try_ranks

RANKS = 4
SPEC = ArraySpec("w", (64, 8), "int32")
WHOLE = np.arange(512, dtype="int32").reshape(64, 8)
#: A chunk is two rows, of which each rank holds a part; a rank assembles one chunk at a time.
LAYOUT = LayoutPolicy(target_chunk_nbytes=64, min_chunk_nbytes=2**20)
POLICY = SavePolicy(layout=LAYOUT, durability="none", budget_nbytes=3 * 64)


def columns(rank):
    """Return what a rank holds: two columns of eight."""
    box = Box((0, 2 * rank), (64, 2 * rank + 2))
    return {"w": LocalShards(ShardSpec(SPEC, box), np.ascontiguousarray(WHOLE[box.slices]))}


@attrs.frozen
class Acting:
    """A group in which one rank calls `act` with the number of its swaps so far, before each of them."""

    inner: object
    act: object
    swaps: list = attrs.field(factory=list)

    @property
    def rank(self):
        return self.inner.rank

    @property
    def size(self):
        return self.inner.size

    def all_gather(self, value):
        if self.swaps and self.swaps[-1] is None:
            raise SystemExit  # dead since its last swap
        return self.inner.all_gather(value)

    def swap(self, *arguments):
        try:
            self.act(len(self.swaps))
        except SystemExit:
            self.swaps.append(None)
            raise
        self.swaps.append(arguments)
        return self.inner.swap(*arguments)


def save(path, act=lambda swaps: None, on=0, policy=POLICY):
    """Save columns on all ranks, of which one acts; return what each returned or raised."""

    def saving(gather):
        group = Acting(gather, act) if gather.rank == on else gather
        return functional_ckpt.save(columns(gather.rank), path, policy=policy, process_group=group)

    return try_ranks(RANKS, saving)


def check_raised(outcomes, rank, text, kind):
    """Every rank says the same: that this one failed, and of what."""
    assert len({str(outcome) for outcome in outcomes}) == 1, outcomes
    for outcome in outcomes:
        assert isinstance(outcome, kind), outcome
        assert outcome.rank == rank
        assert text in str(outcome)


def check_nobody_waits(tmp_path, here, on, text, kind):
    """Save on all ranks, each telling its thread who it is; one fails, so all raise at once and nothing is left."""

    def saving(gather):
        here.rank = gather.rank
        return functional_ckpt.save(columns(gather.rank), tmp_path / "a", policy=POLICY, process_group=gather)

    check_raised(try_ranks(RANKS, saving), on, text, kind)  # a rank that waited in vain could not say this
    assert not list(tmp_path.iterdir())


def test_pieces_meet_in_whole_chunks(tmp_path):
    (manifest, *_) = save(tmp_path / "a")
    assert [entry.layout.ownership for entry in manifest.arrays] == ["owned"]
    assert functional_ckpt.open_checkpoint(tmp_path / "a")["w"][...].tolist() == WHOLE.tolist()
    assert functional_ckpt.verify(tmp_path / "a").ok
    told = json.loads((tmp_path / "a" / "provenance.json").read_text())["ranks"]
    # Every chunk has four equal pieces, of which three move.
    assert sum(rank["moved_nbytes"] for rank in told) == WHOLE.nbytes * 3 // 4
    assert sum(rank["nbytes"] for rank in told) == WHOLE.nbytes
    assert all(rank["nbytes"] for rank in told)


def test_fewer_messages_where_the_budget_allows(tmp_path):
    def messages(budget):
        save(tmp_path / str(budget), policy=attrs.evolve(POLICY, budget_nbytes=budget))
        ranks = json.loads((tmp_path / str(budget) / "provenance.json").read_text())["ranks"]
        return [rank["messages"] for rank in ranks]

    assert messages(2**30) == [RANKS - 1] * RANKS  # one for each pair of ranks
    assert sum(messages(3 * 64)) == 32 * 3  # one for each piece that moves


@pytest.mark.parametrize("ranks", [{0}, {3}, {0, 1, 2, 3}])
def test_the_smallest_budget_of_any_rank_counts(tmp_path, ranks):
    def saving(budget):
        def each(gather):
            policy = attrs.evolve(POLICY, budget_nbytes=budget if gather.rank in ranks else 2**30)
            path = tmp_path / str(budget)
            return functional_ckpt.save(columns(gather.rank), path, policy=policy, process_group=gather)

        return try_ranks(RANKS, each)

    for outcome in saving(3 * 64 - 1):
        assert isinstance(outcome, PolicyError), outcome
        assert (outcome.key, outcome.expected, outcome.found) == ("w", "at least 192 bytes", 191)
    assert not list(tmp_path.iterdir())
    assert {type(outcome).__name__ for outcome in saving(3 * 64)} == {"Manifest"}


def test_a_chunk_on_one_rank_alone_needs_no_budget(tmp_path):
    """A save by one rank moves nothing, and cuts at will."""
    policy = attrs.evolve(POLICY, budget_nbytes=1)
    functional_ckpt.save({"w": WHOLE}, tmp_path / "a", policy=policy)
    assert functional_ckpt.verify(tmp_path / "a").ok


@pytest.mark.parametrize("on", [0, 2])
def test_a_rank_that_ends_in_the_middle_is_missed_by_all(tmp_path, on):
    def act(swaps):
        if swaps == 7:
            raise SystemExit

    outcomes = save(tmp_path / "a", act, on)
    assert isinstance(outcomes[on], SystemExit)
    for outcome in (*outcomes[:on], *outcomes[on + 1 :]):
        assert isinstance(outcome, RankFailedError), outcome
        assert not re.search(r"within \d", str(outcome))  # seen to end, not waited for
    assert not (tmp_path / "a").exists()


def test_a_rank_that_hangs_is_given_up(tmp_path):
    given_up = threading.Barrier(RANKS)

    def act(swaps):
        if swaps == 7:
            given_up.wait(60)  # for all others to have returned

    def saving(gather):
        gather._mail.timeout_s = 1
        group = Acting(gather, act) if gather.rank == 2 else gather
        try:
            functional_ckpt.save(columns(gather.rank), tmp_path / "a", policy=POLICY, process_group=group)
        finally:
            if gather.rank != 2:
                given_up.wait(60)

    outcomes = try_ranks(RANKS, saving, timeout_s=120)
    late = outcomes.pop(2)
    assert isinstance(late, Exception), late
    assert all(isinstance(outcome, RankFailedError) for outcome in outcomes), outcomes
    assert any("within 1 s" in str(outcome) for outcome in outcomes)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("on", [0, 3])
@pytest.mark.parametrize(("after", "times"), [(0, 99), (9, 99), *((after, 1) for after in range(12))])
def test_a_buffer_that_fails_in_a_later_wave_keeps_nobody_waiting(tmp_path, monkeypatch, on, after, times):
    get, calls, here = HostBuffer.get, [], threading.local()

    def failing(self, *arguments):
        if here.rank == on:
            calls.append(arguments)
            if after < len(calls) <= after + times:
                raise RuntimeError("the device is gone")
        return get(self, *arguments)

    monkeypatch.setattr(HostBuffer, "get", failing)
    check_nobody_waits(tmp_path, here, on, "the device is gone", RankFailedError)


@pytest.mark.parametrize("on", [0, 3])
@pytest.mark.parametrize("after", [0, 2])
def test_a_disk_that_is_full_in_a_later_wave_keeps_nobody_waiting(tmp_path, monkeypatch, on, after):
    create, calls, here = FileStore.create, [], threading.local()

    def failing(self, name, *arguments):
        if here.rank == on and "/c" in name:
            calls.append(name)
            if len(calls) > after:
                raise OSError(errno.ENOSPC, "No space left on device")
        return create(self, name, *arguments)

    monkeypatch.setattr(FileStore, "create", failing)
    check_nobody_waits(tmp_path, here, on, "No space left", StorageError)
    assert len(calls) == after + 1  # after the first failure nothing more is written


@pytest.mark.parametrize("on", [0, 3])
def test_a_directory_that_cannot_be_opened_keeps_nobody_waiting(tmp_path, monkeypatch, on):
    store, here = Site.store, threading.local()

    def failing(self, *arguments):
        if here.rank == on:
            raise OSError(errno.EMFILE, "Too many open files")
        return store(self, *arguments)

    monkeypatch.setattr(Site, "store", failing)
    check_nobody_waits(tmp_path, here, on, "Too many open files", StorageError)


@pytest.mark.parametrize("on", [0, 3])
def test_a_callback_that_fails_before_the_first_byte_keeps_nobody_waiting(tmp_path, monkeypatch, on):
    enter, here = Tracker.enter, threading.local()

    def failing(self, phase, *arguments):
        if here.rank == on and phase == "write":
            raise RuntimeError("no bar")
        return enter(self, phase, *arguments)

    monkeypatch.setattr(Tracker, "enter", failing)
    check_nobody_waits(tmp_path, here, on, "no bar", RankFailedError)


def test_a_message_that_cannot_be_made_becomes_zeros_and_a_failure():
    def refuse(_):
        raise ValueError("nothing to send")

    def exchange(gather):
        came = []
        sent = Message(3, refuse if gather.rank == 0 else lambda _: np.full(3, gather.rank + 1, np.uint8))
        taken = Message(3, lambda message: came.append(message.tolist()))
        other = 1 - gather.rank
        return *deliver(gather, {other: sent}, {other: taken}), came

    (traffic, failure, came), (other_traffic, no_failure, other_came) = run_ranks(2, exchange)
    assert isinstance(failure, ValueError)
    assert came == []  # it has failed: what comes is received, and nothing done with it
    assert (no_failure, other_came) == (None, [[0, 0, 0]])
    assert traffic == other_traffic == Traffic(1, 3)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_that_has_failed_before_sends_zeros_to_all_that_wait(size):
    """Without them the others would wait until they time out, and blame the exchange."""
    failure = StorageError("no space left")

    def exchange(gather):
        came = []

        def take(message):
            came.append(message.tolist())
            return message

        others = [rank for rank in range(size) if rank != gather.rank]
        outgoing = {rank: Message(3, lambda _: np.full(3, 1 + gather.rank, np.uint8)) for rank in others}
        incoming = {rank: Message(3, take) for rank in others}
        sent, found = deliver(gather, outgoing, incoming, failure if gather.rank == 0 else None)
        return sent, found, sorted(came)

    outcomes = run_ranks(size, exchange, timeout_s=20)
    assert [found for _, found, _ in outcomes] == [failure] + [None] * (size - 1)
    assert all(sent == Traffic(size - 1, 3 * (size - 1)) for sent, _, _ in outcomes)
    assert outcomes[0][2] == []  # it takes what comes, and uses nothing of it
    for rank in range(1, size):
        assert outcomes[rank][2] == [[0] * 3, *([1 + other] * 3 for other in range(1, size) if other != rank)]


def test_a_message_that_cannot_be_used_does_not_stop_those_that_follow():
    def refuse(_):
        raise ValueError("no room")

    def exchange(gather):
        rank, others = gather.rank, [r for r in range(3) if r != gather.rank]
        outgoing = {other: Message(1, lambda _: np.array([rank], np.uint8)) for other in others}
        came = {}
        takes = {other: (lambda m, other=other: came.update({other: int(m[0])})) for other in others}
        if rank == 1:
            takes[0] = refuse
        incoming = {other: Message(1, take) for other, take in takes.items()}
        return *deliver(gather, outgoing, incoming), came

    found = run_ranks(3, exchange)
    # What rank 1 sends once it has failed are zeros, and it uses nothing that comes.
    assert [came for _, _, came in found] == [{1: 0, 2: 2}, {}, {0: 0, 1: 1}]
    assert [type(failure) for _, failure, _ in found] == [type(None), ValueError, type(None)]
    assert {traffic for traffic, _, _ in found} == {Traffic(2, 2)}


def test_no_rank_sends_to_itself_alone():
    assert deliver(LocalExchange(), {}, {}) == (Traffic(), None)
    with pytest.raises(SpecError, match="no other rank"):
        LocalExchange().swap(0, np.zeros(1, np.uint8), 0, 1)


def test_bytes_that_are_not_those_expected_are_refused():
    def exchange(gather):
        return gather.swap(1 - gather.rank, np.zeros(2 + gather.rank, np.uint8), 1 - gather.rank, 3)

    good, bad = try_ranks(2, exchange)
    assert good.tolist() == [0, 0, 0]
    assert "rank 0 sent 2 bytes, 3 were expected" in str(bad)
