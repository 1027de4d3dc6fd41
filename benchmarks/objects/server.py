"""A server that speaks as much of S3 as the benchmark asks for, in memory: ``python -m benchmarks.objects.server``.

Servers of others take longer for a request than we do, and would be all that is measured. This one takes 0.1 ms. It
heeds the conditions of writes. It prints its port.
"""

import asyncio
import itertools
import re
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from benchmarks.objects.proxy import run

_PAGE = 1000
_DATE = "Sun, 22 Nov 2026 10:00:00 GMT"
_NUMBERS = itertools.count()
_REASONS = {200: "OK", 204: "No Content", 206: "Partial Content", 404: "Not Found", 412: "Precondition Failed",
            416: "Range Not Satisfiable", 501: "Not Implemented"}  # fmt: skip


class Objects:
    """Objects by bucket and key, and parts of uploads."""

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
            for key in re.findall(r"<Key>(.*?)</Key>", body.decode()):
                self.found.pop(f"{bucket}/{unescape(key)}", None)
            return 200, {}, b"<DeleteResult/>"
        return self._listed(bucket, query) if method == "GET" else (200, {}, b"")

    def _put(self, name, query, headers, body):
        if "partNumber" in query:
            self.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
            return 200, {"ETag": _new_tag()}, b""
        if "x-amz-copy-source" in headers:
            body = self.found[unquote(headers["x-amz-copy-source"]).lstrip("/")][0]
        there = self.found.get(name)
        if ("if-none-match" in headers and there) or ("if-match" in headers and there[1] != headers["if-match"]):
            return _failed(412, "PreconditionFailed")
        tag = _new_tag()
        self.found[name] = body, tag
        is_copy = "x-amz-copy-source" in headers
        return 200, {"ETag": tag}, f"<CopyObjectResult><ETag>{tag}</ETag></CopyObjectResult>".encode() * is_copy

    def _post(self, name, query, _, body):
        if "uploads" in query:
            number = str(next(_NUMBERS))
            self.uploads[number] = {}
            kind = "InitiateMultipartUploadResult"
            return 200, {}, f"<{kind}><UploadId>{number}</UploadId></{kind}>".encode()
        parts = self.uploads.pop(query["uploadId"][0])
        self.found[name] = b"".join(parts[number] for number in sorted(parts)), _new_tag()
        return 200, {}, b"<CompleteMultipartUploadResult/>"

    def _delete(self, name, query, _headers, _body):
        self.found.pop(name, None)
        return 204, {}, b""

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
        start, stop = int(found[1]), min(int(found[2] or len(data)) + 1, len(data))
        if start >= len(data):
            return _failed(416, "InvalidRange")
        more["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        return 206, more, memoryview(data)[start:stop]

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
            text.append(f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>{escape(tag)}</ETag>"
                        "<LastModified>2026-11-22T10:00:00.000Z</LastModified></Contents>")  # fmt: skip
        text += [f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>" for key in folders]
        more = len(rest) > _PAGE
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        body = (f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><IsTruncated>{str(more).lower()}'
                f"</IsTruncated><KeyCount>{len(page)}</KeyCount>{token}{''.join(text)}</ListBucketResult>")  # fmt: skip
        return 200, {"Content-Type": "application/xml"}, body.encode()


def _unknown(*_):
    return _failed(501, "NotImplemented")


def _failed(status, code):
    return status, {}, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def _new_tag():
    return f'"{next(_NUMBERS):032x}"'


async def _received(reader, writer):
    """Return method, target, headers and body of the next request; None at the end."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.split("\r\n")[:-2]
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    method, target, _ = first.split(" ")
    if "expect" in headers:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    parts, left = [], int(headers.get("content-length", 0))
    while left:
        part = await reader.read(min(left, 2**20))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return method, target, headers, b"".join(parts)


async def _talk(objects, reader, writer):
    while (request := await _received(reader, writer)) is not None:
        status, headers, body = objects.answer(*request)
        lines = [f"HTTP/1.1 {status} {_REASONS[status]}", *(f"{name}: {value}" for name, value in headers.items())]
        lines += [f"Content-Length: {len(body)}"] if status != 204 else []
        writer.write("\r\n".join([*lines, "", ""]).encode())
        if request[0] != "HEAD" and len(body):
            writer.write(body)
        try:
            await writer.drain()
        except ConnectionError:
            break
    writer.close()


async def _serve():
    objects = Objects()
    server = await asyncio.start_server(
        lambda reader, writer: _talk(objects, reader, writer), "127.0.0.1", 0, limit=2**22, backlog=512
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    run(_serve())
