"""Stores of other packages, found by the scheme of a URL among the entry points ``functional_ckpt.stores``.

The name of an entry point is the scheme; its object is called with the URL and the keywords `access`, a `StorePolicy`,
and `guard`, the name of a claim or None, and returns a `Store` of the objects below the URL.
"""

from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from functional_ckpt.errors import CheckpointError, PolicyError, StorageError
from functional_ckpt.store.access import StorePolicy
from functional_ckpt.store.base import Store

__all__ = ["GROUP", "plugged_in"]

#: The entry points of stores.
GROUP = "functional_ckpt.stores"
_NEEDED = tuple(sorted(name for name in vars(Store) if not name.startswith("_")))
#: What a store needs besides if other processes see what this one writes.
_NEEDED_SHARED = ("alone", "lease_s", "refuses", "replace")


def plugged_in(scheme: str, url: str, guard: str | None, access: StorePolicy) -> Store | None:
    """Return the store that another package has for a URL; None if none has.

    Raises
    ------
    PolicyError
        If several packages have one, or it cannot be imported, or is no store.
    StorageError
        If it cannot be opened.

    Examples
    --------
    >>> plugged_in("papyrus", "papyrus://scroll", None, StorePolicy()) is None
    True
    """
    found = _opener(scheme)
    if found is None:
        return None
    package, opener = found
    try:
        store = opener(url, access=access, guard=guard)
    except CheckpointError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise StorageError(f"the store of the package {package} could not be opened", path=url, found=told) from error
    _require_store(store, url, package)
    return store  # type: ignore[no-any-return] # checked by its members


@cache
def _opener(scheme: str) -> tuple[str, Callable[..., Any]] | None:
    """Return the name of a package, and what opens its store; looked up once in this process."""
    # One package may be found twice, in two places of the path.
    found = {each.value: each for each in entry_points(group=GROUP, name=scheme)}
    if not found:
        return None
    packages = sorted(map(_package, found.values()))
    if len(found) > 1:
        raise PolicyError(
            f"several packages have a store for {scheme}://", expected="one", found=", ".join(packages),
            remedy="Uninstall all but one of them",
        )  # fmt: skip
    (entry,) = found.values()
    try:
        opener = entry.load()
    except Exception as error:
        raise PolicyError(
            f"the store for {scheme}:// cannot be imported", expected=f"{entry.value} of the package {packages[0]}",
            found=f"{type(error).__name__}: {error}", remedy=f"Install {packages[0]} again, or uninstall it",
        ) from error  # fmt: skip
    if not callable(opener):
        raise _no_store(scheme, packages[0], "a function of a URL", repr(opener))
    return packages[0], opener


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


def _require_store(store: Any, url: str, package: str) -> None:
    missing = [name for name in _NEEDED if not hasattr(store, name)]
    if not missing and store.capabilities.shared:
        missing = [name for name in _NEEDED_SHARED if not hasattr(store, name)]
    if missing:
        raise _no_store(url, package, f"a store with {', '.join(missing)}", type(store).__name__)


def _no_store(url: str, package: str, expected: str, found: str) -> PolicyError:
    return PolicyError(
        f"what the package {package} has for {url} is no store", expected=expected, found=found,
        remedy="Derive it from functional_ckpt.store.WholeStore",
    )  # fmt: skip
