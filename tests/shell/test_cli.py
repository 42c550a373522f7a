"""The command `quail`, run in this process with a stub in the engine's place."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import quail
from quail import cli
from quail.execution.runner import Engine
from tests.shell.stub import StubEngine

Run = Callable[..., tuple[int, str, str]]

TABLE = pa.table({"id": [1, 2, 3], "text": ["good, one", "bad", None]})
GOOD = "SELECT id, text FROM docs WHERE AI.IF(PROMPT('Good? {0}', text))"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pq.write_table(TABLE, tmp_path / "docs.parquet")
    return tmp_path / "docs.parquet"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    class ClosableStub(StubEngine):
        def close(self) -> None:
            pass

    stub = ClosableStub(lambda call, arguments: "good" in arguments[0])
    monkeypatch.setattr(Engine, "boot", lambda config, progress=None, store=None: stub)

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["quail", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            cli.main()
            code: Any = 0
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsysbinary.readouterr()
        return code, captured.out.decode(errors="replace"), captured.err.decode()

    return run


def test_version_and_help(run: Run) -> None:
    assert run("--version") == (0, f"quail {quail.__version__}\n", "")
    code, out, _ = run("sql", "--help")
    assert code == 0
    for option in ("--table", "--model", "--device", "--dtype", "--kv-memory", "--format", "--output"):
        assert option in out


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("csv", 'id,text\n1,"good, one"\n'),
        ("json", '[{"id": 1, "text": "good, one"}]\n'),
        ("jsonl", '{"id": 1, "text": "good, one"}\n'),
        ("markdown", "| id | text |\n| ---: | --- |\n| 1 | good, one |\n"),
    ],
)
def test_formats(run: Run, path: Path, format: str, expected: str) -> None:
    assert run("sql", GOOD, "--table", f"docs={path}", "--format", format) == (0, expected, "")


def test_table_is_the_default_and_the_name_of_the_file_that_of_the_table(run: Run, path: Path) -> None:
    code, out, err = run("sql", GOOD, "-t", str(path))
    assert (code, err) == (0, "")
    assert "│     1 │ good, one │" in out
    assert out.endswith("1 row\n")


@pytest.mark.parametrize("suffix", ["parquet", "csv", "json", "jsonl", "md"])
def test_output_takes_its_format_from_its_suffix(run: Run, path: Path, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"out.{suffix}"
    assert run("sql", GOOD, "-t", str(path), "-o", str(target)) == (0, "", "")
    assert target.stat().st_size > 0
    if suffix == "parquet":
        assert pq.read_table(target).to_pylist() == [{"id": 1, "text": "good, one"}]
    if suffix == "json":
        assert json.loads(target.read_text()) == [{"id": 1, "text": "good, one"}]


def test_statement_from_standard_input(run: Run, path: Path) -> None:
    assert run("sql", "-", "-t", str(path), "-f", "jsonl", stdin=GOOD)[0] == 0


def test_report_goes_to_standard_error(run: Run, path: Path) -> None:
    _, out, err = run("sql", GOOD, "-t", str(path), "-f", "csv", "--report")
    assert out.startswith("id,text\n")
    assert "1 rows | stub on cpu" in err


def test_a_warning_is_one_line(run: Run, path: Path) -> None:
    code, _, err = run("sql", GOOD.replace("Good? ", r"Good?\n"), "-t", str(path))
    assert code == 0
    assert err.startswith("quail: warning: ")
    assert err.count("\n") == 1


def test_explain(run: Run, path: Path) -> None:
    code, out, err = run("explain", GOOD, "-t", str(path))
    assert (code, err) == (0, "")
    assert "AI.IF" in out
    assert json.loads(run("explain", GOOD, "-t", str(path), "-f", "json")[1])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("sql", "SELECT nothing FROM docs"), 1, "nothing"),
        (("sql", "SELECT 1", "-t", "x=missing.csv"), 1, "there is no file 'missing.csv' (hint:"),
        (("sql", "SELECT 1", "--device", "gpu"), 1, "device = 'gpu' is not one of"),
        (("sql", "SELECT 1", "--kv-memory", "lots"), 1, "kv_memory = 'lots' is not a size"),
        (("sql", "SELECT 1", "-o", "no/such/folder/x.csv"), 1, "cannot write 'no/such/folder/x.csv'"),
        (("sql", "SELECT 1", "--on-long", "skip"), 1, "on_long = 'skip' is not one of"),
        (("models", "info", "no-such-model"), 1, "no-such-model"),
        (("sql",), 2, "Missing argument 'statement'"),
        (("sql", "SELECT 1", "--format", "xml"), 2, "'xml' is not one of"),
        (("sql", "SELECT 1", "--no-such-option"), 2, "--no-such-option"),
        (("nonsense",), 2, "nonsense"),
    ],
)
def test_errors(run: Run, path: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    if arguments[:1] == ("sql",) and "docs" in " ".join(arguments):
        arguments = (*arguments, "-t", str(path))
    got, out, err = run(*arguments)
    assert (got, out) == (code, "")
    assert message in err
    assert "Traceback" not in err
    if code == 1:
        assert err.startswith("quail: ")
        assert err.count("\n") == 1, "an error is one line"


def test_debug_shows_the_traceback_wherever_it_stands(run: Run) -> None:
    for arguments in (
        ("--debug", "sql", "SELECT 1", "--device", "gpu"),
        ("sql", "SELECT 1", "--device", "gpu", "--debug"),
    ):
        code, _, err = run(*arguments)
        assert code == 1
        assert "Traceback" in err


def test_a_failed_run_leaves_no_output(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "out.csv"
    assert run("sql", "SELECT error('stop')", "-o", str(target))[0] == 1
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_is_130(run: Run, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: Any, progress: Any = None, store: Any = None) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "boot", interrupted)
    code, _, err = run("sql", GOOD, "-t", str(path))
    assert (code, err) == (130, "quail: interrupted\n")


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quail", "sql", "SELECT * FROM range(300000)", "-f", "csv"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0
    process.stderr.close()


def test_doctor_measures_what_explain_reckons_with(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUAIL_CACHE_DIR", str(tmp_path))
    assert "measured and kept: matrix products" in run("doctor", "--no-rates", "--measure")[1]
    (kept,) = (tmp_path / "rates").glob("*.json")
    before = kept.stat().st_mtime_ns
    run("doctor", "--no-rates", "--measure")
    assert kept.stat().st_mtime_ns > before


def test_models_and_doctor(run: Run) -> None:
    code, out, err = run("models", "list")
    assert (code, err) == (0, "")
    assert "smollm2-135m" in out
    assert "Apache-2.0" in run("models", "info")[1]
    code, out, err = run("doctor", "--no-rates")
    assert (code, err) == (0, "")
    for what in ("torch", "duckdb", "memory:", "device"):
        assert what in out
