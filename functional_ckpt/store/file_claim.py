"""`Claim`: the mark of a live save, by which `sweep` distinguishes its directory from a leftover.

On a file system the claim is a small file beside the save. The saving process locks it, and the operating system
releases the lock when the process dies. For a store in memory it is an entry in a table of this process.
"""

import fcntl
import json
import os
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from errno import ENOLCK, ENOSYS, EOPNOTSUPP
from pathlib import Path
from threading import Lock

import attrs

from functional_ckpt.errors import AlreadyExistsError, StorageError
from functional_ckpt.store.directories import sync_directory
from functional_ckpt.store.machine import boot_id

__all__ = ["ABANDONED", "Claim", "claimed_by", "claimed_nodes", "is_live_in_memory", "save_id_of", "state_of"]

#: Suffix of the claim of a save that was abandoned while other ranks might still be writing.
ABANDONED = ".abandoned"

# The in-memory stores that this process is saving to.
_MEMORY: dict[str, None] = {}
_MEMORY_LOCK = Lock()

# Errors of file systems without locks.
_NO_LOCKS = (ENOLCK, ENOSYS, EOPNOTSUPP)
# How often a claim is created again after a sweep has removed the file before it was locked.
_TRIES = 20
# No claim is longer: a larger file is not one, and is not read whole.
_MAX_NBYTES = 2**28


@attrs.define(eq=False)
class Claim:
    """A claim held by this process until `release`, or until nobody refers to it: then its save cannot end any more.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / ".x.claim"
    >>> claim = Claim.take(path, "1f")
    >>> state_of(path), claim.release(), path.exists()
    ('live', None, False)
    """

    path: Path | None
    _file: int | None
    _url: str | None = None
    _owner: int = attrs.field(factory=os.getpid, init=False)

    def __del__(self) -> None:
        # A forked child has the object too, and would drop the lock for both.
        if os.getpid() == self._owner and not sys.is_finalizing():
            self.drop()

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

        The file gets its name only after it is locked, so that no sweep takes it for a leftover. On a file system
        without locks the claim records that, and counts as live until it is removed.
        """
        new = path.with_name(path.name + ".new")
        for _ in range(_TRIES):
            claim = cls(new, os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
            try:
                claim._write({"save_id": save_id, "pid": os.getpid(), "locked": claim._lock(), **_machine()})
                if nodes:
                    claim.name(nodes)
                os.rename(new, path)
            except FileNotFoundError:  # a sweep removed the file before it was locked
                claim.release()
                continue
            except BaseException as error:
                claim.release_after(error)
                raise
            claim.path = path
            return claim
        raise StorageError(
            "the claim of this save is removed as soon as it is created",
            path=str(path),
            remedy="Find out what deletes files in this directory, or save under another path",
        )

    @classmethod
    def adopt(cls, path: Path) -> "Claim | None":
        """Take over the claim of a dead save, so that no other process does; None unless it is known to be dead."""
        try:
            file = _opened(path)
        except PermissionError:
            return None  # a file of another user
        if file is None:
            return None
        claim = cls(path, file)
        try:
            if _judged(path, file) == "dead" and os.fstat(file).st_nlink:
                return claim
        except BaseException:
            claim.drop()
            raise
        claim.drop()
        return None

    @property
    def label(self) -> str:
        """Name of the file; empty for a store in memory."""
        return self.path.name if self.path is not None else ""

    def name(self, nodes: Sequence[str], durable: bool = False) -> None:
        """Record which nodes are going to be written; until then a sweep removes nothing beside the claim."""
        if self._file is None:
            return
        self._write({"nodes": list(nodes)})
        if durable and self.path is not None:
            os.fsync(self._file or 0)
            sync_directory(self.path.parent)

    def set_aside(self) -> None:
        """Record that the save was abandoned, and keep the names of its nodes: a late rank may still write to them."""
        if self.path is not None:
            aside = self.path.with_name(self.path.name + ABANDONED)
            os.rename(self.path, aside)
            self.path = None

    def is_held(self) -> bool:
        """Tell whether the claim still exists: a sweep that could not see the lock may have removed it."""
        return self.path is None or self._file is None or os.fstat(self._file).st_nlink > 0

    def release(self) -> str | None:
        """Remove the claim, then drop its lock: in this order no process finds a live claim unlocked.

        Returns a failure as text: the outcome of the save does not depend on it.
        """
        problem = None
        try:
            if self.path is not None and self._file is not None:
                os.unlink(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            problem = f"its claim {self.path} could not be removed ({error.strerror or error})"
        self.drop()
        return problem

    def release_after(self, error: BaseException) -> None:
        """Release the claim of a save that has failed; a failure to do so becomes a note of `error`."""
        problem = self.release()
        if problem is not None:
            error.add_note(problem)

    def drop(self) -> None:
        """Drop the lock and leave the file."""
        url, self._url = self._url, None
        if url is not None:
            _MEMORY.pop(url, None)
        file, self._file = self._file, None
        if file is not None:
            # A forked child shares the lock with us; unlocking by hand drops it for both.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)
            with suppress(OSError):  # the file is not needed any more
                os.close(file)

    def _lock(self) -> bool:
        """Lock the file and return True, or False if the file system has no locks."""
        try:
            fcntl.flock(self._file or 0, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        return True

    def _write(self, content: dict[str, object]) -> None:
        data = memoryview(json.dumps(content).encode() + b"\n")
        while data:
            data = data[os.write(self._file or 0, data) :]


def state_of(path: Path) -> str:
    """Return ``"live"``, ``"dead"`` or ``"foreign"``: made on another machine, whose locks may be invisible here."""
    try:
        file = _opened(path)
    except PermissionError:
        return "live"
    if file is None:
        return "dead"
    try:
        return _judged(path, file)
    finally:
        with suppress(OSError):
            os.close(file)


def _opened(path: Path) -> int | None:
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None  # not a claim; and opening a pipe would wait for its other end
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None


def _judged(path: Path, file: int) -> str:
    """Return the state of an open claim as `state_of` does; if it is dead, this process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "live"
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    if path.name.endswith(ABANDONED):
        return "dead"
    content = _parsed(_read(file))
    if content.get("locked") is False:
        return "live"
    here, there = _machine(), {name: content.get(name) for name in ("host", "boot")}
    # A claim of an earlier version, or a truncated one, does not record where it was made.
    same = there["host"] in (None, here["host"]) or there["boot"] == here["boot"] != ""
    return "dead" if same else "foreign"


def _machine() -> dict[str, str]:
    """Return the name of this machine and its boot id, which its containers have in common."""
    return {"host": os.uname().nodename, "boot": boot_id()}


def is_live_in_memory(url: str) -> bool:
    """Tell whether this process is saving to a ``memory://`` URL."""
    return url in _MEMORY


def claimed_by(path: Path, save_id: str) -> bool:
    """Tell whether the claim at `path` is that of `save_id`: so a rank checks that it sees the same directory."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        return save_id_of(_read(file)) == save_id
    finally:
        with suppress(OSError):
            os.close(file)


def save_id_of(data: bytes) -> object:
    """Return the save that a claim with content `data` is of; None if it is no claim.

    Examples
    --------
    >>> save_id_of(b'{"save_id": "1f"}')
    '1f'
    """
    return _parsed(data).get("save_id")


def claimed_nodes(data: bytes) -> list[str] | None:
    """Return the nodes that a claim with content `data` names; None if it is not a claim, or is truncated.

    Examples
    --------
    >>> claimed_nodes(b'{"save_id": "1f"}'), claimed_nodes(b'{"save_id": "1f", "nodes": ["w"]}'), claimed_nodes(b"{")
    ([], ['w'], None)
    """
    content = _parsed(data)
    nodes = content.get("nodes")
    if isinstance(nodes, list):
        return [node for node in nodes if isinstance(node, str)]
    return [] if "save_id" in content else None


def _read(file: int) -> bytes:
    return os.pread(file, min(os.fstat(file).st_size, _MAX_NBYTES), 0)


def _parsed(data: bytes) -> dict[str, object]:
    """Return the fields of a claim; its last line may be truncated."""
    content: dict[str, object] = {}
    for line in data.splitlines():
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            break
        if isinstance(found, dict):
            content |= found
    return content
