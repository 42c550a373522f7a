"""The public surface, what an import costs, and which room may import which."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import quail

PACKAGE = Path(quail.__file__).parent

SURFACE = [
    "BindError",
    "ConfigError",
    "Docs",
    "EngineConfig",
    "ModelError",
    "PlanError",
    "QuailError",
    "Query",
    "QueryCancelled",
    "QueryResult",
    "QueryTimeout",
    "Report",
    "RowError",
    "RunHandle",
    "Session",
    "SourceError",
    "SourceInfo",
    "StoreError",
    "TooManyErrors",
    "UnsupportedError",
    "__version__",
    "ai_classify",
    "ai_if",
    "ai_probabilities",
    "ai_score",
    "col",
    "prompt",
]

# From the top down: a module imports from its own room and those below.
ROOMS = (
    ("__main__",),
    ("cli",),
    ("demo", "doctor", "frames", "layouts"),
    ("session",),
    ("frontend.builder",),
    ("output", "result", "progress"),
    ("rendering",),
    ("frontend",),
    ("explain",),
    ("execution",),
    ("planner",),
    ("models",),
    ("cost.device",),
    ("kernels",),
    ("cost",),
    ("execution.reads",),
    ("kv",),
    ("execution.asks", "execution.chunk", "execution.ledger"),
    ("sources",),
    ("answers",),
    ("plan",),
    ("config",),
    ("interrupts", "processes", "runs"),
    ("arrays",),
    ("errors", "__version__"),
)
TORCH_MAY_STAND_IN = ("kv/arena.py", "execution/", "models/", "kernels/", "cost/device.py")


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_all_is_frozen_and_every_name_is_there() -> None:
    assert quail.__all__ == SURFACE
    for name in SURFACE:
        assert getattr(quail, name) is not None
    assert set(dir(quail)) >= set(SURFACE)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Sesion'"):
        quail.Sesion  # noqa: B018


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_import_is_light() -> None:
    heavy = ("torch", "transformers", "duckdb", "pyarrow", "pandas")
    loaded = run_python(f"import sys, quail; print([name for name in {heavy!r} if name in sys.modules])")
    assert loaded.strip() == "[]"


def test_the_session_comes_without_torch() -> None:
    assert run_python("import sys, quail; quail.Session; print('torch' in sys.modules)").strip() == "False"


@pytest.mark.alone
def test_import_takes_less_than_three_tenths_of_a_second() -> None:
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        run_python("import quail")
        with_import = time.perf_counter() - started
        started = time.perf_counter()
        run_python("pass")
        seconds.append(with_import - (time.perf_counter() - started))
    assert min(seconds) < 0.3


def test_help_imports_no_engine() -> None:
    code = "import sys, quail.cli; print([n for n in ('torch', 'duckdb', 'pyarrow') if n in sys.modules])"
    assert run_python(code).strip() == "[]"


def modules() -> Iterator[Path]:
    return (path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py")


def imported(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def depth(module: str) -> int:
    """How far down a module's room lies; `module` names it, or something in it, inside the package."""
    parts = module.split(".")
    for name in (".".join(parts[:2]), parts[0]):
        for level, rooms in enumerate(ROOMS):
            if name in rooms:
                return level
    raise AssertionError(f"{module} is in no room; give it one")


@pytest.mark.parametrize("path", list(modules()), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    own = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for name in imported(path):
        if name.startswith("quail."):
            target = name.removeprefix("quail.")
            assert depth(own) <= depth(target), f"{own} imports {target}, which lies above it"


def test_torch_stays_in_its_places() -> None:
    for path in modules():
        if any(name.partition(".")[0] == "torch" for name in imported(path)):
            place = str(path.relative_to(PACKAGE))
            assert place.startswith(TORCH_MAY_STAND_IN), f"{place} imports torch"
