"""Statements around the calls: names and types of columns, parameters, sources, statements that write."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quail.errors import BindError
from quail.execution.asks import RunControl
from quail.execution.relational import RelationalRun
from quail.frontend.sql import bind_sql
from quail.sources.catalog import Catalog
from tests.sql.stub import Stub, StubCatalog, rows, run


def yes() -> Stub:
    return Stub(lambda call, key: True)


@pytest.fixture
def tables() -> StubCatalog:
    return StubCatalog(
        "CREATE TABLE r AS SELECT i AS id, 'b' || i AS body, i % 3 AS k FROM range(6) t(i)",
        'CREATE TABLE odd AS SELECT \'x\' AS "Text", \'y\' AS "a b", \'z\' AS "x.y", \'w\' AS "order", 1 AS "quail_a0"',
    )


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ("AI.IF('q' || body)", "AI.IF('q' || body)"),
        ("ai . if( 'q'||body )", "ai . if( 'q'||body )"),
        ("((AI.IF('q' || body)))", "AI.IF('q' || body)"),
        ("( /* c */ AI.IF('q' || body) -- d\n)", "AI.IF('q' || body)"),
        ("AI.IF('q' || body) IS NOT TRUE", "AI.IF('q' || body) IS NOT TRUE"),
        ("(AI.SCORE('q' || body) + 1)::INT", "(AI.SCORE('q' || body) + 1)::INT"),
        ("AI.IF('a \"b\" ' || body)", "AI.IF('a \"b\" ' || body)"),
        ("NOT AI.IF('q' || body)", "NOT AI.IF('q' || body)"),
        ("AI.IF('q' || body) x", "x"),
        ("x: AI.IF('q' || body)", "x"),
        ("AI.IF('q' || body) AS \"An x\"", "An x"),
        ("count(*) FILTER (WHERE AI.IF('q' || body))", "count(*) FILTER (WHERE AI.IF('q' || body))"),
        ("AI.IF('é😀' || body)", "AI.IF('é😀' || body)"),
    ],
)
def test_column_names(item: str, name: str, tables: StubCatalog) -> None:
    stub = Stub(lambda call, key: 0.5 if call.operator.value == "AI.SCORE" else True)
    assert run(f"SELECT {item}, 1 AS one FROM r", tables, stub).schema.names == [name, "one"]


def test_all_other_text_is_verbatim(tables: StubCatalog) -> None:
    sql = "SELECT  id , /* é */ sum( k ) OVER ( ) , AI.IF('q'||body) AS x FROM r -- end\n ORDER BY 1;"
    bound = bind_sql(sql, None, tables)
    start, stop = bound.sites[0].span
    assert (start, stop) == (sql.encode().index(b"AI.IF"), sql.encode().index(b" AS x"))
    assert bound.edited_text(0, start) == sql.encode()[:start].decode()
    assert bound.edited_text(stop, len(sql.encode())) == sql.encode()[stop:].decode()


@pytest.mark.parametrize("column", ['"Text"', "text", "TEXT", '"a b"', '"x.y"', '"order"', '"quail_a0"'])
def test_quoted_and_mixed_case_names(column: str, tables: StubCatalog) -> None:
    sql = f"SELECT {column}, AI.IF(PROMPT('q {{0}}', {column})) AS x FROM odd WHERE AI.IF('p' || {column})"
    [[value, answer]] = rows(run(sql, tables, yes()))
    assert answer is True
    assert run(f"SELECT {column} FROM odd", tables, yes()).column(0).to_pylist() == [value]


def test_an_ambiguous_name_is_duckdbs_error(tables: StubCatalog) -> None:
    with pytest.raises(BindError, match="Ambiguous reference"):
        bind_sql("SELECT 1 FROM r a, r b WHERE AI.IF('q' || body)", None, tables)


@pytest.mark.parametrize(
    ("sql", "parameters", "asked"),
    [
        ("SELECT id FROM r WHERE id = ? AND AI.IF('q' || body)", [3], "b3"),
        ("SELECT id FROM r WHERE AI.IF(? || body) AND id = ?", ["why ", 2], "b2"),
        (
            "SELECT id FROM r WHERE AI.IF($q || body || $tail) AND id = $id",
            {"q": "why ", "tail": "!", "id": 2},
            "b2",
        ),
        ("SELECT id FROM r WHERE AI.IF(PROMPT($1, body, $2)) AND id = 4", ["why {0}-{1}", "z"], "b4-z"),
        ("SELECT id FROM r WHERE AI.IF('q' || body) ORDER BY id LIMIT ?", [2], "b0"),
    ],
)
def test_parameters(sql: str, parameters: object, asked: str, tables: StubCatalog) -> None:
    stub = yes()
    assert run(sql, tables, stub, parameters).num_rows in (1, 2)
    assert stub.asked[0][1] == (asked,)


def test_parameters_of_a_statement_without_calls(tables: StubCatalog) -> None:
    assert rows(run("SELECT ?::INTEGER + $2 AS x", tables, yes(), [2, 3]))[0] == (5,)
    run("INSERT INTO r VALUES (?, ?, 0)", tables, yes(), [77, "new"])
    assert rows(run("SELECT body FROM r WHERE id = $id", tables, yes(), {"id": 77})) == [("new",)]


def test_create_insert_copy(tables: StubCatalog, tmp_path: Path) -> None:
    made = run(
        "CREATE TABLE kept AS SELECT id, AI.IF('q' || body) AS ok FROM r WHERE AI.IF('p' || body)",
        tables,
        yes(),
    )
    assert rows(made) == [(6,)]
    stub = Stub(lambda call, key: False)
    insert = (
        "INSERT INTO kept (id, ok) SELECT id + 100, AI.IF('q' || body) FROM r WHERE k = 0 RETURNING id, ok"
    )
    assert rows(run(insert, tables, stub)) == [(100, False), (103, False)]
    assert rows(run("SELECT count(*), count(*) FILTER (WHERE ok) FROM kept", tables, yes())) == [(8, 6)]
    path = tmp_path / "out.parquet"
    run(f"COPY (SELECT id, AI.IF('q' || body) AS ok FROM r) TO '{path}'", tables, yes())
    assert pq.read_table(path).column("ok").to_pylist() == [True] * 6
    run(
        "CREATE OR REPLACE TABLE kept AS WITH c AS (SELECT 1 AS one) SELECT one, AI.IF('q' || one) AS x FROM c",
        tables,
        yes(),
    )
    assert rows(run("FROM kept", tables, yes())) == [(1, True)]


def test_a_failed_write_leaves_nothing(tables: StubCatalog) -> None:
    run("CREATE TABLE kept (id INTEGER PRIMARY KEY)", tables, yes())
    with pytest.raises(BindError, match="(?i)constraint|duplicate"):
        run("INSERT INTO kept SELECT 1 FROM r WHERE AI.IF('q' || body)", tables, yes())
    assert rows(run("SELECT count(*) FROM kept", tables, yes())) == [(0,)]


@pytest.mark.parametrize(
    "sql", ["CREATE TABLE x (i INTEGER)", "EXPLAIN SELECT 1", "SHOW TABLES", "PIVOT r ON k USING sum(id)"]
)
def test_statements_without_calls(sql: str, tables: StubCatalog) -> None:
    bound = bind_sql(sql, None, tables)
    assert bound.calls == ()
    run(sql, tables, yes())


SHAPES = {
    "string": pa.array(["a", None, "b"]),
    "large_string": pa.array(["a", None, "b"], type=pa.large_string()),
    "string_view": pa.array(["a", None, "b"], type=pa.string_view()),
    "dictionary": pa.array(["a", None, "b"]).dictionary_encode(),
    "slice": pa.array(["x", "y", "z", "x", "y", "a", None, "b"])[5:],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_string_columns_of_every_kind(shape: str) -> None:
    catalog = Catalog()
    array = SHAPES[shape]
    catalog.register("r", pa.table({"body": pa.chunked_array([array.slice(0, 0), array])}))
    stub = Stub({"a": True, "b": False})
    sql = "SELECT body, AI.IF('q' || body) AS x FROM r"
    assert rows(run(sql, catalog, stub)) == [("a", True), (None, None), ("b", False)]  # type: ignore[arg-type]
    catalog.close()


def test_a_file_replaced_in_mid_run_does_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    pq.write_table(pa.table({"id": range(50), "body": [f"old {i}" for i in range(50)]}), path)
    catalog = Catalog()
    catalog.register("r", path)
    bound = bind_sql("SELECT body, AI.IF('q' || body) AS x FROM r WHERE AI.IF('p' || body)", None, catalog)
    pq.write_table(pa.table({"id": range(60), "body": [f"mid {i}" for i in range(60)]}), path)
    running = RelationalRun(bound, catalog, RunControl())
    pq.write_table(pa.table({"id": range(70), "body": [f"new {i}" for i in range(70)]}), path)
    stub = yes()
    stub.run(bound.calls, running.feed, RunControl())
    assert rows(running.result()) == [(f"mid {i}", True) for i in range(60)]
    running.close()
    catalog.close()


def test_a_table_changed_in_mid_run_does_not_mix(tables: StubCatalog) -> None:
    bound = bind_sql("SELECT id, AI.IF('q' || body) AS x FROM r", None, tables)
    running = RelationalRun(bound, tables, RunControl())
    tables.connection.execute("UPDATE r SET body = 'changed'")
    tables.connection.execute("INSERT INTO r VALUES (99, 'more', 1)")
    yes().run(bound.calls, running.feed, RunControl())
    assert rows(running.result()) == [(i, True) for i in range(6)]
    running.close()


def test_files_named_in_the_statement(tables: StubCatalog, tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("id,body\n1,one\n2,two\n")
    for source, name in (
        (f"'{path}' AS r", "r"),
        (f"read_csv('{path}')", "read_csv"),
        (f"read_csv('{path}') AS f", "f"),
    ):
        stub = yes()
        sql = f"SELECT {name}.id, AI.IF('q' || body) AS x FROM {source} WHERE AI.IF('p' || {name}.body) ORDER BY id"
        assert rows(run(sql, tables, stub)) == [(1, True), (2, True)]


def test_a_run_leaves_nothing_behind(tables: StubCatalog) -> None:
    run("SELECT AI.IF('q' || body) FROM r", tables, yes())
    found = tables.connection.sql(
        "SELECT function_name FROM duckdb_functions() WHERE function_name LIKE 'quail%'"
        " UNION ALL SELECT table_name FROM duckdb_tables() WHERE table_name LIKE 'quail%'"
    )
    assert found.fetchall() == []


def test_binding_a_long_statement_is_quick(tables: StubCatalog) -> None:
    parts = [
        f"c{i} AS (SELECT id, k, body || '{i}' AS body FROM {'r' if i == 0 else f'c{i - 1}'}\n"
        f"  WHERE id > {i - 50} AND k IN (0, 1, 2)\n     AND AI.IF('question {i}' || body || '.'))"
        for i in range(60)
    ]
    sql = "WITH " + ",\n".join(parts) + "\nSELECT count(*) FROM c59"
    assert sql.count("\n") >= 180
    assert len(bind_sql(sql, None, tables).calls) == 60
