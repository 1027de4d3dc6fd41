"""Mutants of what is promised of object stores, row by row of the table in `docs/reliability.md`, see `mutants`.

The row of Megatron's halves is in `halves_mutants`; that of the law of stores has wrong stores of its own.
"""

from tests.soak.mutant import Mutant

OBJECTS = (
    # A path holds a whole checkpoint or none; the next save works.
    Mutant(
        "a root that is on its way is not waited for", "store/lease.py",
        "    if content.get(_PUBLISHING):", "    if not content:",
        ("tests/stores/test_savers.py", "-k", "on_its_way"),
    ),
    Mutant(
        "a chunk that is on its way is not waited for", "store/lease.py",
        "min(_LATE_S, _lease_of(content) / 3) if content.get(\"nodes\") else 0.0", "0.0",
        ("tests/stores/test_savers.py", "-k", "on_its_way"),
    ),
    Mutant(
        "the root is sent with what it names", "run/closing.py",
        "files += [(MANIFEST, text),",
        "files += [(\"zarr.json\", root_metadata(manifest, manifest_digest(text), None)), (MANIFEST, text),",
        ("tests/stores/test_savers.py", "-k", "taken_for_dead"),
    ),
    Mutant(
        "what a killed save left in an object store is in the way of the next", "store/commit.py",
        "        if dead or store.capabilities.sized:", "        if store.capabilities.sized:",
        ("tests/stores/test_faults.py", "-k", "kills"),
    ),
    Mutant(
        "a claim does not name what its save writes", "store/commit.py",
        "claim.name([*nodes, MANIFEST], durability", "claim.name([], durability",
        ("tests/stores/test_faults.py", "-k", "kills"),
    ),
    Mutant(
        "claims are deleted with what they name", "store/sweep.py",
        "store.delete([name for name in names if name not in signs])", "store.delete(names)",
        ("tests/stores/test_savers.py", "-k", "half_way"),
    ),
    # One error with a remedy, and nothing published, or it is said that this is not known.
    Mutant(
        "chunks are removed under a root that may come", "run/saving.py",
        "_is_any(error, OutcomeUnknownError)", "_is_any(error, SaveCancelledError)",
        ("tests/stores/test_faults.py", "-k", "too_late"),
    ),
    Mutant(
        "the error of a server has no remedy", "store/server_errors.py",
        "found=_short(text), remedy=remedy)", "found=_short(text))",
        ("tests/stores/test_faults.py", "-k", "refusal"),
    ),
    Mutant(
        "a server that does not answer is waited for", "store/object_store.py",
        "future.result(timeout=self.policy.timeout_s)", "future.result(timeout=self.policy.timeout_s + 61)",
        ("tests/stores/test_faults.py", "-k", "never_answers"),
    ),
    Mutant(
        "a root whose outcome is not known is a failure like others", "store/commit.py",
        "        raise OutcomeUnknownError(", "        raise StorageError(",
        ("tests/stores/test_faults.py", "-k", "too_late"),
    ),
    Mutant(
        "nobody looks for a root whose answers were lost", "store/commit.py",
        "            if store.read(ROOT) == root:", "            if not root:",
        ("tests/stores/test_faults.py", "-k", "answers_are_all_lost"),
    ),
    Mutant(
        "what a failed save has written to an object store stays", "store/commit.py",
        "    store.delete([found for found in names if found != name])", "    del names",
        ("tests/stores/test_faults.py", "-k", "told_to_all"),
    ),
    # What is worth another try is tried again.
    Mutant(
        "a request that was repeated is taken for another's object, or the reverse", "store/object_store.py",
        "if found.value != content():", "if not found.value:",
        ("tests/stores/test_savers.py", "-k", "never_replaced"),
    ),
    Mutant(
        "a request is sent once", "store/object_store.py",
        '"max_retries": retries,', '"max_retries": 0,',
        ("tests/stores/test_faults.py", "-k", "one_request"),
    ),
    Mutant(
        "a renewal whose answer was lost is another's", "store/object_store.py",
        'return found.stamp.generation if found.state == "value" and found.value == data else None', "return None",
        ("tests/stores/test_faults.py", "-k", "renewal"),
    ),
    # A committed checkpoint is never overwritten; of two saves at most one is published.
    Mutant(
        "an object of a store is written without a condition", "store/object_store.py",
        "write(name, joined(parts, nbytes), if_equal=_MISSING)", "write(name, joined(parts, nbytes))",
        ("tests/stores/test_savers.py", "-k", "came_meanwhile or never_replaced"),
    ),
    Mutant(
        "a large object of a store is written without a condition", "store/object_store.py",
        "lambda data: kv.write(name, data, if_equal=_MISSING)", "lambda data: kv.write(name, data)",
        ("tests/stores/test_savers.py", "-k", "never_replaced"),
    ),
    Mutant(
        "a root that is there is not looked for", "store/commit.py",
        "    if ROOT in there:", "    if not there:",
        ("tests/stores/test_savers.py", "-k", "never_overwritten"),
    ),
    Mutant(
        "a live save is not looked for", "store/commit.py",
        "        if live:", "        if not store:",
        ("tests/stores/test_savers.py", "-k", "comes_to_a_live_one"),
    ),
    Mutant(
        "claims are listed before one's own is there", "store/lease.py",
        "        lease._stamp = store.replace(lease._label, lease._text(), None)\n        try:\n"
        "            _, names = at_once([lease._probe, lambda: list(store.names())], store.capabilities.concurrency)",
        "        names = list(store.names())\n"
        "        lease._stamp = store.replace(lease._label, lease._text(), None)\n        try:\n"
        "            lease._probe()",
        ("tests/stores/test_savers.py", "-k", "claim_together"),
    ),
    # A sweep removes nothing of a live save; who was taken for dead publishes nothing.
    Mutant(
        "a claim in an object store is not renewed", "store/lease.py",
        "self._stop.wait(self._store.lease_s / 3)", "self._stop.wait(3600)",
        ("tests/stores/test_savers.py", "-k", "live_save"),
    ),
    Mutant(
        "a root stays though its claim was taken over", "store/commit.py",
        "        if stands():", "        if stands() or store:",
        ("tests/stores/test_savers.py", "-k", "taken_for_dead"),
    ),
    Mutant(
        "what a slow saver leaves is not named", "store/lease.py",
        "        store.publish(name + ABANDONED, taken)", "        del taken",
        ("tests/stores/test_savers.py", "-k", "taken_for_dead"),
    ),
    Mutant(
        "a rank writes on though its save was given up", "store/whole.py",
        "if data is None or is_taken(data):", "if data is not None and is_taken(data):",
        ("tests/stores/test_savers.py", "-k", "given_up"),
    ),
    Mutant(
        "a claim is taken over though it was renewed", "store/lease.py",
        "store.replace(name, taken, stamp) is not None", "store.replace(name, taken, store.stamp(name)) is not None",
        ("tests/stores/test_savers.py", "-k", "renews_at_last"),
    ),
    Mutant(
        "a claim that was lost is made anew", "store/lease.py",
        "            if self._lost:", "            if not self._label:",
        ("tests/stores/test_savers.py", "-k", "lost_claim"),
    ),
    # A server that ignores conditions is found.
    Mutant(
        "a claim is written without a condition", "store/object_store.py",
        "write(name, data, if_equal=_MISSING), lambda: data)", "write(name, data), lambda: data)",
        ("tests/stores/test_savers.py", "-k", "never_replaced"),
    ),
    Mutant(
        "a server is not asked whether it heeds conditions", "store/lease.py",
        "if self._store.alone or self._store.refuses(", "if True or self._store.refuses(",
        ("tests/stores/test_savers.py", "-k", "ignores_conditions"),
    ),
    # A run resumes from a whole step.
    Mutant(
        "a step without a root counts", "store/steps.py",
        "for step in _named(names) if _is_committed(store, step)}", "for step in _named(names)}",
        ("tests/stores/test_objects.py", "-k", "cut_off"),
    ),
    Mutant(
        "the root of a step is removed with the rest", "store/steps.py",
        "    store.delete([ROOT])", "    pass",
        ("tests/stores/test_objects.py", "-k", "cut_off"),
    ),
    Mutant(
        "nothing tells what is left of a removal", "store/steps.py",
        "    store.publish(sign, json.dumps(", "    (lambda *_: None)(sign, json.dumps(",
        ("tests/stores/test_objects.py", "-k", "cut_off"),
    ),
    # A chunk that is missing or short is named.
    Mutant(
        "a chunk that a listing lacks is taken to be there", "store/chunk.py",
        "for name, nbytes in zip(unlisted, found, strict=True) if nbytes is None)",
        "for name, nbytes in zip(unlisted, found, strict=True) if not name)",
        ("tests/stores/test_objects.py", "-k", "missing_chunk"),
    ),
    Mutant(
        "a chunk that a listing lacks is taken for lost", "store/chunk.py",
        "for name, nbytes in zip(unlisted, found, strict=True) if nbytes is None)",
        "for name, nbytes in zip(unlisted, found, strict=True) if name)",
        ("tests/stores/test_objects.py", "-k", "does_not_list_yet"),
    ),
    Mutant(
        "an object that is too short is read", "store/object_store.py",
        "        if data is None or len(data) < nbytes:\n", "        if data is None:\n",
        ("tests/stores/test_objects.py", "-k", "missing_or_short"),
    ),
    # Requests are few, and many at a time; memory keeps to the budget.
    Mutant(
        "requests of a store hold more than the budget", "store/work.py",
        "self._changed.wait_for(lambda: self._free >= nbytes)", "self._free += 0",
        ("tests/stores/test_work.py",),
    ),
    Mutant(
        "large objects are handed over by many threads, each of which keeps memory", "store/object_store.py",
        "self._joiner.passed(parts, nbytes, lambda data: kv.write(name, data, if_equal=_MISSING))",
        "kv.write(name, joined(parts, nbytes), if_equal=_MISSING)",
        ("tests/stores/test_objects.py", "-k", "handed_over"),
    ),
    Mutant(
        "each rank reads from an object store what it wants", "run/loading.py",
        "dear = self.gather.size > 1 and not self.store.capabilities.sized", "dear = False",
        ("tests/stores/test_objects.py", "-k", "read_once"),
    ),
    Mutant(
        "a few requests at a time", "store/work.py",
        "    count = concurrency or min(", "    count = min(",
        ("tests/stores/test_objects.py", "-k", "many_requests"),
    ),
    Mutant(
        "requests that need nothing of one another wait for one another", "store/work.py",
        "return run_all([Work(0, call, 0) for call in calls], 1, None, concurrency)",
        "return [call() for call in calls]",
        ("tests/stores/test_objects.py", "-k", "go_together"),
    ),
)  # fmt: skip
