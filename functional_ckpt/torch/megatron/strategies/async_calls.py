"""`AsyncRequest`: a prepared save; `AsyncCallsQueue`: runs requests in the background and finalises them in order.

A thread of this process does the work, never a forked process: TensorStore aborts there.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import attrs

from functional_ckpt.errors import CheckpointError, SpecError, raise_problems
from functional_ckpt.run.comm import TIMEOUT_S, Gather, LocalGather, agree
from functional_ckpt.torch.group.link import torch_gather
from functional_ckpt.torch.megatron.exceptions import SpecAssertionError

__all__ = ["AsyncCallsQueue", "AsyncRequest"]

# How long a rank waits for its own work before it exchanges a message with the others, which shows that it is alive.
_BEAT_S = 0.2


class AsyncRequest(NamedTuple):
    """A prepared save: the function to run in the background, and those to call afterwards on the caller's thread.

    Parameters
    ----------
    async_fn
        The work of this rank; None if it has none.
    async_fn_args, async_fn_kwargs
        Its arguments.
    finalize_fns
        Functions without arguments, called in order once the work of all ranks is done.
    preload_fn
        If given, called on the caller's thread; its result replaces the second of three arguments.
    is_frozen
        Whether adding functions is forbidden.
    call_idx
        Number in the queue.

    Examples
    --------
    >>> request = AsyncRequest(print, ("written",), [])
    >>> request.add_finalize_fn(lambda: print("published"))
    >>> request.execute_sync()
    written
    published
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 - a default of Megatron's, never changed
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Add a function to be called after the existing ones.

        Raises
        ------
        RuntimeError
            If the request is frozen.
        """
        if self.is_frozen:
            raise RuntimeError("a frozen request does not accept more functions")
        self.finalize_fns.append(fn)

    def freeze(self) -> "AsyncRequest":
        """Return a frozen copy, which shares the list of functions."""
        return self._replace(is_frozen=True)

    def execute_sync(self) -> None:
        """Run everything now. All ranks of the default process group call it; a failure is raised on all of them.

        Raises
        ------
        CheckpointingException
            The failures of all ranks. Functions after a failure are not called.
        """
        gather = torch_gather(None, TIMEOUT_S, "queue", "AsyncRequest.execute_sync")
        agree(gather, lambda: self._run(self._arguments()))
        self._finalize(gather)

    def _arguments(self) -> tuple[Any, ...]:
        if self.preload_fn is None:
            return self.async_fn_args
        if len(self.async_fn_args) != 3:
            raise SpecAssertionError(
                "a request with a preload_fn must have three arguments", found=len(self.async_fn_args)
            )
        first, _, last = self.async_fn_args
        return first, self.preload_fn(), last

    def _run(self, arguments: tuple[Any, ...]) -> None:
        if self.async_fn is not None:
            self.async_fn(*arguments, **self.async_fn_kwargs)

    def _finalize(self, gather: Gather) -> None:
        for function in self.finalize_fns:
            agree(gather, function)


@attrs.frozen(eq=False)
class _Call:
    """A request whose work was submitted to the worker."""

    request: AsyncRequest
    future: "Future[None]"


class AsyncCallsQueue:
    """A queue of saves in the background. All ranks schedule and finalise in the same order, from one thread each.

    Parameters
    ----------
    persistent
        Keep the worker thread while the queue is empty.
    process_group
        Ranks that save together; None for the default group.
    timeout_s
        Longest silence of another rank, in seconds; a save may take longer.

    Examples
    --------
    >>> queue = AsyncCallsQueue()
    >>> queue.schedule_async_request(AsyncRequest(None, (), [lambda: print("published")]))
    0
    >>> queue.maybe_finalize_async_calls(blocking=True)
    published
    [0]
    """

    def __init__(self, persistent: bool = False, *, process_group: Any = None, timeout_s: float = TIMEOUT_S) -> None:
        self._persistent = persistent
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._calls: deque[_Call] = deque()
        self._next = 0
        self._worker: ThreadPoolExecutor | None = None

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start the work of a request, after the work of earlier ones, and return its number, from 0.

        `maybe_finalize_async_calls` raises failures, on all ranks.
        """
        request = async_request.freeze()._replace(call_idx=self._next)
        self._next += 1
        self._calls.append(_Call(request, self._started(request)))
        return request.call_idx

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalise, in order, the calls whose work has ended on all ranks, and return their numbers.

        Parameters
        ----------
        blocking
            Wait for all calls.
        no_dist
            Do not communicate with other ranks.

        Raises
        ------
        CheckpointingException
            The failures of all ranks in the first call that failed, on all ranks. That call is dropped: its remaining
            functions are not called. Later calls stay in the queue.
        """
        found: list[int] = []
        gather = self._gather(no_dist)
        while self._calls and self._done_everywhere(gather, blocking):
            call = self._calls.popleft()
            agree(gather, call.future.result)
            call.request._finalize(gather)
            found.append(call.request.call_idx)
        if not self._calls and not self._persistent:
            self._stop()
        return found

    def get_num_unfinalized_calls(self) -> int:
        """Return the number of calls in the queue."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Finalise all calls and end the worker; with `abort`, drop the calls, whose functions are not called.

        With `abort`, running work continues to its end. A save of our strategies publishes by itself, dropped or not.

        Raises
        ------
        CheckpointingException
            The failures of all ranks in all calls, on all ranks, after the last call.
        """
        problems: list[CheckpointError] = []
        while self._calls and not abort:
            try:
                self.maybe_finalize_async_calls(blocking=True)
            except CheckpointError as error:
                problems.append(error)
        self._calls.clear()
        self._stop()
        raise_problems(problems)

    def _started(self, request: AsyncRequest) -> "Future[None]":
        try:
            arguments = request._arguments()
        except Exception as error:
            failed: Future[None] = Future()
            failed.set_exception(error)
            return failed
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="functional_ckpt-queue")
        return self._worker.submit(request._run, arguments)

    def _gather(self, no_dist: bool) -> Gather:
        if no_dist or not self._calls:
            return LocalGather()
        return torch_gather(self._process_group, self._timeout_s, "queue", "AsyncCallsQueue.maybe_finalize_async_calls")

    def _done_everywhere(self, gather: Gather, blocking: bool) -> bool:
        call = self._calls[0]
        while True:
            if blocking:
                wait([call.future], _BEAT_S)
            states = gather.all_gather((call.request.call_idx, call.future.done()))
            numbers = [number for number, _ in states]
            if len(set(numbers)) > 1:
                raise SpecError(
                    "ranks finalise different calls", found=numbers, remedy="Use the same order on all ranks"
                )
            if all(done for _, done in states) or not blocking:
                return all(done for _, done in states)

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(wait=False, cancel_futures=True)
            self._worker = None
