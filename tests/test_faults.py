"""The system refuses calls of a save: the caller is told truly whether it was published, and nothing is lost.

Some of the calls here, each with its own kind of refusal; `tox -e soak` refuses every one in every way.
"""

import pytest

from tests.faults import CASES, HOWS, try_each

STEP = 11


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("case", CASES)
def test_refused_calls(case, how, tmp_path):
    # Cases and kinds begin elsewhere, so that together they refuse most calls somehow.
    first = (4 * list(CASES).index(case) + 7 * list(HOWS).index(how)) % STEP
    count = try_each(tmp_path, case, how, first, STEP)
    assert count > 50, "the calls are no longer seen"
