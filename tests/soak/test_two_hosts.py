"""Ranks on two hosts, which are network namespaces of this machine: neither reaches the loopback of the other."""

import contextlib
import os
import shutil
import subprocess
import sys

import pytest

from tests.pages import ROOT

pytest.importorskip("torch")

RANK = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
import functional_ckpt as fc

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
if sys.argv[2] == "route":  # gloo needs the name of the interface here; we find the address by the route
    del os.environ["GLOO_SOCKET_IFNAME"]
whole, mesh = torch.arange(2048.0).reshape(64, 32), init_device_mesh("cpu", (2,))
state = {"w": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None), "step": 1}
fc.async_save(state, sys.argv[1] + "/a").result()
columns = distribute_tensor(torch.zeros(64, 32), mesh, [Shard(1)], src_data_rank=None)
loaded = fc.load({"w": columns, "step": 0}, sys.argv[1] + "/a", policy=fc.LoadPolicy(read_once=True))
print(torch.equal(loaded["w"].full_tensor(), whole), flush=True)
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    fc.save(state, sys.argv[1] + "/b", policy=fc.SavePolicy(timeout_s=3600))
except fc.errors.RankFailedError as error:
    print(error, flush=True)
os._exit(0)
"""


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts():
    """Yield the names of two namespaces, whose addresses are 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("only root can make network namespaces, with `ip`")
    names = [f"ckpt-{os.getpid()}-{number}" for number in range(2)]
    with contextlib.ExitStack() as made:
        for name in names:
            ip("netns", "add", name)
            made.callback(ip, "netns", "del", name)
        ip("-n", names[0], "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "wire")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "wire", "up")
        yield names


@pytest.mark.parametrize("address", ["interface", "route"])
def test_ranks_on_two_hosts_exchange_pieces_and_notice_a_death(hosts, tmp_path, address):
    """Pieces move; a rank that dies is missed at once, without a connection to it that could break."""
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29711", "GLOO_SOCKET_IFNAME": "wire",
             "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # fmt: skip
    ranks = [
        subprocess.Popen(["ip", "netns", "exec", host, sys.executable, "-c", RANK, str(tmp_path), address],
                         env={**os.environ, **given, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank, host in enumerate(hosts)
    ]  # fmt: skip
    said = [rank.communicate(timeout=900)[0] for rank in ranks]
    assert said[1] == "True\n"
    assert said[0].startswith("True\n")
    assert "the process of rank 1 has ended" in said[0]
