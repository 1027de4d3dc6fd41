"""A torch process group as a `Gather`."""

import atexit
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from hashlib import blake2b
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import attrs
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from functional_ckpt.comm import Gather, LocalGather
from functional_ckpt.errors import RankFailedError, SpecError
from functional_ckpt.store.encoding import Array

__all__ = ["Link", "TorchGather", "member_link", "torch_gather"]

T = TypeVar("T")
_TAG = 1
#: How long a rank that has lost the group waits for the others to say that they have lost it too.
_GRACE_S = 0.5
#: How often a rank that waits for the others to come asks whether it should.
_ASK_S = 0.2


def torch_gather(process_group: Any, timeout_s: float, purpose: str) -> Gather:
    """Return a `Gather` over the members of `process_group` (the default group for None).

    Uses gloo connections of its own per parent, timeout and `purpose` (``"sync"`` or ``"async"``), made on first use
    and kept: gloo since what travels lives on the host, its own so that neither the caller's collectives nor a save in
    the background can come between ours. Connections that broke are replaced.

    Raises
    ------
    SpecError
        If this process is not in the group.
    RankFailedError
        If a rank does not come to connect in time.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise SpecError(
                "a process group was passed, but torch.distributed is not initialised",
                found=type(process_group).__name__, remedy="Call torch.distributed.init_process_group first",
            )  # fmt: skip
        return LocalGather()
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise SpecError("this process is not a member of the process group", rank=dist.get_rank())
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise SpecError(
            "this is no process group", found=type(process_group).__name__,
            remedy="Pass a torch process group (of a DeviceMesh: mesh.get_group()), or a Gather",
        )  # fmt: skip
    parent: Any = process_group if process_group is not None else dist.group.WORLD
    rank = dist.get_rank(parent)
    if rank < 0:
        raise SpecError("this process is not a member of the process group", rank=dist.get_rank())
    size = dist.get_world_size(parent)
    members = tuple(dist.get_process_group_ranks(parent))
    if size == 1:
        return LocalGather(members=members)
    return _link(parent, rank, members, timeout_s, purpose).gather()


def member_link(members: tuple[int, ...], timeout_s: float, purpose: str) -> "Link | LocalGather":
    """Return what connects `members`, numbers of ranks in the default group, for who knows them but not their group.

    Raises
    ------
    SpecError
        If this process is not one of them.
    """
    if len(members) == 1:
        return LocalGather(members=members)
    number = dist.get_rank()
    if number not in members:
        raise SpecError("this process is not one of the ranks that save", rank=number, expected=members)
    name = blake2b(repr(members).encode(), digest_size=8).hexdigest()
    return _link(dist.group.WORLD, members.index(number), members, timeout_s, f"{purpose}/{name}")


def _link(parent: Any, rank: int, members: tuple[int, ...], timeout_s: float, purpose: str) -> "Link":
    """Return the link of `members`, who meet in the store of `parent`."""
    links = _LINKS.setdefault(parent, {})
    if (timeout_s, purpose) not in links:
        # Named by their order, which is that of the calls on every rank, so that ranks with other timeouts meet too.
        name = f"{purpose}/{sum(known == purpose for _, known in links)}"
        links[timeout_s, purpose] = Link(_store_of(parent), rank, members, timeout_s, name)
    return links[timeout_s, purpose]


def _store_of(group: Any) -> Any:
    """Return the store in which the members of a group have met."""
    ask = getattr(group, "get_group_store", None)
    if ask is not None:
        return ask()
    known: Any = dist.distributed_c10d
    return known._world.pg_map[group][1]  # where older versions keep it


@attrs.frozen(eq=False)
class TorchGather:
    """Gathers small picklable values and exchanges bytes over gloo; `members` are the ranks' numbers in the world."""

    rank: int
    members: tuple[int, ...]
    _line: "_Line"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the `value` of each rank.

        Raises
        ------
        RankFailedError
            If a rank died, does not answer in time, or has a value that cannot be pickled; names it.
        """
        texts = self._line.exchange(_pickled(value))
        found = [pickle.loads(text) for text in texts]  # noqa: S301 - from our own ranks, never from storage
        for rank, (picklable, answer) in enumerate(found):
            if not picklable:
                raise RankFailedError("a rank holds what cannot travel to the others", None, rank, found=answer)
        return [answer for _, answer in found]

    def swap(self, target: int, outgoing: Array, source: int, nbytes: int) -> Array:
        """Send bytes to `target` and return the `nbytes` that come from `source`.

        Raises
        ------
        RankFailedError
            If a rank died or does not answer in time; names it.
        """
        return self._line.swap(target, outgoing, source, nbytes)


def _pickled(value: Any) -> bytes:
    # A rank that cannot pickle must say so: the others wait for it.
    try:
        return pickle.dumps((True, value))
    except Exception as error:
        return pickle.dumps((False, f"{type(error).__name__}: {error}"))


class Link:
    """The gloo connections for one parent, timeout and purpose: one set after the other, as they break.

    Ranks meet under numbered names in the parent's store. ``dist.new_group`` is no help: the name that it hashes counts
    the groups of this process, so ranks that belong to different numbers of groups would wait for each other forever.
    """

    def __init__(self, store: Any, rank: int, members: tuple[int, ...], timeout_s: float, name: str) -> None:
        # A client of its own: the parent's is blocked while another thread waits for something in it.
        store = store.clone() if hasattr(store, "clone") else store
        self._store = PrefixStore(f"functional_ckpt/{name}", store)
        self.rank, self._members, self._timeout_s = rank, members, timeout_s
        self._number = self._meetings = 0
        self._open: TorchGather | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._members)

    def gather(self) -> TorchGather:
        """Return the open connections, or connect."""
        self._skip_broken()
        if self._open is None:
            line = _Line(PrefixStore(str(self._number), self._store), self.rank, self.size)
            line.connect(self._timeout_s)
            self._open = TorchGather(self.rank, self._members, line)
        return self._open

    def meet(self, is_over: Callable[[], bool]) -> TorchGather:
        """Return the connections once all ranks have come; stop waiting when `is_over` says that some never will.

        Ranks wait in the store: a collective cannot be left, and would mix with the next one of who comes late.

        Raises
        ------
        RankFailedError
            If not all ranks came. They begin anew then, with new connections.
        """
        self._skip_broken()
        self._meetings += 1
        came, meeting = f"{self._number}/came", self._meetings
        self._store.set(f"{came}/{self.rank}", str(meeting))
        # One counter for all meetings, so that the store does not grow by the number of ranks with every save.
        if self._store.add(came, 1) == self.size * meeting:
            self._store.set(f"{came}/all {meeting}", "")
        ends = time.monotonic() + self._timeout_s
        while not self._appears(f"{came}/all {meeting}"):
            if is_over() or time.monotonic() > ends or self._is_broken():
                self._store.set(f"{self._number}/broken", "")
                absent = [rank for rank in range(self.size) if not self._has_come(f"{came}/{rank}")]
                raise RankFailedError(
                    "a rank did not come to the save", None, tuple(absent) or None,
                    remedy="The rank failed, died, hangs, or takes longer than the policy's timeout_s",
                )  # fmt: skip
        return self.gather()

    def close(self) -> None:
        """Drop the connections."""
        if self._open is not None:
            self._open._line.gloo = None
            self._open = None

    def _skip_broken(self) -> None:
        while self._is_broken():
            self._number, self._meetings, self._open = self._number + 1, 0, None

    def _is_broken(self) -> bool:
        return bool(self._store.check([f"{self._number}/broken"]))

    def _has_come(self, name: str) -> bool:
        return bool(self._store.check([name])) and int(self._store.get(name)) >= self._meetings

    def _appears(self, name: str) -> bool:
        try:
            self._store.wait([name], timedelta(seconds=_ASK_S))
        except RuntimeError:  # it has not appeared yet; if the store is gone, whoever asks it next is told
            return False
        return True


@attrs.define(eq=False)
class _Line:
    """Gloo connections; each rank notes in the store how many steps it has come to, so that a missing one is named."""

    store: Any
    rank: int
    size: int
    gloo: Any = None
    step: int = 0

    def connect(self, timeout_s: float) -> None:
        """Meet the other ranks."""
        timeout = timedelta(seconds=timeout_s)
        self.gloo = self._watch(lambda: self._meet(timeout), self.step + 1)

    def exchange(self, text: bytes) -> list[bytes]:
        """Return the texts of all ranks."""
        return self._watch(lambda: self._exchange(text), self.step + 1)

    def swap(self, target: int, outgoing: Array, source: int, nbytes: int) -> Array:
        """Send to one rank and receive from another."""
        # Ranks swap at different times, and as often as their plans say: who comes to the next step is there.
        return self._watch(lambda: self._swap(target, outgoing, source, nbytes), self.step + 1)

    def _swap(self, target: int, outgoing: Array, source: int, nbytes: int) -> Array:
        if self.gloo is None:
            raise ConnectionError("broken by an earlier failure")
        # Torch warns of memory that it must not write; sending reads it.
        sent = torch.from_numpy(outgoing if outgoing.flags.writeable else outgoing.copy())
        leaving = self.gloo.send([sent], target, _TAG) if len(outgoing) else None
        received = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            self.gloo.recv([received], source, _TAG).wait()
        if leaving is not None:
            leaving.wait()
        found: Array = received.numpy()
        return found

    def _meet(self, timeout: timedelta) -> Any:
        self._arrive()
        return dist.ProcessGroupGloo(self.store, self.rank, self.size, timeout)

    def _arrive(self) -> None:
        self.step += 1
        self.store.set(f"at/{self.rank}", str(self.step))

    def _exchange(self, text: bytes) -> list[bytes]:
        self._arrive()
        if self.gloo is None:
            raise ConnectionError("broken by an earlier failure")
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        self.gloo.allgather([lengths], [torch.tensor([len(text)])]).wait()
        longest = max(int(n) for n in lengths)
        padded = torch.frombuffer(bytearray(text.ljust(longest, b"\0")), dtype=torch.uint8)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self.gloo.allgather([parts], [padded]).wait()
        return [part[: int(n)].numpy().tobytes() for part, n in zip(parts, lengths, strict=True)]

    def _watch(self, communicate: Callable[[], T], step: int) -> T:
        """Call `communicate`; if it fails, hang up, and say who has neither come to `step` nor failed as well."""
        try:
            return communicate()
        except Exception as error:
            # Hanging up passes the news on at once: only neighbours in gloo's ring feel that a rank has died.
            self.gloo = None
            absent = tuple(self._absent(step))
            raise RankFailedError(
                "the group of ranks broke while they agreed or exchanged data", None, absent or None,
                found=_first_line(error),
                remedy="The rank died, hangs, or takes longer than the policy's timeout_s",
            ) from error  # fmt: skip

    def _absent(self, step: int) -> list[int]:
        try:
            self.store.set("broken", "")
            self.store.set(f"failed/{self.rank}", "")
            # Ranks that wait for the missing one learn of it now, and have a moment to say that they are there.
            patience = time.monotonic() + _GRACE_S
            absent = [rank for rank in range(self.size) if not self._is_there(rank, step)]
            while absent and time.monotonic() < patience:
                time.sleep(_GRACE_S / 10)
                absent = [rank for rank in absent if not self._is_there(rank, step)]
            return absent
        except Exception:  # the store died with the rank that held it: nobody to ask
            return []

    def _is_there(self, rank: int, step: int) -> bool:
        if self.store.check([f"failed/{rank}"]):
            return True
        return bool(self.store.check([f"at/{rank}"])) and int(self.store.get(f"at/{rank}")) >= step


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


_LINKS: "WeakKeyDictionary[Any, dict[tuple[float, str], Link]]" = WeakKeyDictionary()


@atexit.register
def _hang_up() -> None:
    """Close the connections while the interpreter is whole: gloo's threads abort the process if they outlive it."""
    for links in list(_LINKS.values()):
        for link in links.values():
            link.close()
