"""Servers to test against, each started on 127.0.0.1 from its PyPI package and ended with the session."""

import contextlib
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.stores.small import BUCKET, SmallServer


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def worker_count():
    """Return in how many processes a server runs that can: one for every two cores."""
    return max(1, (os.cpu_count() or 1) // 2)


def program(name):
    """Return a program of the environment that runs the tests, or of those that are named for it."""
    for place in (*os.environ.get("FUNCTIONAL_CKPT_SERVERS", "").split(":"), os.path.dirname(sys.executable)):
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
    port = free_port()
    command = [program("moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, port, place / "moto.log"):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request).read()
        yield port


@contextlib.contextmanager
def rclone(place):
    port = free_port()
    (place / "rclone" / BUCKET).mkdir(parents=True)
    command = [
        program("rclone"), "serve", "s3", "--auth-key", "test:tester,testing", "--addr", f"127.0.0.1:{port}",
        # Without a cache: with one an object was not found for a moment, seconds after it was written.
        "--vfs-cache-mode", "off", str(place / "rclone"),
    ]  # fmt: skip
    with _running(command, port, place / "rclone.log"):
        yield port


@contextlib.contextmanager
def swift(place):
    """OpenStack Swift behind its s3api: one device, four processes, on many cores more of proxy and object server."""
    workers = worker_count() if worker_count() > 1 else 0  # 0: the process that is started is the only one
    ports = {"account": free_port(), "container": free_port(), "object": free_port()}
    proxy = free_port()
    (place / "node" / "sda").mkdir(parents=True)
    builder = program("swift-ring-builder")
    for name, port in ports.items():
        ring = [builder, str(place / f"{name}.builder")]
        for words in (("create", "4", "1", "0"), ("add", f"r1z1-127.0.0.1:{port}/sda", "1"), ("rebalance",)):
            subprocess.run([*ring, *words], cwd=place, check=False, capture_output=True)
    (place / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = a\nswift_hash_path_prefix = b\n")
    user = pwd.getpwuid(os.getuid()).pw_name
    with contextlib.ExitStack() as running:
        for name, port in ports.items():
            children = workers if name == "object" else 0
            (place / f"{name}.conf").write_text(
                f"[DEFAULT]\nbind_ip = 127.0.0.1\nbind_port = {port}\nuser = {user}\nswift_dir = {place}\n"
                f"devices = {place}/node\nmount_check = false\nworkers = {children}\n"
                f"[pipeline:main]\npipeline = {name}-server\n[app:{name}-server]\nuse = egg:swift#{name}\n"
            )
            command = [program(f"swift-{name}-server"), str(place / f"{name}.conf")]
            running.enter_context(_running(command, port, place / f"{name}.log"))
        filters = [
            "catch_errors",
            "gatekeeper",
            "healthcheck",
            "cache",
            "listing_formats",
            "bulk",
            "s3api",
            "tempauth",
            "slo",
            "dlo",
        ]
        (place / "proxy.conf").write_text(
            f"[DEFAULT]\nbind_ip = 127.0.0.1\nbind_port = {proxy}\nuser = {user}\nswift_dir = {place}\n"
            f"workers = {workers}\n[pipeline:main]\npipeline = {' '.join(filters)} proxy-server\n"
            "[app:proxy-server]\nuse = egg:swift#proxy\naccount_autocreate = true\n"
            # On a loaded machine it would give its only device up for a minute, and say that there is no bucket.
            "conn_timeout = 60\nnode_timeout = 60\nrecoverable_node_timeout = 60\nerror_suppression_limit = 1000000\n"
            + "".join(f"[filter:{name}]\nuse = egg:swift#{name.replace('cache', 'memcache')}\n" for name in filters
                      if name != "tempauth")
            + "[filter:tempauth]\nuse = egg:swift#tempauth\nuser_test_tester = testing .admin\n"
        )  # fmt: skip
        command = [program("swift-proxy-server"), str(place / "proxy.conf")]
        running.enter_context(_running(command, proxy, place / "proxy.log"))
        import boto3

        client = boto3.client(
            "s3", endpoint_url=f"http://127.0.0.1:{proxy}", aws_access_key_id="test:tester",
            aws_secret_access_key="testing", region_name="us-east-1",
        )  # fmt: skip
        client.create_bucket(Bucket=BUCKET)
        yield proxy


#: "google" is the small one, by Google's API.
STARTERS = {"small": small, "google": small, "moto": moto, "rclone": rclone, "swift": swift}
#: Those that write over an object although they are told not to.
HEEDLESS = ("rclone",)
