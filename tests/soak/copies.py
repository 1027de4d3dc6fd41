"""Mutants of the copies that saves in the background write from: see `tests.soak.mutants`."""

from tests.soak.mutant import Mutant

COPIES = (
    Mutant(
        "a chunk is free before it is written", "store/staging.py",
        "    return np.ndarray(values.shape, values.dtype, np.asarray(span.part(start, start + values.nbytes)))",
        "    span.part(start, start + values.nbytes)\n    return values",
        ("property_tests/test_staging.py",),
    ),
    Mutant(
        "small copies are free before they are written", "store/staging.py",
        "blocks = [np.asarray(span) for span in spans]",
        "blocks = [span._slab.memory[span.low : span.high] for span in spans]",
        ("property_tests/test_staging.py",),
    ),
    Mutant(
        "a part of a span is given away twice", "store/pool.py",
        "self._left[number : number + 1] = [(a, b) for a, b in ((first, low), (high, last)) if a < b]", "pass",
        ("property_tests/test_staging.py",),
    ),
    Mutant(
        "a copy is asked for more than once", "store/staging.py",
        "                self._array = self._span = None\n            elif", "                pass\n            elif",
        ("tests/test_staging.py", "-k", "handed_out_once"),
    ),
    Mutant(
        "the pool grows above its limit", "store/pool.py",
        "        if self.nbytes + sum(sizes) > limit:", "        if False:",
        ("property_tests/test_staging.py", "tests/test_staging.py", "-k", "limit or kept"),
    ),
    Mutant(
        "memory that saves do not need any more stays", "store/pool.py",
        "            self._shrink(limit)\n", "",
        ("property_tests/test_staging.py", "tests/test_staging.py", "-k", "limit or less"),
    ),
    Mutant(
        "threads take from the pool at the same time", "store/pool.py",
        "        with self._lock:\n            self._needs", "        if True:\n            self._needs",
        ("tests/test_staging.py", "-k", "one_thread"),
    ),
    Mutant(
        "a save that is over keeps its copy", "api.py",
        "            unstage(staged)", "            pass",
        ("tests/test_staging.py", "-k", "not_published"),
    ),
    Mutant(
        "a rank keeps its copy when another cannot copy", "run/staging.py",
        "        _drop(copies)\n        raise", "        raise",
        ("tests/test_staging.py", "-k", "another_cannot"),
    ),
    Mutant(
        "forked children have the copies, too", "store/pool.py",
        '("MADV_DONTFORK", "MADV_HUGEPAGE")', '("MADV_HUGEPAGE",)',
        ("tests/test_staging.py", "-k", "forked"),
    ),
    Mutant(
        "forked children go on with the pool of their parent", "store/pool.py",
        "    _POOL = StagingPool()\n\n\n", "    _POOL = _POOL\n\n\n",
        ("tests/test_staging.py", "-k", "forked"),
    ),
    Mutant(
        "nobody waits for what a device copies", "torch/devices.py",
        "= side.synchronize\n", "= side.todo.copy\n",
        ("tests/test_devices.py", "-k", "devices_copies"),
    ),
    Mutant(
        "a device copies before it has computed", "torch/devices.py",
        "        side.wait_stream(self.api.current_stream(self.device))\n", "",
        ("tests/test_devices.py", "-k", "comes_first"),
    ),
    Mutant(
        "a device goes on copying when one copy could not begin", "torch/devices.py",
        "            side.synchronize()\n            raise", "            raise",
        ("tests/test_devices.py", "-k", "go_on"),
    ),
    Mutant(
        "a device goes on copying when the host fails", "store/staging.py",
        "            ending.callback(begin(mine, copies))",
        "            ending.push(lambda kind, *_, wait=begin(mine, copies): None if kind else wait())",
        ("tests/test_devices.py", "-k", "go_on"),
    ),
    Mutant(
        "memory that is given back stays pinned", "torch/devices.py",
        "            self._copier.unpin(address_of(self._memory))\n", "            pass\n",
        ("tests/test_devices.py", "-k", "devices_copies"),
    ),
    Mutant(
        "a thread opens another device to let go of memory", "torch/devices.py",
        "        with self.api.device(self.device):\n", "        if True:\n",
        ("tests/test_devices.py", "-k", "devices_copies"),
    ),
    Mutant(
        "a forked child calls the device of its parent", "torch/devices.py",
        " and os.getpid() == self._process:\n", ":\n",
        ("tests/test_devices.py", "-k", "forked"),
    ),
    Mutant(
        "a load returns before the device has put everything in its place", "torch/memory.py",
        "        wait_for(piece.device)\n", "",
        ("tests/test_devices.py", "-k", "is_there"),
    ),
    Mutant(
        "a forked child unmaps what others have mapped", "store/pool.py",
        "    _LEFT_BEHIND.extend(_MAPPED.values())\n", "",
        ("tests/test_staging.py", "-k", "lets_go_of"),
    ),
    Mutant(
        "an error keeps what failed to be saved, through the functions that it has left", "run/comm.py",
        '        forget_locals(error, "functional_ckpt")\n        raise', "        raise",
        ("tests/test_garbage.py", "-k", "that_fails"),
    ),
    Mutant(
        "an error of a task keeps the tasks", "store/work.py", "        failures.clear()", "        pass",
        ("tests/test_garbage.py", "-k", "cannot_be_read"),
    ),
    Mutant(
        "two threads run the saves of one queue", "run/pending.py",
        "        if key in _WORKED_ON or key not in _QUEUES:", "        if key not in _QUEUES:",
        ("tests/test_pending.py", "-k", "start_that_is_interrupted"),
    ),
    Mutant(
        "a thread that begins late goes on with memory that was given back", "store/work.py",
        "            if self._is_over:", "            if not self._changed:",
        ("tests/test_pending.py", "-k", "threads_begin"),
    ),
    Mutant(
        "a thread is at work when a call returns", "store/work.py",
        "            self._changed.wait_for(lambda: not self._inside)", "            pass",
        ("tests/test_pending.py", "-k", "threads_begin"),
    ),
)  # fmt: skip
