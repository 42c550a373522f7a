"""What statements may reach: registered tables, files under `allow`, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import quail
from tests.shell.stub import StubEngine

SECRET = pa.table({"leak": [1]})  # a variable of the caller that DuckDB would find, if it looked

READS = [
    "SELECT * FROM read_csv('{file}')",
    "SELECT * FROM '{file}'",
    "FROM read_text('{file}')",
    "FROM read_blob('{file}')",
    "FROM read_json('{file}')",
    "FROM read_parquet('{file}')",
    "FROM sniff_csv('{file}')",
    "FROM parquet_metadata('{file}')",
    "FROM parquet_schema('{file}')",
    "FROM glob('{folder}/*')",
    "FROM read_csv('/etc/passwd')",
    "SELECT (SELECT max(a) FROM read_csv('{file}'))",
    "WITH c AS (FROM read_csv('{file}')) FROM c",
    "SELECT * FROM (SELECT * FROM (FROM read_csv('{file}')))",
    "SELECT * FROM docs WHERE text IN (SELECT a::VARCHAR FROM read_csv('{file}'))",
    "SELECT * FROM docs, LATERAL (FROM read_csv('{file}'))",
    "SELECT AI.IF(PROMPT('{{0}}', a::VARCHAR)) FROM read_csv('{file}')",
    "SELECT AI.IF(PROMPT('{{0}}', (SELECT content FROM read_text('{file}')))) FROM docs",
    "CREATE TABLE t AS FROM read_csv('{file}')",
    "CREATE TABLE t AS SELECT a FROM read_csv('{file}') WHERE AI.IF(PROMPT('{{0}}', a::VARCHAR))",
    "INSERT INTO kept SELECT a FROM read_csv('{file}')",
    "COPY kept FROM '{file}'",
    "CREATE TYPE e AS ENUM (SELECT a::VARCHAR FROM read_csv('{file}'))",
    "FROM query('FROM read_csv(''{file}'')')",
    "FROM query_table('{file}')",
    "FROM json_execute_serialized_sql(json_serialize_sql('FROM read_csv(''{file}'')'))",
    "IMPORT DATABASE '{folder}'",
    "ATTACH '{file}' AS x",
    "ATTACH '{file}' AS x (READ_ONLY)",
    "LOAD '{file}'",
    "FROM read_text('quail://../../{file}')",
    "FROM read_text('file://{file}')",
]
WRITES = [
    "COPY (SELECT 1) TO '{out}.csv'",
    "COPY docs TO '{out}.parquet' (FORMAT parquet)",
    "COPY (SELECT AI.IF(PROMPT('{{0}}', text)) FROM docs) TO '{out}.csv'",
    "EXPORT DATABASE '{out}'",
    "ATTACH '{out}.duckdb' AS x",
    "COPY (SELECT 1) TO 'quail://0/x.csv'",
    "COPY FROM DATABASE memory TO x",
]
NETWORK = [
    "INSTALL httpfs",
    "FORCE INSTALL json FROM 'http://127.0.0.1:9'",
    "LOAD httpfs",
    "UPDATE EXTENSIONS",
    "SELECT * FROM 'https://127.0.0.1:9/z.parquet'",
    "FROM read_csv('http://127.0.0.1:9/z.csv')",
    "FROM read_parquet('s3://bucket/z.parquet')",
    "FROM read_text('hf://datasets/a/b/c.txt')",
    "ATTACH 'https://127.0.0.1:9/x.duckdb' AS x",
]


@pytest.fixture
def session(tmp_path: Path) -> Iterator[quail.Session]:
    with quail.Session(engine=StubEngine(lambda call, arguments: True)) as made:
        made.register("docs", [{"text": "a"}])
        made.sql("CREATE TABLE kept (a INTEGER)").run()
        yield made


def run(session: quail.Session, text: str, tmp_path: Path, params: object = None) -> list[tuple[object, ...]]:
    (tmp_path / "secret.csv").write_text("a,b\n1,2\n")
    filled = text.format(file=tmp_path / "secret.csv", folder=tmp_path, out=tmp_path / "written")
    return session.sql(filled, params).run(progress=False).fetchall()  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [*READS, *WRITES, *NETWORK])
def test_nothing_outside_is_reached(text: str, session: quail.Session, tmp_path: Path) -> None:
    with pytest.raises(quail.QuailError) as caught:
        run(session, text, tmp_path)
    assert "Traceback" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["secret.csv"]


LOCKED = [
    "SET enable_external_access = true",
    "SET GLOBAL enable_external_access = true",
    "RESET enable_external_access",
    "PRAGMA enable_external_access = true",
    "SET allowed_directories = ['/']",
    "SET allowed_paths = ['{file}']",
    "SET allowed_configs = ['profiling_output']",
    "SET lock_configuration = false",
    "SET allow_unsigned_extensions = true",
    "SET autoinstall_known_extensions = true",
    "SET custom_extension_repository = 'http://127.0.0.1:9'",
    "SET extension_directories = ['{out}']",
    "SET temp_directory = '{out}'",
    "SET home_directory = '{out}'",
    "SET secret_directory = '{out}'",
    "SET log_query_path = '{out}.log'",
    "SET profiling_output = '{out}.json'",
    "PRAGMA profiling_output = '{out}.json'",
    "PRAGMA enable_profiling = 'json'",
    "CALL enable_profiling(format = 'json', save_location = '{out}.json')",
    "CALL enable_logging('QueryLog', storage = 'file', storage_config = {{'path': '{out}'}})",
    "FROM enable_logging('QueryLog', storage = 'file', storage_config = {{'path': '{out}'}})",
    "SET python_enable_replacements = true",
    "SET python_scan_all_frames = true",
    "SET http_proxy = 'http://127.0.0.1:9'",
    "SET max_expression_depth = 10000000",
    "CREATE SECRET s (TYPE http, BEARER_TOKEN 'x')",
    "CREATE PERSISTENT SECRET s (TYPE http, BEARER_TOKEN 'x')",
    "SELECT getenv('HOME')",
]


@pytest.mark.parametrize("text", LOCKED)
def test_settings_that_reach_outside_are_locked(text: str, session: quail.Session, tmp_path: Path) -> None:
    with pytest.raises(quail.BindError):
        run(session, text, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["secret.csv"]
    with pytest.raises(quail.BindError, match="disabled by configuration"):
        run(session, "FROM read_csv('{file}')", tmp_path)


@pytest.mark.parametrize(
    "setting", ["TimeZone = 'Asia/Tokyo'", "threads = 1", "default_null_order = 'nulls_first'"]
)
def test_settings_of_queries_can_be_changed(setting: str, session: quail.Session, tmp_path: Path) -> None:
    run(session, f"SET {setting}", tmp_path)
    assert run(session, "SELECT count(*) FROM docs WHERE AI.IF(PROMPT('{{0}}', text))", tmp_path) == [(1,)]


def test_parameters_name_no_files(session: quail.Session, tmp_path: Path) -> None:
    for text in (
        "FROM read_csv(?)",
        "FROM read_text($1)",
        "SELECT (SELECT content FROM read_text(?))",
        "FROM glob(?)",
    ):
        with pytest.raises(quail.BindError):
            run(session, text, tmp_path, [str(tmp_path / "secret.csv")])


@pytest.mark.parametrize("name", ["SECRET", "local", "session", "quail", "__builtins__"])
def test_variables_of_the_caller_are_no_tables(name: str, session: quail.Session, tmp_path: Path) -> None:
    local = SECRET  # noqa: F841
    with pytest.raises(quail.BindError, match="does not exist"):
        run(session, f"FROM {name}", tmp_path)


def test_only_what_is_named_is_registered(session: quail.Session, tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("x\n1\n")
    session.register("one", tmp_path / "a.csv")
    assert run(session, "FROM one", tmp_path) == [(1,)]
    assert set(session.tables) == {"docs", "one"}
    for other in ("FROM read_csv('{folder}/b.csv')", "FROM read_csv('{folder}/a.csv')", "FROM 'b.csv'"):
        with pytest.raises(quail.BindError):
            run(session, other, tmp_path)
    with pytest.raises(quail.BindError):
        run(session, "FROM read_csv('quail://0/000001-b.csv')", tmp_path)
    with pytest.raises(quail.BindError):
        run(session, "COPY (SELECT 2 AS x) TO 'quail://0/000000-a.csv'", tmp_path)
    assert (tmp_path / "a.csv").read_text() == "x\n1\n"


def test_a_session_reaches_no_other_session(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x\n1\n")
    with quail.Session() as first, quail.Session() as second:
        first.register("t", path)
        for text in ("FROM t", "FROM read_csv('quail://0/000000-a.csv')"):
            with pytest.raises(quail.BindError):
                second.sql(text).run()


def test_allow_reaches_what_it_names_only(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("x\n1\n")
    (tmp_path / "b.csv").write_text("x\n2\n")
    (tmp_path / "in" / "link.csv").symlink_to(tmp_path / "b.csv")
    with quail.Session(allow=[tmp_path / "in"]) as session:
        assert session.sql(f"FROM read_csv('{tmp_path}/in/a.csv')").run().fetchall() == [(1,)]
        for path in ("b.csv", "in/../b.csv", "inside.csv"):
            with pytest.raises(quail.BindError):
                session.sql(f"FROM read_csv('{tmp_path}/{path}')").run()
            with pytest.raises(quail.QuailError):
                session.sql(f"COPY (SELECT 1) TO '{tmp_path}/{path}'").run()
    assert (tmp_path / "b.csv").read_text() == "x\n2\n"
