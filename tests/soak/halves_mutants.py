"""Mutants of what keeps Megatron's halves together in an object store, see `mutants`."""

from tests.soak.mutant import Mutant

HALVES = (
    Mutant(
        "the common half is not looked at when the root is written", "store/commit.py",
        "        require_beside(store, bound, digests_beside(store, bound))", "        del bound",
        ("tests/stores/test_megatron.py", "-k", "halves_of_two"),
    ),
    Mutant(
        "the common half of another save is taken for ours", "torch/megatron/halves.py",
        "        require_beside(store, {_BESIDE[1]: mine}, found)", "        del mine",
        ("tests/stores/test_megatron.py", "-k", "halves_of_two"),
    ),
    Mutant(
        "the common half of a live save is removed by another", "torch/megatron/halves.py",
        "        clear_in_place(store, claim.label, there)", "        del there",
        ("tests/stores/test_megatron.py", "-k", "left_alone"),
    ),
    Mutant(
        "a committed checkpoint of Megatron in an object store is invalidated", "torch/megatron/halves.py",
        "    if store.nbytes_of(ROOT) is not None:\n        raise AlreadyExistsError(",
        "    if not store:\n        raise AlreadyExistsError(",
        ("tests/stores/test_megatron.py", "-k", "committed"),
    ),
)  # fmt: skip
