"""`Lane`: one of several independent channels between the same ranks, so that concurrent operations do not mix.

There is a lane for each purpose: saves, loads, saves in the background, and so on; the threads of a rank take turns on
it. One operation of all ranks on it is a `Call`, and each message is tagged with its call and step. Connections that
broke are not used again: the lane opens new ones, which form its next generation.
"""

import atexit
import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import attrs

from functional_ckpt.errors import CheckpointError, RankFailedError
from functional_ckpt.store.encoding import Array
from functional_ckpt.torch.group.board import Board
from functional_ckpt.torch.group.presence import announce, has_ended
from functional_ckpt.torch.group.wires import MismatchError, Patience, WireError, Wires

__all__ = ["Call", "Lane"]

T = TypeVar("T")
#: How long a rank that has lost its connections waits for the notes of the others.
_GRACE_S = 0.5
#: How long it waits for the board meanwhile.
_BOARD_S = 5.0
#: How often a waiting rank checks whether another has given up, and when it publishes the call in which it waits.
_ASK_S = 1.0


@attrs.frozen
class _Note:
    """The note of a rank that gives up a call; `number` counts the calls of a generation."""

    rank: int
    number: int
    what: str
    text: str
    lost: int | None
    is_mixed: bool


class Lane:
    """A channel between the ranks of a group; `name` is its name on the board, `host` the host of the group's store.

    With `is_once` it is for a single call, whose name all ranks know: a late rank finds it given up by the others.
    """

    def __init__(
        self, board: Board, rank: int, members: tuple[int, ...], name: str, host: str | None, is_once: bool = False
    ) -> None:
        self.rank, self.members, self.name, self._is_once = rank, members, name, is_once
        #: Held by the thread that uses the lane.
        self.lock = threading.RLock()
        self._board, self._host = board, host
        self._generation = self._number = 0
        self._wires: Wires | None = None
        self._is_broken = False
        self._notes: list[_Note] = []
        _LANES.add(self)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """The lock that a thread holds during a call; with `is_once` releasing it closes the connections."""
        return contextlib.closing(self) if self._is_once else self.lock

    def close(self) -> None:
        """Close the connections after the running call."""
        if self._wires is not None and not self._is_broken:
            self._wires.withdraw(_BOARD_S)

    def hang_up(self) -> None:
        """Close the connections at once, even if they are in use."""
        if self._wires is not None:
            self._wires.close()

    def begin(self, timeout_s: float) -> tuple[int, int]:
        """Return the generation and the number of a new call.

        Raises
        ------
        RankFailedError
            If other ranks have given up this call already: no rank would answer.
        """
        while self.notes(timeout_s) or self._is_broken:
            late = [note for note in self._notes if note.number > self._number and self._is_final(note)]
            if self._is_once or (late and not self._is_broken):
                self._is_broken = True
                note = (late or self._notes)[0]
                raise RankFailedError(
                    "the other ranks have given up the call that this rank begins",
                    rank=note.rank,
                    found=note.text,
                    remedy="This rank came late; call it again on all ranks",
                )
            self.renew()
        self._number += 1
        return self._generation, self._number

    def _is_final(self, note: _Note) -> bool:
        """Tell whether a call cannot be repeated: a rank was lost, or the ranks called different things."""
        heard = {each.rank for each in self._notes}
        return note.is_mixed or (note.lost is not None and note.lost not in heard)

    def renew(self) -> None:
        """Start the next generation, with new connections."""
        self.hang_up()
        self._wires, self._notes, self._is_broken = None, [], False
        self._generation, self._number = self._generation + 1, 0

    def wires(self, generation: int, timeout_s: float) -> Wires:
        """Return the connections of a generation.

        Raises
        ------
        RankFailedError
            If they have broken.
        """
        if generation != self._generation or self._is_broken:
            raise RankFailedError("the connections of the ranks broke in an earlier step", rank=self.rank)
        if self._wires is None:
            announce(self._board, self.members[self.rank], self._host, timeout_s)
            name = f"{self.name}/{generation}"
            self._wires = Wires(self._board, self.rank, self.size, name, self._host, timeout_s)
        return self._wires

    def ended(self, ranks: Collection[int]) -> int | None:
        """Return one of `ranks` whose process has ended, if there is one."""
        found = (rank for rank in sorted(ranks) if has_ended(self._board, self.members[rank], _BOARD_S))
        return next(found, None)

    def notes(self, timeout_s: float) -> Sequence[_Note]:
        """Return the notes of the ranks that have given up a call of this generation."""
        name = f"{self.name}/{self._generation}/given up"
        for number in range(len(self._notes) + 1, self._board.count(name, 0, timeout_s) + 1):
            text = self._board.read(f"{name}/{number}", timeout_s)
            if text is None:  # it is being written
                break
            self._notes.append(_Note(**json.loads(text)))
        return self._notes

    def is_left_behind(self, number: int, error: Exception) -> bool:
        """Tell whether others gave up an earlier call that succeeded on this rank: they may still begin this one."""
        if isinstance(error, MismatchError) or self._is_once:
            return False
        lost = getattr(error, "lost", None)
        ends = time.monotonic() + _GRACE_S
        with contextlib.suppress(ConnectionError):
            while True:
                notes = self.notes(_BOARD_S)
                if any(note.rank == lost or lost is None for note in notes) or time.monotonic() > ends:
                    return bool(notes) and all(note.number < number and not note.is_mixed for note in notes)
                time.sleep(_GRACE_S / 10)
        return False

    def give_up(self, number: int, what: str, error: BaseException, asks: bool = True) -> CheckpointError:
        """Publish that this rank gives up, close the connections and return the error; if it `asks`, read the notes."""
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        lost, is_mixed = getattr(error, "lost", None), isinstance(error, MismatchError)
        mine = _Note(self.rank, number, what, text, lost, is_mixed)
        self._is_broken = True
        if self.name in self._board.said:
            self.say(f"{what}, and has given up")
        try:
            name = f"{self.name}/{self._generation}/given up"
            place = self._board.count(name, 1, _BOARD_S)
            self._board.put(f"{name}/{place}", json.dumps(attrs.asdict(mine)), _BOARD_S)
            # Closing the connections wakes up the waiting ranks, which then leave their notes.
            self.hang_up()
            return self._verdict(mine, self._replies()) if asks else _broken(mine, (), ())
        except ConnectionError:  # the store died with the rank that hosted it: there are no notes
            self.hang_up()
            return _broken(mine, () if lost is None else (lost,), ())

    def say(self, what: str | None) -> None:
        """Publish the call in which this rank waits, None for none, if that is not published already."""
        said = self._board.said
        if said.get(self.name) == what:
            return
        said.pop(self.name, None)
        said.update({} if what is None else {self.name: what})
        with contextlib.suppress(ConnectionError):
            self._board.put(f"waits/{self.members[self.rank]}", "; ".join(said.values()), _BOARD_S)

    def _replies(self) -> Sequence[_Note]:
        ends = time.monotonic() + _GRACE_S
        while len({note.rank for note in self.notes(_BOARD_S)}) < self.size and time.monotonic() < ends:
            time.sleep(_GRACE_S / 25)
        return self._notes

    def _verdict(self, mine: _Note, notes: Sequence[_Note]) -> CheckpointError:
        """Return the error that the notes of the ranks add up to."""
        if any(note.is_mixed for note in notes):
            called = {note.rank: f"rank {note.rank}: {note.what}" for note in notes}
            return RankFailedError(
                "the ranks call different functions at the same time",
                found="; ".join(called[rank] for rank in sorted(called)),
                remedy="Call the same on all ranks, in the same order",
            )
        heard = {note.rank for note in notes}
        lost = {note.lost for note in notes if note.lost is not None} - heard
        absent = sorted(lost or set(range(self.size)) - heard)
        waits = ((rank, self._board.read(f"waits/{self.members[rank]}", _BOARD_S)) for rank in absent[:3])
        return _broken(mine, tuple(absent), [f"rank {rank} waits in {text}" for rank, text in waits if text])


def _broken(mine: _Note, absent: tuple[int, ...], waits: Sequence[str]) -> RankFailedError:
    found = "; ".join([f"in {mine.what}: {mine.text}", *waits])
    return RankFailedError(
        "the group of ranks broke while they agreed or exchanged data",
        rank=absent or None,
        found=found,
        remedy="The rank died, hangs, calls another function or none, or takes longer than the policy's timeout_s",
    )


class Call:
    """One operation of all ranks of a lane, such as a save, in steps; it gets its number with its first message.

    Waiting for other ranks ends when `is_over` returns true.
    """

    def __init__(self, lane: Lane, what: str, timeout_s: float, is_over: Callable[[], bool] | None = None) -> None:
        self._lane, self._what, self._timeout_s, self._is_over = lane, what, timeout_s, is_over
        self._generation = self._number = self._step = 0
        self._asked_s = 0.0

    def all_gather(self, text: bytes) -> list[bytes]:
        """Return the texts of all ranks.

        Raises
        ------
        CheckpointError
            If a rank dies, is silent for too long, or calls something else.
        """
        found = self._do(lambda wires: wires.all_gather(self._tag(), text, self._patience()))
        self._step += 1
        return found

    def transfer(self, target: int, parts: Sequence[memoryview], source: int | None) -> Array:
        """Send to one rank while receiving from another.

        Raises
        ------
        CheckpointError
            If a rank dies, does not answer in time, or calls another function.
        """
        return self._do(lambda wires: wires.transfer(self._tag(), target, parts, source, self._patience()))

    def _do(self, act: Callable[[Wires], T]) -> T:
        lane = self._lane
        with lane.lock:
            while True:
                try:
                    if not self._number:
                        self._generation, self._number = lane.begin(self._timeout_s)
                    found = act(lane.wires(self._generation, self._timeout_s))
                except CheckpointError:
                    raise
                except OSError as error:
                    is_over = self._is_over is not None and self._is_over()
                    if is_over or self._step or not lane.is_left_behind(self._number, error):
                        raise lane.give_up(self._number, self._what, error, not is_over) from error
                    lane.renew()
                    self._number = 0
                except BaseException as error:  # an interrupt: the others must not wait
                    lane.give_up(self._number, self._what, error)
                    raise
                else:
                    lane.say(None)
                    return found

    def _tag(self) -> bytes:
        return f"{self._what}, call {self._number}, step {self._step + 1}".encode()

    def _patience(self) -> Patience:
        self._asked_s = 0.0
        return Patience(self._timeout_s, self._look, lambda _: self._ask())

    def _look(self, waited_s: float, awaited: Collection[int]) -> None:
        if self._is_over is not None and self._is_over():
            raise WireError("the save is over")
        if waited_s - self._asked_s < min(_ASK_S, self._timeout_s / 4):
            return
        self._asked_s = waited_s
        self._lane.say(self._what)
        self._ask()
        lost: int | None = None
        with contextlib.suppress(ConnectionError):  # as in `_ask`
            lost = self._lane.ended(awaited)
        if lost is not None:
            raise WireError(f"the process of rank {lost} has ended", lost)

    def _ask(self) -> None:
        """Stop waiting if another rank has given up."""
        notes: Sequence[_Note] = ()
        with contextlib.suppress(ConnectionError):  # waiting for a live rank works without the board
            notes = self._lane.notes(_BOARD_S)
        if notes:
            raise WireError(f"rank {notes[0].rank} gave up: {notes[0].text}")


def _hang_up() -> None:
    """Close all connections: at exit, and in a forked child, which would keep the connections of its parent open."""
    for lane in list(_LANES):
        lane.hang_up()


_LANES: "weakref.WeakSet[Lane]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_hang_up)
atexit.register(_hang_up)
