"""Forks the ranks of a soak: importing torch takes seconds, forking a process that has it does not.

Reads one order per line, and answers with how each of its ranks has ended. It has no threads, and never uses torch.
"""

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.tensor

import functional_ckpt.api
import functional_ckpt.torch.dcp.storage_writer
import functional_ckpt.torch.tensors  # noqa: F401


def serve(run):
    """Do what comes, until there is no more: `run(order, rank)` is what a rank does."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(world(json.loads(line), run)), flush=True)


def world(order, run):
    """Run all ranks of one order; return for each its exit status (negative: the signal), and whether it hung.

    If the order has a `grace_s`, the others are killed so many seconds after one has failed.
    """
    began = time.monotonic()
    running = {start(order, rank, run): rank for rank in range(order["size"])}
    ended, ends = {}, began + order["limit_s"]
    while running and time.monotonic() < ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.005)
        else:
            rank = running.pop(pid)
            ended[rank] = os.waitstatus_to_exitcode(status)
            if ended[rank] and "grace_s" in order:
                ends = min(ends, time.monotonic() + order["grace_s"])
    hung = sorted(running.values())
    for pid in running:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5 * bool(running))
    for pid, rank in running.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ended[rank] = None
    return {"ended": [ended[rank] for rank in range(order["size"])], "hung": hung, "seconds": time.monotonic() - began}


def start(order, rank, run):
    """Fork a rank; if it `ends`, it does as a script does, with all that the interpreter does then."""
    pid = os.fork()
    if pid:
        return pid
    log = os.open(str(Path(order["place"], f"log.{rank}")), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    run(order, rank)
    if not order["ends"]:
        os._exit(0)
    sys.exit(0)


if __name__ == "__main__":
    from tests.soak.rank import run

    serve(run)
