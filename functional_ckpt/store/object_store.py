"""`ObjectStore`: objects of a bucket, by TensorStore's key-value stores: ``s3://``, ``gs://``; ``http(s)://`` to read.

A request costs a round trip, so that many are sent at a time; names come from one listing, which tells no sizes.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from math import ceil
from threading import Lock
from typing import Any

import attrs
import tensorstore as ts

from functional_ckpt.errors import AlreadyExistsError, CorruptionError, StorageError
from functional_ckpt.store.access import Place, StorePolicy
from functional_ckpt.store.base import METADATA_NBYTES, UNSIZED, Capabilities, OnBlock, check_limit
from functional_ckpt.store.joiner import REUSED_NBYTES, Joiner, copy_bytes, joined
from functional_ckpt.store.server_errors import explained, knows_no_condition
from functional_ckpt.store.whole import WholeStore
from functional_ckpt.store.zarr import refuse_forked

__all__ = ["ObjectStore"]

#: So many requests at a time bring what this process can copy: connections to Amazon's S3 carry about 85 MB/s each.
_STREAMS = 16
#: At most so many of them are for one object,
_PARTS = 4
#: and each brings between so many bytes, if the object has them,
_PART_NBYTES = 8 * 2**20
#: and so many.
_LARGEST_NBYTES = 32 * 2**20
#: What a request brings is taken in blocks. Measured, for 1 GiB in objects of 32 MiB: taken whole, each by memory that
#: is new to the process, they cost 2.4 CPU seconds; in blocks, whose memory is used again, 1.0.
_BLOCK_NBYTES = 4 * 2**20
#: What lies between two ranges is fetched with them if it is less: a request takes as long as so many bytes.
_GAP_NBYTES = 2**20
#: The generation, in TensorStore's words, of an object that is not there.
_MISSING = b"\x02"
_LONGEST_DELAY_S = 8.0
#: Servers (TensorStore's words for them) that have said that they know no condition for writing over an object.
_UNCONDITIONAL: set[str] = set()


@attrs.define(eq=False)
class _Guarding:
    """When the claim was last looked at, on the clock of ``time.monotonic``; one thread at a time looks."""

    lock: Any = attrs.field(factory=Lock)
    looked_s: float | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Guarding, ()


@attrs.frozen
class ObjectStore(WholeStore):
    """Objects under a prefix of a bucket. Each write is whole, and done when it returns; none replaces an object.

    Nothing is written any more once the claim `guard` is gone, as far as this rank has noticed: it looks every third of
    a lease. `reads` tells how many objects are read at a time: the fewer, the more requests for each.

    Examples
    --------
    >>> ObjectStore(Place.of("s3", "bucket/run/step-1")).url
    's3://bucket/run/step-1'
    """

    place: Place
    policy: StorePolicy = attrs.field(factory=StorePolicy)
    guard: str | None = None
    reads: int = 1
    sync: str = attrs.field(default="none", init=False)
    _guarding: "_Guarding" = attrs.field(init=False, eq=False, repr=False, factory=lambda: _Guarding())
    _joiner: Joiner = attrs.field(init=False, eq=False, repr=False, factory=Joiner)

    @property
    def url(self) -> str:
        """The place as a URL."""
        return self.place.url

    @property
    def capabilities(self) -> Capabilities:
        """No rename, no sizes, and many requests at a time."""
        lists = self.place.scheme in ("s3", "gs")
        return Capabilities(
            shared_chunks=False,
            rename=False,
            shared=True,
            sized=False,
            lists=lists,
            concurrency=self.policy.concurrency,
        )

    @property
    def lease_s(self) -> float:
        """How long a claim counts that is not renewed."""
        return self.policy.lease_s

    @property
    def alone(self) -> bool:
        """Whether the caller says that nobody else saves or sweeps here meanwhile."""
        return self.policy.alone

    def create(self, name: str, parts: Sequence[memoryview], nbytes: int, each: OnBlock | None = None) -> None:
        """Write a new object, in one request. One that is there already stays, and must hold the same bytes.

        It does where the answer to our own request was lost, and the request repeated.
        """
        self.check_guard()
        kv = self._kv()
        if nbytes < REUSED_NBYTES:
            request = kv.write(name, joined(parts, nbytes), if_equal=_MISSING)
        else:
            request = self._joiner.passed(parts, nbytes, lambda data: kv.write(name, data, if_equal=_MISSING))
        for part in parts if each is not None else ():  # while the request is on its way
            each(part)  # type: ignore[misc]
        self._created(name, request, lambda: joined(parts, nbytes))

    def _created(self, name: str, request: Any, content: Callable[[], bytes]) -> object:
        """Wait for the request that writes a new object, and return its stamp."""
        generation = self._wait("writing", name, request).generation
        if generation:
            return generation
        # This is how TensorStore says that the condition did not hold.
        found = self._wait("reading", name, self._kv().read(name))
        if found.state != "value":
            list(self.names())  # says what is wrong with the bucket, if that is so
            raise StorageError(
                "writing failed", path=self._named(name), found="the server refused it", remedy="Save again"
            )
        if found.value != content():
            raise AlreadyExistsError("an object exists already", path=name, found=self.url)
        return found.stamp.generation

    def replace(self, name: str, data: bytes, stamp: object) -> object:
        """Write over an object whose stamp is still `stamp`; return the new one, or None if it is another's by now.

        If `stamp` is None the object is created.
        """
        if stamp is None:
            return self._created(name, self._kv().write(name, data, if_equal=_MISSING), lambda: data)
        server = json.dumps({**self.place.spec(self.policy), "path": ""})
        if server not in _UNCONDITIONAL:
            try:
                return self._replaced(name, data, stamp)
            except StorageError as error:
                if not knows_no_condition(error):
                    raise
                _UNCONDITIONAL.add(server)
        # A server that knows no such condition: we look, and then write.
        if self.stamp(name) != stamp:
            return None
        return self._wait("writing", name, self._kv().write(name, data)).generation

    def _replaced(self, name: str, data: bytes, stamp: object) -> object:
        """Write over an object by one conditional request, as `replace` does."""
        kv = self._kv()
        generation = self._wait("writing", name, kv.write(name, data, if_equal=stamp)).generation
        if generation:
            return generation
        found = self._wait("reading", name, kv.read(name))  # the answer to our own request may have been lost
        return found.stamp.generation if found.state == "value" and found.value == data else None

    def refuses(self, name: str, data: bytes) -> bool:
        """Try to create an object that is there already; tell whether the server refuses.

        Sent again after an answer was lost, the request is refused, or not, as the first time.
        """
        return not self._wait("writing", name, self._kv().write(name, data, if_equal=_MISSING)).generation

    def read(self, name: str, limit: int = METADATA_NBYTES) -> bytes | None:
        """Return an object's bytes, or None. Its size is known once it is read."""
        found = self._wait("reading", name, self._kv().read(name))
        if found.state != "value":
            return None
        value: bytes = found.value  # a copy each time that it is asked for
        check_limit(self._named(name), len(value), limit)
        return value

    def nbytes_of(self, name: str) -> int | None:
        """Return `UNSIZED` if there is an object, or None."""
        return None if self.stamp(name) is None else UNSIZED

    def reading(self, count: int) -> "ObjectStore":
        """Return this store for reading `count` objects at a time."""
        return attrs.evolve(self, reads=max(1, count))

    def read_into(self, name: str, into: memoryview, each: OnBlock | None = None) -> None:
        """Read an object's head, a large one by several requests at a time unless as many objects are read."""
        for start, data in self._blocks(name, len(into)):
            block = into[start : start + len(data)]
            copy_bytes(data, block)
            if each is not None:
                each(block)

    def read_ranges(self, name: str, starts: Sequence[int], nbytes: int, into: memoryview) -> None:
        """Read ranges of an object, and what lies between two of them if that is little."""
        spans: list[tuple[int, int]] = []
        for start in starts:
            if spans and 0 <= start - spans[-1][1] < _GAP_NBYTES and start + nbytes - spans[-1][0] <= _PART_NBYTES:
                spans[-1] = spans[-1][0], start + nbytes
            else:
                spans.append((start, start + nbytes))
        todo = iter(enumerate(starts))
        position, start = next(todo)
        for (low, high), data in zip(spans, self._fetched(name, spans), strict=True):
            while low <= start and start + nbytes <= high:
                into[position * nbytes : (position + 1) * nbytes] = data[start - low : start - low + nbytes]
                position, start = next(todo, (-1, -1))

    def scan(self, name: str, nbytes: int, each: OnBlock) -> None:
        """Read an object's head block by block."""
        for _, data in self._blocks(name, nbytes):
            each(data)

    def _blocks(self, name: str, nbytes: int) -> Iterator[tuple[int, memoryview]]:
        """Yield the blocks of an object's head, each with where it begins."""
        cuts = [(at, min(at + _BLOCK_NBYTES, nbytes)) for at in range(0, nbytes, _BLOCK_NBYTES)]
        parts = min(_PARTS, -(-_STREAMS // self.reads))
        wanted = min(max(nbytes / parts, _PART_NBYTES), _LARGEST_NBYTES)
        for (start, _), data in zip(cuts, self._fetched(name, cuts, ceil(wanted / _BLOCK_NBYTES)), strict=True):
            yield start, data

    def _fetched(self, name: str, spans: Sequence[tuple[int, int]], together: int = 1) -> Iterator[memoryview]:
        """Yield the bytes of spans in order, so many of them `together` by one request; a few are on their way.

        A server that answers a range as if it were all of the object (rclone) is asked for all of it.
        """
        whole = b""
        asked = _ahead(_asked(self._kv(), name, spans, together), _PARTS * together)
        for (start, stop), future in zip(spans, asked, strict=True):
            if whole:
                future.cancel()
                yield memoryview(whole)[start:stop]
                continue
            try:
                found = self._wait("reading", name, future)
            except StorageError as error:
                if "OUT_OF_RANGE" not in str(error.found):
                    raise
                whole = self._whole(name, max(stop for _, stop in spans))
                yield memoryview(whole)[start:stop]
                continue
            if found.state != "value":
                raise CorruptionError("an object is missing", path=self._named(name))
            yield memoryview(found.value)

    def _whole(self, name: str, nbytes: int) -> bytes:
        """Return all of an object, which must have `nbytes` bytes at least."""
        data = self.read(name, 2**62)
        if data is None or len(data) < nbytes:
            raise CorruptionError(
                "an object is too short",
                path=self._named(name),
                expected=f"{nbytes} bytes",
                found="nothing" if data is None else f"{len(data)} bytes",
            )
        return data

    def names(self) -> Iterator[str]:
        """Yield the names of all objects under the prefix, by one listing."""
        if not self.capabilities.lists:
            raise StorageError("objects of this store cannot be listed", path=self.url)
        for key in self._wait("listing", "", self._kv().list()):
            yield key.decode("utf-8", "surrogateescape")

    def stamp(self, name: str) -> object:
        """Return the generation of an object, on S3 its entity tag."""
        found = self._wait("looking at", name, self._kv().read(name, byte_range=slice(0, 0)))
        return found.stamp.generation if found.state == "value" else None

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, many at a time."""
        kv = self._kv()
        todo = (kv.write(name, None) for name in names)
        for name, future in zip(names, _ahead(todo, self.policy.concurrency), strict=True):
            self._wait("deleting", name, future)

    def check_guard(self) -> None:
        """Raise `StorageError` if the save that writes here was given up."""
        if self.guard is None:
            return
        with self._guarding.lock:
            now = time.monotonic()
            if self._guarding.looked_s is not None and now - self._guarding.looked_s < self.policy.lease_s / 3:
                return
            try:
                super().check_guard()
            except StorageError:
                list(self.names())  # says what is wrong with the bucket, if that is so
                raise
            self._guarding.looked_s = now

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """Return TensorStore's key-value store at `prefix`."""
        spec = self.place.spec(self.policy)
        return {**spec, "path": spec["path"] + prefix}

    def _named(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _kv(self) -> Any:
        refuse_forked()
        text = json.dumps(self.place.spec(self.policy))
        with_policy = (
            self.policy.credentials_type,
            self.policy.retries,
            self.policy.retry_delay_s,
            self.policy.concurrency,
        )
        try:
            return _opened(text, *with_policy)
        except (ValueError, RuntimeError) as error:
            raise explained("opening", self.url, str(error)) from error

    def _wait(self, what: str, name: str, future: Any) -> Any:
        """Return what a request has brought.

        Raises
        ------
        StorageError
            If it has failed for good, or is not done in time: it is taken back then, as far as it was not sent.
        """
        try:
            return future.result(timeout=self.policy.timeout_s)
        except TimeoutError:
            future.cancel()
            raise StorageError(
                f"{what} took too long",
                path=self._named(name),
                expected=f"at most {self.policy.timeout_s} s",
                remedy="Check the endpoint and the network, or pass a longer StorePolicy(timeout_s=...)",
            ) from None
        except (ValueError, RuntimeError) as error:
            raise explained(what, self._named(name), str(error)) from error


def _asked(kv: Any, name: str, spans: Sequence[tuple[int, int]], together: int) -> Iterator[Any]:
    """Yield what brings each of the spans, in order; `together` of them, which lie side by side, are one request."""
    for at in range(0, len(spans), together):
        with ts.Batch() as batch:
            flying = [kv.read(name, byte_range=slice(*span), batch=batch) for span in spans[at : at + together]]
        yield from flying


def _ahead(futures: Iterable[Any], count: int) -> Iterator[Any]:
    """Yield futures in order; so many of them are on their way at a time."""
    futures = iter(futures)
    flying = list(islice(futures, count))
    try:
        while flying:
            yield flying.pop(0)
            flying += islice(futures, 1)
    finally:
        for future in flying:
            future.cancel()


@cache
def _opened(spec: str, credentials: str, retries: int, delay_s: float, concurrency: int) -> Any:
    """Open a key-value store, once in this process: it keeps connections."""
    waits = {"max_retries": retries, "initial_delay": f"{delay_s}s", "max_delay": f"{max(delay_s, _LONGEST_DELAY_S)}s"}
    many: dict[str, Any] = {"limit": concurrency}
    context = ts.Context(
        {
            "s3_request_retries": waits,
            "gcs_request_retries": waits,
            "http_request_retries": waits,
            "s3_request_concurrency": many,
            "gcs_request_concurrency": many,
            "http_request_concurrency": many,
            "aws_credentials": {"type": credentials},
        }
    )
    return ts.KvStore.open(json.loads(spec), context=context).result()
