"""What a person sees of a long call: a bar in a terminal, lines in the log elsewhere, nothing of a short one."""

import logging
import os
import pty
import select
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import functional_ckpt as fc
from functional_ckpt.errors import CheckpointError
from functional_ckpt.show import bar
from functional_ckpt.show.bar import Count, displayed
from functional_ckpt.testing.simulate import run_ranks

FAST = fc.SavePolicy(durability="none")

# A save, a load and a verification that take their time, since the chunk they come to does.
PROGRAM = """
import sys, time, numpy as np, functional_ckpt as fc
from functional_ckpt.show import bar
from functional_ckpt.store import files
bar._LONG_S = 0.05
def slow(name):
    fast = getattr(files.FileStore, name)
    def wait(*arguments, **options):
        time.sleep(0.4)
        return fast(*arguments, **options)
    setattr(files.FileStore, name, wait)
state = {str(i): np.full(2**18, i, "f4") for i in range(4)}
for name in ("create", "read_into", "scan"):
    slow(name)
fc.save(state, sys.argv[1], policy=fc.SavePolicy(durability="none"))
print("saved")
fc.load(state, sys.argv[1])
print("loaded")
fc.verify(sys.argv[1])
print("rich" in sys.modules)
"""


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(bar, "_LONG_S", 0.05)


def on_a_terminal(words, **environment):
    """Run a program whose error stream is a terminal; return what it prints, and what is shown there."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm"} | environment
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True) as process:
        os.close(theirs)
        shown = b""
        while process.poll() is None or select.select([ours], [], [], 0)[0]:
            if select.select([ours], [], [], 0.05)[0]:
                try:
                    shown += os.read(ours, 65536)
                except OSError:  # how a terminal says that nobody writes to it any more
                    break
        out = process.stdout.read()
    os.close(ours)
    assert process.returncode == 0, shown.decode()
    return out, shown.decode()


def test_a_terminal_has_a_bar_for_save_load_and_verify_that_goes_away(tmp_path):
    out, shown = on_a_terminal([sys.executable, "-c", PROGRAM, str(tmp_path / "c")])
    assert out.split() == ["saved", "loaded", "True"]
    for title in ("saving 'c'", "loading 'c'", "verifying"):
        assert title in shown
    assert "of 4.0 MiB" in shown
    assert "/s, 0:0" in shown
    assert shown.rstrip().endswith(("\x1b[2K", "\x1b[?25h"))  # the line is empty again, and the cursor there


def test_a_pipe_has_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "c")], capture_output=True, text=True, check=True
    )
    assert (done.stdout.split(), done.stderr) == (["saved", "loaded", "False"], "")


def test_without_a_terminal_two_lines_are_logged(tmp_path, caplog, impatient):
    def slowly(progress):
        time.sleep(0.1)

    state = {"w": np.ones(1000)}
    with caplog.at_level(logging.INFO, "functional_ckpt"):
        fc.save(state, tmp_path / "c", policy=FAST, progress=slowly)
        fc.async_save(state, tmp_path / "d", policy=FAST, progress=slowly).result()
        fc.load(state, tmp_path / "c", progress=slowly)
        fc.verify(tmp_path / "c", lambda n: time.sleep(0.1))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0].split("'")[0] for line in lines] == [
        *["saving "] * 4, *["loading "] * 2, *["verifying "] * 2,
    ]  # fmt: skip
    assert ": write, " in lines[0]
    assert "saving 'c': done after" in lines[1]
    assert "7.8 KiB, " in lines[1]


def test_a_failure_is_logged_as_one(tmp_path, caplog, impatient):
    def fail(progress):
        time.sleep(0.1)
        raise ValueError("no")

    with caplog.at_level(logging.INFO, "functional_ckpt"), pytest.raises((ValueError, CheckpointError)):
        fc.save({"w": np.ones(3)}, tmp_path / "c", policy=FAST, progress=fail)
    assert "failed with" in caplog.records[-1].getMessage()


def test_short_calls_are_silent(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "functional_ckpt"):
        for step in range(3):
            fc.save({"w": np.ones(3)}, tmp_path / str(step), policy=FAST)
    assert caplog.records == []
    assert not [t for t in threading.enumerate() if t.name == "functional_ckpt-display"]


def test_only_rank_0_tells(tmp_path, caplog, impatient, piece):
    whole = np.arange(8.0)

    def save(gather):
        half = fc.Box((4 * gather.rank,), (4 * gather.rank + 4,))
        state = {"w": piece(whole, half)}
        fc.save(state, tmp_path / "c", policy=FAST, process_group=gather, progress=lambda p: time.sleep(0.1))

    with caplog.at_level(logging.INFO, "functional_ckpt"):
        run_ranks(2, save)
    assert len(caplog.records) == 2


def test_a_terminal_that_fails_does_not_make_the_call_fail(monkeypatch, impatient):
    class Broken:
        def isatty(self):
            return True

        def write(self, text):
            raise OSError(5, "Input/output error")

        flush = write

    monkeypatch.setattr(sys, "stderr", Broken())
    with displayed("saving", lambda: Count("write", 1, 2)):
        time.sleep(0.3)
    monkeypatch.setattr(sys, "stderr", None)
    with displayed("saving", lambda: Count("write", 1, 2)):
        time.sleep(0.1)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), None])
def test_no_thread_is_no_error(monkeypatch, caplog, impatient, error):
    def start(self):
        raise error or RuntimeError

    monkeypatch.setattr(threading.Thread, "start", start)
    with caplog.at_level(logging.INFO, "functional_ckpt"), displayed("x", lambda: Count("write", 0, 0)):
        time.sleep(0.1)


def test_a_title_cannot_steer_the_terminal(caplog, impatient):
    with caplog.at_level(logging.INFO, "functional_ckpt"), displayed("\x1b[2J\n", lambda: Count("write", 0, 0)):
        time.sleep(0.3)
    assert all(record.getMessage().isprintable() for record in caplog.records)
    assert len(caplog.records) == 2


def test_one_bar_at_a_time(monkeypatch, impatient):
    drawn = []
    monkeypatch.setattr(bar, "_is_terminal", lambda: True)
    monkeypatch.setattr(bar._Watcher, "_draw", lambda self: (drawn.append(self._title), self._over.wait()))
    with displayed("one", lambda: Count("write", 0, 0)):
        time.sleep(0.3)
        with displayed("two", lambda: Count("write", 0, 0)):
            time.sleep(0.3)
    assert drawn == ["one"]
