"""A model of a disk that loses what was not synced: what a power cut may leave of a save's system calls.

Stricter than real disks: any of the names and contents that were not synced may be there or not, in any combination.
A content may also be torn, or be zeros of the right length.
"""

import os
import random
import threading
from contextlib import contextmanager

from tests.effects import watched

#: What may be found of a file whose content was not synced, of what it had and what it was to have.
CONTENTS = {
    "nothing new": lambda old, new: old,
    "torn": lambda old, new: new[: len(new) // 2],
    "zeros": lambda old, new: bytes(len(new)),
    "all": lambda old, new: new,
}


class Log:
    """What happened to names and contents below a directory, in order, and when which of them were synced.

    Files and directories are numbers: 0 is the directory itself. `steps` are ``("names", directory, {name: number})``
    (None: removed), ``("content", file, bytes)``, ``("sync", number, what)`` and ``("sync all", None, what)``.
    """

    def __init__(self, root):
        self.root, self.steps = os.path.abspath(root), []
        self.names, self.contents = {0: {}}, {}
        self._files, self._lock = {}, threading.Lock()
        self._scan(0, self.root)
        self.first = ({n: dict(names) for n, names in self.names.items()}, dict(self.contents))

    def _scan(self, number, path):
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            made = self._made(entry.is_dir())
            self.names[number][entry.name] = made
            if entry.is_dir():
                self._scan(made, entry.path)
            else:
                with open(entry.path, "rb") as file:
                    self.contents[made] = file.read()

    def _made(self, is_directory):
        number = len(self.names) + len(self.contents)
        (self.names if is_directory else self.contents)[number] = {} if is_directory else b""
        return number

    @contextmanager
    def recorded(self):
        with watched(self.root, self._handle):
            yield self

    def _handle(self, call):
        record = getattr(self, f"_{call.name}", None)
        if record is None:
            return call.do()
        with self._lock:  # so that the order of the log is the order in which they took place
            before = [self._find(path) for path in call.paths if path is not None]
            found = call.do()
            record(call, before, found)
            return found

    def _find(self, path):
        number = 0
        for name in os.path.relpath(path, self.root).split("/"):
            if name not in (".", ""):
                number = self.names.get(number, {}).get(name)
        return number

    def _rename_to(self, changes):
        by_directory = {}
        for path, number in changes:
            directory, name = os.path.split(path)
            by_directory.setdefault(self._find(directory), {})[name] = number
        for directory, names in by_directory.items():
            self.names[directory] = {n: i for n, i in {**self.names[directory], **names}.items() if i is not None}
            self.steps.append(("names", directory, names))

    def _mkdir(self, call, before, found):
        self._rename_to([(call.paths[0], self._made(True))])

    def _create(self, call, before, found):
        self._files[found] = self._made(False)
        self._contain(self._files[found], b"")
        self._rename_to([(call.paths[0], self._files[found])])

    def _open(self, call, before, found):
        self._files[found] = before[0]

    def _unlink(self, call, before, found):
        self._rename_to([(call.paths[0], None)])

    _rmdir = _unlink

    def _rename(self, call, before, found):
        self._rename_to([(call.paths[0], None), (call.paths[1], before[0])])

    def _link(self, call, before, found):
        self._rename_to([(call.paths[1], before[0])])

    def _renameat2(self, call, before, found):
        self._rename_to([(call.paths[0], before[1]), (call.paths[1], before[0])])

    def _write(self, call, before, found):
        file = self._files[call.arguments[0]]
        self._contain(file, self.contents[file] + bytes(call.arguments[1][:found]))

    def _ftruncate(self, call, before, found):
        file, nbytes = self._files[call.arguments[0]], call.arguments[1]
        self._contain(file, self.contents[file][:nbytes].ljust(nbytes, b"\0"))

    def _contain(self, file, data):
        self.contents[file] = data
        self.steps.append(("content", file, data))

    def _fsync(self, call, before, found):
        self.steps.append(("sync", self._files[call.arguments[0]], call.paths[0]))

    def _syncfs(self, call, before, found):
        self.steps.append(("sync all", None, call.paths[0]))

    def image(self):
        """Return what is there now."""
        return dict(walk(0, "", self.names, self.contents))

    def syncs(self):
        """Return the positions of all syncs."""
        return [at for at, step in enumerate(self.steps) if step[0].startswith("sync")]


class Cut:
    """The disk at a power cut after the first `count` steps of a log, of which those in `dropped` did not happen."""

    def __init__(self, log, count, dropped=()):
        self.names = {number: dict(names) for number, names in log.first[0].items()}
        self.contents = dict(log.first[1])
        self.pending, self.unsynced = [], {}
        for at, (kind, number, what) in enumerate(log.steps[:count]):
            if kind == "names":
                self.pending.append((number, what))
            elif kind == "content":
                self.unsynced[number] = what
            elif at not in dropped:
                self._sync(None if kind == "sync all" else number)

    def _sync(self, number):
        for directory, names in self.pending:
            if number in (None, directory):
                self.names.setdefault(directory, {}).update(names)
        self.pending = [change for change in self.pending if number not in (None, change[0])]
        for file in [file for file in self.unsynced if number in (None, file)]:
            self.contents[file] = self.unsynced.pop(file)

    def choices(self, chances=8):
        """Yield which of the pending changes of names a disk may have kept: none, all, one, all but one, or some."""
        count = len(self.pending)
        yield ()
        if count:
            yield tuple(range(count))
        if count > 1:
            for one in range(count):
                yield (one,)
                yield tuple(n for n in range(count) if n != one)
            chance = random.Random(count)
            for _ in range(chances):
                yield tuple(n for n in range(count) if chance.random() < 0.5)

    def images(self):
        """Yield what may be found afterwards: path -> content, None for a directory."""
        for kept in self.choices():
            names = {number: dict(found) for number, found in self.names.items()}
            for at in kept:
                directory, changes = self.pending[at]
                names.setdefault(directory, {}).update(changes)
            for content in CONTENTS.values() if self.unsynced else (CONTENTS["all"],):
                found = {file: content(self.contents.get(file, b""), new) for file, new in self.unsynced.items()}
                yield dict(walk(0, "", names, {**self.contents, **found}))


def walk(number, path, names, contents):
    for name, inner in sorted(names.get(number, {}).items()):
        below = f"{path}/{name}" if path else name
        if inner in contents:
            yield below, contents[inner]
        elif inner is not None:
            yield below, None
            yield from walk(inner, below, names, contents)


def files_below(image, path):
    """Return the files below `path`, by their names from there."""
    return {name[len(path) + 1 :]: data for name, data in image.items() if data is not None and name.startswith(path)}


def is_aside(name):
    """Tell whether a file is a claim, or a root that has not got its name: no part of a checkpoint."""
    return ".claim" in name or name == "zarr.json.new"


def put(image, root):
    """Make an image real."""
    for name, data in image.items():
        path = root / name
        if data is None:
            path.mkdir()
        else:
            path.write_bytes(data)
