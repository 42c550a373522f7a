"""Chains of filters: what is asked, in which order, what follows from answers, what is let go."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from quail.execution.asks import FollowUp, RunControl
from quail.execution.relational import RelationalRun
from quail.frontend.sql import bind_sql
from tests.sql.stub import Stub, StubCatalog, keys_of, rows, run, run_with_report

TWO = "SELECT id FROM r WHERE AI.IF('first ' || body, selectivity := 0.2) AND AI.IF('second ' || body) AND k < 3"


@pytest.fixture(scope="module")
def tables() -> StubCatalog:
    return StubCatalog("CREATE TABLE r AS SELECT i AS id, 'b' || i AS body, i % 5 AS k FROM range(20) t(i)")


def one_column(body: list[str | None]) -> StubCatalog:
    values = ", ".join("(NULL)" if text is None else f"('{text}')" for text in body)
    return StubCatalog(f"CREATE TABLE r AS SELECT * FROM (VALUES {values}) t(body)")


def start(sql: str, tables: StubCatalog, order: str = "auto") -> RelationalRun:
    return RelationalRun(bind_sql(sql, None, tables), tables, RunControl(order=order))


def answer(running: RelationalRun, call: int, keys: list[int], value: bool | None) -> FollowUp:
    return running.feed.answered(
        call, np.array(keys, dtype=np.int64), pa.array([value] * len(keys), type=pa.bool_())
    )


def test_free_conjuncts_come_first_and_rows_in_their_order(tables: StubCatalog) -> None:
    running = start(TWO, tables)
    [asks] = running.feed.take(100)
    assert asks.call == 0
    assert [key[0] for key in keys_of(asks)] == [f"b{i}" for i in range(20) if i % 5 < 3]
    assert asks.rows.tolist() == [i for i in range(20) if i % 5 < 3]
    assert asks.table == "r"
    assert asks.may_follow.all()
    assert running.feed.take(100) == ()
    assert not running.feed.done
    running.close()


def test_take_gives_each_question_once(tables: StubCatalog) -> None:
    running = start(TWO, tables)
    taken = [key for _ in range(10) for asks in running.feed.take(3) for key in keys_of(asks)]
    assert taken == [(f"b{i}",) for i in range(20) if i % 5 < 3]
    running.close()


def test_a_row_that_passes_asks_its_next_filter_at_once(tables: StubCatalog) -> None:
    running = start(TWO, tables)
    [asks] = running.feed.take(4)
    follow = answer(running, 0, [int(asks.keys[2])], True)
    [due] = follow.asks
    assert (due.call, keys_of(due)) == (1, [("b2",)])
    assert due.documents.tolist() == [asks.documents[2]]
    assert not due.may_follow.any()
    assert follow.released.tolist() == []
    follow = answer(running, 1, due.keys.tolist(), True)
    assert follow.asks == ()
    assert follow.released.tolist() == [asks.documents[2]]
    running.close()


@pytest.mark.parametrize("value", [False, None])
def test_a_row_that_fails_releases_its_document(value: bool | None, tables: StubCatalog) -> None:
    running = start(TWO, tables)
    [asks] = running.feed.take(4)
    follow = answer(running, 0, [int(asks.keys[1])], value)
    assert follow.asks == ()
    assert follow.released.tolist() == [asks.documents[1]]
    running.close()


def test_one_question_keeps_no_document(tables: StubCatalog) -> None:
    running = start("SELECT id FROM r WHERE AI.IF('q' || body)", tables)
    [asks] = running.feed.take(100)
    assert not asks.may_follow.any()
    running.close()


def test_a_document_read_by_select_later_is_kept(tables: StubCatalog) -> None:
    sql = "SELECT AI.SCORE('s' || body) FROM r WHERE AI.IF('q' || body)"
    running = start(sql, tables)
    [asks] = running.feed.take(100)
    assert asks.may_follow.all()
    assert answer(running, 0, [int(asks.keys[0])], True).released.tolist() == []
    assert answer(running, 0, [int(asks.keys[1])], False).released.tolist() == [asks.documents[1]]
    running.close()


def test_a_document_shared_by_two_rows_is_released_with_the_last() -> None:
    tables = StubCatalog(
        "CREATE TABLE r AS SELECT * FROM (VALUES ('same', 'x'), ('same', 'y')) t(body, title)"
    )
    running = start("SELECT 1 FROM r WHERE AI.IF('q' || title) AND AI.IF(PROMPT('p {0}', body))", tables)
    [asks] = running.feed.take(9)
    assert len(asks) == 2
    running.close()
    running = start("SELECT 1 FROM r WHERE AI.IF('q' || body) AND AI.IF(PROMPT('p {0}', body))", tables)
    [asks] = running.feed.take(9)
    assert len(asks) == 1
    assert answer(running, 0, asks.keys.tolist(), False).released.tolist() == asks.documents.tolist()
    running.close()


def test_the_filter_that_decides_more_comes_first(tables: StubCatalog) -> None:
    sql = "SELECT id FROM r WHERE AI.IF('aa ' || body, selectivity := 0.9) AND AI.IF('bb ' || body, selectivity := 0.1)"
    for order, first in (("auto", 1), ("as_written", 0)):
        running = start(sql, tables, order)
        [asks] = running.feed.take(3)
        assert asks.call == first
        running.close()


def test_the_shorter_question_comes_first(tables: StubCatalog) -> None:
    sql = f"SELECT id FROM r WHERE AI.IF('{'long ' * 50}' || body) AND AI.IF('short ' || body)"
    running = start(sql, tables)
    assert running.feed.take(3)[0].call == 1
    running.close()


def test_nulls_empties_and_duplicates() -> None:
    tables = one_column(["a", None, "b", None, "a", "", " ", "", "\u200b"])
    stub = Stub({"a": True, "b": False, "": True, " ": True, "\u200b": None})
    bound = bind_sql("SELECT body FROM r WHERE AI.IF('q' || body)", None, tables)
    table, report = run_with_report(bound, tables, stub)
    assert rows(table) == [("a",), ("a",), ("",), (" ",), ("",)]
    assert [key[0] for _, key in stub.asked] == ["a", "b", "", " ", "\u200b"]
    assert report == [
        {
            "call": "AI.IF('q' || body)",
            "rows": 9,
            "evaluated": 5,
            "passed": 3,
            "observed_selectivity": 0.6,
            "null": 2,
            "deduplicated": 2,
        }
    ]


def test_answers_stay_with_their_rows() -> None:
    tables = one_column(["a", None, "b", None, "c"])
    stub = Stub({"a": True, "b": False, "c": None})
    sql = "SELECT body, AI.IF('q' || body) AS x FROM r"
    assert rows(run(sql, tables, stub)) == [
        ("a", True),
        (None, None),
        ("b", False),
        (None, None),
        ("c", None),
    ]


@pytest.mark.parametrize("where", ["WHERE false AND", "WHERE k > 100 AND", "WHERE"])
def test_nothing_to_ask(where: str) -> None:
    tables = StubCatalog(
        "CREATE TABLE r (id INTEGER, body VARCHAR, k INTEGER)", "INSERT INTO r VALUES (1, NULL, 2)"
    )
    stub = Stub(lambda call, key: True)
    table = run(f"SELECT id, body FROM r {where} AI.IF('q' || body)", tables, stub)
    assert (table.num_rows, table.schema.names, stub.asked) == (0, ["id", "body"], [])


def test_an_empty_table() -> None:
    tables = StubCatalog("CREATE TABLE r (id INTEGER, body VARCHAR)")
    table = run("SELECT id, AI.SCORE('q' || body) AS s FROM r", tables, Stub(lambda call, key: 1.0))
    assert table.schema.types == [pa.int32(), pa.float64()]


def test_a_limit_stops_in_row_order() -> None:
    tables = StubCatalog(
        "CREATE TABLE r AS SELECT i AS id, 'b' || i AS body, i % 2 AS k FROM range(10000) t(i)"
    )
    stub = Stub(lambda call, key: int(key[0][1:]) % 3 == 0, batch=4)
    sql = "SELECT id FROM r WHERE k = 1 AND AI.IF('q' || body) LIMIT 5 OFFSET 2"
    assert rows(run(sql, tables, stub)) == [(15,), (21,), (27,), (33,), (39,)]
    assert len(stub.asked) <= 20 + 4


@pytest.mark.parametrize(
    "tail",
    ["ORDER BY id LIMIT 5", "QUALIFY row_number() OVER (ORDER BY id) < 3 LIMIT 5", "GROUP BY id LIMIT 5"],
)
def test_a_limit_behind_a_sort_or_group_asks_all(tail: str, tables: StubCatalog) -> None:
    stub = Stub(lambda call, key: True)
    run(f"SELECT id FROM r WHERE AI.IF('q' || body) {tail}", tables, stub)
    assert len(stub.asked) == 20


@pytest.mark.parametrize("select", ["count(*)", "max(id)", "row_number() OVER ()"])
def test_a_limit_over_an_aggregate_asks_all(select: str, tables: StubCatalog) -> None:
    stub = Stub(lambda call, key: True)
    run(f"SELECT {select} FROM r WHERE AI.IF('q' || body) LIMIT 1", tables, stub)
    assert len(stub.asked) == 20


def test_a_limit_of_all_rows_is_row_limited(tables: StubCatalog) -> None:
    for sql, expected in (("SELECT id FROM r WHERE AI.IF('q' || body) LIMIT 5", True), (TWO, False)):
        running = start(sql, tables)
        assert running.feed.row_limited is expected
        running.close()


def test_select_is_asked_only_for_rows_after_limit() -> None:
    tables = StubCatalog("CREATE TABLE r AS SELECT i AS id, 'b' || i AS body FROM range(10000) t(i)")
    stub = Stub(lambda call, key: True)
    table = run("SELECT id, AI.IF('q' || body) AS x FROM r ORDER BY id DESC LIMIT 10", tables, stub)
    assert rows(table) == [(i, True) for i in range(9999, 9989, -1)]
    assert len(stub.asked) == 10


def test_order_by_a_score_asks_all_and_no_more(tables: StubCatalog) -> None:
    stub = Stub(lambda call, key: int(key[0][1:]) / 20)
    sql = "SELECT id, AI.SCORE('s' || body) AS s, AI.SCORE('t' || body) AS t FROM r ORDER BY s DESC LIMIT 3"
    assert [row[0] for row in rows(run(sql, tables, stub))] == [19, 18, 17]
    assert [call for call, _ in stub.asked].count(0) == 20
    assert [call for call, _ in stub.asked].count(1) == 3


def test_or_asks_the_second_only_where_the_first_is_not_true(tables: StubCatalog) -> None:
    stub = Stub(lambda call, key: call.index == 0 and int(key[0][1:]) % 2 == 0)
    sql = "SELECT id FROM r WHERE k = 0 OR AI.IF('first ' || body) OR AI.IF('second ' || body)"
    table = run(sql, tables, stub)
    assert [row[0] for row in rows(table)] == [i for i in range(20) if i % 2 == 0 or i % 5 == 0]
    assert len([1 for call, _ in stub.asked if call == 0]) == 16
    assert len([1 for call, _ in stub.asked if call == 1]) == 8


def test_case_asks_only_the_branch_that_is_reached(tables: StubCatalog) -> None:
    stub = Stub(lambda call, key: True)
    run(
        "SELECT CASE WHEN k = 0 THEN AI.IF('a ' || body) WHEN k = 1 THEN AI.IF('b ' || body) END FROM r",
        tables,
        stub,
    )
    assert sorted(stub.asked) == sorted(
        [(0, (f"b{i}",)) for i in range(0, 20, 5)] + [(1, (f"b{i}",)) for i in range(1, 20, 5)]
    )


def test_a_call_written_three_times_is_asked_once(tables: StubCatalog) -> None:
    stub = Stub(lambda call, key: True)
    sql = "SELECT AI.IF('q' || body) AS x FROM r WHERE AI.IF('q' || body) ORDER BY AI.IF('q' || body), id"
    assert run(sql, tables, stub).num_rows == 20
    assert len(stub.asked) == 20


def test_text_with_nul_is_whole() -> None:
    tables = StubCatalog("CREATE TABLE r AS SELECT 'good' || chr(0) || 'bad' AS body")
    stub = Stub(lambda call, key: True)
    assert run("SELECT AI.IF('q' || body) FROM r", tables, stub).num_rows == 1
    assert stub.asked == [(0, ("good\0bad",))]


@pytest.mark.parametrize("batch", [1, 3, 1000])
def test_the_size_of_batches_changes_nothing(batch: int, tables: StubCatalog) -> None:
    stub = Stub(lambda call, key: int(key[0][1:]) % (2 + call.index) == 0, batch=batch)
    table = run(TWO, tables, stub)
    assert [row[0] for row in rows(table)] == [0, 6, 12]


def test_two_runs_of_one_statement_at_once(tables: StubCatalog) -> None:
    bound = bind_sql(TWO, None, tables)
    first, second = (RelationalRun(bound, tables, RunControl()) for _ in range(2))
    for running in (first, second):
        Stub(lambda call, key: True).run(bound.calls, running.feed, RunControl())
    assert first.result().equals(second.result())
    first.close()
    second.close()
    assert run(TWO, tables, Stub(lambda call, key: True)).num_rows == 12


EXISTENCE = {
    "EXISTS (SELECT 1 FROM u WHERE {})": True,
    "EXISTS (SELECT * FROM u WHERE id > 3 AND NOT {negated} AND {})": True,
    "NOT EXISTS (SELECT 1 FROM u WHERE {})": False,
    "EXISTS (SELECT 1 FROM u WHERE u.k = r.k AND {})": True,
    "NOT EXISTS (SELECT 1 FROM u WHERE u.k = r.k AND {})": False,
}


@pytest.mark.parametrize("condition", EXISTENCE)
@pytest.mark.parametrize("first", [0, 40, None])
def test_a_match_in_its_own_table_ends_exists(condition: str, first: int | None) -> None:
    tables = StubCatalog(
        "CREATE TABLE r AS SELECT i AS id, 1 AS k FROM range(3) t(i)",
        "CREATE TABLE u AS SELECT i AS id, 'w' || i AS word, 1 AS k FROM range(5000) t(i)",
    )
    stub = Stub(
        lambda call, key: first is not None and "second" not in call.text and int(key[0][1:]) >= first,
        batch=8,
    )
    sql = condition.format("AI.IF('first ' || u.word)", negated="AI.IF('second ' || u.word)")
    found = run(f"SELECT id FROM r WHERE {sql}", tables, stub)
    assert found.num_rows == (3 if EXISTENCE[condition] == (first is not None) else 0)
    if first is None:
        assert {key[0] for _, key in stub.asked} >= {f"w{i}" for i in range(4, 5000)}
    else:
        assert len(stub.asked) <= 2 * (first + 4 + 8 + 16)


def test_a_match_in_the_right_table_ends_a_semi_join() -> None:
    tables = StubCatalog(
        "CREATE TABLE r AS SELECT i AS id, i % 2 AS k FROM range(6) t(i)",
        "CREATE TABLE u AS SELECT i AS id, 'w' || i AS word, i % 2 AS k FROM range(5000) t(i)",
    )
    for join, expected in (("SEMI", [0, 2, 4]), ("ANTI", [1, 3, 5])):
        stub = Stub(lambda call, key: int(key[0][1:]) % 2 == 0, batch=8)
        found = run(
            f"SELECT id FROM r {join} JOIN u ON r.k = u.k AND AI.IF('q ' || u.word) ORDER BY id", tables, stub
        )
        assert [row[0] for row in rows(found)] == expected
        assert len(stub.asked) <= 2500 + 16


def test_exists_leaves_other_questions_alone() -> None:
    tables = StubCatalog(
        "CREATE TABLE r AS SELECT i AS id, 'b' || i AS body FROM range(100) t(i)",
        "CREATE TABLE u AS SELECT i AS id, 'w' || i AS word FROM range(1000) t(i)",
    )
    stub = Stub(lambda call, key: True, batch=8)
    sql = (
        "SELECT id, AI.IF('third ' || body) AS x FROM r WHERE AI.IF('first ' || body)"
        " AND EXISTS (SELECT 1 FROM u WHERE AI.IF('second ' || u.word))"
    )
    assert rows(run(sql, tables, stub)) == [(i, True) for i in range(100)]
    asked = [call for call, _ in stub.asked]
    assert [asked.count(call) for call in sorted(set(asked))].count(100) == 2
    assert len(asked) <= 200 + 16
