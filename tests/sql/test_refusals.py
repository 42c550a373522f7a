"""What cannot be understood or served is refused before anything runs, with its place in the statement."""

from __future__ import annotations

import contextlib

import pyarrow as pa
import pytest

from quail.errors import BindError, UnsupportedError
from quail.execution.asks import RunControl
from quail.execution.relational import RelationalRun
from quail.frontend.sql import bind_sql
from tests.sql.stub import StubCatalog


@pytest.fixture(scope="module")
def tables() -> StubCatalog:
    return StubCatalog(
        "CREATE TABLE r AS SELECT 1 AS id, 'alpha' AS body, [1, 2] AS list, 'x'::BLOB AS bytes, {'a': 1} AS struct",
        "CREATE TABLE u AS SELECT 1 AS id, 'omega' AS word",
    )


REFUSED = {
    "SELECT AI.^FOO(body) FROM r": "there is no AI function AI.FOO",
    "SELECT AI.^IFF(body) FROM r": "did you mean AI.IF",
    "SELECT ^ai_filtre(body) FROM r": "there is no AI function AI_FILTRE",
    "SELECT AI.IF(^PROMPT('a {1}', body)) FROM r": "placeholder {1} has no argument",
    "SELECT AI.IF(^PROMPT('a {0} {0}', body)) FROM r": "placeholder {0} stands twice",
    "SELECT AI.IF(PROMPT('a {0}', body, ^id)) FROM r": "argument {1} of PROMPT does not stand in its text",
    "SELECT AI.IF(^PROMPT(body)) FROM r": "the first argument of PROMPT is its text",
    "SELECT AI.IF(PROMPT(^7, body)) FROM r": "it must be a string",
    "SELECT AI.IF(^'no document') FROM r": "holds no document",
    "SELECT ^AI.IF() FROM r": "takes a prompt, got 0 arguments",
    "SELECT ^AI.CLASSIFY(body) FROM r": "takes an input and categories, got 1",
    "SELECT ^AI.IF(DISTINCT body) FROM r": "takes no DISTINCT",
    "SELECT AI.IF('q' || body, selectivty := ^0.2) FROM r": "did you mean selectivity",
    "SELECT AI.IF('q' || body, selectivity := ^2) FROM r": "a number from 0 to 1, got 2",
    "SELECT AI.IF('q' || body, selectivity := ^id) FROM r": "must be a constant",
    "SELECT AI.IF('q' || body, answers := ^['a']) FROM r": "two different words",
    "SELECT AI.IF('q' || body, answers := ^['A', 'a']) FROM r": "two different words",
    "SELECT AI.IF('q' || body, anchor := ^'r') FROM r": "anchor needs a prompt over two relations",
    "SELECT 1 FROM r, u WHERE AI.IF(PROMPT('{0} {1}', body, word), anchor := ^'w')": "'left', 'right', 'r' or 'u'",
    "SELECT AI.CLASSIFY(body, ^['a']) FROM r": "2 to 255 categories are needed, got 1",
    "SELECT AI.CLASSIFY(body, ^['a', 'A']) FROM r": "are the same",
    "SELECT AI.CLASSIFY(body, ^['a', '']) FROM r": "'' is not a category",
    "SELECT AI.CLASSIFY(body, ^'a') FROM r": "categories are a list",
    "SELECT ^AI.IF(list) FROM r": "is a INTEGER[], not text",
    "SELECT ^AI.IF(PROMPT('{0}', bytes)) FROM r": "is a BLOB, not text",
    "SELECT ^AI.IF(PROMPT('{0}', struct)) FROM r": "not text",
    "SELECT list_filter([1], x -> ^AI.IF('q' || x)) FROM r": "AI.IF in a lambda",
    "SELECT 1 FROM r LIMIT ^AI.SCORE('q' || 1)": "AI.SCORE in LIMIT or OFFSET",
    "WITH RECURSIVE c AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM c WHERE ^AI.IF('q' || i)) FROM c": (
        "AI.IF in a recursive term"
    ),
    "SELECT 1 FROM r ASOF JOIN u ON r.id >= u.id AND ^AI.IF('q' || r.body)": "AI.IF in an ASOF join condition",
    "SELECT 1 FROM range(^AI.SCORE('q' || 1)::INT)": "AI.SCORE in an argument of a table function",
    "SELECT AI.IF(^PROMPT('{0} {1} {2}', r.body, u.word, w.word)) FROM r, u, u w": "a prompt over 3 relations",
    "SELECT AI.IF('q' || ^nope) FROM r": 'column "nope" not found',
    "SELECT AI.IF('q' || body) FROM ^nope": "nope does not exist",
    "SELECT AI.IF('q' || body)\nFROM r\nWHERE ^nope > 1": 'column "nope" not found',
    "SELECT 1 FROM r WHERE ^) AI.IF(body)": "syntax error",
    "CREATE TABLE x AS SELECT 1 FROM ^FROM r": "syntax error",
    "CREATE VIEW v AS SELECT ^AI.IF('q' || body) FROM r": "AI functions in CREATE",
    "CREATE TEMP TABLE v AS SELECT ^AI.IF('q' || body) FROM r": "AI functions in CREATE TEMP",
    "DELETE FROM r WHERE ^AI.IF('q' || body)": "AI functions in DELETE",
    "SELECT AI.IF('é😀' || ^nope) FROM r": 'column "nope" not found',
}


@pytest.mark.parametrize("marked", REFUSED)
def test_refused_with_its_place(marked: str, tables: StubCatalog) -> None:
    before, after = marked.split("^")
    # The mark inside a dotted name points at the name's start.
    start = before.rfind("AI.") if before.endswith("AI.") else len(before)
    with pytest.raises(BindError) as caught:
        bind_sql(before + after, None, tables)
    assert REFUSED[marked] in str(caught.value)
    line_start = before.rfind("\n") + 1
    assert (caught.value.line, caught.value.column) == (before.count("\n") + 1, start - line_start + 1)


@pytest.mark.parametrize("sql", ["", "  ", "SELECT 1; SELECT 2", "SELEC 1", "DROP TABLE a; DROP TABLE b"])
def test_not_one_statement(sql: str, tables: StubCatalog) -> None:
    with pytest.raises(BindError):
        bind_sql(sql, None, tables)


def test_lone_surrogate(tables: StubCatalog) -> None:
    with pytest.raises(BindError, match="lone surrogate"):
        bind_sql("SELECT '\ud800'", None, tables)


@pytest.mark.parametrize(
    ("sql", "parameters", "message"),
    [
        ("SELECT id FROM r WHERE id = ?", None, "parameter 1 has no value"),
        ("SELECT id FROM r WHERE id = $a", {"b": 1}, "parameter a has no value"),
        ("SELECT id FROM r", [1], "parameter 1 does not stand in the statement"),
    ],
)
def test_parameters_that_do_not_fit(sql: str, parameters: object, message: str, tables: StubCatalog) -> None:
    with pytest.raises(BindError, match=message):
        bind_sql(sql, parameters, tables)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT " + "(" * 5000 + "1" + ")" * 5000,
        "SELECT id FROM r WHERE " + "(" * 5000 + "AI.IF('q' || body)" + ")" * 5000,
        "SELECT " + "upper(" * 600 + "body" + ")" * 600 + " FROM r",
        "SELECT AI.IF('q' || " + "upper(" * 400 + "body" + ")" * 400 + ") FROM r",
    ],
)
def test_deep_nesting_is_an_error_or_works(sql: str, tables: StubCatalog) -> None:
    with contextlib.suppress(BindError):
        bind_sql(sql, None, tables)
    assert bind_sql("SELECT 1", None, tables).calls == ()


def test_a_thousand_ors(tables: StubCatalog) -> None:
    sql = "SELECT id FROM r WHERE " + " OR ".join(f"AI.IF('question {i}' || body)" for i in range(1000))
    assert len(bind_sql(sql, None, tables).calls) == 1000


def test_a_column_or_alias_called_ai_is_no_function(tables: StubCatalog) -> None:
    bind_sql("SELECT ai.ai, ai.lower() FROM (SELECT body AS ai FROM r) ai", None, tables)
    assert not bind_sql("SELECT ai.body FROM r AS ai", None, tables).calls
    assert len(bind_sql("SELECT ai.body FROM r AS ai WHERE AI.IF('q' || ai.body)", None, tables).calls) == 1


def many_ors(questions: list[str]) -> str:
    return "SELECT id FROM r WHERE " + " OR ".join(
        f"AI.IF(PROMPT('{each} {{0}}', body))" for each in questions
    )


def test_a_thousand_times_the_same_question_is_asked_once_a_document() -> None:
    catalog = StubCatalog()
    catalog.cursor().execute("CREATE TABLE r AS SELECT i AS id, 'text ' || i AS body FROM range(6) t(i)")
    bound = bind_sql(many_ors(["good?"] * 1000), None, catalog)
    run = RelationalRun(bound, catalog, RunControl())
    asked = 0
    while not run.feed.done:
        for asks in run.feed.take(100):
            asked += len(asks)
            run.feed.answered(asks.call, asks.keys, pa.array([key % 2 == 0 for key in asks.keys.tolist()]))
    assert asked == 6
    assert run.result().num_rows == 3
    run.close()


def test_a_thousand_questions_in_one_statement_are_refused_with_the_numbers() -> None:
    catalog = StubCatalog()
    catalog.cursor().execute("CREATE TABLE r AS SELECT 1 AS id, 'text' AS body")
    bound = bind_sql(many_ors([f"good {n}?" for n in range(1000)]), None, catalog)
    with pytest.raises(UnsupportedError, match="asks questions in 1000 places, 250 are supported") as error:
        RelationalRun(bound, catalog, RunControl())
    assert max(map(len, str(error.value).splitlines())) < 300
