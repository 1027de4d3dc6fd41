"""Open the `Store` of a path or URL."""

import os
import re
from pathlib import Path, PurePath
from urllib.parse import unquote, urlsplit

from functional_ckpt.errors import NotImplementedYet, PolicyError
from functional_ckpt.plan.field import refuse
from functional_ckpt.store.access import SCHEMES, Place, StorePolicy
from functional_ckpt.store.base import Store, storage_errors
from functional_ckpt.store.files import FileStore

__all__ = ["directory_of", "local_path", "open_store"]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)  # a scheme of one letter would be a drive
_BROKEN_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)(.+)", re.DOTALL)


def open_store(
    url: str | os.PathLike[str],
    sync: str = "none",
    guard: str | None = None,
    access: StorePolicy = StorePolicy(),
) -> Store:
    """Return the store at a path or URL; nothing is created, and no server is asked.

    `sync` is ``"none"``, ``"fsync"`` or ``"syncfs"`` (for file systems only); writing fails once the claim `guard` is
    gone. `access` says how to reach an object store.

    Raises
    ------
    NotImplementedYet
        For a URL scheme without a store.
    PolicyError
        If `url` is neither a path nor a URL.

    Examples
    --------
    >>> open_store("memory://example").capabilities.rename
    False
    """
    scheme, rest = _split(url)
    if scheme == "memory":
        # Importing TensorStore takes a third of a second, and files of plain chunks do not need it.
        from functional_ckpt.store.zarr import MemoryStore

        return MemoryStore(rest.strip("/"))
    if scheme in SCHEMES:
        place = Place.of(scheme, rest)
        from functional_ckpt.store.object_store import ObjectStore

        return ObjectStore(place, access, guard)
    if scheme != "file":
        from functional_ckpt.store.plugins import GROUP, plugged_in  # looks through all installed packages

        found = plugged_in(scheme, f"{scheme}://{rest}", guard, access)
        if found is None:
            raise NotImplementedYet(
                "there is no store for this URL",
                found=f"{scheme}://{rest}",
                expected="a path, file://, memory://, " + ", ".join(f"{known}://" for known in SCHEMES),
                remedy=f"Install a package that has one (entry point {GROUP})",
            )
        return found
    return FileStore(local_path(url), sync, guard)


def local_path(url: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a plain path or ``file://`` URL, without ``..``.

    Raises
    ------
    PolicyError
        For what is neither.

    Examples
    --------
    >>> local_path("file:///tmp/a%20b").name
    'a b'
    """
    scheme, rest = _split(url)
    if scheme != "file":
        raise refuse("this function", "path", "a path or file:// URL", url)
    with storage_errors("understanding a path", rest):
        if b"\0" in os.fsencode(rest):  # which fails for what is no name of a file
            raise ValueError("embedded null byte")
        found = Path(rest).expanduser().absolute()
        if ".." not in found.parts:
            return found
        # TensorStore refuses "..". Links in parent directories are resolved, a link at the last name is not: a save may
        # replace it.
        return found.resolve() if found.name == ".." else found.parent.resolve() / found.name


def directory_of(url: str | os.PathLike[str]) -> Path | None:
    """Return the `local_path`, or None for the URL of another store.

    Raises
    ------
    PolicyError
        For what is neither a path nor a URL.

    Examples
    --------
    >>> directory_of("memory://a") is None
    True
    """
    return local_path(url) if _split(url)[0] == "file" else None


def _split(url: object) -> tuple[str, str]:
    """Return the scheme and the rest; a plain path has the scheme ``file``, like that of a ``file://`` URL."""
    text = os.fspath(url) if isinstance(url, os.PathLike) else url
    if not isinstance(text, str) or not text:
        raise refuse("functional_ckpt", "path", "a path or URL", text)
    broken = _BROKEN_URL.fullmatch(text)
    if broken:
        what = "pathlib has removed a slash of this URL" if isinstance(url, PurePath) else "a URL needs two slashes"
        remedy = f"Pass text: '{broken[1]}:{'///' if broken[1] == 'file' else '//'}{broken[2]}'"
        raise PolicyError(what, expected="a path or URL", found=text, remedy=remedy)
    match = _URL.fullmatch(text)
    if match is None:
        return "file", text
    scheme = match[1].lower()
    return scheme, _file_path(text) if scheme == "file" else match[2]


def _file_path(text: str) -> str:
    with storage_errors("understanding a path", text):
        parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise PolicyError(
            "a file URL cannot name another host",
            expected="three slashes",
            found=text,
            remedy=f"Pass 'file:///{parts.netloc}{parts.path}' for an absolute path",
        )
    if "?" in text or "#" in text:
        raise PolicyError(
            "a file URL cannot have a query or a fragment", found=text, remedy="Write %3F for ? and %23 for #"
        )
    return unquote(parts.path)
