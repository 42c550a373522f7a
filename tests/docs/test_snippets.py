"""Every fenced Python, SQL and shell block of the documentation runs, with a stub in the engine's place."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quail
import quail.frames
from quail import cli
from quail.execution.runner import Engine
from quail.plan.logical import AICall, Operator
from tests.shell.stub import StubEngine

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = {"python", "sql", "sh"}
NOT_RUN = {"text", "console", "json", "toml"}
# Lines of shell blocks that set up a clone; the targets of make are checked to exist.
SETS_UP = ("git clone ", "cd ", "pip install ", "make ")


def blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    """Line, language and text of each fenced block."""
    text = page.read_text()
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start()) + 1, match[1], match[2]


SNIPPETS = [
    pytest.param(language, code, id=f"{page.name}:{line}")
    for page in PAGES
    for line, language, code in blocks(page)
    if language in RUN
]


class Stub(StubEngine):
    """Says TRUE to every second document, and labels by length."""

    def __init__(self) -> None:
        super().__init__(self.answer_of)

    @staticmethod
    def answer_of(call: AICall, arguments: tuple[str, ...]) -> Any:
        is_even = len(arguments[0]) % 2 == 0
        labels = [category.label for category in call.categories]
        return {
            Operator.IF: is_even,
            Operator.SCORE: 0.9 if is_even else 0.2,
            Operator.CLASSIFY: labels[len(arguments[0]) % len(labels)] if labels else None,
            Operator.PROBABILITIES: [(label, 1 / len(labels)) for label in labels],
        }[call.operator]

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _in_a_copy_of_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quail.frames, "_shared", [])
    monkeypatch.setattr(Engine, "boot", lambda config, progress=None, store=None: Stub())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_names_its_language(page: Path) -> None:
    assert {language for _, language, _ in blocks(page)} <= RUN | NOT_RUN


@pytest.mark.parametrize(("language", "code"), SNIPPETS)
def test_snippet_runs(language: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if language == "python":
        exec(compile(code, "snippet", "exec"), {"__name__": "snippet"})
    elif language == "sql":
        run_sql(code)
    else:
        for line in code.splitlines():
            run_line(line, monkeypatch)


def run_sql(code: str) -> None:
    with quail.Session() as session:
        for name in ("reviews", "licences", "chapters", "calls"):
            session.register(name, f"examples/data/{name}.parquet")
        query = session.sql(code.strip().removesuffix(";"))
        assert query.explain()
        query.run(progress=False)


def run_line(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not line.strip() or line.startswith("#"):
        return
    words = shlex.split(line, comments=True)
    if words[0] == "quail":
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code, line
    else:
        assert line.startswith(SETS_UP), f"a shell line that no test runs: {line}"
        if words[0] == "make":
            targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
            assert set(words[1:]) <= targets


def test_the_table_of_settings_is_complete() -> None:
    from dataclasses import fields

    page = (ROOT / "docs" / "configuration.md").read_text()
    for each in fields(quail.EngineConfig):
        assert f"| `{each.name}` | `{each.metadata['environment']}` |" in page


def test_every_example_file_has_its_origin() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    for path in (ROOT / "examples" / "data").iterdir():
        assert f"| {path.name} |" in page


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_example_programs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[Any] = sorted((ROOT / "examples").glob("*.py"))
    assert programs
    for program in programs:
        exec(compile(program.read_text(), str(program), "exec"), {"__name__": "x", "__file__": str(program)})
