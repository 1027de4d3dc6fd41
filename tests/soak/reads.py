"""Mutants of what a load checks before it reads."""

from tests.soak.mutant import Mutant

READS = (
    Mutant(
        "digests that have the right length only together are taken", "plan/listing.py",
        "    if {*map(len, texts)} - {2 * DIGEST_NBYTES} or len(found)", "    if len(found)",
        ("property_tests/test_manifest_fuzz.py", "-k", "each_digest"),
    ),
    Mutant(
        "blanks in a digest count", "plan/listing.py",
        " or len(found) != len(texts) * DIGEST_NBYTES:", ":",
        ("property_tests/test_manifest_fuzz.py", "-k", "each_digest"),
    ),
    Mutant(
        "a root of another tool that looks like ours is cut at a wrong place", "store/reading.py",
        "        with suppress(ValueError):", "        with suppress():",
        ("tests/test_bad_checkpoint.py", "-k", "looks_like_two"),
    ),
    Mutant(
        "a tensor without memory is filled", "torch/tensors.py",
        "    if tensor.is_meta or isinstance(tensor, DTensor):", "    if not isinstance(tensor, torch.Tensor):",
        ("tests/test_dcp_items.py", "-k", "without_memory"),
    ),
    Mutant(
        "a transposed view is filled by what fills its tensor", "store/buffer.py",
        "(one.dtype, one.shape, one.strides) == (two.dtype, two.shape, two.strides)",
        "(one.dtype, one.shape) == (two.dtype, two.shape)",
        ("tests/test_targets.py", "-k", "transposed"),
    ),
)  # fmt: skip
