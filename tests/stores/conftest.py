"""A server behind a proxy: the small one of ours, or those that FUNCTIONAL_CKPT_STORES names (`tox -e stores`)."""

import itertools
import os

import attrs
import pytest

from functional_ckpt import LoadPolicy, SavePolicy, StorePolicy
from tests.stores.proxy import Proxy
from tests.stores.servers import HEEDLESS, STARTERS

_NAMES = os.environ.get("FUNCTIONAL_CKPT_STORES", "small").split(",")
_NUMBERS = itertools.count()
# Faults are tried at every so many requests; `tox -e stores` sets 1.
STEP = int(os.environ.get("FUNCTIONAL_CKPT_STEP", "9"))
#: One that takes ten times as long for each request as the others, and has no conditions that the others have not.
_SLOW = {"swift": 9}


@attrs.frozen
class Server:
    """A server behind a proxy, and policies that reach it without long waits."""

    name: str
    proxy: Proxy

    @property
    def heeds_conditions(self):
        return self.name not in HEEDLESS

    @property
    def step(self):
        """At every how many requests faults are tried."""
        return max(STEP, _SLOW.get(self.name, 1))

    def access(self, **more):
        options = {"retries": 2, "retry_delay_s": 0.01, "timeout_s": 120, "lease_s": 0.5, "endpoint": self.proxy.url}
        return StorePolicy(**{**options, "alone": not self.heeds_conditions, **more})

    def saving(self, **more):
        return SavePolicy(store=self.access(), timeout_s=300, **more)

    def loading(self, **more):
        return LoadPolicy(store=self.access(), timeout_s=300, **more)


@pytest.fixture(scope="session", params=_NAMES)
def upstream(request, tmp_path_factory):
    with STARTERS[request.param](tmp_path_factory.mktemp(request.param)) as port:
        yield request.param, port


@pytest.fixture
def server(upstream, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test:tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    proxy = Proxy(upstream[1])
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", proxy.url)
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
    yield Server(upstream[0], proxy)
    proxy.close()


@pytest.fixture
def url(server):
    return f"{'gs' if server.name == 'google' else 's3'}://ckpt/run-{os.getpid()}-{next(_NUMBERS)}/step-1"
