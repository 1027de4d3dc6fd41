"""A server that speaks as much of S3 as the benchmark asks for, in memory: ``python -m benchmarks.objects.server``.

Servers of others take longer for a request than we do, and would be all that is measured. This one takes 0.1 ms, and
receives and sends what is large on as many threads as there are connections. It heeds the conditions of writes. It
prints its port.
"""

import itertools
import re
import socket
from contextlib import suppress
from threading import Lock, Thread
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

import numpy as np

_PAGE = 1000
_DATE = "Sun, 22 Nov 2026 10:00:00 GMT"
_NUMBERS = itertools.count()
_REASONS = {200: "OK", 204: "No Content", 206: "Partial Content", 404: "Not Found", 412: "Precondition Failed",
            416: "Range Not Satisfiable", 501: "Not Implemented"}  # fmt: skip


class Data(tuple):
    """The bytes of an object: the parts in which it came, which are never copied."""

    def nbytes(self):
        return sum(map(len, self))

    def cut(self, start, stop):
        """Return the bytes from `start` to before `stop`."""
        found, at = [], 0
        for part in self:
            found.append(part[max(start - at, 0) : max(stop - at, 0)])
            at += len(part)
        return Data(filter(len, found))


class Objects:
    """Objects by bucket and key, and parts of uploads. One request at a time is answered, once its body is there."""

    def __init__(self):
        self.found, self.uploads = {}, {}

    def answer(self, method, target, headers, body):
        """Return status, headers and body of the answer."""
        parts = urlsplit(target)
        name, query = unquote(parts.path).lstrip("/"), parse_qs(parts.query, keep_blank_values=True)
        if "/" not in name.rstrip("/"):
            return self._of_bucket(method, name.rstrip("/"), query, body)
        return getattr(self, f"_{method.lower()}", _unknown)(name, query, headers, body)

    def _of_bucket(self, method, bucket, query, body):
        if method == "POST" and "delete" in query:
            for key in re.findall(r"<Key>(.*?)</Key>", b"".join(body).decode()):
                self.found.pop(f"{bucket}/{unescape(key)}", None)
            return 200, {}, _text("<DeleteResult/>")
        return self._listed(bucket, query) if method == "GET" else (200, {}, Data())

    def _put(self, name, query, headers, body):
        if "partNumber" in query:
            self.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
            return 200, {"ETag": _new_tag()}, Data()
        if "x-amz-copy-source" in headers:
            body = self.found[unquote(headers["x-amz-copy-source"]).lstrip("/")][0]
        there = self.found.get(name)
        if ("if-none-match" in headers and there) or ("if-match" in headers and there[1] != headers["if-match"]):
            return _failed(412, "PreconditionFailed")
        tag = _new_tag()
        self.found[name] = body, tag
        is_copy = "x-amz-copy-source" in headers
        answer = f"<CopyObjectResult><ETag>{tag}</ETag></CopyObjectResult>" if is_copy else ""
        return 200, {"ETag": tag}, _text(answer)

    def _post(self, name, query, _, body):
        if "uploads" in query:
            number = str(next(_NUMBERS))
            self.uploads[number] = {}
            kind = "InitiateMultipartUploadResult"
            return 200, {}, _text(f"<{kind}><UploadId>{number}</UploadId></{kind}>")
        parts = self.uploads.pop(query["uploadId"][0])
        self.found[name] = Data(piece for number in sorted(parts) for piece in parts[number]), _new_tag()
        return 200, {}, _text("<CompleteMultipartUploadResult/>")

    def _delete(self, name, query, _headers, _body):
        self.found.pop(name, None)
        return 204, {}, Data()

    def _head(self, name, query, headers, body):
        return self._get(name, query, headers, body)

    def _get(self, name, _query, headers, _body):
        if name not in self.found:
            return _failed(404, "NoSuchKey")
        data, tag = self.found[name]
        more = {"ETag": tag, "Last-Modified": _DATE}
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        if found is None:
            return 200, more, data
        nbytes = data.nbytes()
        start, stop = int(found[1]), min(int(found[2] or nbytes) + 1, nbytes)
        if start >= nbytes:
            return _failed(416, "InvalidRange")
        more["Content-Range"] = f"bytes {start}-{stop - 1}/{nbytes}"
        return 206, more, data.cut(start, stop)

    def _listed(self, bucket, query):
        prefix, mark = (query.get(name, [""])[0] for name in ("prefix", "delimiter"))
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        keys = (name.partition("/")[2] for name in list(self.found) if name.startswith(f"{bucket}/{prefix}"))
        rest = sorted(key for key in keys if key > after)
        page = rest[:_PAGE]
        folders = {}
        text = []
        for key in page:
            cut = key.find(mark, len(prefix)) if mark else -1
            if cut >= 0:
                folders[key[: cut + 1]] = True
                continue
            data, tag = self.found[f"{bucket}/{key}"]
            text.append(f"<Contents><Key>{escape(key)}</Key><Size>{data.nbytes()}</Size><ETag>{escape(tag)}</ETag>"
                        "<LastModified>2026-11-22T10:00:00.000Z</LastModified></Contents>")  # fmt: skip
        text += [f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>" for key in folders]
        more = len(rest) > _PAGE
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        body = (f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><IsTruncated>{str(more).lower()}'
                f"</IsTruncated><KeyCount>{len(page)}</KeyCount>{token}{''.join(text)}</ListBucketResult>")  # fmt: skip
        return 200, {"Content-Type": "application/xml"}, _text(body)


def _unknown(*_):
    return _failed(501, "NotImplemented")


def _failed(status, code):
    return status, {}, _text(f"<Error><Code>{code}</Code><Message>{code}</Message></Error>")


def _text(text):
    return Data([text.encode()])


def _new_tag():
    return f'"{next(_NUMBERS):032x}"'


class Connection:
    """A client's connection, on a thread of its own."""

    def __init__(self, objects, lock, sock):
        self.objects, self.lock, self.sock = objects, lock, sock
        self._early = b""  # received, and not looked at yet

    def serve(self):
        """Answer requests until the client ends the connection."""
        with self.sock, suppress(ConnectionError, EOFError):
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                method, *request = self._received()
                with self.lock:
                    status, headers, body = self.objects.answer(method, *request)
                self._answer(status, headers, body, method != "HEAD")

    def _received(self):
        """Return method, target, headers and body of the next request."""
        while b"\r\n\r\n" not in self._early:
            self._early += self._more(2**16)
        head, _, self._early = self._early.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        method, target, _ = first.split(" ")
        if "expect" in headers:
            self.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        return method, target, headers, Data([self._body(int(headers.get("content-length", 0)))])

    def _body(self, nbytes):
        body = memoryview(np.empty(nbytes, "u1"))  # unlike a bytearray it is not filled first
        at = min(len(self._early), nbytes)
        body[:at], self._early = self._early[:at], self._early[at:]
        while at < nbytes:
            count = self.sock.recv_into(body[at:], min(nbytes - at, 2**20))
            if not count:
                raise EOFError
            at += count
        return body

    def _more(self, nbytes):
        data = self.sock.recv(nbytes)
        if not data:
            raise EOFError
        return data

    def _answer(self, status, headers, body, with_body):
        lines = [f"HTTP/1.1 {status} {_REASONS[status]}", *(f"{name}: {value}" for name, value in headers.items())]
        lines += [f"Content-Length: {body.nbytes()}"] if status != 204 else []
        head = "\r\n".join([*lines, "", ""]).encode()
        pieces = [head, *body] if with_body else [head]
        for piece in pieces if body.nbytes() > 2**16 else [b"".join(pieces)]:
            self.sock.sendall(piece)


def _serve():
    objects, lock = Objects(), Lock()
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(listening.getsockname()[1], flush=True)
    while True:
        sock, _ = listening.accept()
        Thread(target=Connection(objects, lock, sock).serve, daemon=True).start()


if __name__ == "__main__":
    _serve()
