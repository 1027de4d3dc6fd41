"""Open and check committed checkpoints: `read_manifest` and `verify`."""

import json
from collections.abc import Callable
from pathlib import Path

import attrs

from functional_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    NotACheckpointError,
    ProblemError,
)
from functional_ckpt.plan.manifest import FORMAT, VERSION, ArrayEntry, Manifest, check_version
from functional_ckpt.store.base import Store
from functional_ckpt.store.chunk import check_chunk, check_digest, read_chunk
from functional_ckpt.store.commit import MANIFEST, ROOT, manifest_digest, root_metadata
from functional_ckpt.store.encoding import array_metadata, digest, node_name
from functional_ckpt.store.opening import open_store
from functional_ckpt.store.work import Work, run_all

__all__ = ["VerifyReport", "check_identity", "read_committed", "read_manifest", "verify"]

_BUDGET_NBYTES = 2**30


def read_manifest(path: str | Path) -> Manifest:
    """Return the manifest of the checkpoint at `path`, checked against the digest in its root.

    Raises
    ------
    NotACheckpointError
        If there is no committed checkpoint of ours: nothing there, something else, or a save that never finished.
    CorruptionError
        If the manifest is missing or is not the one that was committed.

    Examples
    --------
    >>> read_manifest("memory://nothing")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    functional_ckpt.errors.NotACheckpointError: no checkpoint here: path memory://nothing, ...
    """
    return read_committed(open_store(path))[0]


def read_committed(store: Store) -> tuple[Manifest, str]:
    """Return the manifest of a store, and its digest as the root records it; see `read_manifest`."""
    expected = _committed_digest(store)
    data = store.read(MANIFEST)
    if data is None or manifest_digest(data) != expected:
        raise CorruptionError(
            "the manifest is missing" if data is None else "the manifest is not the one that was committed",
            path=f"{store.url}/{MANIFEST}", expected=expected, found=None if data is None else manifest_digest(data),
            remedy="Restore the file, or load another checkpoint",
        )  # fmt: skip
    return Manifest.from_json(data), expected


def _committed_digest(store: Store) -> str:
    root = store.read(ROOT)
    if root is None:
        begun = next(iter(store.names()), None) is not None
        raise NotACheckpointError(
            "no checkpoint here", path=store.url,
            found="no root: a save that did not finish, or was partly deleted" if begun else "nothing",
            remedy="Load another checkpoint; functional_ckpt.sweep removes leftovers" if begun else "Check the path",
        )  # fmt: skip
    try:
        ours = json.loads(root)["attributes"]["functional_ckpt"]
        if ours["format"] != FORMAT:
            raise KeyError("format")
        check_version(ours["version"])
        return str(ours["manifest"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise NotACheckpointError(
            "this Zarr group is not a checkpoint of functional_ckpt", path=store.url, remedy="Open it with zarr"
        ) from None


def check_identity(store: Store, identity: object) -> None:
    """Raise `CorruptionError` if another checkpoint has taken this one's place since `identity` was asked for."""
    if store.identity() != identity:
        raise CorruptionError("the checkpoint was replaced while it was read", path=store.url, remedy="Load it again")


@attrs.frozen
class VerifyReport:
    """What `verify` found: problems name key and chunk.

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


def verify(path: str | Path, on_bytes: Callable[[int], None] | None = None) -> VerifyReport:
    """Read every chunk and compare it with its digest, and root and every array's metadata with the manifest.

    Problems of root and arrays are returned, not raised.

    Raises
    ------
    NotACheckpointError, CorruptionError
        If there is no checkpoint, or its manifest cannot be trusted.
    """
    store = open_store(path)
    manifest = read_manifest(path)
    work = [Work(0, lambda: _root_problem(store, manifest), 0)]
    work += [w for entry in manifest.arrays for w in _checks(store, entry)]
    found = run_all(work, _BUDGET_NBYTES, on_bytes)
    problems = tuple(p for p in found if isinstance(p, CheckpointError))
    return VerifyReport(problems, sum(e.grid.size for e in manifest.arrays), manifest.nbytes)


def _root_problem(store: Store, manifest: Manifest) -> ProblemError | None:
    """Return a problem if the root says something else than the manifest."""
    try:
        root = json.loads(store.read(ROOT) or b"")
        ours = root["attributes"][FORMAT]
        made = (json.loads(root_metadata(manifest, ours["manifest"], consolidate)) for consolidate in (True, False))
        # Who wrote a later minor version knows what else belongs there.
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
        try:
            data = store.read(f"{node_name(entry.spec.key)}/zarr.json")
        except ProblemError as error:
            return attrs.evolve(error, key=entry.spec.key)
        if data == array_metadata(entry.spec, entry.layout):
            return None
        what = "an array's zarr.json is missing" if data is None else "an array's zarr.json was changed"
        return CorruptionError(what, entry.spec.key, None, entry.spec.shape)

    def chunk(index: tuple[int, ...]) -> Callable[[], ProblemError | None]:
        def check() -> ProblemError | None:
            problem = check_chunk(store, entry, index)
            if problem is not None:
                return problem
            try:
                check_digest(entry, grid.position(index), digest(read_chunk(store, entry.spec, entry.layout, index)))
            except ProblemError as error:
                return error
            return None

        return check

    return [
        Work(0, header, 0),
        *(
            Work(grid.box(index).size * entry.spec.itemsize, chunk(index), grid.box(index).size * entry.spec.itemsize)
            for index in grid.touched(entry.spec.box)
        ),
    ]
