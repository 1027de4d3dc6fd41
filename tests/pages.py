"""Programs as the pages of the documentation show them: a page is the only place where their text stands.

The ``python`` blocks of a page are one program, in their order. A comment above a block says otherwise:

* ``<!-- run: name.py -->`` begins another program, or goes on with it, until the next such comment;
* ``<!-- run: name.py by tests/... -->``: the test named runs that one program, with what the reader is assumed to have;
* ``<!-- not run: reason -->``: the next block is only shown;
* ``<!-- also run`` and lines of Python, up to ``-->``: part of the program that the page does not show.

An ``sh`` block is a program of its own. A ``text`` block that follows code under the same heading is what that code
prints. A program whose text mentions ``torchrun`` runs on two ranks.
"""

import re
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
TOKEN = re.compile(
    r"""^(?:
        ```(?P<language>\w+)[^\n]*\n(?P<body>.*?)^```$
      | <!--\ run:\ (?P<name>\S+)(?:\ by\ (?P<by>\S+))?\ -->$
      | (?P<skip><!--\ not\ run:\ [^\n]+\ -->)$
      | <!--\ also\ run\n(?P<hidden>.*?)^-->$
      | (?P<heading>\#+\ )
    )""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)


@attrs.define
class Program:
    """What one block of shell commands, or all Python blocks of one name, do and print."""

    name: str
    code: str = ""
    prints: str = ""
    by: str | None = None

    @property
    def ranks(self) -> int:
        """Return on how many ranks it runs."""
        return 2 if "torchrun" in self.code else 1


def programs(page: Path) -> list[Program]:
    """Return the programs of a page in the order in which they begin."""
    found: dict[str, Program] = {}
    name, by, last, skipped = f"{page.stem}.py", None, None, False
    for token in TOKEN.finditer(page.read_text()):
        kind = token.lastgroup
        if kind == "heading":
            last = None
        elif token["name"]:
            name, by = token["name"], token["by"]
        elif token["skip"]:
            skipped = True
        elif token["hidden"] or token["language"] == "python":
            if not skipped:
                last = found.setdefault(name, Program(name, by=by))
                last.code += (token["hidden"] or token["body"]) + "\n\n"
            skipped = False
        elif token["language"] == "sh":
            if not skipped:
                last = found.setdefault(f"{len(found)}.sh", Program(f"{len(found)}.sh", token["body"]))
            skipped = False
        elif token["language"] == "text" and last:
            last.prints += token["body"]
    return list(found.values())


def program(page: str, name: str) -> str:
    """Return the text of the program of this name on a page of `docs`."""
    return {each.name: each.code for each in programs(DOCS / page)}[name]


def shown(page: str, name: str, **given: object) -> dict[str, object]:
    """Run a program of a page with what it takes for granted; return its names."""
    names = {"__name__": "shown", **given}
    exec(compile(program(page, name), name, "exec"), names)
    return names
