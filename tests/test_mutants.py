"""The list of `tests.soak.mutants`, which takes hours to run, follows the source."""

from tests.soak.mutants import MUTANTS, ROOT, faults


def test_each_mutant_fits_the_source_once():
    assert [f"{mutant.name}: {fault}" for mutant in MUTANTS for fault in faults(mutant, ROOT)] == []
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))
