"""What a power cut at each moment of a save may leave, made real: sweep and the next save."""

import pytest

from tests.test_power_cuts import CASES, check_recoveries


@pytest.mark.parametrize(("mode", "durability"), CASES)
def test_after_each_power_cut_the_next_save_works(mode, durability, tmp_path):
    check_recoveries(tmp_path, mode, durability, 1, 7)
