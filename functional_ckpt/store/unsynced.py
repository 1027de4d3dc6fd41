"""`Unsynced`: files that the disk is still writing, kept open until it has."""

import os
from collections import deque
from contextlib import suppress
from types import TracebackType

from functional_ckpt.store.base import storage_errors
from functional_ckpt.store.directories import begin_sync

__all__ = ["EARLY_NBYTES", "Unsynced"]

#: The disk is not told of a smaller file: its sync costs the journal's write and no waiting for data.
EARLY_NBYTES = 2**20

#: So many files are kept open; a process has 1024 or more. When there are more, the older half is synced: the
#: first of these syncs writes the file system's journal, which then has the others too.
MOST = 64


class Unsynced:
    """In the ``with`` block it keeps files; at its end they are synced, or closed if the block has failed.

    While the disk writes a file, the threads make the next ones.
    """

    def __init__(self) -> None:
        self._files: deque[tuple[str, int]] = deque()
        self._keeps = False

    def __enter__(self) -> None:
        """Begin to keep files."""
        self._keeps = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Sync the files, or only close them.

        Raises
        ------
        StorageError
            Naming the file that the disk has not got.
        """
        self._keeps = False
        try:
            if error is None:
                self._sync(0)
        finally:
            while self._files:
                with suppress(OSError):
                    os.close(self._files.popleft()[1])

    def keep(self, name: str, file: int, nbytes: int) -> bool:
        """Take over a file that is written and let the disk begin; False if the caller has to sync it.

        Raises
        ------
        StorageError
            If the disk has not got an older file; the caller keeps this one.
        """
        if not self._keeps:
            return False
        if len(self._files) >= MOST:
            self._sync(MOST // 2)
        if nbytes >= EARLY_NBYTES and not begin_sync(file):
            return False
        self._files.append((name, file))
        return True

    def give_back(self) -> bool:
        """Sync and close the files that are kept; return False if there are none.

        Raises
        ------
        StorageError
            Naming the file that the disk has not got.
        """
        if not self._files:
            return False
        self._sync(0)
        return True

    def _sync(self, left: int) -> None:
        """Sync the oldest files, but for `left` of them."""
        while len(self._files) > left:
            try:
                name, file = self._files.popleft()
            except IndexError:  # another thread has taken the last one
                return
            with storage_errors("syncing", name):
                try:
                    os.fsync(file)
                except BaseException:
                    with suppress(OSError):  # it must not hide the first error
                        os.close(file)
                    raise
                os.close(file)
