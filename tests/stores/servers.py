"""Servers to test against, each started on 127.0.0.1 from its PyPI package and ended with the session."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.stores.small import BUCKET, SmallServer


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def _program(name):
    """Return a program of the environment that runs the tests, or of one that is named for it."""
    for place in (os.environ.get("FUNCTIONAL_CKPT_SERVERS"), os.path.dirname(sys.executable)):
        if place and os.path.exists(os.path.join(place, name)):
            return os.path.join(place, name)
    raise FileNotFoundError(name)


@contextlib.contextmanager
def _running(command, port, log, **options):
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, **options)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if process.poll() is not None:
                raise AssertionError(Path(log).read_text(errors="replace")[-2000:])
            time.sleep(0.1)
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def small(_):
    server = SmallServer()
    try:
        yield server.port
    finally:
        server.close()


@contextlib.contextmanager
def moto(place):
    port = _free_port()
    command = [_program("moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, port, place / "moto.log"):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request).read()
        yield port


@contextlib.contextmanager
def rclone(place):
    port = _free_port()
    (place / "rclone" / BUCKET).mkdir(parents=True)
    command = [
        _program("rclone"), "serve", "s3", "--auth-key", "test:tester,testing", "--addr", f"127.0.0.1:{port}",
        "--vfs-cache-mode", "writes", "--cache-dir", str(place / "cache"), str(place / "rclone"),
    ]  # fmt: skip
    with _running(command, port, place / "rclone.log"):
        yield port


STARTERS = {"small": small, "moto": moto, "rclone": rclone}
#: Those that write over an object although they are told not to.
HEEDLESS = ("rclone",)
