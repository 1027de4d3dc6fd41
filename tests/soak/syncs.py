"""Mutants of what disks are asked for: syncs, and the way in which files wait for theirs; reading ahead."""

from tests.soak.mutant import Mutant

SYNCS = (
    Mutant(
        "files are not synced", "store/files.py",
        "                if synced:", "                if synced and not name:", ("tests/test_power_cuts.py",),
    ),
    Mutant(
        "directories are not synced", "store/files.py",
        "sync_directory(self._prefix + directory)", "pass", ("tests/test_power_cuts.py",),
    ),
    Mutant(
        "a root is linked before it is durable", "store/files.py",
        'None, self.sync != "none")', 'None, self.sync == "fsync")', ("tests/test_power_cuts.py",),
    ),
    Mutant(
        "new parents are not synced", "store/directories.py",
        "sync_directory(directory.parent)", "pass", ("tests/test_power_cuts.py",),
    ),
    Mutant(
        "a claim in place is not synced", "store/file_claim.py",
        "            os.fsync(self._file or 0)", "            pass", ("tests/test_power_cuts.py",),
    ),
    Mutant(
        "the exchange is not synced", "store/target.py",
        "        notes += synced(final.parent)", "        pass", ("tests/test_power_cuts.py",),
    ),
    Mutant(
        "ranks other than 0 do not sync", "run/saving.py",
        "            store.flush()", "            pass", ("tests/test_power_cuts.py",),
    ),
    Mutant(
        "files that are kept open are not synced", "store/unsynced.py",
        "                    os.fsync(file)", "                    pass", ("tests/test_power_cuts.py",),
    ),
    Mutant(
        "of too many open files the older ones are only closed", "store/unsynced.py",
        "            self._sync(MOST // 2)", "            os.close(self._files.popleft()[1])",
        ("tests/test_power_cuts.py",),
    ),
    Mutant(
        "all files are kept open", "store/unsynced.py",
        "        if len(self._files) >= MOST:", "        if not name:", ("tests/test_syncs.py",),
    ),
    Mutant(
        "the disk begins when all is written", "store/unsynced.py",
        "        if nbytes >= EARLY_NBYTES and not begin_sync(file):", "        if nbytes < 0:",
        ("tests/test_syncs.py",),
    ),
    Mutant(
        "the disk begins when all is written, where the file system is synced", "store/files.py",
        "                    begin_sync(file)", "                    pass", ("tests/test_syncs.py",),
    ),
    Mutant(
        "each file is waited for when it is written", "store/unsynced.py",
        "        if not self._keeps:", "        if True:", ("tests/test_syncs.py",),
    ),
    Mutant(
        "what the disk refuses is published", "store/unsynced.py",
        '            with storage_errors("syncing", name):', "            with suppress(OSError):",
        ("tests/test_syncs.py",),
    ),
    Mutant(
        "a save that fails leaves files open", "store/unsynced.py",
        "            while self._files:", "            while error is None and self._files:",
        ("tests/test_syncs.py",),
    ),
    Mutant(
        "files that are kept open use up the descriptors", "store/files.py",
        "or not self._unsynced.give_back():", "or name:", ("tests/test_syncs.py", "-k", "descriptors"),
    ),
    Mutant(
        "a file system is synced through a handle that knows of no earlier error", "store/files.py",
        "sync_file_system(self._at.file)", "sync_file_system(os.open(self.root, _READ))",
        ("tests/test_syncs.py", "-k", "handle"),
    ),
    Mutant(
        "each rank fetches its own columns", "store/readahead.py",
        "len(starts) * nbytes * readers >= span:", "len(starts) * nbytes >= span:",
        ("tests/test_readahead.py",),
    ),
    Mutant(
        "all ranks count as ranks of this machine", "run/loading.py",
        "request.machine == boot_id() != \"\"", "boot_id() != \"\"", ("tests/test_readahead.py",),
    ),
)  # fmt: skip
