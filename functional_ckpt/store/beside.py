"""Files beside a checkpoint that belong to it: its root holds digests of them, so that it is not taken with others."""

import json
from collections.abc import Iterable, Mapping

import xxhash

from functional_ckpt.errors import AlreadyExistsError
from functional_ckpt.plan.manifest import FORMAT, Manifest
from functional_ckpt.store.base import UNSIZED, Store

__all__ = ["BESIDE", "bound_beside", "digests_beside", "require_beside"]

#: Attribute of the root: name of a file beside it -> digest of the file when the root was committed.
BESIDE = f"{FORMAT}_beside"


def digests_beside(store: Store, names: Iterable[str]) -> dict[str, str]:
    """Return the digests of those of the files `names` that are there.

    Examples
    --------
    >>> from functional_ckpt.store.opening import open_store
    >>> digests_beside(open_store("memory://beside-example"), ["common.pt"])
    {}
    """
    found = {}
    for name in names:
        digest = _digest(store, name)
        if digest is not None:
            found[name] = digest
    return found


def _digest(store: Store, name: str) -> str | None:
    nbytes = store.nbytes_of(name) if store.capabilities.sized else UNSIZED
    if nbytes is None:
        return None
    digest = xxhash.xxh3_128()
    if nbytes != UNSIZED:
        store.scan(name, nbytes, digest.update)
        return digest.hexdigest()
    data = store.read(name)
    return None if data is None else xxhash.xxh3_128_hexdigest(data)


def bound_beside(manifest: Manifest) -> dict[str, str] | None:
    """Return the digests that the root of a checkpoint holds; None if it holds none."""
    found = json.loads(manifest.attributes).get(BESIDE)
    return found if isinstance(found, dict) else None


def require_beside(store: Store, expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Raise unless the files beside a checkpoint, `found` just now, are those that were saved with it.

    Raises
    ------
    AlreadyExistsError
        If another save has replaced them.
    """
    for name, digest in expected.items():
        if found.get(name) != digest:
            raise AlreadyExistsError(
                "another save into this directory has replaced what this one has written", path=f"{store.url}/{name}",
                expected=digest, found=found.get(name, "none"), remedy="Save to one directory once at a time",
            )  # fmt: skip
