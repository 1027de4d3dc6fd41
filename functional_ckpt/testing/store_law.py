"""The law of stores: whatever is done to one, in any order, it holds what was written to it, whole, and nothing else.

`store_machine` makes a Hypothesis state machine, which compares a store with a dict. It needs Hypothesis.
"""

import threading
from collections.abc import Callable
from itertools import count
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from functional_ckpt.errors import AlreadyExistsError, CorruptionError, StorageError
from functional_ckpt.store.base import UNSIZED, Store
from functional_ckpt.testing.laws import require

__all__ = ["store_machine"]

# Such as a save writes.
_NAMES = ("zarr.json", "manifest.json", "w/zarr.json", "w/c.0", "w/c.0.1", "model.ü/c", ".ponmlkjihgfedcba.claim")
_RACERS = 4

names = st.sampled_from(_NAMES)
# Some larger than what a connection carries in one piece.
contents = st.binary(max_size=40) | st.integers(0, 255).map(lambda byte: bytes([byte]) * 70_001)


def store_machine(make: Callable[[str], Store]) -> type[RuleBasedStateMachine]:
    """Return a state machine that tests a store; its `TestCase` runs under pytest or unittest.

    Parameters
    ----------
    make
        Opens the store at a place of this name, which is another one for each name; it is called several times for one
        name, as by several processes, and finds there what was written before.

    Examples
    --------
    >>> from hypothesis import settings
    >>> from hypothesis.stateful import run_state_machine_as_test
    >>> from functional_ckpt.store import open_store
    >>> machine = store_machine(lambda name: open_store(f"memory://law-example/{name}"))
    >>> run_state_machine_as_test(machine, settings=settings(max_examples=5, deadline=None))
    """
    places = count()

    class StoreMachine(_StoreMachine):
        def opened(self) -> None:
            self.place = f"place-{next(places)}"
            self.make = make

    return StoreMachine


class _StoreMachine(RuleBasedStateMachine):
    make: Callable[[str], Store]
    place: str

    def opened(self) -> None:
        """Choose a place of its own."""
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        """Open the place."""
        self.opened()
        self.store = self.make(self.place)
        self.model: dict[str, bytes] = {}
        self.stamps: dict[str, tuple[object, bytes]] = {}

    @rule(name=names, parts=st.lists(contents, max_size=3), padding=st.integers(0, 9), publishes=st.booleans())
    def create(self, name: str, parts: list[bytes], padding: int, publishes: bool) -> None:
        """Write a new object, or find that there is one."""
        body, seen = b"".join(parts), bytearray()
        data = body if publishes else body + bytes(padding)

        def write() -> None:
            if publishes:
                self.store.publish(name, data)
            else:
                self.store.create(name, [memoryview(part) for part in parts], len(data), seen.extend)

        before = self.model.get(name)
        try:
            write()
        except AlreadyExistsError:
            require(before is not None, f"{name}: a new object was refused, as if there were one")
        else:
            require(before in (None, data), f"{name}: an object was written over although it must be new")
            require(publishes or seen == body, f"{name}: `each` was called with {len(seen)} bytes of {len(body)}")
            self.model[name] = data

    @rule(name=names, limit=st.integers(0, 50))
    def read(self, name: str, limit: int) -> None:
        """Read an object, also where it is too large."""
        expected = self.model.get(name)
        require(self.store.read(name) == expected, f"{name}: read returns something else than was written")
        if expected is None or len(expected) <= limit:
            require(self.store.read(name, limit) == expected, f"{name}: read returns something else under a limit")
            return
        try:
            self.store.read(name, limit)
        except CorruptionError:
            return
        require(False, f"{name}: read returns {len(expected)} bytes, and the limit is {limit}")

    @rule(name=names)
    def look(self, name: str) -> None:
        """Ask for the size and the stamp."""
        expected, found = self.model.get(name), self.store.nbytes_of(name)
        if expected is None:
            require(found is None, f"{name}: there is no object, and its size is {found}")
        else:
            unsized = found == UNSIZED and not self.store.capabilities.sized
            require(found == len(expected) or unsized, f"{name}: the size is {found}, not {len(expected)}")
        require(
            (self.store.stamp(name) is None) == (expected is None), f"{name}: the stamp does not tell if it is there"
        )

    @rule(name=names, data=st.data())
    def read_parts(self, name: str, data: st.DataObject) -> None:
        """Read the head and ranges of an object; what is not there is an error, and nothing else is returned for it."""
        expected = self.model.get(name, b"")
        nbytes = data.draw(st.integers(0, len(expected)) | st.just(len(expected) + 1))
        starts = sorted(data.draw(st.lists(st.integers(0, max(len(expected) - nbytes, 0)), min_size=1, max_size=4)))
        for what in ("read_into", "scan", "read_ranges"):
            try:
                found, wanted = self._part(what, name, starts, nbytes)
            except StorageError:
                problem = name not in self.model or nbytes > len(expected)
                require(problem, f"{name}: {what} fails for {nbytes} of {len(expected)} bytes")
                continue
            there = name in self.model and nbytes <= len(expected)
            require(there or not nbytes, f"{name}: {what} returns {nbytes} bytes of {len(expected)}")
            require(found == wanted, f"{name}: {what} returns something else than was written")

    def _part(self, what: str, name: str, starts: list[int], nbytes: int) -> tuple[bytes, bytes]:
        """Return what a way to read parts returns, and what was written there."""
        expected, seen = self.model.get(name, b""), bytearray()
        if what == "scan":
            self.store.scan(name, nbytes, seen.extend)
            return bytes(seen), expected[:nbytes]
        into = memoryview(bytearray(nbytes * (1 if what == "read_into" else len(starts))))
        if what == "read_into":
            self.store.read_into(name, into, seen.extend)
            require(seen == into, f"{name}: `each` was called with other bytes than were read")
            return bytes(into), expected[:nbytes]
        self.store.read_ranges(name, starts, nbytes, into)
        return bytes(into), b"".join(expected[start : start + nbytes] for start in starts)

    @rule(gone=st.lists(names, unique=True, max_size=3))
    def delete(self, gone: list[str]) -> None:
        """Delete objects, also some that are not there."""
        self.stamps |= {name: (self.store.stamp(name), self.model[name]) for name in gone if name in self.model}
        self.store.delete(gone)
        for name in gone:
            self.model.pop(name, None)

    @rule(name=names)
    def compare_stamps(self, name: str) -> None:
        """An object of other bytes has another stamp."""
        before = self.stamps.get(name)
        if before is not None and self.model.get(name) not in (None, before[1]):
            require(self.store.stamp(name) != before[0], f"{name}: other bytes have the stamp of those before")

    @precondition(lambda self: self.store.capabilities.shared and hasattr(self.store, "replace"))
    @rule(name=names, data=contents, other=contents)
    def replace(self, name: str, data: bytes, other: bytes) -> None:
        """Write over what has not changed, and not over what has."""
        store: Any = self.store
        old = store.stamp(name)
        if old is None:
            self.stamp_of_new(name, data)
            return
        changed = self.model[name] + data + b"1"  # never what is there: the same bytes may have the same stamp
        stamp = store.replace(name, changed, old)
        require(stamp is not None, f"{name}: replace refuses the stamp of what is there")
        require(store.stamp(name) == stamp, f"{name}: replace returns another stamp than what is there has")
        self.model[name] = changed
        refused = store.replace(name, other + b"2", old)
        require(refused is None, f"{name}: replace writes over what has changed meanwhile")

    def stamp_of_new(self, name: str, data: bytes) -> None:
        """Create an object by `replace`, as a claim is; then it must be refused to create it once more."""
        store: Any = self.store
        stamp = store.replace(name, data, None)
        require(stamp is not None and store.stamp(name) == stamp, f"{name}: replace returns no stamp of a new object")
        self.model[name] = data
        require(store.refuses(name, data + b"3"), f"{name}: an object was written over although it must be new")

    @rule(name=names)
    def race(self, name: str) -> None:
        """Several write one new object at once: one does, and the others are told."""
        if name in self.model:
            return
        written: list[int] = []
        failed: list[BaseException] = []
        stores = [self.make(self.place) if self.store.capabilities.shared else self.store for _ in range(_RACERS)]
        barrier = threading.Barrier(_RACERS)

        def write(number: int) -> None:
            barrier.wait()
            try:
                stores[number].publish(name, b"racer %d" % number)
                written.append(number)
            except AlreadyExistsError:
                return
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(_RACERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        require(not failed, f"{name}: writing at once fails: {failed}")
        require(len(written) == 1, f"{name}: {len(written)} of {_RACERS} have written one new object")
        self.model[name] = b"racer %d" % written[0]

    @invariant()
    def agrees(self) -> None:
        """What is listed and read is what was written, in this process and for another that opens the place."""
        stores = [self.store, *([self.make(self.place)] if self.store.capabilities.shared else [])]
        for store in stores:
            for name, expected in self.model.items():
                require(store.read(name) == expected, f"{name}: what was written is lost or changed")
            if store.capabilities.lists:
                found = sorted(store.names())
                require(found == sorted(self.model), f"listed are {found}, written were {sorted(self.model)}")
                heads = {head + slash for head, slash, _ in (name.partition("/") for name in self.model)}
                missing = sorted(heads - {*store.children()})
                require(not missing, f"children lacks {missing}")
