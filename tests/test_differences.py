"""Each difference from another library that a page lists names a test, and the test exists."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGES = {name: (TESTS.parent / "docs" / name).read_text() for name in ("dcp.md", "megatron.md")}
ROWS = [
    pytest.param(line, id=f"{name} {number}")
    for name, page in PAGES.items()
    for number, line in enumerate(page.splitlines(), 1)
    if line.startswith("| ") and "---" not in line and "| test |" not in line
]
NAMED = sorted({found for page in PAGES.values() for found in re.findall(r"`([\w./]+\.py)::(\w+)`", page)})


def test_the_pages_are_read():
    assert len(ROWS) > 60
    assert len(NAMED) > 40


@pytest.mark.parametrize("row", ROWS)
def test_each_row_names_a_test(row):
    cells = row.strip("|").split("|")
    assert len(cells) == 4
    assert re.fullmatch(r" `[\w./]+\.py::test_\w+` ", cells[3])


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_named_tests_exist(path, name):
    assert f"\ndef {name}(" in (TESTS / path).read_text()
