"""S: memory of copies is used again, and no byte by two at once, whatever is saved, fails and changes meanwhile."""

import threading
from unittest.mock import patch

import attrs
import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

import functional_ckpt
from functional_ckpt.errors import CheckpointError, SpecError
from functional_ckpt.plan.layout import LayoutPolicy
from functional_ckpt.run.pending import wait_for_all
from functional_ckpt.run.policy import SavePolicy
from functional_ckpt.run.staging import release_staging
from functional_ckpt.store import staging
from functional_ckpt.store.files import FileStore
from functional_ckpt.store.pool import Span, StagingPool, aligned, host_memory, the_pool
from property_tests.test_roundtrip import directory

# Each example saves several times, in a thread.
FEWER = settings(max_examples=settings.default.max_examples // 2)

# ---- The pool by itself --------------------------------------------------------------------------

TAKE = st.tuples(st.just("take"), st.lists(st.integers(0, 400), max_size=4), st.none() | st.integers(0, 1500))
PART = st.tuples(st.just("part"), st.integers(0, 9), st.integers(0, 400), st.integers(0, 400))
STEPS = st.lists(TAKE | PART | st.tuples(st.just("drop"), st.integers(0, 9)) | st.just(("release",)), max_size=20)


@attrs.define(eq=False)
class User:
    """Who has filled a span with a value; of its bytes those that are `own` were not given on as a part."""

    span: Span
    value: int
    array: np.ndarray = attrs.field(init=False)
    own: np.ndarray = attrs.field(init=False)

    def __attrs_post_init__(self):
        self.array = np.asarray(self.span)
        self.array[...] = self.value
        self.own = np.ones(len(self.array), bool)

    def part(self, low, high):
        """Return the user of a part, which must be its own."""
        if not self.own[low:high].all():
            with pytest.raises(SpecError, match="twice"):
                self.span.part(low, high)
            return []
        self.own[low:high] = False
        return [User(self.span.part(low, high), self.value)]


def users_after(steps, pool):
    """Take the steps; after each, every user finds what it wrote. Yield the users, and the largest limit so far."""
    users, most, largest, written = [], 0, 0, 0
    for name, *arguments in steps:
        if name == "take":
            needed = pool.used_nbytes + sum(aligned(size or 1) for size in arguments[0])
            largest = max(largest, needed)
            most = max(most, largest if arguments[1] is None else arguments[1])
            for span in pool.take(arguments[0], keep_nbytes=arguments[1]):
                written = written % 250 + 1
                users.append(User(span, written))
            span = None
        elif name == "release":
            pool.release()
        elif users and name == "drop":
            users.pop(arguments[0] % len(users))
        elif users:
            user = users[arguments[0] % len(users)]
            low, high = sorted(end % (len(user.array) + 1) for end in arguments[1:])
            users += user.part(low, high) if low < high else []
            user = None
        for each in users:
            assert (each.array[each.own] == each.value).all()
        each = None
        yield users, most


@given(STEPS)
@example([("take", [100, 100], None), ("drop", 0), ("take", [64], None)])
@example([("take", [200], None), ("part", 0, 64, 128), ("take", [64, 64], None)])
@example([("take", [64], 0), ("take", [64], 0)])
def test_no_byte_has_two_users(steps):
    pool = StagingPool()
    *_, (users, _) = users_after([*steps, ("take", [1], None)], pool)
    users.clear()
    assert pool.used_nbytes == 0


@given(STEPS)
@example([("take", [0, 0], None), ("drop", 0), ("take", [129], None), ("take", [65], None)])
@example([("take", [0, 0], None), ("take", [0, 0], 0), ("drop", 0), ("take", [65], None)])
def test_the_pool_never_holds_more_than_its_limit(steps):
    pool = StagingPool()
    for _, most in users_after(steps, pool):
        assert pool.nbytes <= most


@given(st.lists(st.lists(st.integers(0, 400), max_size=4), min_size=1, max_size=12), st.integers(0, 1500))
def test_what_nobody_uses_goes_when_the_limit_falls(calls, keep):
    pool = StagingPool()
    for sizes in calls:
        pool.take(sizes)
    pool.take([], keep_nbytes=keep)
    assert pool.nbytes <= keep


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.integers(2, 5))
def test_the_same_sizes_take_new_memory_once(sizes, rounds):
    pool, asked = StagingPool(), []

    def allocate(nbytes):
        asked.append(nbytes)
        return host_memory(nbytes)

    for _ in range(rounds):
        pool.take(sizes, allocate)
    assert len(asked) == 1


# ---- Saves and training steps ----------------------------------------------------------------------


class Gate:
    """Lets so many files be written, and the next ones when it is opened."""

    def __init__(self):
        self._changed, self._free = threading.Condition(), 0
        self.refused = ()

    def let(self, count):
        with self._changed:
            self._free += count
            self._changed.notify_all()

    def close(self):
        with self._changed:
            self._free = 0

    def create(self, store, *arguments, **options):
        with self._changed:
            assert self._changed.wait_for(lambda: self._free > 0, 60)
            self._free -= 1
        if any(f"/{name}/" in store.url for name in self.refused):
            raise OSError(28, "No space left on device")
        return CREATE(store, *arguments, **options)


CREATE = FileStore.create
MANY = 10**6
LAYOUT = LayoutPolicy(target_chunk_nbytes=256, min_chunk_nbytes=0)


def state_of(kind, value):
    """Return one of a few states; large arrays have several chunks, some of them not contiguous ones."""
    forms = [
        {"w": (16, 32)}, {"a": (5,), "b": (3, 40), "c": ()}, {"w": (700,), "x": (200,), "y": (1,)},
        {"e": (0, 4), "w": (250,)}, {"w": (40, 9), "v": (9, 40)}, {"w": (100,), "x": (100,)},
    ][kind % 6]  # fmt: skip
    state = {key: np.full(shape, value, "u1") for key, shape in forms.items()}
    return {key: array.T if kind % 2 and array.ndim == 2 else array for key, array in state.items()}


SAVE = st.tuples(
    st.just("save"), st.integers(0, 11), st.sampled_from(["queue", "queue", "wait"]),
    st.sampled_from(["ends", "ends", "fails", "is cancelled"]), st.sampled_from([None, None, 0, 700]),
)  # fmt: skip
PROGRAM = st.lists(
    SAVE | st.tuples(st.just("let"), st.integers(1, 9)) | st.just(("train",)) | st.just(("release",)), max_size=10
)


@FEWER
@given(PROGRAM)
@example([("save", 2, "queue", "ends", None), ("train",), ("save", 2, "queue", "ends", None)])
@example([("save", 1, "queue", "ends", None), ("train",), ("save", 1, "queue", "ends", None)])
@example([("save", 5, "queue", "ends", None), ("let", 1), ("train",), ("save", 5, "queue", "ends", None)])
@example([("save", 2, "queue", "ends", None), ("let", 1), ("save", 5, "queue", "ends", None)])
@example([("save", 4, "queue", "fails", None), ("save", 4, "queue", "ends", None), ("let", 2), ("release",)])
@example([("save", 0, "queue", "is cancelled", 0), ("train",), ("save", 0, "wait", "ends", 0)])
def test_what_is_saved_is_what_the_state_was(program):
    """Each save that is published holds the state of its call, and all memory comes back."""
    release_staging()
    gate, states, begun = Gate(), {}, []
    small = patch.multiple(staging, SMALL_NBYTES=128, _SHARED_NBYTES=256, _PART_NBYTES=128)
    with directory() as path, small, patch.object(FileStore, "create", lambda *a, **k: gate.create(*a, **k)):
        for number, (step, *arguments) in enumerate(program):
            if step == "save":
                kind, in_flight, end, keep = arguments
                state = states.setdefault(kind, state_of(kind, number))
                gate.refused += (f"save{number}",) * (end == "fails")
                if in_flight == "wait":
                    gate.let(MANY)
                    wait_for_all()
                    gate.close()
                policy = SavePolicy(layout=LAYOUT, durability="none", in_flight=in_flight, staging_nbytes=keep)
                where = path / f"save{number}" / "here"
                pending = functional_ckpt.async_save(state, where, policy=policy)
                begun.append((pending, where, {key: array.copy() for key, array in state.items()}))
                if end == "is cancelled":
                    pending.cancel()
            elif step == "let":
                gate.let(*arguments)
            elif step == "release":
                release_staging()
            else:
                for array in (array for state in states.values() for array in state.values()):
                    array += 101
        gate.let(MANY)
        for pending, where, expected in begun:
            try:
                pending.result(60)
            except (CheckpointError, OSError):
                event("not published")
                assert not where.exists()
                continue
            found = functional_ckpt.open_checkpoint(where)
            assert {key: found[key][...].tolist() for key in found} == {k: v.tolist() for k, v in expected.items()}
            assert functional_ckpt.verify(where).ok
    assert the_pool().used_nbytes == 0
