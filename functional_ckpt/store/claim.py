"""`Claim`: says that a live process is saving, so that `sweep` tells its directory from a leftover.

On a file system the claim is a small file beside the save, locked as long as the process lives; the operating system
drops the lock when it dies. In memory it is an entry of this process.
"""

import fcntl
import json
import os
from pathlib import Path

import attrs

__all__ = ["Claim", "is_live"]


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

    path: Path
    _file: int | None

    @classmethod
    def take(cls, path: Path, save_id: str) -> "Claim":
        """Create the claim file, locked; `save_id` lets other ranks recognise it."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        fcntl.flock(file, fcntl.LOCK_EX)
        os.write(file, json.dumps({"save_id": save_id, "pid": os.getpid()}).encode())
        return cls(path, file)

    def release(self) -> None:
        """Remove the claim, then drop its lock: in this order nobody finds an unlocked live claim."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            # A forked child shares the lock with us; unlocking by hand drops it for both.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = None


def is_live(path: Path) -> bool:
    """Tell whether a process holds the claim at `path`."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def claimed_by(path: Path, save_id: str) -> bool:
    """Tell whether the claim at `path` is that of `save_id`: what a rank checks to see that it shares the path."""
    try:
        found: object = json.loads(path.read_text()).get("save_id")
    except (OSError, ValueError, AttributeError):
        return False
    return found == save_id
