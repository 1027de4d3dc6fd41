"""A proxy that adds latency to each request, and counts them: ``python -m benchmarks.objects.proxy UPSTREAM``.

In a process of its own, or several of one ``--port``, among which the kernel shares out the connections. It prints its
port, and that of its log. It looks only at the first bytes of a request, and passes on all others as they come, so that
it carries more than the servers behind it. The log is the requests since the last time as JSON, each ``[method, target,
seconds at which it came, seconds at which it was answered]``, on the clock of ``time.monotonic``.
"""

import argparse
import asyncio
import json
import socket
import time
from contextlib import suppress

_METHODS = (b"GET ", b"PUT ", b"HEAD ", b"POST ", b"DELETE ")


class Link:
    """What both ends of all connections share."""

    def __init__(self, upstream, latency_s, nbytes_per_s):
        self.upstream, self.latency_s, self.nbytes_per_s = upstream, latency_s, nbytes_per_s
        self.requests = []

    def noted(self, head):
        method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        entry = [method, target, time.monotonic(), None]
        self.requests.append(entry)
        return entry

    def answer(self):
        """Return the log as an answer to a request, and begin a new one."""
        body = json.dumps(self.requests).encode()
        self.requests = []
        return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


class _End(asyncio.Protocol):
    """One end of a connection: what it receives goes to the `other`, no faster than that takes it."""

    def __init__(self, link):
        self.link, self.other, self.transport = link, None, None
        self._free_s = 0.0
        self._reasons = 0

    def connection_made(self, transport):
        self.transport = transport

    def connection_lost(self, _):
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()

    def hold(self):
        """Receive nothing more until as many calls of `go_on`."""
        self._reasons += 1
        if self._reasons == 1:
            with suppress(RuntimeError):
                self.transport.pause_reading()

    def go_on(self):
        self._reasons -= 1
        if not self._reasons and not self.transport.is_closing():
            self.transport.resume_reading()

    def pause_writing(self):
        self.other.hold()

    def resume_writing(self):
        self.other.go_on()

    def pass_on(self, data):
        self.other.transport.write(data)
        if self.link.nbytes_per_s:
            now = time.monotonic()
            self._free_s = max(self._free_s, now) + len(data) / self.link.nbytes_per_s
            if self._free_s > now + 0.001:
                self.hold()
                asyncio.get_running_loop().call_later(self._free_s - now, self.go_on)


class Client(_End):
    """The client's end: a request waits before it is passed on."""

    def __init__(self, link):
        super().__init__(link)
        self.entry = None
        self._early = []

    def connection_made(self, transport):
        super().connection_made(transport)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self):
        loop = asyncio.get_running_loop()
        try:
            _, self.other = await loop.create_connection(
                lambda: Server(self.link, self), "127.0.0.1", self.link.upstream
            )
        except OSError:
            self.transport.close()
            return
        for data in self._early:
            self.pass_on(data)

    def pass_on(self, data):
        if self.other is None:
            self._early.append(data)
        else:
            super().pass_on(data)

    def data_received(self, data):
        is_request = data.startswith(_METHODS) and (self.entry is None or self.entry[3] is not None)
        if not is_request:
            self.pass_on(data)
        else:
            self.entry = self.link.noted(data)
            self.hold()
            asyncio.get_running_loop().call_later(self.link.latency_s, self._forward, data)

    def _forward(self, data):
        self.pass_on(data)
        self.go_on()


class Server(_End):
    """The server's end."""

    def __init__(self, link, client):
        super().__init__(link)
        self.other = client

    def data_received(self, data):
        if not data.startswith(b"HTTP/1.1 100"):
            self.other.entry[3] = time.monotonic()
        self.pass_on(data)


class Log(asyncio.Protocol):
    """A connection to the log: whatever it asks for, the log is the answer."""

    def __init__(self, link):
        self.link, self.transport = link, None

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, _):
        self.transport.write(self.link.answer())
        self.transport.close()


async def _serve(chosen):
    loop = asyncio.get_running_loop()
    link = Link(chosen.upstream, chosen.latency_ms / 1e3, chosen.stream_mib * 2**20)
    listening = socket.create_server(("127.0.0.1", chosen.port), backlog=512, reuse_port=True)
    server = await loop.create_server(lambda: Client(link), sock=listening)
    log = await loop.create_server(lambda: Log(link), "127.0.0.1", 0)
    print(listening.getsockname()[1], log.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _run(main):
    """Run the main function, with uvloop where it is installed: it carries twice as much."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.objects.proxy")
    parser.add_argument("upstream", type=int)
    parser.add_argument(
        "--port", type=int, default=0, help="shared with other processes of this program; 0: a free one"
    )
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--stream-mib", type=float, default=0.0, help="MiB/s that one connection carries; 0: any")
    _run(_serve(parser.parse_args()))
