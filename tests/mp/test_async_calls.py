"""Saves in the background on two ranks: finalised in order and together, failures on all ranks."""

import threading
import time

import pytest

from tests.mp import launch

pytestmark = pytest.mark.mp


def queue_of(**more):
    from functional_ckpt.torch.megatron.strategies.async_calls import AsyncCallsQueue

    return AsyncCallsQueue(timeout_s=20, **more)


def request(work, *finalize_fns, **more):
    from functional_ckpt.torch.megatron.strategies.async_calls import AsyncRequest

    return AsyncRequest(work, (), list(finalize_fns), **more)


def in_order():
    """Rank 1 is slow at first, and has nothing to write in the end."""
    queue, seen = queue_of(), []
    slow, looked = launch.rank() == 1, threading.Event()
    numbers = [
        queue.schedule_async_request(request(lambda: looked.wait(50 * slow), lambda: seen.append("a"))),
        queue.schedule_async_request(request(lambda: seen.append("work"), lambda: seen.append("b"))),
        queue.schedule_async_request(request(None if slow else lambda: None, lambda: seen.append("c"))),
    ]
    assert numbers == [0, 1, 2]
    assert queue.maybe_finalize_async_calls() == []
    assert queue.get_num_unfinalized_calls() == 3
    looked.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == numbers
    queue.close()
    return [entry for entry in seen if entry != "work"]


def test_calls_are_finalised_in_order_on_all_ranks(two):
    assert two.run(in_order) == [["a", "b", "c"]] * 2


def failing(where):
    """One rank fails; the call after it is not concerned."""
    from functional_ckpt.errors import CheckpointError

    def fail(*_):
        if launch.rank() == 1:
            raise OSError("no space left")

    queue, seen = queue_of(), []
    calls = {
        "work": request(fail, lambda: seen.append("published")),
        "finalize": request(lambda: None, fail, lambda: seen.append("published")),
        "preload": request(lambda: None, lambda: seen.append("published"), preload_fn=fail),
    }
    if where == "preload":
        calls["preload"] = calls["preload"]._replace(async_fn=lambda *_: None, async_fn_args=(1, None, 2))
    queue.schedule_async_request(calls[where])
    queue.schedule_async_request(request(lambda: None, lambda: seen.append("next")))
    with pytest.raises(CheckpointError) as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert seen == ["next"]
    return type(caught.value).__name__, caught.value.rank, "no space left" in str(caught.value)


@pytest.mark.parametrize("where", ["work", "finalize", "preload"])
def test_a_failure_of_one_rank_is_raised_on_all(two, where):
    assert two.run(failing, where) == [("StorageError", 1, True)] * 2


def closing():
    """Close finalises what is left, and raises all failures at the end."""
    from functional_ckpt.errors import CheckpointErrors

    def fail(text):
        if launch.rank() == 0:
            raise ValueError(text)

    queue, seen = queue_of(persistent=True), []
    queue.schedule_async_request(request(lambda: fail("first")))
    queue.schedule_async_request(request(lambda: time.sleep(0.1), lambda: seen.append("published")))
    queue.schedule_async_request(request(lambda: fail("last")))
    with pytest.raises(CheckpointErrors, match=r"(?s)first.*last"):
        queue.close()
    assert queue.get_num_unfinalized_calls() == 0
    return seen


def test_close_goes_on_after_a_failure(two):
    assert two.run(closing) == [["published"]] * 2


def synchronous():
    from functional_ckpt.errors import CheckpointError

    def fail():
        if launch.rank() == 1:
            raise ValueError("broken")

    seen = []
    request(lambda: seen.append("work"), lambda: seen.append("published")).execute_sync()
    with pytest.raises(CheckpointError, match="broken"):
        request(fail, lambda: seen.append("never")).execute_sync()
    return seen


def test_a_request_run_at_once_fails_together_too(two):
    assert two.run(synchronous) == [["work", "published"]] * 2


def unlike():
    """Rank 1 has scheduled one call more."""
    from functional_ckpt.errors import CheckpointError

    queue = queue_of()
    for _ in range(1 + launch.rank()):
        queue.schedule_async_request(request(None))
    if launch.rank() == 1:
        assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0, 1]
        queue.schedule_async_request(request(None))
    with pytest.raises(CheckpointError, match="different calls"):
        queue.maybe_finalize_async_calls(blocking=True)


def test_ranks_that_differ_are_told(two):
    two.run(unlike)
