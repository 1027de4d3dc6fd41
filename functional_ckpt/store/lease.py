"""`Lease`: the claim of a save in an object store, where no lock is dropped when its process dies.

The claim is an object that its saver renews every third of the lease, each time on the condition that it is still the
one that it wrote last. A process that needs to know whether the saver lives watches the object for as long as the
lease; clocks of two machines are never compared. If the object does not change, the process takes it over by a
conditional write. Then its saver, if it wakes up, can neither renew it nor publish.
"""

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, cast

from functional_ckpt.errors import CheckpointError, StorageError, add_notes
from functional_ckpt.store.base import Store
from functional_ckpt.store.file_claim import ABANDONED
from functional_ckpt.store.machine import boot_id
from functional_ckpt.store.temporary import claim_name, is_claim_name
from functional_ckpt.store.work import at_once

__all__ = ["Lease", "LeasedStore", "expired", "is_taken"]

#: In the claim of a saver that is about to write its root.
_PUBLISHING = "publishing"
#: In a claim that a sweep has taken over.
_TAKEN = "taken"
#: So long the requests of a process that is known to have ended are waited for.
_LATE_S = 2.0
#: Longer leases of others are not waited for.
_LONGEST_S = 600.0


class LeasedStore(Store, Protocol):
    """A store whose claims are leases: it can write over an object on a condition."""

    @property
    def lease_s(self) -> float:
        """How long a claim counts after it was renewed last, in seconds."""

    @property
    def alone(self) -> bool:
        """Whether the caller says that nobody else saves or sweeps here at the same time."""

    def replace(self, name: str, data: bytes, stamp: object) -> object:
        """Write over an object whose stamp is still `stamp`; return the new one, or None if it is another's by now.

        If `stamp` is None the object is created; one of other content must not be there.
        """

    def refuses(self, name: str, data: bytes) -> bool:
        """Try to create an object that is there already; tell whether the server refuses."""


class Lease:
    """A claim held by this process, and renewed by a thread, until `release`."""

    def __init__(self, store: LeasedStore, label: str, content: dict[str, Any]) -> None:
        self._store, self._label, self._content = store, label, content
        self._beat = 0
        self._stamp: object = None
        self._lost = self._dropped = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def take(cls, store: LeasedStore, save_id: str) -> "tuple[Lease, list[str]]":
        """Create the claim, and find out whether the server respects the condition of a write.

        Meanwhile the place is listed; the names are returned too.

        Raises
        ------
        StorageError
            If it does not, and the caller has not said that nobody else saves here (`StorePolicy.alone`).
        """
        lease = cls(store, claim_name(save_id), {"save_id": save_id, "lease_s": store.lease_s, **_process()})
        lease._stamp = store.replace(lease._label, lease._text(), None)
        try:
            _, names = at_once([lease._probe, lambda: list(store.names())], store.capabilities.concurrency)
        except BaseException as error:
            lease.release_after(error)
            raise
        lease._thread = threading.Thread(target=lease._keep, name="functional_ckpt-lease", daemon=True)
        lease._thread.start()
        return lease, cast("list[str]", names)

    def _probe(self) -> None:
        if self._store.alone or self._store.refuses(self._label, self._text(probe=True)):
            return
        raise StorageError(
            "this server writes over an object although it was told to create a new one",
            path=self._store.url,
            remedy="If no other save to this path, and no sweep, can run at the same time, pass "
            "SavePolicy(store=StorePolicy(alone=True)); else save to another server",
        )

    @property
    def label(self) -> str:
        """Name of the claim in the store."""
        return self._label

    def name(self, nodes: Sequence[str], durable: bool = False) -> None:
        """Record which nodes are going to be written."""
        self._content["nodes"] = list(nodes)
        if not self._renew():
            raise StorageError(
                "the claim of this save was removed as soon as it was made", path=self._store.url, remedy="Save again"
            )

    def is_held(self) -> bool:
        """Renew the claim; tell whether that was possible: nobody has taken it over.

        From now on the claim says that the root is being written: the request may arrive after its saver has died.
        """
        self._content[_PUBLISHING] = True
        return self._renew()

    def _renew(self) -> bool:
        with self._lock:
            if self._lost:
                return False
            self._beat += 1
            stamp = self._store.replace(self._label, self._text(), self._stamp)
            self._lost, self._stamp = stamp is None, stamp
            return not self._lost

    def _keep(self) -> None:
        while not self._stop.wait(self._store.lease_s / 3):
            with suppress(CheckpointError):  # the next time, or it is found when the save publishes
                if not self._renew():
                    return

    def _text(self, **more: Any) -> bytes:
        return json.dumps({**self._content, "beat": self._beat, **more}).encode() + b"\n"

    def set_aside(self) -> None:
        """Keep its content under another name, and remove the claim."""
        self._end()
        self._store.publish(self._label + ABANDONED, self._text())
        self._store.delete([self._label])

    def release(self) -> str | None:
        """Remove the claim; return a failure as text."""
        self._end()
        if self._dropped:
            return None
        if self._lost:
            return "its claim was taken over by a sweep"
        try:
            self._store.delete([self._label])
        except CheckpointError as error:
            return f"its claim {self._label} could not be removed ({error})"
        return None

    def release_after(self, error: BaseException) -> None:
        """Remove the claim of a save that has failed; a failure to do so becomes a note of the error."""
        problem = self.release()
        add_notes(error, [problem] if problem else [])

    def drop(self) -> None:
        """Stop renewing; the object stays until another process finds that its lease has expired."""
        self._end()
        self._dropped = True

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


@contextmanager
def expired(
    store: LeasedStore, but: str | None = None, there: Sequence[str] | None = None
) -> Iterator[tuple[list[str], list[str]]]:
    """Take over the claims of dead savers, and name those of live ones: (dead, live).

    `there` are the names in the store, if they were listed already.

    This waits as long as the longest lease that is found, unless it is known before: by a change of the claim, or by
    the process, if it was one of this machine; for requests of it that may still arrive it waits 2 seconds at most.
    """
    listed = store.names() if there is None else there
    names = sorted(name for name in listed if is_claim_name(name) and name != but)
    dead = [name for name in names if name.endswith(ABANDONED)]
    watched = {name: found for name in names if name not in dead and (found := _seen(store, name)) is not None}
    live: list[str] = []
    began = time.monotonic()
    while watched:
        for name, (stamp, content) in list(watched.items()):
            if time.monotonic() - began >= _patience_s(content):
                is_ours = _take_over(store, name, stamp, content)
                (dead if is_ours or store.stamp(name) is None else live).append(name)
                del watched[name]
            elif store.stamp(name) != stamp:
                if store.stamp(name) is not None:  # else it was released
                    live.append(name)
                del watched[name]
        if watched:
            time.sleep(max(0.01, min(_patience_s(content) for _, content in watched.values()) / 10))
    yield dead, live


def _take_over(store: LeasedStore, name: str, stamp: object, content: dict[str, Any]) -> bool:
    """Take over a claim, and tell whether that was possible: it has not changed meanwhile."""
    taken = json.dumps({**content, _TAKEN: True}).encode() + b"\n"
    is_ours = store.replace(name, taken, stamp) is not None
    # Its saver may only be slow, and a request still on its way: the next save or sweep can tell what that leaves.
    if is_ours and not _is_over(content):
        store.publish(name + ABANDONED, taken)
    return is_ours


def is_taken(data: bytes) -> bool:
    """Tell whether a claim with content `data` was taken over by a sweep.

    Examples
    --------
    >>> is_taken(b'{"save_id": "1f"}'), is_taken(b'{"save_id": "1f", "taken": true}')
    (False, True)
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and bool(content.get(_TAKEN))


def _seen(store: LeasedStore, name: str) -> tuple[object, dict[str, Any]] | None:
    # In this order: one that is renewed in between is seen to change.
    stamp, data = store.stamp(name), store.read(name)
    if stamp is None or data is None:
        return None
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = {}
    return stamp, content if isinstance(content, dict) else {}


def _lease_of(content: dict[str, Any]) -> float:
    found = content.get("lease_s")
    return min(float(found), _LONGEST_S) if isinstance(found, int | float) and found > 0 else _LONGEST_S


def _patience_s(content: dict[str, Any]) -> float:
    """Return how long to wait for a saver that shows no life."""
    if not _is_over(content):
        return _lease_of(content)
    # A request that it sent before it was killed may still arrive, and be in the way of the next save.
    return min(_LATE_S, _lease_of(content) / 3) if content.get("nodes") else 0.0


def _process() -> dict[str, Any]:
    """Return what names this process among all of this machine's, on all its containers."""
    return {
        "host": os.uname().nodename,
        "boot": boot_id(),
        "space": _space(),
        "pid": os.getpid(),
        "began": _began(os.getpid()),
    }


def _is_over(content: dict[str, Any]) -> bool:
    """Tell whether a claim's process is known to have ended: one of ours, by number and the time at which it began."""
    here = _process()
    if content.get(_PUBLISHING):  # its lease is waited for: a request of a dead saver may still arrive
        return False
    if not here["boot"] or not here["space"] or any(content.get(name) != here[name] for name in ("boot", "space")):
        return False
    pid = content.get("pid")
    return isinstance(pid, int) and _began(pid) != content.get("began")


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _began(pid: int) -> str:
    """Return when a process began, in ticks of the kernel; "" if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
