"""What a newcomer's pip reads, and what the installed package says of itself."""

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import functional_ckpt

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]


def test_every_pin_names_a_version_that_anybody_can_find():
    """A local version such as 2.13.0+cpu lies on no public index; a plain one is met by the local build, too."""
    assert [pin for pin in PINS if "+" in pin] == []


def test_the_version_is_the_one_that_is_installed():
    assert functional_ckpt.__version__ == version("functional_ckpt")
    assert "__version__" in dir(functional_ckpt)


def test_the_version_is_looked_up_only_when_asked_for():
    code = "import sys, functional_ckpt; print('importlib.metadata' in sys.modules); print(functional_ckpt.__version__)"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False,
                          env={"PYTHONPATH": str(ROOT)}, timeout=60)  # fmt: skip
    # Without site-packages it is not installed; the source tree says so rather than fail.
    assert done.stdout.split() == ["False", "0+unknown"], done.stderr


def test_extras_name_only_packages_that_are_pinned():
    """Otherwise the next release of one of them decides what CI does."""
    named = {line.split("[")[0].split(">")[0].split("=")[0] for each in PROJECT["optional-dependencies"].values()
             for line in each} - {"functional_ckpt", "pre-commit"}  # fmt: skip
    assert {"mkdocs", "mkdocs-material", "mkdocstrings"} <= named
    assert named - {pin.split("==")[0] for pin in PINS} == set()
