"""Peak memory of a save or load, in a process of its own: ``python -m benchmarks.objects.peak``, of `object_stores`."""

import os
import subprocess
import sys
from functools import partial

from benchmarks.objects.start import Reached
from benchmarks.objects.state import chunked_state
from benchmarks.objects.ways import ours
from benchmarks.rss import peak_extra_nbytes
from benchmarks.state import MIB, blank_like


def measure(what, nbytes, budget_nbytes, concurrency):
    """Return the bytes that a save or a load adds at its peak; the environment says where the server is."""
    numbers = map(str, (nbytes, budget_nbytes, concurrency))
    command = [sys.executable, "-m", __name__, what, *numbers]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def _main(what, nbytes, budget_nbytes, concurrency):
    port = int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])
    way = ours(Reached("", port, port), int(concurrency), int(budget_nbytes))
    way.save(chunked_state(64 * MIB), f"peak-{os.getpid()}/small")  # imports, connections and pools are there then
    state = chunked_state(int(nbytes))
    place = f"peak-{os.getpid()}/large"
    if what == "load":
        way.save(state, place)
        state = blank_like(state)
    print(peak_extra_nbytes(partial(getattr(way, what), state, place)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
