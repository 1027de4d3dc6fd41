"""A proxy in front of an object store on 127.0.0.1: it counts requests, adds latency, and goes wrong as it is told.

Faults, by name: ``503`` (SlowDown, not forwarded), ``500``, ``501``, ``403``, ``expired`` (403 of an expired token),
``nobucket`` (404), ``region`` (400) and ``elsewhere`` (301: the bucket is in another region), ``reset`` (the connection
is cut before the server sees the request), ``lost`` (cut after the server has done it, before it is told), ``torn``
(cut in the middle of the answer), ``hang`` (never answered), ``late:S`` (forwarded after S seconds, whether the client
still waits or not), ``late:S+FAULT``.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from urllib.parse import parse_qs, unquote

import attrs

_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>{}</Message></Error>'
_ANSWERS = {
    "503": (503, "SlowDown"),
    "500": (500, "InternalError"),
    "501": (501, "NotImplemented"),
    "403": (403, "AccessDenied"),
    "expired": (403, "ExpiredToken"),
    "nobucket": (404, "NoSuchBucket"),
    "region": (400, "AuthorizationHeaderMalformed"),
    "elsewhere": (301, "PermanentRedirect"),
}
FAULTS = ("503", "500", "403", "expired", "reset", "lost", "torn")


@attrs.frozen
class Request:
    """What a client asked for: `number` counts from 0 in the order of arrival."""

    number: int
    method: str
    target: str
    conditional: bool
    nbytes: int
    #: Whether it writes over an object on a condition, by S3's API.
    replaces: bool = False

    @property
    def path(self):
        """The key, with its bucket."""
        return self.target.partition("?")[0]


class Proxy:
    """Forwards to `upstream`, a port; `fault` names what goes wrong with a request, or None."""

    def __init__(self, upstream: int, fault: Callable[[Request], str | None] = lambda _: None, latency_s: float = 0.0):
        self.upstream, self.fault, self.latency_s = upstream, fault, latency_s
        self.requests: list[Request] = []
        self.in_flight = self.most_in_flight = 0
        self._lock = threading.Lock()
        self._clients: set[socket.socket] = set()
        self._closing = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self, fault=lambda _: None):
        """Forget what was asked, and go wrong as `fault` says from now on."""
        with self._lock:
            self.requests, self.fault, self.most_in_flight = [], fault, 0

    def clients(self):
        """Return the connections that are open."""
        with self._lock:
            return frozenset(self._clients)

    def outlast(self, but):
        """Wait until all connections have ended `but` these: nothing of what came by them is still on its way."""
        with socket.create_connection(("127.0.0.1", self.port)) as last:  # taken after all that came before it
            last.sendall(b"\r\n")
            last.recv(1)
        while self.clients() - but:
            time.sleep(0.01)

    def close(self):
        """Stop, and cut what clients keep open: the next proxy may get this port."""
        self._closing.set()
        for each in (self._socket, *tuple(self._clients)):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self):
        while not self._closing.is_set():
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._clients.add(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        server = None
        with contextlib.suppress(OSError, ValueError, EOFError), contextlib.ExitStack() as held:
            held.callback(client.close)
            held.callback(self._clients.discard, client)
            stream = held.enter_context(client.makefile("rb"))
            while (head := _head(stream)) is not None:
                if b"expect: 100-continue" in head.lower():
                    client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                    head = b"\r\n".join(x for x in head.split(b"\r\n") if not x.lower().startswith(b"expect:"))
                body = _body(head, stream)
                request = self._noted(head, len(body))
                try:
                    if self.latency_s:
                        time.sleep(self.latency_s)
                    fault = self.fault(request)
                    if fault == "hang":
                        self._closing.wait()
                        return None
                    if fault is not None and fault.startswith("late:"):
                        seconds, _, fault = fault[5:].partition("+")
                        time.sleep(float(seconds))
                    if fault == "reset":
                        return _cut(client)
                    if fault in _ANSWERS:
                        client.sendall(_answer(*_ANSWERS[fault], request.method))
                        continue
                    if server is None:
                        server = held.enter_context(socket.create_connection(("127.0.0.1", self.upstream)))
                        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        answers = held.enter_context(server.makefile("rb"))
                    server.sendall(head + body)
                    answer_head = _head(answers)
                    if answer_head is None:
                        return None
                    has_body = request.method != "HEAD" and b" 204 " not in answer_head[:16]
                    try:
                        answer = _body(answer_head, answers) if has_body else b""
                    except EOFError:
                        return _cut(client)
                    if fault == "lost":
                        return _cut(client)
                    whole = answer_head + answer
                    if fault == "torn":
                        client.sendall(whole[: len(whole) - 1 - len(answer) // 2])
                        return _cut(client)
                    client.sendall(whole)
                    if b"connection: close" in answer_head.lower():
                        return None
                finally:
                    with self._lock:
                        self.in_flight -= 1
        return None

    def _noted(self, head, nbytes):
        method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        lower = head.lower()
        with self._lock:
            conditional = any(words in lower for words in (b"\r\nif-match:", b"\r\nif-none-match:", b"ifgenerationm"))
            method, target = _as_s3(method, target)
            replaces = b"\r\nif-match:" in lower
            request = Request(len(self.requests), method, target, conditional, nbytes, replaces)
            self.requests.append(request)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return request


def _as_s3(method, target):
    """Return a request of Google's API as the one of S3 that asks for the same; any other as it is."""
    path, query = target.partition("?")[0], parse_qs(target.partition("?")[2])
    if path.startswith("/upload/storage/v1/b/"):
        return "PUT", f"/{path.split('/')[5]}/{query['name'][0]}"
    if not path.startswith("/storage/v1/b/"):
        return method, target
    bucket, _, key = path.removeprefix("/storage/v1/b/").partition("/o")
    return method, f"/{bucket}{unquote(key)}" if key else f"/{bucket}?list-type=2"


def _head(stream):
    lines = []
    while line := stream.readline():
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)
    return None


def _body(head, stream):
    lower = head.lower()
    if b"transfer-encoding: chunked" in lower:
        parts = []
        while True:
            size = stream.readline()
            chunk = stream.read(int(size.split(b";")[0], 16) + 2)
            parts += [size, chunk]
            if len(chunk) == 2:
                return b"".join(parts)
    at = lower.find(b"\r\ncontent-length:")
    nbytes = int(lower[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
    data = stream.read(nbytes)
    if len(data) < nbytes:
        raise EOFError
    return data


def _answer(status, code, method):
    body = b"" if method == "HEAD" else _ERROR.format(code, "injected into request 501").encode()
    reason = {301: "Moved Permanently", 400: "Bad Request", 403: "Forbidden", 404: "Not Found",
              500: "Internal Server Error", 501: "Not Implemented", 503: "Slow Down"}[status]  # fmt: skip
    return (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def _cut(client):
    """Reset the connection rather than end it."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
