"""`Mutant`: one protection taken out."""

from pathlib import Path

import attrs


@attrs.frozen
class Mutant:
    """In `file`, `old` becomes `new`; then some of `tests`, words for pytest, must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Where the source is, below a tree."""
        return Path("functional_ckpt", self.file)
