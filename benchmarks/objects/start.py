"""Start a server and the proxy in front of it, each in a process of its own, and end them."""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs
import tensorstore as ts

from benchmarks.objects.processes import cpu_s, descendants
from tests.stores.servers import moto, swift, worker_count

BUCKET = "ckpt"
MEMORY = "memory"


@attrs.frozen
class Reached:
    """A server as a client reaches it: `direct` is its own port, `port` that of the proxy, in one process or several.

    `proxies` are their process ids, and `logs` the ports of their logs.
    """

    name: str
    port: int
    direct: int
    proxies: tuple = ()
    logs: tuple = ()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.port}"

    def without_proxy(self):
        """Return the server as a client reaches it that does not wait."""
        return attrs.evolve(self, port=self.direct)

    def log(self):
        """Return the requests since the last time: (method, target, when it came, when it was answered)."""
        answers = [urllib.request.urlopen(f"http://127.0.0.1:{port}/").read() for port in self.logs]
        return [entry for answer in answers for entry in json.loads(answer)]

    def cpu_s(self):
        """Return the CPU seconds that the proxy has taken so far, and the server, in all their processes."""
        proxy = sum(cpu_s(pid) for pid in self.proxies)
        return proxy, sum(cpu_s(pid) for pid in descendants(os.getpid())) - proxy

    def store(self, prefix, concurrency):
        """Return TensorStore's key-value store."""
        many = {"limit": concurrency}
        spec = {"driver": "s3", "bucket": BUCKET, "path": prefix, "aws_region": "us-east-1",
                "endpoint": self.endpoint,
                "context": {"s3_request_concurrency": many, "aws_credentials": {"type": "environment"}}}  # fmt: skip
        return ts.KvStore.open(spec).result()

    def empty(self):
        """Remove all objects, not through the proxy."""
        kv = self.without_proxy().store("", 32)
        for gone in [kv.write(key, None) for key in kv.list().result()]:
            gone.result()


@contextmanager
def _printing_ports(*command):
    """Run a program of this repository that prints ports; yield its process id and the ports."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    try:
        yield process.pid, *map(int, process.stdout.readline().split())
    finally:
        process.kill()
        process.wait()


@contextmanager
def _memory(_):
    with _printing_ports("benchmarks.objects.server") as (_, port):
        yield port


SERVERS = {MEMORY: _memory, "moto": moto, "swift": swift}


@contextmanager
def reached(name, latency_ms, stream_mib):
    """Start a server and its proxy, and set the environment of their clients."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "test:tester", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": "us-east-1",
                   "AWS_EC2_METADATA_DISABLED": "true", "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
                   "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
                   "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(2**30)}  # fmt: skip
    with ExitStack() as running:
        place = Path(running.enter_context(tempfile.TemporaryDirectory()))
        port = running.enter_context(SERVERS[name](place))
        options = ("--latency-ms", str(latency_ms), "--stream-mib", str(stream_mib))
        command = ("benchmarks.objects.proxy", str(port), *options)
        pid, shared, log = running.enter_context(_printing_ports(*command))
        found = Reached(name, shared, port, (pid,), (log,))
        for _ in range(worker_count() - 1):
            pid, _, log = running.enter_context(_printing_ports(*command, "--port", str(shared)))
            found = attrs.evolve(found, proxies=(*found.proxies, pid), logs=(*found.logs, log))
        os.environ["AWS_ENDPOINT_URL"] = found.endpoint
        yield found


def described(log):
    """Return a log in words: requests by method, the most in flight at a time, and the time with few in flight."""
    began = min(entry[2] for entry in log)
    ended = max(entry[3] or entry[2] for entry in log)
    changes = sorted(change for _, _, came, done in log for change in ((came, 1), (done or ended, -1)))
    now = most = 0
    few_s, last = 0.0, began
    for at, change in changes:
        few_s += (at - last) * (now <= 1)
        now, last = now + change, at
        most = max(most, now)
    methods = ", ".join(f"{count} {method}" for method, count in sorted(Counter(entry[0] for entry in log).items()))
    return f"{methods}; {most} in flight at most; {few_s:.2f} of {ended - began:.2f} s with at most one"
