"""Open and check committed checkpoints: `read_manifest` and `verify`."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs

from functional_ckpt.errors import (
    CheckpointError,
    CheckpointErrors,
    CorruptionError,
    ProblemError,
    ReplacedError,
    StorageError,
    changed,
)
from functional_ckpt.plan.manifest import FORMAT, VERSION, ArrayEntry, Manifest, check_version
from functional_ckpt.plan.save import GIB
from functional_ckpt.show.bar import Count, displayed
from functional_ckpt.store.access import StorePolicy
from functional_ckpt.store.base import Store
from functional_ckpt.store.chunk import check_chunk, check_digest, chunk_digest, decoding_nbytes
from functional_ckpt.store.encoding import MANIFEST, ROOT, array_metadata, metadata_path
from functional_ckpt.store.foreign import why_not
from functional_ckpt.store.opening import open_store
from functional_ckpt.store.root import CONSOLIDATED, CONSOLIDATED_END, members, root_metadata
from functional_ckpt.store.target import manifest_digest
from functional_ckpt.store.work import Work, at_once, most_at_once, run_all

__all__ = ["Opened", "VerifyReport", "read_manifest", "root_attributes", "verify"]


def read_manifest(path: str | Path, *, store: StorePolicy = StorePolicy()) -> Manifest:
    """Return the manifest of the checkpoint at `path`, checked against the digest in its root.

    Parameters
    ----------
    path
        A directory (path or ``file://``), or a ``memory://``, ``s3://``, ``gs://`` or ``http(s)://`` URL.
    store
        How to reach an object store.

    Raises
    ------
    NotACheckpointError
        If there is no committed checkpoint: the path is empty, holds something else, or a save did not finish there.
    CorruptionError
        If the manifest is missing or is not the one that was committed.

    Examples
    --------
    >>> read_manifest("memory://nothing")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    functional_ckpt.errors.NotACheckpointError: no checkpoint here: path memory://nothing, ...
    """
    return Opened.at(path, store).manifest


@attrs.frozen(eq=False)
class Opened:
    """A committed checkpoint, open for reading; it never reads files of another checkpoint that replaces it.

    `digest` is the digest of the manifest, from the root.

    Examples
    --------
    >>> import functional_ckpt
    >>> _ = functional_ckpt.save({"step": 3}, "memory://opened-example")
    >>> opened = Opened.at("memory://opened-example")
    >>> opened.check(), opened.manifest.values[0].text
    (None, '3')
    """

    store: Store
    manifest: Manifest
    digest: str
    _root: str
    _stamp: object

    @classmethod
    def at(cls, path: str | Path, access: StorePolicy = StorePolicy(), attempts: int = 10) -> "Opened":
        """Open the checkpoint at `path`; if another replaces it meanwhile, open that one.

        Raises
        ------
        NotACheckpointError, CorruptionError
            See `read_manifest`.
        """
        store = open_store(path, access=access).pinned()
        try:
            return cls._of(store)
        except StorageError:
            if store.is_current() or attempts == 1:
                raise
        return cls.at(path, access, attempts - 1)

    @classmethod
    def _of(cls, store: Store) -> "Opened":
        concurrency = store.capabilities.concurrency
        # The stamp first: a root that is replaced meanwhile has another.
        calls = [lambda: (store.stamp(ROOT), store.read(ROOT)), lambda: store.read(MANIFEST)]
        begun: Any = at_once(calls if concurrency else calls[:1], concurrency)
        stamp, root = begun[0]
        expected: str = root_attributes(store, root)[FORMAT]["manifest"]
        data = begun[1] if concurrency else store.read(MANIFEST)
        found = None if data is None else manifest_digest(data)
        if data is None or found != expected:
            raise CorruptionError(
                "the manifest is missing" if data is None else "the manifest is not the one that was committed",
                path=f"{store.url}/{MANIFEST}",
                expected=expected,
                found=found,
                remedy="Restore the file, or load another checkpoint",
            )
        return cls(store, Manifest.from_json(data), expected, manifest_digest(root or b""), stamp)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Raise `ReplacedError` for a storage error that occurs because the checkpoint was replaced meanwhile.

        Raises
        ------
        ReplacedError
            Instead of the storage error, such as a missing file.
        """
        try:
            yield
        except (StorageError, CheckpointErrors) as error:
            inner = error.exceptions if isinstance(error, CheckpointErrors) else (error,)
            if any(isinstance(problem, StorageError) for problem in inner) and not self.is_there():
                raise self._replaced() from error
            raise

    def check(self) -> None:
        """Raise `ReplacedError` if the root has been replaced; otherwise all files that were read belong to it."""
        if not self._is_same_root():
            raise self._replaced()

    def is_there(self) -> bool:
        """Tell whether the checkpoint is still there; true if that cannot be known."""
        try:
            return self.store.is_current() and self._is_same_root()
        except StorageError:
            return True  # unknown: the original error is reported

    def close(self) -> None:
        """Close the directory, where waiting until the last reference is gone may take long."""
        self.store.unpin()

    def _is_same_root(self) -> bool:
        if self._stamp == self.store.stamp(ROOT):
            return True
        root = self.store.read(ROOT)
        return root is not None and manifest_digest(root) == self._root

    def _replaced(self) -> ReplacedError:
        return ReplacedError(
            "the checkpoint was replaced or removed while it was read",
            path=self.store.url,
            remedy="If it was overwritten, load it again",
        )


def root_attributes(store: Store, root: bytes | None) -> dict[str, Any]:
    """Return the attributes in a root's text: the caller's, and ours, which name the format and the manifest.

    Raises
    ------
    NotACheckpointError
        If this is not the root of a checkpoint; the error tells what is in the store instead.
    """
    try:
        attributes: dict[str, Any] = _document(root or b"")["attributes"]
        ours = attributes[FORMAT]
        if ours["format"] != FORMAT:
            raise KeyError("format")
        check_version(ours["version"])
        if not isinstance(ours["manifest"], str):
            raise TypeError("manifest")
        return attributes
    except (ValueError, KeyError, TypeError, RecursionError):
        raise why_not(store, root) from None


def _document(root: bytes) -> Any:
    """Return a root's document; one that we wrote is returned without the metadata of its arrays, which is not parsed.

    That metadata is for other tools, and has several times the size of the manifest. Braces in it are balanced, so that
    the rest is no JSON if `CONSOLIDATED_END` was found anywhere else.
    """
    _, found, rest = root.partition(CONSOLIDATED_END)
    if found and root.startswith(CONSOLIDATED):
        with suppress(ValueError):
            return json.loads(b"{" + rest)
    return json.loads(root)


@attrs.frozen
class VerifyReport:
    """The result of `verify`; problems name key and chunk.

    Examples
    --------
    >>> VerifyReport((), 3, 12).ok
    True
    """

    problems: tuple[CheckpointError, ...]
    chunks: int
    nbytes: int

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems


def verify(
    path: str | Path, on_bytes: Callable[[int], None] | None = None, *, store: StorePolicy = StorePolicy()
) -> VerifyReport:
    """Read every chunk and compare it with its digest, and root and every array's metadata with the manifest.

    Problems of root and arrays are returned, not raised.

    Parameters
    ----------
    path
        A directory (path or ``file://``), or a ``memory://``, ``s3://``, ``gs://`` or ``http(s)://`` URL.
    on_bytes
        Called from working threads with the number of bytes that were just read and compared.
    store
        How to reach an object store.

    Raises
    ------
    NotACheckpointError, CorruptionError
        If there is no checkpoint, or its manifest is damaged.
    ReplacedError
        If the checkpoint was replaced meanwhile.
    """
    opened = Opened.at(path, store)
    manifest, concurrency = opened.manifest, opened.store.capabilities.concurrency
    held = (decoding_nbytes(entry.layout) for entry in manifest.arrays for _ in range(entry.grid.size))
    found_in = opened.store.reading(most_at_once(held, GIB, concurrency))
    work = [Work(0, lambda: _root_problem(found_in, manifest), 0)]
    work += [w for entry in manifest.arrays for w in _checks(found_in, entry)]
    done: list[int] = []

    def count(nbytes: int) -> None:
        done.append(nbytes)
        if on_bytes is not None:
            on_bytes(nbytes)

    def now() -> Count:
        return Count("read", sum(done), manifest.nbytes)

    with displayed(f"verifying {found_in.url.rpartition('/')[2]!r}", now, bar=on_bytes is None):
        found = run_all(work, GIB, count, concurrency)
    problems = tuple(p for p in found if isinstance(p, CheckpointError))
    if problems and not opened.is_there():
        opened.check()
    return VerifyReport(problems, sum(e.grid.size for e in manifest.arrays), manifest.nbytes)


def _root_problem(store: Store, manifest: Manifest) -> ProblemError | None:
    """Return a problem if the root does not agree with the manifest."""
    try:
        root = json.loads(store.read(ROOT) or b"")
        ours = root["attributes"][FORMAT]
        forms = (members(manifest.arrays), None)
        made = (json.loads(root_metadata(manifest, ours["manifest"], consolidated)) for consolidated in forms)
        # A later minor version may have more in the root.
        if tuple(ours["version"]) > VERSION or root in made:
            return None
    except ProblemError as error:
        return error
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return CorruptionError("the root was changed", path=f"{store.url}/{ROOT}", remedy="Restore the file")


def _checks(store: Store, entry: ArrayEntry) -> list[Work]:
    grid = entry.grid

    def header() -> ProblemError | None:
        expected = array_metadata(entry.spec, entry.layout)
        try:
            data = store.read(metadata_path(entry.spec.key), len(expected))
        except ProblemError as error:
            return changed(error, key=entry.spec.key)
        if data == expected:
            return None
        what = "an array's zarr.json is missing" if data is None else "an array's zarr.json was changed"
        return CorruptionError(what, entry.spec.key, shape=entry.spec.shape)

    def chunk(index: tuple[int, ...]) -> Callable[[], ProblemError | None]:
        def check() -> ProblemError | None:
            problem = check_chunk(store, entry, index)
            if problem is not None:
                return problem
            try:
                check_digest(entry, grid.position(index), chunk_digest(store, entry.spec, entry.layout, index))
            except ProblemError as error:
                return error
            return None

        return check

    held = decoding_nbytes(entry.layout)
    return [
        Work(0, header, 0),
        *(
            Work(grid.box(index).size * entry.spec.itemsize, chunk(index), held)
            for index in grid.touched(entry.spec.box)
        ),
    ]
