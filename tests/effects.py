"""The system calls of this process under one directory, as a test sees them: counted, refused, killed at, or logged.

Calls of Python's own `os` are seen, not those of TensorStore. Nothing here imports it or torch: they survive no fork.
"""

import fcntl
import os
import signal
from contextlib import contextmanager, suppress

from functional_ckpt.store import directories

BY_PATH = ("open", "stat", "lstat", "mkdir", "rmdir", "unlink", "listdir", "scandir", "chmod", "chown")
BY_TWO = ("rename", "link")
BY_FILE = ("read", "pread", "preadv", "write", "ftruncate", "fsync", "fstat", "close")
# What changes something: a save that is killed between two of them is as if killed before the second.
EFFECTS = ("mkdir", "rmdir", "unlink", "rename", "link", "write", "ftruncate", "chmod", "chown", "create", "renameat2")
REAL = {name: getattr(os, name) for name in (*BY_PATH, *BY_TWO, *BY_FILE)}


class Call:
    """One system call: its name, the paths it is about, its arguments; `do()` makes it, once."""

    def __init__(self, name, paths, real, arguments, options):
        self.name, self.paths, self.arguments = name, paths, arguments
        self._real, self._options = real, options

    def do(self):
        if self.name in ("fsync", "syncfs"):
            return None  # no test waits for a disk; what a sync does, the model of tests/disk.py knows
        return self._real(*self.arguments, **self._options)


@contextmanager
def watched(root, handle):
    """Let `handle(call)` make (or refuse) every system call under `root`, of any thread, and return its result."""
    files, root = {}, os.path.abspath(root)

    def path_of(value, dir_fd=None):
        if isinstance(value, int):
            return files.get(value)
        if dir_fd is not None:
            return f"{files[dir_fd]}/{os.fsdecode(value)}" if dir_fd in files else None
        return os.path.abspath(os.fsdecode(value))

    def wrap(name, real):
        def call(*arguments, **options):
            paths = [path_of(arguments[0] if arguments else ".", options.get("dir_fd"))]
            if name in BY_TWO:
                paths.append(path_of(arguments[1]))
            if not any(path is not None and (path + "/").startswith(root + "/") for path in paths):
                return real(*arguments, **options)
            creates = name == "open" and arguments[1] & os.O_CREAT
            if name == "close":  # before the call: once it is done, another thread may get the number for its file
                files.pop(arguments[0], None)
            found = handle(Call("create" if creates else name, paths, real, arguments, options))
            if name == "open":
                files[found] = paths[0]
            return found

        return call

    def locked(file, operation):
        if file not in files:
            return flock(file, operation)
        return handle(Call("flock", [files[file]], flock, (file, operation), {}))

    def called(name, *arguments):
        paths = [path_of(a) for a in arguments if isinstance(a, bytes)] or [files[arguments[0]]]
        return handle(Call(name, paths, call_system, (name, *arguments), {}))

    flock, call_system = fcntl.flock, directories.call_system
    try:
        for name, real in REAL.items():
            setattr(os, name, wrap(name, real))
        fcntl.flock, directories.call_system = locked, called
        yield
    finally:
        for name, real in REAL.items():
            setattr(os, name, real)
        fcntl.flock, directories.call_system = flock, call_system


def killing_at(at):
    """Return what kills this process at effect `at`, which is done half if it is a write, else not at all."""
    seen = iter(range(10**6))

    def stop(call):
        if call.name in EFFECTS and next(seen) == at:
            if call.name == "write":
                file, data = call.arguments
                REAL["write"](file, bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return call.do()

    return stop


class Refusal:
    """Refuses call number `at`: ``"once"``, ``"onwards"`` (and all that follow), or ``"after"`` it took effect."""

    def __init__(self, at, how, code):
        self.at, self.how, self.code = at, how, code
        self.count, self.refused = 0, None

    def __call__(self, call):
        number, self.count = self.count, self.count + 1
        if number != self.at and not (self.how == "onwards" and number > self.at):
            return call.do()
        self.refused = self.refused or f"{call.name} {call.paths}"
        if self.how == "after" or call.name == "close":  # the system closes a file whatever it says
            undo(call, call.do())
        raise OSError(self.code, f"refused {call.name}")


def undo(call, found):
    """Give back what the caller, told of an error, will not."""
    if call.name in ("open", "create"):
        REAL["close"](found)
    with suppress(AttributeError):
        found.close()
