"""Every system call of a save refused in turn, in every way."""

import pytest

from tests.faults import CASES, HOWS, try_each


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("case", CASES)
def test_each_call_refused(case, how, tmp_path):
    assert try_each(tmp_path, case, how) > 50, "the calls are no longer seen"
