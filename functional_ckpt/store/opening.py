"""From a path or URL to a `Store`."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from functional_ckpt.errors import NotImplementedYet, PolicyError
from functional_ckpt.store.base import Store, storage_errors
from functional_ckpt.store.files import FileStore

__all__ = ["local_path", "open_store"]


def open_store(url: str | Path, sync: str = "none", guard: Path | None = None) -> Store:
    """Return the store at a path, ``file://`` or ``memory://`` URL; nothing is created.

    `sync` is ``"none"``, ``"fsync"`` or ``"syncfs"``; nothing is written once the file `guard` is gone (both for file
    systems only).

    Raises
    ------
    NotImplementedYet
        For a URL scheme without a store.
    PolicyError
        For an empty path.

    Examples
    --------
    >>> open_store("memory://example").capabilities.rename
    False
    """
    text = str(url)
    with storage_errors("understanding a path", text):
        scheme = urlsplit(text).scheme if "://" in text else "file"
    if scheme == "memory":
        # TensorStore takes a third of a second to import, which files of plain chunks never need.
        from functional_ckpt.store.zarr import MemoryStore

        return MemoryStore(text.removeprefix("memory://").strip("/"))
    if scheme != "file":
        raise NotImplementedYet(
            "no store for this kind of URL yet", found=text, expected="a path, file:// or memory://"
        )
    return FileStore(local_path(url), sync, guard)


def local_path(url: str | Path) -> Path:
    """Return the absolute path of a plain path or ``file://`` URL, without ``..``.

    Examples
    --------
    >>> local_path("file:///tmp/a%20b").name
    'a b'
    """
    text = str(url)
    if not text:  # to pathlib it is the working directory, and to nobody else
        raise PolicyError("the path is empty", remedy="Pass '.' if you mean the working directory")
    with storage_errors("understanding a path", text):
        found = Path(unquote(urlsplit(text).path) if text.startswith("file://") else text).expanduser().absolute()
        if ".." not in found.parts:
            return found
        # TensorStore refuses them. Links below count, those of the last name do not: it may be replaced.
        return found.resolve() if found.name == ".." else found.parent.resolve() / found.name
