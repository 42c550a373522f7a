from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import quail
from quail import Query, QueryCancelled, QueryResult, Session
from quail.errors import BindError, ConfigError, QuailError, SourceError
from quail.plan.logical import AICall
from tests.shell.stub import StubEngine

DOCUMENTS = pa.table({"id": [1, 2, 3, 4, 5], "text": ["good one", "bad one", None, "good two", "good one"]})
GOOD = "SELECT id FROM docs WHERE AI.IF(PROMPT('Good? {0}', text)) ORDER BY id"


def is_good(call: AICall, arguments: tuple[str, ...]) -> bool:
    return "good" in arguments[0]


@pytest.fixture
def engine() -> StubEngine:
    return StubEngine(is_good)


@pytest.fixture
def session(engine: StubEngine) -> Any:
    with Session(engine=engine) as session:
        session.register("docs", DOCUMENTS)
        yield session


def test_a_query_runs_when_it_is_told_to(session: Session, engine: StubEngine) -> None:
    query = session.sql(GOOD)
    assert isinstance(query, Query)
    assert engine.asked == []
    result = query.run()
    assert isinstance(result, QueryResult)
    assert result.fetchall() == [(1,), (4,), (5,)]
    assert len(engine.asked) == 3, "equal documents are asked once, NULL never"


def test_a_query_runs_again_and_sees_new_rows(session: Session, tmp_path: Path) -> None:
    assert session.sql(GOOD).collect().num_rows == 3
    query = session.sql(GOOD)
    assert query.run().fetchall() == query.run().fetchall()


def test_explain_asks_nothing(session: Session, engine: StubEngine) -> None:
    text = session.sql(GOOD).explain()
    assert "AI.IF" in text
    assert engine.asked == []
    with pytest.raises(ConfigError, match="format = 'xml' is not one of 'text', 'json'"):
        session.sql(GOOD).explain(format="xml")


def test_report_tells_what_was_done(session: Session) -> None:
    report = session.sql(GOOD).run().report
    assert (report["model"], report["device"], report["dtype"]) == ("stub", "cpu", "float32")
    assert report["tokens"]["naive"] == report["tokens"]["computed"] == 30
    assert report["tokens"]["reused_rewind"] == 0
    assert set(report["seconds"]) == {"boot", "plan", "tokenize", "run", "total"}
    (stage,) = report["stages"]
    assert (stage["evaluated"], stage["passed"], stage["null"]) == (3, 2, 1)
    assert stage["observed_selectivity"] == pytest.approx(2 / 3)
    assert (report.rows, report.nulls, report.passes) == (3, 1, 1)
    assert "stub on cpu" in str(report)


def test_a_statement_without_calls_needs_no_engine(session: Session, engine: StubEngine) -> None:
    result = session.sql("SELECT count(*) AS n FROM docs").run()
    assert result.fetchall() == [(5,)]
    assert result.report.model is None
    assert engine.asked == []


def test_no_model_is_loaded_where_no_row_asks_it() -> None:
    with Session(quail.EngineConfig(model="no-such-model")) as session:
        session.register("docs", DOCUMENTS)
        assert (
            session.sql("SELECT id FROM docs WHERE false AND AI.IF(PROMPT('Good? {0}', text))")
            .run()
            .fetchall()
            == []
        )


def test_parameters(session: Session) -> None:
    statement = "SELECT id FROM docs WHERE id > {} AND AI.IF(PROMPT('Good? {{0}}', text)) ORDER BY id"
    assert session.sql(statement.format("?"), [1]).run().fetchall() == [(4,), (5,)]
    assert session.sql(statement.format("$least"), {"least": 4}).run().fetchall() == [(5,)]


def test_statements_that_cannot_be_understood(session: Session) -> None:
    with pytest.raises(BindError):
        session.sql("SELECT nothing FROM docs")
    with pytest.raises(BindError):
        session.sql("SELEC 1").run()
    with pytest.raises(QuailError, match="a statement is text, not NoneType"):
        session.sql(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT id, AI.IF(PROMPT('Good? {0}', text)) AS ok FROM docs",
        "SELECT id FROM docs WHERE id = 2 OR AI.IF(PROMPT('Good? {0}', text))",
        "SELECT id FROM docs GROUP BY id, text HAVING AI.IF(PROMPT('Good? {0}', text))",
        "WITH good AS (SELECT id FROM docs WHERE AI.IF(PROMPT('Good? {0}', text))) SELECT id FROM good",
        "SELECT a.id FROM docs a LEFT JOIN docs b ON a.id = b.id AND AI.IF(PROMPT('Good? {0}', b.text))",
    ],
)
def test_calls_elsewhere_are_answered_by_a_stub(session: Session, statement: str) -> None:
    answers = (
        "(SELECT *, CASE WHEN text IS NULL THEN NULL ELSE contains(text, 'good') END AS answer FROM docs)"
    )
    plain = statement.replace("docs", answers).replace("AI.IF(PROMPT('Good? {0}', text))", "answer")
    plain = plain.replace("AI.IF(PROMPT('Good? {0}', b.text))", "b.answer").replace("id, text", "id, answer")
    assert sorted(session.sql(statement).run().fetchall()) == sorted(session.sql(plain).run().fetchall())


@pytest.mark.parametrize(
    ("option", "value"), [("order", "random"), ("on_long", "skip"), ("on_error", "ignore")]
)
def test_options_are_checked(session: Session, option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} = '{value}' is not one of"):
        session.sql(GOOD).run(**{option: value})  # type: ignore[arg-type]


def test_a_closed_session_says_so(engine: StubEngine) -> None:
    session = Session(engine=engine)
    session.register("docs", DOCUMENTS)
    query = session.sql(GOOD)
    session.close()
    session.close()
    for use in (
        lambda: session.sql("SELECT 1"),
        lambda: session.register("x", DOCUMENTS),
        lambda: session.tables,
        query.run,
        query.explain,
        session.__enter__,
    ):
        with pytest.raises(QuailError, match="the session is closed"):
            use()


def test_config_is_an_engine_config() -> None:
    with pytest.raises(ConfigError, match="dict, not an EngineConfig"):
        Session({"model": "x"})  # type: ignore[arg-type]


def test_threads_take_turns(session: Session, engine: StubEngine) -> None:
    results: list[Any] = []

    def ask() -> None:
        results.append(session.sql(GOOD).run().fetchall())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[(1,), (4,), (5,)]] * 4


def test_a_run_is_cancelled_from_another_thread_and_the_session_goes_on() -> None:
    asked = threading.Event()
    go_on = threading.Event()

    def slow(call: AICall, arguments: tuple[str, ...]) -> bool:
        asked.set()
        go_on.wait(10)
        return True

    with Session(engine=StubEngine(slow)) as session:
        session.register("docs", [{"text": f"document {i}"} for i in range(500)])
        query = session.sql("SELECT count(*) FROM docs WHERE AI.IF(PROMPT('Good? {0}', text))")
        errors: list[BaseException] = []

        def run() -> None:
            try:
                query.run()
            except QueryCancelled as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        asked.wait(10)
        query.cancel()
        go_on.set()
        thread.join()
        assert len(errors) == 1
        assert query.run().fetchall() == [(500,)]


def test_work_of_duckdb_is_cancelled_too() -> None:
    with Session() as session:
        query = session.sql(
            "SELECT count(*) FROM range(100000) a, range(1000000) b WHERE hash(a.range, b.range) = 1"
        )
        timer = threading.Timer(0.5, query.cancel)
        timer.start()
        with pytest.raises(QueryCancelled):
            query.run()
        timer.join()
        assert session.sql("SELECT 1").run().fetchall() == [(1,)]


def test_an_interrupt_leaves_the_session_usable() -> None:
    answers = iter([KeyboardInterrupt])

    def interrupt_once(call: AICall, arguments: tuple[str, ...]) -> bool:
        for error in answers:
            raise error
        return True

    with Session(engine=StubEngine(interrupt_once)) as session:
        session.register("docs", DOCUMENTS)
        query = session.sql(GOOD)
        with pytest.raises(KeyboardInterrupt):
            query.run()
        assert len(query.run()) == 4


def test_created_tables_stay_in_the_database_file(tmp_path: Path, engine: StubEngine) -> None:
    path = tmp_path / "kept.duckdb"
    with Session(database=path, engine=engine) as session:
        session.register("docs", DOCUMENTS)
        session.sql(f"CREATE TABLE good AS {GOOD}").run()
    with Session(database=path) as session:
        assert session.sql("SELECT id FROM good ORDER BY id").run().fetchall() == [(1,), (4,), (5,)]


def test_files_are_read_and_written_only_as_allowed(tmp_path: Path, engine: StubEngine) -> None:
    statement = f"COPY ({GOOD}) TO '{tmp_path}/good.csv'"
    with Session(engine=engine) as session:
        session.register("docs", DOCUMENTS)
        with pytest.raises(QuailError, match="disabled by configuration"):
            session.sql(statement).run()
    with Session(engine=engine, allow=[tmp_path]) as session:
        session.register("docs", DOCUMENTS)
        session.sql(statement).run()
    assert (tmp_path / "good.csv").read_text() == "id\n1\n4\n5\n"


def test_variables_of_the_caller_are_no_tables(session: Session) -> None:
    hidden = DOCUMENTS  # noqa: F841
    with pytest.raises(QuailError, match="hidden"):
        session.sql("SELECT * FROM hidden").run()


def test_a_table_is_registered_by_name_and_source(session: Session) -> None:
    with pytest.raises(SourceError, match="not a table"):
        session.register("numbers", 3)
    assert list(session.tables) == ["docs"]
    assert session.tables["docs"].num_rows == 5


def test_a_literal_backslash_n_is_warned_of(session: Session) -> None:
    with pytest.warns(UserWarning, match=r"\\n"):
        query = session.sql(r"SELECT id FROM docs WHERE AI.IF(PROMPT('Good?\n{0}', text))")
    assert query.run().report.warnings


def test_threads_of_one_session_are_not_those_of_the_next(tmp_path: Path) -> None:
    import torch

    from tests.models.tiny import make_tiny

    folder = make_tiny(tmp_path / "model", "llama")
    before = torch.get_num_threads()
    for threads, expected in ((None, before), (1, 1), (None, before)):
        config = quail.EngineConfig(model=str(folder), threads=threads, cache_dir=tmp_path / "cache")
        with quail.Session(config) as session:
            session.register("t", {"text": ["a"]})
            session.sql("SELECT * FROM t WHERE AI.IF(PROMPT('good? {0}', text))").run(progress=False)
        assert torch.get_num_threads() == expected
