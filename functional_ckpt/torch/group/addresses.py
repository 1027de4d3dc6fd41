"""The addresses under which other ranks can reach a port of this host."""

import errno
import fcntl
import os
import socket
import struct
from functools import cache
from typing import Any

from functional_ckpt.store.machine import boot_id

__all__ = ["endpoint", "host_id", "listener", "places", "ways_to"]

_SIOCGIFADDR = 0x8915
_LOOPBACK = "127.0.0.1"


def listener() -> socket.socket:
    """Return a listening socket: on the interface in ``GLOO_SOCKET_IFNAME`` if that is set, else on all."""
    chosen = _chosen()
    if chosen:
        return socket.create_server((chosen[0], 0), backlog=socket.SOMAXCONN)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN)
        except OSError as error:  # the kernel supports IPv6, this host does not
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", 0), backlog=socket.SOMAXCONN)


def places(towards: str | None) -> list[str]:
    """Return addresses of this host, most likely first: that of the route to the host `towards` of the group's store.

    Examples
    --------
    >>> len(places(None)) > 0
    True
    """
    chosen = _chosen()
    if chosen:
        return chosen
    found = [_route_to(towards)] if towards else []
    try:
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    except OSError:  # a host without a name that resolves
        found += [_address_of(name) for _, name in socket.if_nameindex()]
    kept = dict.fromkeys(place for place in found if place and not place.startswith(("127.", "::1", "fe80")))
    return [*kept] or [_LOOPBACK]


def endpoint(listening: socket.socket, towards: str | None) -> dict[str, Any]:
    """Return where other ranks can reach a listening socket, as JSON can hold it; `towards` as for `places`."""
    return {"host": host_id(), "places": places(towards), "port": listening.getsockname()[1]}


def ways_to(endpoint: dict[str, Any]) -> list[tuple[str, int]]:
    """Return what to connect to, in order, to reach the `endpoint` of a socket: on its own host the loopback first.

    Examples
    --------
    >>> ways_to({"host": "another", "places": ["10.0.0.2", "10.1.0.2"], "port": 7})
    [('10.0.0.2', 7), ('10.1.0.2', 7)]
    """
    here = [_LOOPBACK] if endpoint["host"] == host_id() else []
    return [(place, endpoint["port"]) for place in dict.fromkeys([*here, *endpoint["places"]])]


@cache
def host_id() -> str:
    """Return a text that is equal exactly in processes with the same loopback interface.

    Examples
    --------
    >>> host_id() == host_id()
    True
    """
    try:
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return socket.gethostname()
    return f"{boot_id()} {network}" if boot_id() else socket.gethostname()


def _chosen() -> list[str]:
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return [found for name in names.split(",") if name and (found := _address_of(name.strip()))]


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # no such interface, or it has no such address
            return ""
    return socket.inet_ntoa(packed[20:24])


def _route_to(host: str) -> str:
    """Return the local address of the route to `host`; nothing is sent."""
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    except OSError:
        pass
    return ""
