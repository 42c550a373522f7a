"""The options of the command that say what happens to rows that fail, and how long a run may take."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quail.execution.runner import Engine
from tests.shell.test_cli import Run, run
from tests.trust.test_row_errors import engine, texts_with

__all__ = ["engine", "run"]

STATEMENT = "SELECT id, AI.IF(PROMPT('Odd? {0}', text)) AS odd FROM docs WHERE id < 5 ORDER BY id"


@pytest.fixture
def path(tmp_path: Path, engine: Engine, run: Run, monkeypatch: pytest.MonkeyPatch) -> str:
    texts = texts_with({1: "not_text", 3: "too_long", 4: "not_finite"}, 5)
    pq.write_table(pa.table({"id": range(5), "text": texts}), tmp_path / "docs.parquet")
    monkeypatch.setattr(Engine, "boot", lambda config, progress=None, store=None: engine)
    monkeypatch.setattr(Engine, "close", lambda engine: None)
    return str(tmp_path / "docs.parquet")


def test_the_first_failure_is_one_line(run: Run, path: str) -> None:
    code, out, err = run("sql", STATEMENT, "--table", path, "--format", "csv")
    assert (code, out) == (1, "")
    assert err.startswith("quail: docs row ")
    assert "(hint: run(on_" in err
    assert err.count("\n") == 1


def test_details_list_failed_rows_on_standard_error(run: Run, path: str) -> None:
    code, out, err = run("sql", STATEMENT, "--table", path, "--format", "csv", "--on-error", "details")
    assert code == 0
    assert [line.split(",")[1] == "" for line in out.splitlines()[1:]] == [False, True, False, True, True]
    lines = sorted(err.splitlines())
    assert [line[:17] for line in lines] == [f"quail: docs row {row}" for row in (1, 3, 4)]
    assert "(not_text, AI.IF(" in lines[0]


def test_null_says_nothing_but_in_the_report(run: Run, path: str) -> None:
    arguments = ("sql", STATEMENT, "--table", path, "--format", "csv", "--on-error", "null")
    assert run(*arguments)[2] == ""
    assert "3 questions failed, the first docs row" in run(*arguments, "--report")[2]


def test_too_many_failures(run: Run, path: str) -> None:
    arguments = ("--table", path, "--on-error", "null", "--max-error-ratio", "0.5")
    code, _, err = run("sql", STATEMENT, *arguments)
    assert code == 1
    assert err.startswith("quail: 3 of 5 questions failed (")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--timeout", "0"), "timeout = 0.0 must be a number of seconds above 0"),
        (("--audit", "2"), "audit = 2.0 must be a number from 0 to 1"),
        (("--max-error-ratio", "0.5"), "has no meaning where the first error stops the run"),
        (("--on-error", "skip"), "on_error = 'skip' is not one of 'raise', 'null', 'details'"),
    ],
)
def test_values_that_are_refused(run: Run, path: str, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run("sql", STATEMENT, "--table", path, *arguments)
    assert (code, message in err) == (1, True)


def test_an_audit_stands_in_the_report(run: Run, path: str) -> None:
    code, _, err = run("sql", STATEMENT, "--table", path, "--on-error", "null", "--audit", "1", "--report")
    assert code == 0
    assert "  audit: 2 answers asked again without reuse, greatest gap 0 " in err


def test_a_query_that_takes_too_long(run: Run, path: str) -> None:
    endless = "SELECT count(*) FROM range(100000) a, range(1000000) b WHERE hash(a.range, b.range) = 1"
    code, _, err = run("sql", endless, "--timeout", "0.3")
    assert code == 1
    assert err.startswith("quail: the query did not end within 0.3 s; no document was answered yet (hint: ")
