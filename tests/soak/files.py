"""Mutants of the rule that keeps files few: see `tests.soak.mutants`."""

from tests.soak.mutant import Mutant

FILES = (
    Mutant(
        "chunks are not joined however many files they are", "plan/ladder.py",
        "    least = least_kept_nbytes(Counter(cuts), policy) if owned_ok else 0",
        "    least = 0",
        ("property_tests/test_files.py", "-k", "f1 or f3"),
    ),
    Mutant(
        "chunks are joined where files are few", "plan/ladder.py",
        "most = max(policy.few_files, bound)",
        "most = bound",
        ("property_tests/test_files.py", "-k", "f2 or f3"),
    ),
    Mutant(
        "two files for each array are not allowed for", "plan/ladder.py",
        "+ 2 * sum(cuts.values())",
        "+ sum(cuts.values())",
        ("property_tests/test_files.py", "-k", "f3"),
    ),
    Mutant(
        "large chunks are joined before small ones", "plan/ladder.py",
        "sorted(sizes, key=sizes.__getitem__)",
        "sorted(sizes, key=sizes.__getitem__, reverse=True)",
        ("property_tests/test_files.py", "-k", "f3"),
    ),
    Mutant(
        "all chunks are joined if any are", "plan/ladder.py",
        "        if files <= most:\n            break",
        "        if files <= most and not least:\n            break",
        ("property_tests/test_files.py", "-k", "f3"),
    ),
    Mutant(
        "chunks of whole shards are kept though the array ends within them", "plan/ladder.py",
        "        if (_count(shape, chunk) - 1) * half <= nbytes:",
        "        if chunk:",
        ("property_tests/test_files.py", "-k", "f1 or f4"),
    ),
    Mutant(
        "shards are split to chunks that are then too many", "plan/ladder.py",
        "faced, itemsize, target, half)",
        "faced, itemsize, target, policy.min_chunk_nbytes)",
        ("property_tests/test_files.py", "-k", "f4"),
    ),
    Mutant(
        "joined chunks are larger than the target", "plan/ladder.py",
        "    together = _free(shards, prod(shard) * itemsize, target_nbytes)",
        "    together = _free(shards, prod(shard) * itemsize, 2 * target_nbytes)",
        ("property_tests/test_files.py", "-k", "f4"),
    ),
    Mutant(
        "shards are cut where they could be joined whole", "plan/ladder.py",
        "        joined = _joined(shard, whole, itemsize, target)",
        "        joined = _free(whole, itemsize, target)",
        ("property_tests/test_files.py", "-k", "f4"),
    ),
    Mutant(
        "chunks are joined where ranks cannot exchange data", "plan/ladder.py",
        "    least = least_kept_nbytes(Counter(cuts), policy) if owned_ok else 0",
        "    least = least_kept_nbytes(Counter(cuts), policy)",
        ("property_tests/test_files.py", "-k", "f5"),
    ),
)  # fmt: skip
