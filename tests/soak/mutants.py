"""Protections taken out one at a time: ``python -m tests.soak.mutants [NAME ...]`` fails for each that no test feels.

Each mutant is a change of one line and the tests that stand nearest to it. They run in a copy of the tree. The list
has to follow the source: a line that is not found, or found twice, is an error.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.soak.copies import COPIES
from tests.soak.files import FILES
from tests.soak.halves_mutants import HALVES
from tests.soak.mutant import Mutant
from tests.soak.objects import OBJECTS
from tests.soak.reads import READS
from tests.soak.remembered import REMEMBERED
from tests.soak.syncs import SYNCS

ROOT = Path(__file__).resolve().parents[2]
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "site", "dist")
#: A mutant may make a rank wait for others in vain; that is felt, too.
_LIMIT_S = 900
_FAILED = 1  # pytest's exit status when tests have run and some failed


MUTANTS = (
    *FILES,
    *SYNCS,
    *COPIES,
    *REMEMBERED,
    *HALVES,
    *READS,
    *OBJECTS,
    Mutant(
        "a rank that has died before it connected is waited for", "torch/group/lane.py",
        "            lost = self._lane.ended(awaited)", "            lost = None",
        ("tests/test_wires.py", "-k", "dies_before"),
    ),
    Mutant(
        "a rank looks at its own files instead of its neighbour's", "run/saving.py",
        "written.receipts[(gather.rank + 1) % gather.size]", "written.receipts[gather.rank]",
        ("tests/test_claims.py", "-k", "neighbour"),
    ),
    Mutant(
        "halves of two saves load together", "torch/megatron/halves.py",
        "        if bound.get(name) != found.get(name):", "        if not name:", ("tests/test_halves.py",),
    ),
    Mutant(
        "a common half of another layout stays", "torch/megatron/strategies/zarr.py",
        "make_way(checkpoint_dir, COMMON, COMMON_FILE, OBJECTS,", "make_way(checkpoint_dir, COMMON, OBJECTS,",
        ("tests/test_halves.py", "-k", "layout"),
    ),
    Mutant(
        "what metadata.json names stays while another format is saved over it", "torch/megatron/halves.py",
        "for name in (CONFIG_FNAME, *stale):", "for name in stale:", ("tests/test_halves.py", "-k", "format"),
    ),
    Mutant(
        "nobody looks whether the checkpoint was replaced between its halves", "torch/megatron/serialization.py",
        "    if root_of(checkpoint_dir, access) != root:", "    if not checkpoint_dir:",
        ("tests/test_halves.py", "-k", "while_its_halves"),
    ),
    Mutant(
        "a claim is unlocked before it is unlinked", "store/file_claim.py",
        "                os.unlink(self.path)",
        "                fcntl.flock(self._file, fcntl.LOCK_UN), os.unlink(self.path)",
        ("tests/test_claims.py", "-k", "lock"),
    ),
    Mutant(
        "shared chunks are not locked", "store/zarr.py",
        '{"mode": "os"}', '{"mode": "none"}', ("tests/test_claims.py", "-k", "lock"),
    ),
    Mutant(
        "one process does not look for its chunks", "run/saving.py",
        "    _check_presence(written.store", "    gather.size > 1 and _check_presence(written.store",
        ("tests/test_publishing.py",),
    ),
    Mutant(
        "a late rank goes on writing", "store/files.py",
        "        if self.guard is None:", "        if True:", ("tests/test_claims.py",),
    ),
    Mutant(
        "who writes part of a chunk does not look at the claim", "store/chunk.py",
        "    store.check_guard()", "    pass", ("tests/test_claims.py",),
    ),
    Mutant(
        "a save publishes without its claim", "run/saving.py",
        "        if not stands():", "        if stands is None:", ("tests/test_publishing.py",),
    ),
    Mutant(
        "rank 0 counts from when it goes on", "run/saving.py",
        "written.checked_s + timeout_s", "time.monotonic() + timeout_s", ("tests/test_publishing.py",),
    ),
    Mutant(
        "a later checkpoint is replaced", "store/target.py",
        "    replaced = replaceable.require(final, final)", "    replaced = identity_of(final)",
        ("tests/test_publishing.py",),
    ),
    Mutant(
        "what came out of the exchange is not looked at", "store/target.py",
        "        if identity_of(work) != replaced:", "        if False:", ("tests/test_publishing.py",),
    ),
    Mutant(
        "a save that waited may not replace the one before it", "store/target.py",
        "        if save_id in self.earlier:", "        if False:", ("tests/test_publishing.py",),
    ),
    Mutant(
        "a step that took effect counts as failed", "store/target.py",
        "        return identity_of(final) == mine", "        return False",
        ("tests/soak/test_faults.py", "-k", "after"),
    ),
    Mutant(
        "closing a file hides what failed", "store/files.py",
        "suppress(OSError):  # it must not hide the first error", "suppress(ValueError):",
        ("tests/test_faults.py",),
    ),
    Mutant(
        "claims of other machines are swept", "store/file_claim.py",
        'return "dead" if same else "foreign"', 'return "dead"', ("tests/test_claims.py",),
    ),
    Mutant(
        "the claim of a late save is removed", "store/commit.py",
        "        claim.set_aside()", "        pass", ("tests/test_claims.py",),
    ),
    Mutant(
        "a claim that is swept is not made again", "store/file_claim.py",
        "                continue\n", "                raise\n", ("tests/test_sweeps.py",),
    ),
    Mutant(
        "a store makes its root", "store/files.py",
        "        if directory:", "        if True:", ("tests/test_publishing.py",),
    ),
    Mutant(
        "the exchange is not tried before", "store/commit.py",
        "        check_exchange(work)", "        pass", ("tests/test_publishing.py",),
    ),
    Mutant(
        "a sweep cleans up beside a live save", "store/sweep.py",
        'if not live and (dead or f"', 'if (dead or f"', ("tests/test_sweeps.py",),
    ),
    Mutant(
        "a failed rank sends nothing", "store/exchange.py",
        "return np.zeros(message.nbytes, np.uint8), failure", "return _NOTHING, failure",
        ("tests/test_exchange.py", "-k", "nobody_waiting"),
    ),
    Mutant(
        "edge chunks are not padded with zeros", "store/chunk.py",
        "np.zeros(layout.chunk, values.dtype)", "np.ones(layout.chunk, values.dtype)",
        ("tests/test_store.py", "-k", "padded"),
    ),
    Mutant(
        "a tie holds wherever its key is held", "plan/state.py",
        "{key: target for key, target in agreed.items() if len(claims[target]) == len(claims[key])}", "agreed",
        ("tests/test_ties.py",),
    ),
    Mutant(
        "conjugated and negated views are ties of the plain tensor", "torch/tensors.py",
        "tensor.stride(), tensor.is_conj(), tensor.is_neg()", "tensor.stride()",
        ("tests/test_ties.py", "tests/test_memory.py", "-k", "tie or conj or neg"),
    ),
    Mutant(
        "a check is remembered though another rank has forgotten it", "torch/megatron/validation.py",
        "if all(known == world for _, known in proposals):", "if checked == world:",
        ("property_tests/test_serialization.py", "-k", "f3"),
    ),
    Mutant(
        "a rank that holds a shard twice writes it twice", "torch/megatron/strategies/fully_parallel.py",
        "            left.discard(place)", "            pass",
        ("tests/test_fully_parallel.py",),
    ),
    Mutant(
        "Megatron is not told of our leaves", "torch/megatron/sharded_base.py",
        "            _introduce(cls)", "            pass",
        ("tests/test_mapping.py", "-k", "megatrons_classes"),
    ),
    Mutant(
        "a file that grows does not show that rank 0 comes", "torch/megatron/arrival.py",
        "        if found != self._seen:", "        if False:",
        ("tests/test_arrival.py",),
    ),
    Mutant(
        "advice names the policy of another function", "torch/megatron/advice.py",
        "    return problem if (what, remedy) ==", "    return problem if True or (what, remedy) ==",
        ("tests/test_advice.py",),
    ),
    Mutant(
        "a key may be stored where the root is made", "store/encoding.py",
        'f"{ROOT}.new", ', "", ("tests/test_hostile.py", "-k", "named_as_the_root"),
    ),
    Mutant(
        "narrow does not look at the offset", "spec/shard.py",
        " or shard.box.start[axis] % extent", "", ("property_tests/test_narrow.py",),
    ),
    Mutant(
        "a chunk that several ranks wrote in parts has one writer", "plan/writers.py",
        " and not has_parts else None", " else None", ("tests/test_cli_map.py", "-k", "shared"),
    ),
    Mutant(
        "keys that a shell runs are completed", "cli/completion.py",
        "if _PLAIN.fullmatch(name)", "if name", ("tests/test_cli_completion.py",),
    ),
    Mutant(
        "keys are tags of a notebook's page", "show/html.py",
        "    return escape(clean(short(text)))", "    return clean(short(text))", ("tests/test_reprs.py",),
    ),
    Mutant(
        "keys steer the terminal", "show/text.py",
        'repr(c)[1:-1] for c in text)', 'c for c in text)', ("tests/test_cli_tree.py",),
    ),
    Mutant(
        "a terminal that goes away is an error", "show/bar.py",
        "except Exception:  # of a terminal", "except KeyError:  # of a terminal", ("tests/test_display.py",),
    ),
    Mutant(
        "two bars write over one another", "show/bar.py",
        "_BAR.acquire(blocking=False)", "_BAR", ("tests/test_display.py", "-k", "one_bar"),
    ),
    Mutant(
        "rm looks at the second when the first is gone", "cli/removal.py",
        "        check_removable(path)", "        pass", ("tests/test_cli_rm.py",),
    ),
)  # fmt: skip


def main(names: Sequence[str]) -> int:
    """Try the mutants of these names, or all; return 1 if one survives or the list is out of date."""
    chosen = [mutant for mutant in MUTANTS if mutant.name in names or not names]
    stale = [f"there is no mutant {name!r}" for name in names if name not in {mutant.name for mutant in MUTANTS}]
    stale += [f"{mutant.name}: {fault}" for mutant in MUTANTS for fault in faults(mutant, ROOT)]
    if stale:
        print("the list of mutants is out of date:", *stale, sep="\n  ")
        return 1
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        tree = Path(scratch, "tree")
        shutil.copytree(ROOT, tree, ignore=_LEFT_OUT)
        survivors = list(surviving(chosen, tree))
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants are felt", *survivors, sep="\n  survives: ")
    return int(bool(survivors))


def faults(mutant: Mutant, root: Path) -> Iterator[str]:
    """Say what in the list does not fit the tree."""
    count = (root / mutant.path).read_text().count(mutant.old) if (root / mutant.path).exists() else 0
    if count != 1:
        yield f"{mutant.path} has {mutant.old.strip()!r} {count} times"
    yield from (f"there is no {word}" for word in mutant.tests if "/" in word and not (root / word).exists())


def surviving(mutants: Iterable[Mutant], tree: Path) -> Iterator[str]:
    """Yield the names of those that no test feels, and of those whose tests fail without them."""
    healthy: dict[tuple[str, ...], bool] = {}
    for mutant in mutants:
        if mutant.tests not in healthy:
            healthy[mutant.tests] = run(mutant.tests, tree) == 0
        if not healthy[mutant.tests]:
            yield f"{mutant.name} (its tests fail without it)"
            continue
        path = tree / mutant.path
        text = path.read_text()
        path.write_text(text.replace(mutant.old, mutant.new))
        felt = run(mutant.tests, tree) == _FAILED
        path.write_text(text)
        print("felt    " if felt else "SURVIVES", mutant.name, flush=True)
        if not felt:
            yield mutant.name


def run(words: tuple[str, ...], tree: Path) -> int:
    """Return pytest's exit status for tests of a tree."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "mp or not mp", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False,
                              timeout=_LIMIT_S)  # fmt: skip
    except subprocess.TimeoutExpired:
        return _FAILED
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            print("        ", line[:200])
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
