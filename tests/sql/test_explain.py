"""The plan as people read it: golden texts."""

from __future__ import annotations

import json
from textwrap import dedent

import pytest

from quail.errors import ConfigError
from quail.explain import explain
from quail.frontend.sql import bind_sql
from tests.sql.stub import StubCatalog


@pytest.fixture(scope="module")
def tables() -> StubCatalog:
    return StubCatalog(
        "CREATE TABLE r AS SELECT i AS id, 'b' || (i % 15) AS body, i % 5 AS k FROM range(20) t(i)",
        "CREATE TABLE u AS SELECT i AS id, 'w' || i AS word, i % 5 AS k FROM range(6) t(i)",
        "CREATE VIEW v AS FROM r",
    )


GOLDEN = {
    "SELECT id FROM r WHERE AI.IF('one ' || body, selectivity := 0.5) AND k < 3 AND NOT AI.IF('two ' || body, {'selectivity': 0.8})": """
        call 0: AI.IF('one ' || body, selectivity := 0.5)
        call 1: AI.IF('two ' || body, {'selectivity': 0.8})
        query from r
        ├─ decide (k < 3)
        ├─ ask call 1 in WHERE: 9 questions (exact)
        └─ ask call 0 in WHERE: 2 questions (estimated) after call 1
        """,
    "SELECT id FROM r WHERE k = 1 OR AI.IF('one ' || body) OR AI.IF('a longer question ' || body)": """
        call 0: AI.IF('one ' || body)
        call 1: AI.IF('a longer question ' || body)
        query from r
        ├─ ask call 0 in WHERE: 12 questions (exact)
        │     if (k = 1) IS NOT TRUE
        └─ ask call 1 in WHERE: after call 0
              if (k = 1) IS NOT TRUE AND call 0 IS NOT TRUE
        """,
    "WITH c AS (SELECT k, AI.SCORE('s ' || body) AS s FROM v) SELECT k, max(s) FROM c GROUP BY k HAVING AI.IF('h ' || k)": """
        call 0: AI.SCORE('s ' || body)
        call 1: AI.IF('h ' || k)
        query from c
        ├─ ask call 1 in HAVING: after call 0
        │     over the rows after GROUP BY, HAVING and QUALIFY
        └─ WITH c from v
           └─ ask call 0 in SELECT: 15 questions (exact)
        """,
    "SELECT r.id, AI.CLASSIFY(body, ['a', 'b']) FROM r LEFT JOIN u ON r.k = u.k AND AI.IF(PROMPT('{0} {1}', body, word))"
    " WHERE r.id < 4 AND EXISTS (SELECT 1 FROM u w WHERE w.id = r.id) ORDER BY r.id LIMIT 3": """
        call 0: AI.IF(PROMPT('{0} {1}', body, word))
        call 1: AI.CLASSIFY(body, ['a', 'b'])
        query from (r LEFT JOIN u ON (((r.k = u.k) AND call 0)))
        ├─ decide (r.id < 4) AND EXISTS(SELECT 1 FROM u AS w WHERE (w.id = r.id))
        ├─ ask call 0 in ON: 5 questions (exact)
        │     anchor body (less work)
        │     if (r.k = u.k) IS TRUE
        ├─ ask call 1 in SELECT: after call 0
        │     over the rows after ORDER BY and LIMIT
        └─ subquery in WHERE from u AS w
           └─ decide (w.id = r.id)
        """,
    "SELECT r.id FROM r, u WHERE AI.IF(PROMPT('{0} {1}', body, word), anchor := 'u') AND AI.IF('one ' || body)": """
        call 0: AI.IF(PROMPT('{0} {1}', body, word), anchor := 'u')
        call 1: AI.IF('one ' || body)
        query from r , u
        ├─ ask call 1 in WHERE: 15 questions (exact)
        └─ ask call 0 in WHERE: 45 questions (estimated) after call 1
              anchor word (as the statement says)
        """,
    "SELECT id FROM r WHERE EXISTS (SELECT 1 FROM u WHERE u.k = r.k AND AI.IF(PROMPT('{0} {1}', body, word)))": """
        call 0: AI.IF(PROMPT('{0} {1}', body, word))
        query from r
        └─ subquery in WHERE from u
           ├─ decide (u.k = r.k)
           └─ ask call 0 in WHERE: 18 questions (at most)
                 anchor word (less work); the first match of a row ends its search
        """,
    "SELECT id FROM r": """
        no AI calls: DuckDB runs the statement as it stands
        query from r
        """,
    r"SELECT id FROM r WHERE AI.IF('a\n' || body)": r"""
        call 0: AI.IF('a\n' || body)
        query from r
        └─ ask call 0 in WHERE: 15 questions (exact)
        warning: the prompt holds a backslash and an n, not a line break: write E'…\n…' or chr(10)
        """,
}


@pytest.mark.parametrize("sql", GOLDEN)
def test_text(sql: str, tables: StubCatalog) -> None:
    assert explain(bind_sql(sql, None, tables), tables) == dedent(GOLDEN[sql]).strip()


def test_json(tables: StubCatalog) -> None:
    sql = "SELECT id FROM r WHERE AI.IF('one ' || body) AND k < 3"
    plan = json.loads(explain(bind_sql(sql, None, tables), tables, format="json"))
    assert plan == {
        "statement": sql,
        "calls": [{"index": 0, "operator": "AI.IF", "text": "AI.IF('one ' || body)"}],
        "blocks": [
            {
                "index": 0,
                "parent": None,
                "label": "query",
                "from": "r",
                "decided_first": ["(k < 3)"],
                "asks": [
                    {
                        "call": 0,
                        "clause": "WHERE",
                        "over": "the rows of FROM and WHERE",
                        "needed_if": [],
                        "after_calls": [],
                        "questions": 9,
                        "is_exact": True,
                        "is_barrier": False,
                    }
                ],
            }
        ],
        "warnings": [],
    }


def test_the_written_order_is_shown(tables: StubCatalog) -> None:
    sql = "SELECT id FROM r WHERE AI.IF('a long question ' || body) AND AI.IF('one ' || body)"
    bound = bind_sql(sql, None, tables)
    assert "ask call 0 in WHERE: 15 questions (exact)" in explain(bound, tables, order="as_written")
    assert "ask call 1 in WHERE: 15 questions (exact)" in explain(bound, tables)


def test_parameters_and_files(tables: StubCatalog, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("explain") / "r.csv"
    path.write_text("id,body\n1,one\n2,two\n")
    bound = bind_sql(f"SELECT 1 FROM '{path}' WHERE id = ? AND AI.IF('q' || body)", [1], tables)
    assert "1 question (exact)" in explain(bound, tables)


def test_a_statement_that_only_duckdb_reads(tables: StubCatalog) -> None:
    assert "no AI calls" in explain(bind_sql("CREATE TABLE x (i INTEGER)", None, tables), tables)
    assert tables.connection.sql("FROM duckdb_tables() WHERE table_name = 'x'").fetchall() == []


def test_an_unknown_format(tables: StubCatalog) -> None:
    with pytest.raises(ConfigError, match="no format 'yaml'"):
        explain(bind_sql("SELECT 1", None, tables), tables, format="yaml")
