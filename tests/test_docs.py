"""Everything the documentation shows is run: snippets by file, the README's blocks in order."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from functional_ckpt import errors

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SNIPPETS = DOCS / "snippets"
FIGURES = DOCS / "figures"
PAGES = sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# On one line, or, where ruff would format the line as Python, as a block.
INCLUDE = re.compile(r'^--8<--(?: "|\n)([^":\n]+)(?::([a-z_0-9:]+))?(?:"|\n--8<--)$', re.MULTILINE)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")

INCLUDED = [(page, *found) for page in PAGES for found in INCLUDE.findall(page.read_text())]
# The first is what look_* look into; tests of Megatron and of programs run the others.
NOT_RUN_HERE = (
    "look_saved.py",
    *(path.name for path in SNIPPETS.glob("megatron_*.py")),
    *(path.name for path in SNIPPETS.glob("program_*.py")),
)
SCRIPTS = sorted(p for p in SNIPPETS.iterdir() if p.suffix in (".py", ".sh") and p.name not in NOT_RUN_HERE)
README = (ROOT / "README.md").read_text()
README_BLOCKS = [code for language, code in FENCE.findall(README) if language == "python"]

pytest.importorskip("torch")


def test_the_scan_found_the_snippets():
    assert len(PAGES) > 10
    assert len(INCLUDED) > 10
    assert len(SCRIPTS) > 10
    assert len(README_BLOCKS) >= 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_pages_hold_no_code_of_their_own(page):
    for language, code in FENCE.findall(page.read_text()):
        if language in ("python", "sh"):
            assert INCLUDE.search(code), f"{page.name} shows code that no test runs:\n{code}"


@pytest.mark.parametrize(("page", "name", "part"), INCLUDED, ids=lambda value: str(getattr(value, "stem", value)))
def test_includes_exist(page, name, part):
    text = ((FIGURES if name.endswith(".svg") else SNIPPETS) / name).read_text()
    if part and not re.fullmatch(r"\d*:\d*", part):
        assert f"[start:{part}]" in text
        assert f"[end:{part}]" in text


def test_every_snippet_is_shown():
    shown = {name for _, name, _ in INCLUDED}
    hidden = {path.name for path in SNIPPETS.iterdir() if path.is_file()} - shown
    assert hidden == {
        "look_saved.py",
        "look_bfloat16.out",
        "per_rank.out",
        "verify.out",
    }  # the first is what look_* look into


def test_figures_are_drawn_from_the_plans_of_today():
    figures = runpy.run_path(str(FIGURES / "make.py"))["FIGURES"]
    for name, draw in figures.items():
        assert draw() == (FIGURES / name).read_text(), "run docs/figures/make.py"


@pytest.mark.parametrize("script", [s for s in SCRIPTS if "torchrun" not in s.name], ids=lambda script: script.name)
def test_snippet(script, tmp_path):
    if script.name.startswith("look_"):
        execute(SNIPPETS / "look_saved.py", tmp_path)
    printed = execute(script, tmp_path)
    expected = script.with_suffix(".out")
    if expected.exists():
        assert printed == expected.read_text()


@pytest.mark.mp
@pytest.mark.parametrize("script", [s for s in SCRIPTS if "torchrun" in s.name], ids=lambda script: script.name)
def test_snippet_on_two_ranks(script, tmp_path):
    execute(script, tmp_path, ranks=2)


@pytest.mark.mp
def test_readme_blocks(tmp_path):
    """One folder for all: the first block saves what the later ones look at."""
    for number, code in enumerate(README_BLOCKS):
        script = tmp_path / f"block{number}.py"
        script.write_text(code)
        execute(script, tmp_path, ranks=2 if "torchrun" in code else 1)


def execute(script, folder, ranks=1):
    """Run a script in `folder` and return what it printed; fail with its errors if it fails."""
    python = [sys.executable]
    if ranks > 1:
        python += ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    # A shell function of the command's name, so that the command itself need not be on the path.
    shell = ["bash", "-euc", 'functional-ckpt() { "$0" -m functional_ckpt.cli "$@"; }; . "$1"', sys.executable]
    words = [*(shell if script.suffix == ".sh" else python), str(script)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{script.name} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


# ---- Pages that follow the code -----------------------------------------------------------------


def error_sections():
    text = (DOCS / "errors.md").read_text()
    parts = re.split(r"^### `(\w+)`$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_errors_page_has_every_class_once_and_no_other():
    classes = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert set(error_sections()) == classes


@pytest.mark.parametrize("name", sorted(error_sections()))
def test_errors_page_says_cause_and_fix_and_parents(name):
    section = error_sections()[name]
    assert "**Cause.**" in section
    assert "**Fix.**" in section
    builtin = [base.__name__ for base in getattr(errors, name).__mro__[1:] if base.__module__ == "builtins"]
    notable = {base for base in builtin if base in ("ValueError", "KeyError", "TypeError", "NotImplementedError")}
    assert set(re.findall(r"also a `(\w+)`", section)) == notable


def test_decisions_are_numbered_and_complete():
    records = sorted(path for path in (DOCS / "adr").glob("*.md") if path.stem != "index")
    assert [int(path.name[:4]) for path in records] == list(range(1, len(records) + 1))
    for path in records:
        headings = re.findall(r"^## (.+)$", path.read_text(), flags=re.MULTILINE)
        assert headings == ["Context", "Decision", "Evidence", "Alternatives"], path.name


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_links_between_files_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
