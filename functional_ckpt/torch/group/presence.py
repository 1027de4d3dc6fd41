"""How a rank notices that the process of another one has ended, before they have connected.

Each process listens on one port for as long as it lives, and publishes the address. Nothing is sent there: a host that
refuses to connect says that the process has ended.
"""

import json
import os
import socket
import threading

from functional_ckpt.torch.group.addresses import endpoint, listener, ways_to
from functional_ckpt.torch.group.board import Board

__all__ = ["announce", "has_ended"]

#: Longest wait for an answer of one address.
_TRY_S = 1.0


def announce(board: Board, member: int, host: str | None, timeout_s: float) -> None:
    """Publish, once on each board, the address of this process, which is rank `member` of the default group.

    `host` is the host of the group's store, if that is known.

    Raises
    ------
    ConnectionError
        If the store of the process group is gone.
    """
    if member in board.present:
        return
    with _LOCK:
        if not _LISTENERS:
            _LISTENERS.append(listener())
    board.put(_name(member), json.dumps(endpoint(_LISTENERS[0], host)), timeout_s)
    board.present.add(member)


def has_ended(board: Board, member: int, timeout_s: float) -> bool:
    """Tell whether the process of rank `member` has certainly ended; False if it has published no address yet.

    Raises
    ------
    ConnectionError
        If the store of the process group is gone.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> board = Board(dist.HashStore(), "presence-example")
    >>> announce(board, 0, None, 10.0)
    >>> has_ended(board, 0, 10.0), has_ended(board, 1, 10.0)
    (False, False)
    """
    text = board.read(_name(member), timeout_s)
    if text is None:
        return False
    # One address may belong to another host as well, such as that of a bridge of containers: all must refuse.
    return all(map(_refuses, ways_to(json.loads(text))))


def _refuses(way: tuple[str, int]) -> bool:
    try:
        socket.create_connection(way, _TRY_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # no answer tells nothing
        return False
    return False


def _name(member: int) -> str:
    return f"present/{member}"


def _close() -> None:
    """In a forked child: it must not keep the port of its parent open."""
    while _LISTENERS:
        _LISTENERS.pop().close()


_LISTENERS: list[socket.socket] = []
_LOCK = threading.Lock()
os.register_at_fork(after_in_child=_close)
