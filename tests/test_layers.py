"""The architecture, held by the source text: who imports what, and how long things may be.

Import contracts between our own modules are import-linter's (see pyproject.toml); here stands what
it cannot see: names of the standard library, submodules of other packages, and sizes.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "functional_ckpt"
MODULES = sorted(PACKAGE.rglob("*.py"))
PURE = [
    path
    for path in MODULES
    if path.relative_to(PACKAGE).parts[0] in {"spec", "plan", "show"} and path != PACKAGE / "show/bar.py"
]
SOURCES = MODULES + sorted(
    path for folder in ("tests", "property_tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)

# Whatever reads a clock, the environment, a file, a generator or another thread.
IMPURE_STDLIB = {
    *("asyncio", "concurrent", "contextvars", "datetime", "glob", "io", "logging"),
    *("multiprocessing", "os", "pathlib", "queue", "random", "secrets", "shutil", "signal"),
    *("socket", "subprocess", "tempfile", "threading", "time", "uuid"),
}
PURE_STDLIB = sys.stdlib_module_names - IMPURE_STDLIB
PURE_PREFIXES = ("functional_ckpt.errors", "functional_ckpt.spec", "functional_ckpt.plan", "functional_ckpt.show")

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 40


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported_names(path: Path) -> Iterator[str]:
    """Yield each imported thing by its dotted name, wherever in the module the import stands."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve(path, node)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def resolve(path: Path, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module that `node` imports from."""
    if not node.level:
        return node.module or ""
    package = path.relative_to(ROOT).parts[: -node.level]
    return ".".join((*package, *([node.module] if node.module else [])))


def is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def is_pure(name: str) -> bool:
    if name.split(".")[0] in PURE_STDLIB | {"attrs", "numpy"}:
        return not is_within(name, "numpy.random")
    return any(is_within(name, prefix) for prefix in PURE_PREFIXES)


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, source: list[str]) -> int:
    """Count the lines of the body that hold code: no docstring, no blank and no comment lines."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return 0
    lines = source[body[0].lineno - 1 : function.end_lineno]
    return sum(1 for line in lines if line.strip() and not line.strip().startswith("#"))


def long_functions(path: Path) -> list[str]:
    source = path.read_text(encoding="utf-8").splitlines()
    return [
        f"{name_of(path)}:{node.lineno} {node.name}: {count} lines"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (count := body_lines(node, source)) > MAX_FUNCTION_LINES
    ]


def test_the_scan_finds_the_layers():
    assert {path.parent.name for path in PURE} == {"spec", "plan", "show"}
    assert len(MODULES) > len(PURE)


@pytest.mark.parametrize("path", PURE, ids=name_of)
def test_pure_layers_import_only_pure_things(path):
    assert [name for name in imported_names(path) if not is_pure(name)] == []


@pytest.mark.parametrize(
    ("name", "pure"),
    [
        ("math.prod", True),
        ("numpy", True),
        ("functional_ckpt.spec.box.Box", True),
        ("functional_ckpt.api.save", False),
        ("functional_ckpt.Box", False),
        ("functional_ckpt.planets", False),
        ("numpy.random.default_rng", False),
        ("os.path", False),
        ("torch", False),
    ],
)
def test_what_counts_as_pure(name, pure):
    assert is_pure(name) is pure


def test_torch_is_imported_in_its_adapter_only():
    adapter = PACKAGE / "torch"
    offenders = [
        f"{name_of(path)}: {name}"
        for path in MODULES
        if adapter not in path.parents
        for name in imported_names(path)
        if is_within(name, "torch")
    ]
    assert offenders == []


def test_dcp_is_imported_only_by_the_bridge_and_by_what_takes_its_storages_place():
    bridges = [PACKAGE / "torch/dcp" / name for name in ("bridge.py", "default_storage.py")]
    offenders = [
        f"{name_of(path)}: {name}"
        for path in MODULES
        if path not in bridges
        for name in imported_names(path)
        if is_within(name, "torch.distributed.checkpoint")
    ]
    assert offenders == []


def test_nobody_touches_the_cycle_collector():
    """Its settings are the whole process's: what another thread sets meanwhile cannot be told from what we set."""
    assert [name_of(path) for path in MODULES if any(is_within(name, "gc") for name in imported_names(path))] == []


def test_importing_the_package_does_not_import_torch():
    code = "import sys, functional_ckpt; print(*sorted({'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_modules_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_MODULE_LINES


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_functions_are_short(path):
    assert long_functions(path) == []


def test_no_module_is_called_utils():
    assert [name_of(path) for path in MODULES if path.stem in {"utils", "util", "helpers"}] == []
