"""The law of stores, over ours and over one of another package, and over wrong ones, which must break it."""

import hashlib
import threading
import time
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from functional_ckpt.errors import AlreadyExistsError
from functional_ckpt.store import Capabilities, StorePolicy, WholeStore, check_limit, open_store
from functional_ckpt.testing.store_law import store_machine
from tests.stores.small import SmallServer

_FEW = settings(max_examples=12, stateful_step_count=20, deadline=None,
                suppress_health_check=[*HealthCheck])  # fmt: skip


def holds(make, few=_FEW):
    run_state_machine_as_test(store_machine(make), settings=few)


def test_memory():
    holds(lambda name: open_store(f"memory://law/{name}"))


@pytest.mark.parametrize("sync", ["none", "fsync"])
def test_files(tmp_path, sync):
    def make(name):
        (tmp_path / name).mkdir(exist_ok=True)  # as the beginning of a save does
        return open_store(tmp_path / name, sync)

    holds(make, _FEW if sync == "none" else settings(_FEW, max_examples=3))


def test_objects(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test:tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    server = SmallServer()
    access = StorePolicy(endpoint=f"http://127.0.0.1:{server.port}")
    holds(lambda name: open_store(f"s3://ckpt/{name}", access=access), settings(_FEW, max_examples=6))
    server.close()


class Dicts(WholeStore):
    """A store of another package: one dict for each place, which all that open it share."""

    places: ClassVar[dict] = {}
    lock = threading.Lock()

    def __init__(self, name):
        self.url = f"dicts://{name}"
        self.objects = self.places.setdefault(name, {})

    url = ""

    def put(self, name, data):
        with self.lock:
            if name in self.objects:
                raise AlreadyExistsError("an object exists already", path=name, found=self.url)
            self.objects[name] = data

    def read(self, name, limit=2**62):
        data = self.objects.get(name)
        if data is not None:
            check_limit(name, len(data), limit)
        return data

    def names(self):
        yield from list(self.objects)

    def delete(self, names):
        for name in names:
            self.objects.pop(name, None)

    def stamp(self, name):
        data = self.objects.get(name)
        return None if data is None else hashlib.sha256(data).digest()

    def replace(self, name, data, stamp):
        with self.lock:
            if self.stamp(name) != stamp:
                return None
            self.objects[name] = data
            return self.stamp(name)


def over(kind):
    """Return what opens such a store at a place of a run of the test."""
    Dicts.places.clear()
    return kind


def test_a_store_of_another_package():
    holds(over(Dicts))


def test_the_same_bytes_may_have_the_same_stamp():
    machine = store_machine(over(Dicts))()
    machine.begin()
    for _ in range(4):
        machine.replace(name="a", data=b"", other=b"")


class LosesAWrite(Dicts):
    def put(self, name, data):
        if name in self.objects or not name.endswith("c.0.1"):
            super().put(name, data)


class IgnoresThePrecondition(Dicts):
    def put(self, name, data):
        self.objects[name] = data


class LooksAndThenWrites(Dicts):
    """Right as long as one writes at a time."""

    def put(self, name, data):
        is_there = name in self.objects
        time.sleep(0.001)
        if is_there:
            raise AlreadyExistsError("an object exists already", path=name)
        self.objects[name] = data


class ListsStale(Dicts):
    """The last object that was written is not listed yet."""

    def names(self):
        yield from list(self.objects)[:-1]


class ListsWhatIsGone(Dicts):
    def __init__(self, name):
        super().__init__(name)
        self.ever = self.places.setdefault(name + "-ever", {})

    def put(self, name, data):
        super().put(name, data)
        self.ever[name] = True

    def names(self):
        yield from list(self.ever)


class ReadsPartially(Dicts):
    """What a connection carries in one piece."""

    def read(self, name, limit=2**62):
        data = super().read(name, limit)
        return None if data is None else data[: 2**16]


class ReadsRangesPartially(Dicts):
    """The rest stays as it was."""

    def read_ranges(self, name, starts, nbytes, into):
        data = self.objects.get(name, b"")
        for number, start in enumerate(starts):
            part = data[start : start + nbytes]
            into[number * nbytes : number * nbytes + len(part)] = part


class IgnoresTheStamp(Dicts):
    def replace(self, name, data, stamp):
        self.objects[name] = data
        return self.stamp(name)


class OneStampForAll(Dicts):
    def stamp(self, name):
        return 1 if name in self.objects else None


class KeepsToItself(Dicts):
    """What is written is not seen by another process."""

    def __init__(self, name):
        super().__init__(name)
        self.objects = {}


class HasNoLimit(Dicts):
    def read(self, name, limit=2**62):
        return self.objects.get(name)


class ForgetsPadding(Dicts):
    def create(self, name, parts, nbytes, each=None):
        for part in parts if each is not None else ():
            each(part)
        self.put(name, b"".join(parts))


class RaisesAnotherError(Dicts):
    def put(self, name, data):
        if name in self.objects:
            raise FileExistsError(name)
        super().put(name, data)


WRONG = [
    LosesAWrite, IgnoresThePrecondition, LooksAndThenWrites, ListsStale, ListsWhatIsGone, ReadsPartially,
    ReadsRangesPartially, IgnoresTheStamp, OneStampForAll, KeepsToItself, HasNoLimit, ForgetsPadding,
    RaisesAnotherError,
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda kind: kind.__name__)
def test_a_wrong_store_breaks_the_law(wrong):
    find = settings(_FEW, max_examples=200, phases=[phase for phase in settings().phases if phase.name == "generate"],
                    database=None, report_multiple_bugs=False)  # fmt: skip
    with pytest.raises((AssertionError, FileExistsError)):
        holds(over(wrong), find)


def test_the_capabilities_of_a_whole_store():
    assert Dicts("x").capabilities == Capabilities(shared_chunks=False, rename=False, shared=True)
