"""A torch process group as a `Gather`."""

import os
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import attrs
import torch.distributed as dist

from functional_ckpt.errors import RankFailedError, SpecError
from functional_ckpt.run.comm import Gather, LocalGather
from functional_ckpt.store.encoding import Array
from functional_ckpt.torch.group.board import Board
from functional_ckpt.torch.group.lane import Call, Lane

__all__ = ["Link", "TorchGather", "announce", "announced", "member_link", "torch_gather"]


def torch_gather(
    process_group: Any,
    timeout_s: float,
    purpose: str,
    what: str | None = None,
    once: str | None = None,
    is_over: Callable[[], bool] | None = None,
) -> Gather:
    """Return a `Gather` over the members of `process_group` (the default group for None), for one call.

    Messages use connections of this library, not the group's: they carry host memory, do not mix with the caller's
    collectives or other threads, and a rank that dies or hangs does not end the others. Each `purpose` (``"save"``,
    ``"load"``, ...) has its lane. `what` describes the call in errors of ranks that are in another call. With `once`, a
    name that all ranks know, the connections are for this call alone. Waiting ends when `is_over` returns true.

    Raises
    ------
    SpecError
        If this process is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise SpecError(
                "a process group was passed, but torch.distributed is not initialised",
                found=type(process_group).__name__,
                remedy="Call torch.distributed.init_process_group first",
            )
        return LocalGather()
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise SpecError("this process is not a member of the process group", rank=dist.get_rank())
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise SpecError(
            "this is not a process group",
            found=type(process_group).__name__,
            remedy="Pass a torch process group (of a DeviceMesh: mesh.get_group()), or a Gather",
        )
    parent: Any = process_group if process_group is not None else dist.group.WORLD
    rank = dist.get_rank(parent)
    if rank < 0:
        raise SpecError("this process is not a member of the process group", rank=dist.get_rank())
    members = tuple(dist.get_process_group_ranks(parent))
    if len(members) == 1:
        return LocalGather(members=members)
    return Link(_lane(parent, rank, members, purpose, once)).gather(timeout_s, what or purpose, is_over)


def member_link(members: tuple[int, ...], purpose: str, once: str | None = None) -> "Link | LocalGather":
    """Return the link between `members`, ranks in the default group, for a caller that has no group of them.

    With `once`, which names a single call of all members, the connections are for that call alone.

    Raises
    ------
    SpecError
        If this process is not a member.
    """
    if len(members) == 1:
        return LocalGather(members=members)
    number = dist.get_rank()
    if number not in members:
        raise SpecError("this process is not one of the ranks that save", rank=number, expected=members)
    return Link(_lane(dist.group.WORLD, members.index(number), members, _name(members, purpose), once))


def announce(members: tuple[int, ...], purpose: str, once: str, timeout_s: float) -> None:
    """Publish the name of the next call to the other `members`; it replaces an earlier name.

    Raises
    ------
    ConnectionError
        If the store of the process group is gone.
    """
    _board(dist.group.WORLD).put(f"{_name(members, purpose)}/next", once, timeout_s)


def announced(members: tuple[int, ...], purpose: str, timeout_s: float) -> str | None:
    """Return the name that was announced last, None if there is none.

    Raises
    ------
    ConnectionError
        If the store of the process group is gone.
    """
    return _board(dist.group.WORLD).read(f"{_name(members, purpose)}/next", timeout_s)


def _name(members: tuple[int, ...], purpose: str) -> str:
    return f"{purpose}/{blake2b(repr(members).encode(), digest_size=8).hexdigest()}"


@attrs.frozen(eq=False)
class Link:
    """A lane of some ranks."""

    _lane: Lane

    @property
    def rank(self) -> int:
        """Position of this process among them."""
        return self._lane.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._lane.size

    @property
    def lane(self) -> object:
        """What calls that follow one another have in common."""
        return self._lane

    def gather(self, timeout_s: float, what: str, is_over: Callable[[], bool] | None = None) -> "TorchGather":
        """Return a `Gather` for one call; waiting in it ends when `is_over` returns true."""
        return TorchGather(self._lane.rank, self._lane.members, Call(self._lane, what, timeout_s, is_over), self._lane)


@attrs.frozen(eq=False)
class TorchGather:
    """Gathers small picklable values and exchanges bytes; `members` are the ranks' numbers in the world."""

    rank: int
    members: tuple[int, ...]
    _call: Call
    _lane: Lane

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """The lock that a thread holds from the first to the last step."""
        return self._lane.turn

    @property
    def lane(self) -> object:
        """What calls that follow one another have in common."""
        return self._lane

    def all_gather(self, value: Any) -> list[Any]:
        """Return the `value` of each rank.

        Raises
        ------
        CheckpointError
            If a rank died, does not answer in time, calls another function, or has a value that cannot be pickled. The
            error names the rank.
        """
        texts = self._call.all_gather(_pickled(value))
        found = [pickle.loads(text) for text in texts]  # noqa: S301 - from ranks of this group, never from storage
        for rank, (picklable, answer) in enumerate(found):
            if not picklable:
                raise RankFailedError("a value cannot be pickled", rank=rank, found=answer)
        return [answer for _, answer in found]

    def swap(self, target: int, outgoing: Array, source: int, nbytes: int) -> Array:
        """Send bytes to `target` and return the `nbytes` that come from `source`.

        Raises
        ------
        CheckpointError
            If a rank died, does not answer in time, or sends another number of bytes. The error names the rank.
        """
        found = self._call.transfer(target, [outgoing.data] if len(outgoing) else [], source if nbytes else None)
        if len(found) != nbytes:
            raise RankFailedError("a rank sent another number of bytes", rank=source, expected=nbytes, found=len(found))
        return found


def _pickled(value: Any) -> bytes:
    # A rank whose value cannot be pickled must send that: the others wait for it.
    try:
        return pickle.dumps((True, value))
    except Exception as error:
        return pickle.dumps((False, f"{type(error).__name__}: {error}"))


def _lane(parent: Any, rank: int, members: tuple[int, ...], name: str, once: str | None = None) -> Lane:
    """Return the lane of `members`, which use the store of the group `parent`."""
    if once is not None:
        return Lane(_board(parent), rank, members, f"{name}/{once}", _host(parent), True)
    lanes = _LANES.setdefault(parent, {})
    return lanes.get(name) or lanes.setdefault(name, Lane(_board(parent), rank, members, name, _host(parent)))


def _board(parent: Any) -> Board:
    if dist.group.WORLD in _FORKED:
        raise SpecError(
            "this process was forked from a rank and is not a member of the group",
            rank=dist.get_rank(),
            remedy="Pass process_group=functional_ckpt.run.comm.LocalGather() there",
        )
    # Ranks find each other under names in the group's store. `dist.new_group` cannot be used: its name depends on the
    # number of groups of the process, so ranks that belong to different numbers of groups would wait forever.
    return _BOARDS.get(parent) or _BOARDS.setdefault(parent, Board(_store_of(parent), "functional_ckpt"))


def _host(parent: Any) -> str | None:
    """Return the host of the store of `parent`."""
    store = _store_of(parent)
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


def _store_of(group: Any) -> Any:
    """Return the store of a process group."""
    ask = getattr(group, "get_group_store", None)
    if ask is not None:
        return ask()
    known: Any = dist.distributed_c10d
    return known._world.pg_map[group][1]  # where older versions keep it


_BOARDS: "WeakKeyDictionary[Any, Board]" = WeakKeyDictionary()
_LANES: "WeakKeyDictionary[Any, dict[str, Lane]]" = WeakKeyDictionary()
#: In a forked process, the default group of its parent.
_FORKED: "WeakSet[Any]" = WeakSet()


def _forget() -> None:
    """In a forked child, forget the lanes and boards, which are the parent's, and record the group of the parent."""
    _LANES.clear()
    _BOARDS.clear()
    if dist.is_available() and dist.is_initialized():
        _FORKED.add(dist.group.WORLD)


os.register_at_fork(after_in_child=_forget)
