"""`Claim`: says that a live process is saving, so that `sweep` tells its directory from a leftover.

On a file system the claim is a small file beside the save, locked as long as the process lives; the operating system
drops the lock when it dies. For a store in memory it is an entry in a table of this process.
"""

import fcntl
import json
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from errno import ENOLCK, ENOSYS, EOPNOTSUPP
from pathlib import Path
from threading import Lock

import attrs

from functional_ckpt.errors import AlreadyExistsError, StorageError
from functional_ckpt.store.files import FileStore

__all__ = ["Claim", "claimed_by", "claimed_nodes", "is_live", "is_live_in_memory"]

# The in-memory stores that this process is saving to.
_MEMORY: dict[str, None] = {}
_MEMORY_LOCK = Lock()

# What file systems without locks answer.
_NO_LOCKS = (ENOLCK, ENOSYS, EOPNOTSUPP)


@attrs.define(eq=False)
class Claim:
    """A claim held by this process until `release`.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / ".x.claim"
    >>> claim = Claim.take(path, "1f")
    >>> is_live(path), claim.release(), path.exists()
    (True, None, False)
    """

    path: Path | None
    _file: int | None
    _url: str | None = None

    @classmethod
    def take_in_memory(cls, url: str) -> "Claim":
        """Claim a ``memory://`` URL among the saves of this process.

        Raises
        ------
        AlreadyExistsError
            If another save to it is running.
        """
        with _MEMORY_LOCK:
            if url in _MEMORY:
                raise AlreadyExistsError("another save to this path is running", path=url)
            _MEMORY[url] = None
        return cls(None, None, url)

    @classmethod
    def take(cls, path: Path, save_id: str, nodes: Sequence[str] = ()) -> "Claim":
        """Create the claim file, locked; `save_id` lets other ranks recognise it, `nodes` will be written beside it.

        It appears under its name only when it is locked, so that nobody can take it for a leftover. Where the file
        system has no locks it says so, and counts as live until somebody removes it.
        """
        new = path.with_name(path.name + ".new")
        claim = cls(new, os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        try:
            claim._fill(save_id, nodes)
            new.rename(path)
        except BaseException:
            claim.release()
            raise
        claim.path = path
        return claim

    def _fill(self, save_id: str, nodes: Sequence[str]) -> None:
        file = self._file or 0
        locked = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            locked = False
        content = {"save_id": save_id, "pid": os.getpid(), "locked": locked, "nodes": list(nodes)}
        data = memoryview(json.dumps(content).encode())
        while data:
            data = data[os.write(file, data) :]

    def release(self) -> None:
        """Remove the claim, then drop its lock: in this order nobody finds an unlocked live claim."""
        if self._url is not None:
            _MEMORY.pop(self._url, None)
        if self._file is not None:
            with suppress(OSError):  # left to `sweep`: a save that has published does not fail for it
                if self.path is not None:
                    self.path.unlink()
            # A forked child shares the lock with us; unlocking by hand drops it for both.
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = None


def is_live(path: Path) -> bool:
    """Tell whether a process holds the claim at `path`, as far as the file system can tell."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False  # no claim of ours: opening a pipe would wait for its other end
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True  # somebody else's, and not ours to judge
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    finally:
        os.close(file)
    return _content(path).get("locked") is False


def is_live_in_memory(url: str) -> bool:
    """Tell whether this process is saving to a ``memory://`` URL."""
    return url in _MEMORY


def claimed_by(path: Path, save_id: str) -> bool:
    """Tell whether the claim at `path` is that of `save_id`: what a rank checks to see that it shares the path."""
    return _content(path).get("save_id") == save_id


def claimed_nodes(data: bytes) -> list[str]:
    """Return the nodes that a claim with content `data` names."""
    nodes = _parsed(data).get("nodes")
    return [node for node in nodes if isinstance(node, str)] if isinstance(nodes, list) else []


def _content(path: Path) -> dict[str, object]:
    try:
        return _parsed(FileStore(path.parent).read(path.name) or b"")
    except StorageError:
        return {}


def _parsed(data: bytes) -> dict[str, object]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
