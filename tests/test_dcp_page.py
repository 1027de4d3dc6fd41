"""Each difference that docs/dcp.md lists names a test, and the test exists."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGE = (TESTS.parent / "docs" / "dcp.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line and "| test |" not in line]
NAMED = sorted(set(re.findall(r"`([\w./]+\.py)::(\w+)`", PAGE)))


def test_the_page_is_read():
    assert len(ROWS) > 10


@pytest.mark.parametrize("row", ROWS)
def test_each_row_names_a_test(row):
    cells = row.strip("|").split("|")
    assert len(cells) == 4
    assert re.fullmatch(r" `[\w./]+\.py::test_\w+` ", cells[3])


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_named_tests_exist(path, name):
    assert f"\ndef {name}(" in (TESTS / path).read_text()
