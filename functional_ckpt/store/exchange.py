"""`Exchange`: the protocol by which ranks send one another pieces, and `deliver`, which runs one wave of a plan.

All ranks go through the same steps: in step k rank r sends to r + k and receives from r - k. So every message has a
receiver that waits for it, no two ranks wait for each other, and a rank holds one message each way at a time.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import attrs
import numpy as np

from functional_ckpt.errors import SpecError
from functional_ckpt.store.encoding import Array

__all__ = ["Exchange", "LocalExchange", "Message", "Traffic", "deliver"]

_NOTHING = np.empty(0, np.uint8)


@runtime_checkable
class Exchange(Protocol):
    """A group of ranks that can send one another bytes."""

    @property
    def rank(self) -> int:
        """Position of this process in the group."""

    @property
    def size(self) -> int:
        """Number of processes in the group."""

    def swap(self, target: int, outgoing: Array, source: int, nbytes: int) -> Array:
        """Send bytes to `target` and return the `nbytes` that `source` sends; a message of no bytes is not sent.

        Raises when a peer has died or does not answer in time.
        """


@attrs.frozen
class LocalExchange:
    """A group of one rank, which never sends anything.

    Examples
    --------
    >>> LocalExchange().size
    1
    """

    rank: int = 0
    size: int = 1

    def swap(self, target: int, outgoing: Array, source: int, nbytes: int) -> Array:
        """Raise `SpecError`: there is no other rank."""
        raise SpecError("there is no other rank to exchange with", rank=(source, target))


@attrs.frozen
class Traffic:
    """What a rank has sent to others: the number of messages, and their bytes.

    Examples
    --------
    >>> Traffic(1, 10) + Traffic(2, 20)
    Traffic(messages=3, nbytes=30)
    """

    messages: int = 0
    nbytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.messages + other.messages, self.nbytes + other.nbytes)


@attrs.frozen(eq=False)
class Message:
    """A message of `nbytes` bytes. `handle` packs it if it is outgoing (its argument is empty), or unpacks it."""

    nbytes: int
    handle: Callable[[Array], Array]


def deliver(
    exchange: Exchange,
    outgoing: Mapping[int, Message],
    incoming: Mapping[int, Message],
    failure: Exception | None = None,
) -> tuple[Traffic, Exception | None]:
    """Send and receive one wave's messages, at most one to and from each rank; return the traffic, and a failure.

    If a message cannot be packed or unpacked, that failure is returned and the exchange goes on, so that no other rank
    waits in vain: a rank that has failed sends zeros. Errors of the exchange itself are raised.
    """
    rank, size = exchange.rank, exchange.size
    steps = {(target - rank) % size for target in outgoing} | {(rank - source) % size for source in incoming}
    traffic = Traffic()
    for step in sorted(steps):
        target, source = (rank + step) % size, (rank - step) % size
        message = _NOTHING
        if target in outgoing:
            message, failure = _packed(outgoing[target], failure)
            traffic += Traffic(1, len(message))
        expected = incoming.get(source)
        received = exchange.swap(target, message, source, expected.nbytes if expected else 0)
        if expected is not None and failure is None:
            try:
                expected.handle(received)
            except Exception as error:
                failure = error
    return traffic, failure


def _packed(message: Message, failure: Exception | None) -> tuple[Array, Exception | None]:
    if failure is None:
        try:
            return message.handle(_NOTHING), None
        except Exception as error:
            failure = error
    return np.zeros(message.nbytes, np.uint8), failure
