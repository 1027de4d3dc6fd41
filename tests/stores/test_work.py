"""Pieces that wait for a server: many at a time, and never more in memory than the budget."""

import threading
import time

from functional_ckpt.store.work import COPIES, Work, run_all


def test_what_waits_for_a_server_keeps_to_the_budget():
    lock, now, most, most_calls = threading.Lock(), [0, 0], [0], [0]

    def call(nbytes):
        def wait():
            with lock:
                now[0] += COPIES * nbytes
                now[1] += 1
                most[0], most_calls[0] = max(most[0], now[0]), max(most_calls[0], now[1])
            time.sleep(0.005)
            with lock:
                now[0] -= COPIES * nbytes
                now[1] -= 1
            return nbytes

        return wait

    sizes = [10, 100, 1, 300, 30, 5, 100] * 10
    work = [Work(nbytes, call(nbytes), nbytes) for nbytes in sizes]
    assert run_all(work, 1000, None, 16) == sizes
    assert 600 < most[0] <= 1000
    assert most_calls[0] > 2
    assert run_all(work, 1, None, 16) == sizes  # one piece is always allowed
