"""Tests against the programs that people run, which are not installed in CI: `tox -e torchtitan` and others set the
variable, and name the file of their program.
"""

import os

from tests.mp.conftest import four, two

__all__ = ["four", "two"]

collect_ignore_glob = [] if os.environ.get("FUNCTIONAL_CKPT_PROGRAMS") else ["*"]
