"""`Wires`: connections between the ranks of a group, which carry tagged messages.

Each connection carries messages in one direction: the sender connects, the receiver accepts. So no two ranks wait for
each other to connect, and a connection is made when the first message needs it. All waiting happens here, in one place;
it ends when a rank is silent for too long or closes its connection, or when a function of `Patience` raises.
"""

import contextlib
import hmac
import json
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from functional_ckpt.store.encoding import Array
from functional_ckpt.torch.group.addresses import endpoint, listener, ways_to
from functional_ckpt.torch.group.board import Board

__all__ = ["MismatchError", "Patience", "WireError", "Wires"]

#: How often a waiting rank calls `Patience.look`.
_TICK_S = 0.2
#: Timeout of connecting to one of several addresses of a host.
_TRY_S = 5.0
_HEADER = struct.Struct("!IQ")
_HELLO = struct.Struct("!16sI")
_LENGTH = struct.Struct("!Q")
#: How many parts of a message are sent by one system call, which has a limit.
_AT_ONCE = 64
_NOTHING = np.empty(0, np.uint8)
_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class WireError(ConnectionError):
    """Communication has failed; `lost` is a rank that has closed its connection."""

    def __init__(self, text: str, lost: int | None = None) -> None:
        super().__init__(text)
        self.lost = lost


class MismatchError(WireError):
    """A rank has sent a message of another call or step."""


@attrs.frozen
class Patience:
    """How long another rank may be silent. Each function may raise to end the waiting.

    `look` is called regularly with the seconds waited and the ranks waited for, `hung_up` when a rank that is not
    waited for closes its connection.
    """

    timeout_s: float
    look: Callable[[float, Collection[int]], None]
    hung_up: Callable[[int], None]


class Wires:
    """Connections of one rank, for one thread at a time. `name` is their name on the board.

    `host` is the host of the group's store, if that is known.
    """

    def __init__(self, board: Board, rank: int, size: int, name: str, host: str | None, timeout_s: float) -> None:
        self._board, self._rank, self._size, self._name = board, rank, size, name
        self._sending: dict[int, socket.socket] = {}
        self._receiving: dict[int, socket.socket] = {}
        self._strangers: dict[int, tuple[socket.socket, bytearray]] = {}
        self._watched: dict[int, tuple[int, int]] = {}
        self._secret = secrets.token_bytes(16)
        self._ends = contextlib.ExitStack()
        # The connections are closed when this object is garbage-collected.
        self.close = weakref.finalize(self, self._ends.close)
        self._epoll = self._ends.enter_context(contextlib.closing(select.epoll()))
        self._listener = self._ends.enter_context(listener())
        self._listener.setblocking(False)
        self._epoll.register(self._listener, select.EPOLLIN)
        address = {"secret": self._secret.hex(), **endpoint(self._listener, host)}
        board.put(f"{name}/address/{rank}", json.dumps(address), timeout_s)

    def withdraw(self, timeout_s: float) -> None:
        """Close the connections and delete the address, which no rank needs any more."""
        self.close()
        with contextlib.suppress(ConnectionError):
            self._board.remove(f"{self._name}/address/{self._rank}", timeout_s)

    def all_gather(self, tag: bytes, text: bytes, patience: Patience) -> list[bytes]:
        """Return the texts of all ranks, in about log2(size) steps."""
        rank, size = self._rank, self._size
        found = [text]  # of this rank, the next one, and so on
        distance = 1
        while distance < size:
            count = min(distance, size - distance)
            parts = [memoryview(_LENGTH.pack(len(each)) + each) for each in found[:count]]
            body = self.transfer(tag, (rank - distance) % size, parts, (rank + distance) % size, patience)
            found += _split(body.tobytes())
            distance *= 2
        # A rank that has all messages may close its connections; for a late rank that is not a failure.
        self._wait(patience, 0.0, 0.0, ())
        return [found[(other - rank) % size] for other in range(size)]

    def transfer(
        self, tag: bytes, target: int, parts: Sequence[memoryview], source: int | None, patience: Patience
    ) -> Array:
        """Send `parts`, if there are any, and return the message of `source`, both at the same time.

        Raises
        ------
        WireError
            If a rank closes its connection, is silent for too long, or sends a message with another `tag`.
        """
        leaving = _Leaving(self._connected(target, patience), tag, parts) if parts else None
        coming = _Coming(tag, source) if source is not None else None
        began = last = time.monotonic()
        while True:
            moved = leaving is not None and leaving.move(target)
            if coming is not None and coming.source in self._receiving:
                moved = coming.move(self._receiving[coming.source]) or moved
            awaited = self._awaited(target, leaving, coming)
            if not awaited:
                return _NOTHING if coming is None else coming.body
            last = time.monotonic() if moved else last
            if time.monotonic() - last > patience.timeout_s:
                raise WireError(f"rank {' and '.join(map(str, sorted(awaited)))} was silent for {patience.timeout_s} s")
            self._wait(patience, time.monotonic() - began, min(_TICK_S, patience.timeout_s), awaited)

    def _awaited(self, target: int, leaving: "_Leaving | None", coming: "_Coming | None") -> set[int]:
        """Return the ranks that this one waits for, and register the events of their connections."""
        awaited: set[int] = set()
        if leaving is not None:
            self._watch(leaving.socket, target, _GONE | select.EPOLLOUT if leaving.parts else _GONE)
            awaited |= {target} if leaving.parts else set()
        if coming is not None:
            awaited |= set() if coming.is_whole else {coming.source}
            if coming.source in self._receiving:
                events = _GONE if coming.is_whole else select.EPOLLIN
                self._watch(self._receiving[coming.source], coming.source, events)
        return awaited

    def _wait(self, patience: Patience, waited_s: float, moment_s: float, awaited: Collection[int]) -> None:
        """Wait for an event for up to `moment_s`; accept new connections and notice closed ones."""
        try:
            events = self._epoll.poll(moment_s)
        except ValueError as error:  # closed by another thread, since the interpreter is shutting down
            raise WireError("this rank has closed its connections") from error
        if not events:
            patience.look(waited_s, awaited)
        for number, event in events:
            if number == self._listener.fileno():
                self._accept()
            elif number in self._strangers:
                self._greet(number)
            elif event & _GONE and not self._watched[number][1] & select.EPOLLIN:
                peer, waits = self._watched.pop(number)
                self._epoll.unregister(number)
                if waits & select.EPOLLOUT:
                    raise WireError(f"rank {peer} has closed its connection", peer)
                patience.hung_up(peer)

    def _watch(self, connection: socket.socket, peer: int, events: int) -> None:
        number = connection.fileno()
        if number not in self._watched:
            self._epoll.register(number, events)
        elif self._watched[number][1] != events:
            self._epoll.modify(number, events)
        self._watched[number] = peer, events

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while True:
                connection, _ = self._listener.accept()
                self._ends.enter_context(connection)
                connection.setblocking(False)
                self._strangers[connection.fileno()] = connection, bytearray()
                self._epoll.register(connection, select.EPOLLIN)

    def _greet(self, number: int) -> None:
        """Read the rank of a new connection; one that does not know the secret is closed."""
        connection, said = self._strangers[number]
        try:
            more = connection.recv(_HELLO.size - len(said))
        except BlockingIOError:
            return
        except ConnectionError:
            more = b""
        said += more
        if more and len(said) < _HELLO.size:
            return
        del self._strangers[number]
        self._epoll.unregister(number)
        secret, peer = _HELLO.unpack(said) if len(said) == _HELLO.size else (b"", -1)
        if hmac.compare_digest(secret, self._secret) and peer not in self._receiving:
            self._receiving[peer] = connection
            self._watch(connection, peer, _GONE)
        else:
            connection.close()

    def _connected(self, target: int, patience: Patience) -> socket.socket:
        """Return the connection to a rank; connect first if necessary, once that rank has published its address."""
        if target in self._sending:
            return self._sending[target]
        began = time.monotonic()
        ends, pause_s = began + patience.timeout_s, 0.001
        while (text := self._board.read(f"{self._name}/address/{target}", patience.timeout_s)) is None:
            if time.monotonic() > ends:
                raise WireError(f"rank {target} did not publish its address within {patience.timeout_s} s")
            patience.look(time.monotonic() - began, (target,))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _TICK_S)
        address = json.loads(text)
        connection = self._ends.enter_context(_dialled(target, address, ends))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_HELLO.pack(bytes.fromhex(address["secret"]), self._rank))
        connection.setblocking(False)
        self._sending[target] = connection
        return connection


def _dialled(target: int, address: dict[str, Any], ends: float) -> socket.socket:
    """Connect to a rank under one of its addresses."""
    problem: OSError = TimeoutError()
    for way in ways_to(address):
        try:
            return socket.create_connection(way, max(0.1, min(_TRY_S, ends - time.monotonic())))
        except OSError as error:
            problem = error
    refused = isinstance(problem, ConnectionRefusedError)
    raise WireError(f"rank {target} cannot be reached: {problem}", target if refused else None) from problem


class _Leaving:
    """A message that is being sent; `parts` are left to send."""

    def __init__(self, connection: socket.socket, tag: bytes, parts: Sequence[memoryview]) -> None:
        self.socket = connection
        header = _HEADER.pack(len(tag), sum(part.nbytes for part in parts))
        self.parts = [memoryview(header + tag), *parts]

    def move(self, target: int) -> bool:
        """Send as much as the connection accepts, and tell whether it accepted anything."""
        moved = False
        try:
            while self.parts:
                count = self.socket.sendmsg(self.parts[:_AT_ONCE])
                moved = True
                while self.parts and count >= self.parts[0].nbytes:
                    count -= self.parts.pop(0).nbytes
                if count:
                    self.parts[0] = self.parts[0][count:]
        except BlockingIOError:
            pass
        except OSError as error:
            raise WireError(f"the connection to rank {target} broke: {error}", target) from error
        return moved


class _Coming:
    """A message that is being received; `body` is complete once it `is_whole`."""

    def __init__(self, tag: bytes, source: int) -> None:
        self.source, self.body, self.is_whole = source, _NOTHING, False
        self._tag = tag
        self._places = self._filled()
        self._place = next(self._places)

    def move(self, connection: socket.socket) -> bool:
        """Receive the bytes that have arrived, and tell whether there were any."""
        moved = False
        try:
            while not self.is_whole:
                count = connection.recv_into(self._place)
                if not count:
                    raise WireError(f"rank {self.source} has closed its connection", self.source)
                moved, self._place = True, self._place[count:]
                if not self._place:
                    self._place = next(self._places, self._place)
        except BlockingIOError:
            pass
        except OSError as error:
            if isinstance(error, WireError):
                raise
            raise WireError(f"the connection from rank {self.source} broke: {error}", self.source) from error
        return moved

    def _filled(self) -> Iterator[memoryview]:
        """Yield, one after the other, the buffers to fill."""
        header = bytearray(_HEADER.size)
        yield memoryview(header)
        tag_nbytes, nbytes = _HEADER.unpack(header)
        tag = bytearray(tag_nbytes)
        yield memoryview(tag)
        if tag != self._tag:
            raise MismatchError(f"rank {self.source} is at {tag.decode()}, this rank at {self._tag.decode()}")
        self.body = np.empty(nbytes, np.uint8)
        if nbytes:
            yield self.body.data
        self.is_whole = True


def _split(body: bytes) -> Iterator[bytes]:
    """Yield the texts that a message holds."""
    begin = 0
    while begin < len(body):
        (length,) = _LENGTH.unpack_from(body, begin)
        begin += _LENGTH.size
        yield body[begin : begin + length]
        begin += length
