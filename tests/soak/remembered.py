"""Mutants of what repeated saves of many small tensors remember and hold open: see `tests.soak.mutants`."""

from tests.soak.mutant import Mutant

REMEMBERED = (
    Mutant(
        "a plan is remembered whatever the ranks and the store can do", "plan/agreement.py",
        "    owned_ok: bool\n", "    owned_ok: bool = attrs.field(eq=False)\n",
        ("property_tests/test_memory.py",),
    ),
    Mutant(
        "True, 1 and 1.0 are one key of a dict", "spec/tree.py",
        "    value: object = attrs.field(eq=lambda value: (type(value), str(value)))", "    value: object",
        ("property_tests/test_memory.py", "-k", "keys_of_dicts"),
    ),
    Mutant(
        "a save that fails leaves its directory open", "run/saving.py",
        "        prepared.store.unpin()", "        pass",
        ("tests/test_syncs.py", "-k", "fails_the_save"),
    ),
    Mutant(
        "small pieces are written many at a time where each waits for a server", "store/orders.py",
        "(0 if waits else SMALL_NBYTES)", "SMALL_NBYTES",
        ("tests/test_small.py",),
    ),
    Mutant(
        "pieces of different fragments have one form", "store/fill.py",
        "cut.stop, cut.low, cut.high)", "cut.stop, cut.low)",
        ("property_tests/test_forms.py",),
    ),
    Mutant(
        "pieces of arrays of different layouts have one form", "store/fill.py",
        "row_keys(like[cut.array], cut.chunk,", "row_keys(cut.chunk,",
        ("property_tests/test_forms.py",),
    ),
    Mutant(
        "moving pieces of different fragments have one form", "store/wave.py",
        "pieces.stop, pieces.low, pieces.high)", "pieces.stop, pieces.low)",
        ("property_tests/test_forms.py",),
    ),
    Mutant(
        "moving pieces of arrays of different types have one form", "store/wave.py",
        "(p.spec.shape, p.spec.dtype, p.layout.chunk)", "(p.spec.shape, p.layout.chunk)",
        ("property_tests/test_forms.py",),
    ),
    Mutant(
        "results that nobody has looked at add nothing to a list", "torch/dcp/results.py",
        "def __radd__(", "def _radd(",
        ("tests/test_dcp_packed.py", "-k", "late"),
    ),
    Mutant(
        "who writes what is remembered whatever the ranks hold", "torch/megatron/strategies/fully_parallel.py",
        " or any(known != world for _, known in proposals)", "",
        ("tests/test_fully_parallel.py", "-k", "same_shards"),
    ),
)  # fmt: skip
