"""Everything that the documentation shows is run, as `tests.pages` finds it in the pages."""

import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys

import pytest

import functional_ckpt
from functional_ckpt import errors
from tests.pages import DOCS, PAGES, ROOT, TOKEN, programs

FIGURES = DOCS / "figures"
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
# What needs a real package is run by the test that the page names.
HERE = {page: found for page in PAGES if (found := [each for each in programs(page) if not each.by])}

pytest.importorskip("torch")


def title(page):
    return str(page.relative_to(ROOT))


def of_one_rank(page):
    return all(each.ranks == 1 for each in HERE[page])


def test_the_scan_found_the_programs():
    assert len(PAGES) > 10
    assert len(HERE) > 8
    assert sum(len(each.prints) > 0 for found in HERE.values() for each in found) > 8


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_block_of_code_and_every_comment_is_understood(page):
    """An indented block, or a slip in a comment, would keep code from being run."""
    text = page.read_text()
    seen = [token.lastgroup for token in TOKEN.finditer(text)]
    assert len(re.findall(r"```\w", text)) == seen.count("body")
    assert text.count("<!--") == sum(seen.count(kind) for kind in ("name", "by", "skip", "hidden"))


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_the_tests_that_run_the_others_name_them(page):
    for each in programs(page):
        if each.by:
            assert each.name in (ROOT / each.by).read_text()


@pytest.mark.parametrize("page", [page for page in HERE if of_one_rank(page)], ids=title)
def test_programs(page, tmp_path):
    check(page, tmp_path / "work")


@pytest.mark.mp
@pytest.mark.parametrize("page", [page for page in HERE if not of_one_rank(page)], ids=title)
def test_programs_on_two_ranks(page, tmp_path):
    check(page, tmp_path / "work")


def check(page, folder):
    """One folder for all: the first program may save what the later ones look at."""
    folder.mkdir()
    for each in HERE[page]:
        printed = execute(each, folder)
        if each.prints:
            assert printed == each.prints, f"{page.name} shows what {each.name} no longer prints"


def execute(program, folder):
    """Run a program in `folder` and return what it printed; fail with its errors if it fails."""
    before = shutil.copytree(folder, folder.with_name("before"), dirs_exist_ok=True)
    done = run(program, folder)
    # torch's gloo now and then ends a process so when the interpreter exits on a loaded machine; a script that saves
    # with DCP's own files, without functional_ckpt, did it too.
    if program.ranks > 1 and done.returncode and "terminate called without an active exception" in done.stderr:
        shutil.rmtree(folder)
        done = run(program, shutil.copytree(before, folder))
    shutil.rmtree(before)
    assert done.returncode == 0, f"{program.name} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run(program, folder):
    script = folder / "programs" / program.name  # not in `folder`: a script called inspect.py is no module
    script.parent.mkdir(exist_ok=True)
    # The reader's environment is the one that runs the tests.
    script.write_text(program.code.replace(".venv/bin/functional-ckpt", "functional-ckpt"))
    python = [sys.executable, "-P"]
    if program.ranks > 1:
        python += ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        python += [f"--nproc-per-node={program.ranks}"]
    # A shell function of the command's name, so that the command itself need not be on the path.
    shell = ["bash", "-euc", 'functional-ckpt() { "$0" -m functional_ckpt.cli "$@"; }; . "$1"', sys.executable]
    words = [*(shell if script.suffix == ".sh" else python), str(script)]
    # Hypothesis takes a loaded machine for a slow test, except in CI.
    variables = {**os.environ, "CI": "true"}
    return subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=300)


def test_figures_are_drawn_from_the_plans_of_today():
    figures = runpy.run_path(str(FIGURES / "make.py"))["FIGURES"]
    for name, draw in figures.items():
        assert draw() == (FIGURES / name).read_text(), "run docs/figures/make.py"


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


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links_between_files_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_how_a_tensor_travels_names_modules_and_functions_that_are_there():
    named = re.findall(r"`([\w/]+\.py)`,? ?\(?((?:`\w+`(?:, )?)*)", (DOCS / "life.md").read_text())
    assert len(named) > 20
    for module, names in named:
        text = (ROOT / "functional_ckpt" / module).read_text()
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^ *(def|class) {name}\b", text, re.MULTILINE), f"{module} has no {name}"


@pytest.mark.parametrize("name", functional_ckpt.__all__)
def test_public_functions_describe_their_parameters(name):
    function = getattr(functional_ckpt, name)
    if inspect.isfunction(function):
        described = function.__doc__.partition("Parameters\n")[2].partition("\n\n")[0]
        assert [each for each in inspect.signature(function).parameters if each not in described] == []
