from __future__ import annotations

import builtins
from dataclasses import replace
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from quail.errors import QuailError
from quail.result import QueryResult, Report

TABLE = pa.table({"id": [1, 2], "text": ["a", None]})
REPORT = Report(
    seconds={"boot": 1.0, "plan": 0.5, "tokenize": 0.1, "run": 2.0, "total": 3.6},
    tokens={
        "naive": 350,
        "computed": 200,
        "reused_rewind": 150,
        "reused_prefix": 0,
        "reused_retained": 0,
        "recomputed": 0,
        "wasted": 0,
    },
    stages=(
        {
            "call": "AI.IF(PROMPT('{0} good?', t))",
            "evaluated": 4,
            "passed": 3,
            "observed_selectivity": 0.75,
            "null": 1,
        },
    ),
    passes=2,
    memory={"peak_resident_bytes": 2**30},
    model="tiny",
    device="cpu",
    dtype="float32",
    rows=2,
    nulls=1,
)


def test_rows_in_every_form() -> None:
    result = QueryResult(TABLE, REPORT)
    assert result.arrow() is TABLE
    assert isinstance(result.df(), pd.DataFrame)
    assert result.pl().equals(pl.DataFrame({"id": [1, 2], "text": ["a", None]}))
    assert result.fetchall() == list(result) == [(1, "a"), (2, None)]
    assert (len(result), result.columns) == (2, ["id", "text"])
    assert result.schema == TABLE.schema


def test_show_and_reprs(capsys: pytest.CaptureFixture[str]) -> None:
    result = QueryResult(TABLE, REPORT)
    result.show(max_rows=1)
    assert capsys.readouterr().out.endswith("2 rows (1 shown)\n")
    QueryResult(TABLE, replace(REPORT, speed_of_light=0.425)).show()
    assert capsys.readouterr().out.endswith("2 rows\n2.00 s, 42% of the speed of light\n")
    assert repr(result).endswith("2 rows")
    assert "<table>" in result._repr_html_()


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_polars(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "polars":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(__import__("sys").modules, "polars", raising=False)
    monkeypatch.setattr("importlib.import_module", lambda name: without_polars(name))
    with pytest.raises(QuailError, match="polars is not installed"):
        QueryResult(TABLE, REPORT).pl()


def test_report_reads_as_mapping_and_as_attributes() -> None:
    assert REPORT["tokens"]["computed"] == REPORT.tokens["computed"] == 200
    assert set(REPORT) == set(dict(REPORT))
    assert "passes" in REPORT
    assert "nonsense" not in REPORT
    with pytest.raises(KeyError, match="it has seconds, tokens"):
        REPORT["nonsense"]


def test_report_as_text_is_as_it_is() -> None:
    assert str(REPORT) == (
        "2 rows | tiny on cpu, float32 | 3.60 s (boot 1.00, plan 0.50, tokenize 0.10, run 2.00)\n"
        "  evaluated     passed   share    NULL  call\n"
        "          4          3   0.750       1  AI.IF(PROMPT('{0} good?', t))\n"
        "  tokens: 350 naive = 200 computed + 150 rewind + 0 prefix + 0 retained (0 recomputed, 0 wasted)\n"
        "  2 passes | 100 tokens/s | peak memory 1.00 GiB"
    )


def test_report_of_a_statement_that_asks_nothing() -> None:
    assert str(Report(rows=3, seconds={"total": 0.01})) == "3 rows | no model asked | 0.01 s"


def test_orders_of_several_runs_count_their_calls_on() -> None:
    one = Report(
        stages=({"call": "a"}, {"call": "b"}),
        order=({"planned": [0, 1], "calls": [1, 0], "pilot_rows": 16, "revisions": 1},),
    )
    total = Report.total([one, one])
    assert [order["calls"] for order in total.order] == [[1, 0], [3, 2]]
    assert [order["planned"] for order in total.order] == [[0, 1], [2, 3]]
    assert "order: calls 1, 0 (planned 0, 1): a pilot of 16 rows, revised once" in str(total)
    assert "order: calls 3, 2 (planned 2, 3): a pilot of 16 rows, revised once" in str(total)
    kept = Report(order=({"planned": [0, 1], "calls": [0, 1], "pilot_rows": 0, "revisions": 0},))
    assert "order: calls 0, 1, as planned" in str(kept)
    unmoved = Report(order=({"planned": [0, 1], "calls": [0, 1], "pilot_rows": 16, "revisions": 0},))
    assert "order: calls 0, 1 (planned 0, 1): a pilot of 16 rows, not revised" in str(unmoved)
