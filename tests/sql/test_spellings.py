"""All spellings of a call mean the same question; what a prompt holds is what DuckDB reads."""

from __future__ import annotations

import pytest

from quail.frontend.sql import bind_sql
from quail.plan.logical import Category, Operator
from tests.sql.stub import Stub, StubCatalog, rows, run


@pytest.fixture(scope="module")
def tables() -> StubCatalog:
    return StubCatalog(
        "CREATE TABLE r AS SELECT 1 AS id, 'alpha' AS body, 'Title' AS title, NULL::VARCHAR AS nothing",
        "CREATE TABLE u AS SELECT 1 AS id, 'omega' AS word",
        "CREATE TABLE labels AS SELECT * FROM (VALUES ('a'), ('b')) t(name)",
        "CREATE TABLE described AS SELECT * FROM (VALUES ('a', 'first'), ('b', 'second')) t(name, meaning)",
    )


def asked(sql: str, tables: StubCatalog) -> tuple[tuple[str | int, ...], tuple[str, ...]]:
    """Prompt and texts of the only question of a statement."""
    stub = Stub(lambda call, key: True)
    bound = bind_sql(sql, None, tables)
    run(sql, tables, stub)
    [(_, key)] = stub.asked
    return bound.calls[0].prompt.parts, key


@pytest.mark.parametrize(
    "call",
    [
        "AI.IF(PROMPT('Is it {0} here?', body))",
        "ai.if(prompt('Is it {0} here?', r.body))",
        "Ai . If ( PROMPT ( 'Is it {0} here?' , body ) )",
        '"AI"."if"(PROMPT(\'Is it {0} here?\', body))',
        "AI_FILTER(PROMPT('Is it {0} here?', body))",
        "ai_if(PROMPT('Is it {0} here?', body))",
        "AI.IF(('Is it ', body, ' here?'))",
        "AI.IF('Is it ' || body || ' here?')",
        "AI.IF(('Is it ' || body) || ' here?')",
        "AI.IF('Is' || ' it ' || (body || ' here?'))",
        "AI.IF(PROMPT('Is it ' || '{0} here?', body))",
        "AI.IF(PROMPT($$Is it {0} here?$$, body), selectivity := 0.2)",
        "AI.IF(PROMPT($tag$Is it {0} here?$tag$, body), selectivity => 0.2)",
        "AI.IF(PROMPT('Is it {0} here?', body), {'selectivity': 0.2, 'answers': ['yes', 'no']})",
        "AI.IF/* why? */(PROMPT('Is it {0} here?', -- so\n body))",
    ],
)
def test_spellings_of_one_question(call: str, tables: StubCatalog) -> None:
    assert asked(f"SELECT id FROM r WHERE {call}", tables) == (("Is it ", 0, " here?"), ("alpha",))


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("'it''s {0}'", "it's "),
        ("E'a\\nb\\t''{0}'", "a\nb\t'"),
        ("'-- no comment; {0}'", "-- no comment; "),
        ("$$it's \\ {0}$$", "it's \\ "),
        ("'é😀 {0}'", "é😀 "),
        ("'a' || chr(10) || '{0}'", "a\n"),
        ("'{} {x} {{y}} {%s} {\"a\": 1} {0}'", '{} {x} {{y}} {%s} {"a": 1} '),
        ("'two\nlines {0}'", "two\nlines "),
    ],
)
def test_a_template_is_the_value_that_duckdb_reads(literal: str, value: str, tables: StubCatalog) -> None:
    assert asked(f"SELECT AI.IF(PROMPT({literal}, body)) FROM r", tables)[0] == (value, 0, "")


@pytest.mark.parametrize(
    ("prompt", "parts", "document"),
    [
        ("PROMPT('{0}', body)", ("", 0, ""), "alpha"),
        ("PROMPT('Q {0}: {1} end', title, body)", ("Q ", 0, " end"), "Title: alpha"),
        ("PROMPT('Q {1}: {0} end', title, body)", ("Q ", 0, " end"), "alpha: Title"),
        ("PROMPT('Q {0}', title || ' ' || body)", ("Q ", 0, ""), "Title alpha"),
        ("PROMPT('Q {0}', id)", ("Q ", 0, ""), "1"),
        ("PROMPT('Q {0}', upper(body))", ("Q ", 0, ""), "ALPHA"),
        ("PROMPT('Q {0}', (SELECT max(word) FROM u))", ("Q ", 0, ""), "omega"),
        ("('Q ', title, ' {0} ', body)", ("Q ", 0, ""), "Title {0} alpha"),
        ("body", ("", 0, ""), "alpha"),
        ("'Q' || body || title", ("Q", 0, ""), "alphaTitle"),
        ("PROMPT('Q {0}', 'a {1} <|im_end|> %s')", ("Q ", 0, ""), "a {1} <|im_end|> %s"),
    ],
)
def test_the_document_reaches_from_the_first_to_the_last_placeholder(
    prompt: str, parts: tuple[str | int, ...], document: str, tables: StubCatalog
) -> None:
    assert asked(f"SELECT AI.IF({prompt}) FROM r", tables) == (parts, (document,))


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("PROMPT('Is {0} like {1}?', r.body, u.word)", ("Is ", 0, " like ", 1, "?")),
        ("PROMPT('Is {1} like {0}?', body, u.word)", ("Is ", 1, " like ", 0, "?")),
        ("PROMPT('{0} or {1}, {0}', body, word)", (0, " or ", 1, ", ", 0)),
        ("PROMPT('{0} {1} and {2}', title, body, word)", (0, " and ", 1)),
        ("('Is ', body, ' like ', word)", ("Is ", 0, " like ", 1)),
        ("body || ' like ' || word", (0, " like ", 1)),
    ],
)
def test_a_prompt_over_two_relations_keeps_its_template(
    prompt: str, parts: tuple[str | int, ...], tables: StubCatalog
) -> None:
    found, key = asked(f"SELECT 1 FROM r, u WHERE AI.IF({prompt})", tables)
    assert found == parts
    assert key == (("Title alpha" if "title" in prompt else "alpha"), "omega")


def test_an_expression_over_two_relations_is_one_document(tables: StubCatalog) -> None:
    assert asked("SELECT AI.IF(PROMPT('Q {0}', r.body || u.word)) FROM r, u", tables) == (
        ("Q ", 0, ""),
        ("alphaomega",),
    )


def test_two_aliases_of_one_table_are_two_relations(tables: StubCatalog) -> None:
    parts, key = asked("SELECT AI.IF(PROMPT('{0} {1}', a.body, b.body)) FROM r a, r b", tables)
    assert (parts, key) == ((0, " ", 1), ("alpha", "alpha"))


def test_a_null_in_any_placeholder_is_a_null_answer(tables: StubCatalog) -> None:
    stub = Stub(lambda call, key: True)
    sql = "SELECT AI.IF(PROMPT('{0} {1}', body, nothing)) AS x, AI.SCORE(nothing) AS y FROM r"
    assert rows(run(sql, tables, stub)) == [(None, None)]
    assert stub.asked == []


def test_options(tables: StubCatalog) -> None:
    bound = bind_sql(
        "SELECT AI.IF('q' || body, {'selectivity': 0.25}, answers := ['yes', ' no ']), AI.SCORE('q' || body) FROM r",
        None,
        tables,
    )
    first, second = bound.calls
    assert (first.options.selectivity, first.options.answers) == (0.25, ("yes", "no"))
    assert (second.operator, second.options.answers) == (Operator.SCORE, ("TRUE", "FALSE"))


@pytest.mark.parametrize(
    ("categories", "expected"),
    [
        ("['a', 'b']", (Category("a"), Category("b"))),
        ("[('a', 'first'), ('b', 'second')]", (Category("a", "first"), Category("b", "second"))),
        (
            "[{'description': 'first', 'label': 'a'}, {'description': 'second', 'label': 'b'}]",
            (Category("a", "first"), Category("b", "second")),
        ),
        ("labels", (Category("a"), Category("b"))),
        ("main.described", (Category("a", "first"), Category("b", "second"))),
        ("string_split('a,b', ',')", (Category("a"), Category("b"))),
    ],
)
def test_categories(categories: str, expected: tuple[Category, ...], tables: StubCatalog) -> None:
    bound = bind_sql(f"SELECT AI.CLASSIFY(body, {categories}) FROM r", None, tables)
    assert bound.calls[0].categories == expected


def test_equal_questions_are_one_call(tables: StubCatalog) -> None:
    bound = bind_sql(
        "SELECT AI.IF('q' || body), AI_FILTER(PROMPT('q{0}', title)) FROM r WHERE ai.if(('q', body))",
        None,
        tables,
    )
    assert len(bound.calls) == 1
    assert len(bound.sites) == 3


def test_a_literal_backslash_n_warns(tables: StubCatalog) -> None:
    assert "chr(10)" in bind_sql(r"SELECT AI.IF(PROMPT('a\n{0}', body)) FROM r", None, tables).warnings[0]
    assert not bind_sql(r"SELECT AI.IF(PROMPT(E'a\n{0}', body)) FROM r", None, tables).warnings


def test_probabilities(tables: StubCatalog) -> None:
    stub = Stub(lambda call, key: [("a", 0.25), ("b", 0.75)])
    sql = "SELECT AI.PROBABILITIES(body, ['a', 'b'])['b'] AS x FROM r"
    assert rows(run(sql, tables, stub)) == [(0.75,)]
