"""A small server that speaks as much of S3 and of Google's JSON API as our stores ask for, with a bucket ``ckpt``.
It holds its objects in memory, in this process.

It heeds the conditions of writes unless it is told not to. The tests of `tox -e stores` run against servers of others.
"""

import hashlib
import itertools
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "ckpt"
_PAGE = 1000


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


class SmallServer:
    """`objects` maps keys to bytes; `port` is where it listens."""

    def __init__(self, heeds_conditions=True):
        self.objects, self.lock, self.heeds_conditions = {}, threading.Lock(), heeds_conditions
        self.generations, self.numbers = {}, itertools.count(1)  # for Google's API only
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": self}))
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        """Stop."""
        self._server.shutdown()
        self._server.server_close()


_GOOGLE = re.compile(r"(?P<upload>/upload)?/storage/v1/b/(?P<bucket>[^/]+)/o(?:/(?P<key>.+))?")


def _tag(data):
    return f'"{hashlib.md5(data).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    store: SmallServer

    def log_message(self, *_):
        pass

    def _answer(self, status, data=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if status != 204:
            self.send_header("Content-Length", headers.get("nbytes") or str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        self.wfile.flush()

    def _fail(self, status, code):
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _key(self):
        """Return the key that is asked for, or None once it is told that there is no such bucket."""
        bucket, _, key = unquote(urlsplit(self.path).path).lstrip("/").partition("/")
        if bucket != BUCKET:
            self._fail(404, "NoSuchBucket")
            return None
        return key

    def do_POST(self):
        """Write an object by Google's API."""
        data = self.rfile.read(int(self.headers["Content-Length"]))
        parts, query = urlsplit(self.path), parse_qs(urlsplit(self.path).query)
        if _GOOGLE.fullmatch(parts.path)["bucket"] != BUCKET:
            self._fail(404, "notFound")
            return
        key = query["name"][0]
        with self.store.lock:
            if not self._matches(key, query):
                self._fail(412, "conditionNotMet")
                return
            self.store.objects[key] = data
            self.store.generations[key] = next(self.store.numbers)
        self._answer(200, self._resource(key))

    def _matches(self, key, query):
        """Tell whether an object has the generation that is asked for; 0 means that there is none."""
        found = self.store.generations.get(key, 0) if key in self.store.objects else 0
        wanted = query.get("ifGenerationMatch")
        return wanted is None or int(wanted[0]) == found or not self.store.heeds_conditions

    def _resource(self, key):
        generation, nbytes = self.store.generations.get(key, 1), len(self.store.objects[key])
        found = {"name": key, "bucket": BUCKET, "generation": str(generation), "size": str(nbytes)}
        return json.dumps(found).encode()

    def _google(self, found):
        """Answer a GET or DELETE of Google's API."""
        query, key = parse_qs(urlsplit(self.path).query), unquote(found["key"] or "")
        if found["bucket"] != BUCKET:
            self._fail(404, "notFound")
        elif not key:
            low, high = query.get("startOffset", [""])[0], query.get("endOffset", ["\U0010ffff"])[0]
            with self.store.lock:
                keys = sorted(key for key in self.store.objects if low <= key < high)
            after = query.get("pageToken", [""])[0]
            keys = [key for key in keys if key > after]
            more = {"nextPageToken": keys[_PAGE - 1]} if len(keys) > _PAGE else {}
            self._answer(200, json.dumps({"items": [{"name": key} for key in keys[:_PAGE]], **more}).encode())
        elif key not in self.store.objects:
            self._fail(404, "notFound")
        elif self.command == "DELETE":
            with self.store.lock:
                if not self._matches(key, query):
                    self._fail(412, "conditionNotMet")
                    return
                self.store.objects.pop(key, None)
            self._answer(204)
        elif query["alt"] == ["json"]:
            self._answer(200, self._resource(key))
        else:
            self._body(self.store.objects[key], x_goog_generation=str(self.store.generations.get(key, 1)))

    def do_PUT(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        key = self._key()
        if key is None:
            return
        with self.store.lock:
            there = self.store.objects.get(key)
            wanted, unwanted = self.headers["If-Match"], self.headers["If-None-Match"]
            refused = (unwanted and there is not None) or (wanted and (there is None or _tag(there) != wanted))
            if refused and self.store.heeds_conditions:
                self._fail(412, "PreconditionFailed")
                return
            self.store.objects[key] = data
        self._answer(200, ETag=_tag(data))

    def do_DELETE(self):
        google = _GOOGLE.fullmatch(urlsplit(self.path).path)
        if google is not None:
            self._google(google)
            return
        key = self._key()
        if key is not None:
            with self.store.lock:
                self.store.objects.pop(key, None)
            self._answer(204)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        google = _GOOGLE.fullmatch(urlsplit(self.path).path)
        if google is not None:
            self._google(google)
            return
        key = self._key()
        if key is None:
            return
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            self._list(query.get("prefix", [""])[0], query.get("continuation-token", [""])[0])
            return
        data = self.store.objects.get(key)
        if data is None:
            self._fail(404, "NoSuchKey")
        else:
            self._body(data, ETag=_tag(data))

    def _body(self, data, **headers):
        """Answer with an object or a range of it."""
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
        if found is not None:
            start, stop = int(found[1]), min(int(found[2] or len(data)) + 1, len(data))
            if start >= len(data):
                self._fail(416, "InvalidRange")
            else:
                self._answer(206, data[start:stop], Content_Range=f"bytes {start}-{stop - 1}/{len(data)}", **headers)
        elif self.command == "HEAD":
            self._answer(200, nbytes=str(len(data)), **headers)
        else:
            self._answer(200, data, **headers)

    def _list(self, prefix, after):
        with self.store.lock:
            keys = sorted(key for key in self.store.objects if key.startswith(prefix) and key > after)
        more = len(keys) > _PAGE
        found = "".join(f"<Contents><Key>{escape(key)}</Key><Size>1</Size></Contents>" for key in keys[:_PAGE])
        token = f"<NextContinuationToken>{escape(keys[_PAGE - 1])}</NextContinuationToken>" if more else ""
        self._answer(200, (
            f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>'
            f"<KeyCount>{min(len(keys), _PAGE)}</KeyCount>{token}{found}</ListBucketResult>"
        ).encode())  # fmt: skip
