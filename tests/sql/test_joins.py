"""Pairs: in which order they are asked, whose KV stays for them, and when enough is known."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from quail.execution import reading
from quail.execution.asks import Asks, FollowUp, RunControl
from quail.execution.relational import RelationalRun
from quail.frontend.sql import bind_sql
from quail.plan.logical import AICall
from tests.sql.reference import StoredAnswers, ai_sql, catalog, plain_sql
from tests.sql.stub import Key, Stub, StubCatalog, keys_of, rows, run
from tests.sql.test_placements import PLACEMENTS, TABLES

JOIN = "SELECT l.id, r.id AS rid FROM l JOIN r ON l.k = r.k AND AI.IF(PROMPT('{0} and {1}', l.body, r.word))"
FILTERED = f"{JOIN} WHERE AI.IF('ok? ' || l.body)"
JOINS = [name for name, template in PLACEMENTS.items() if "@IF[j]" in template or "@IF[i]" in template]


def tables(left: int = 6, right: int = 5, groups: int = 1, long: str = "left") -> StubCatalog:
    """Two tables; the texts of one side are long."""
    padding = {side: " and so on" * (40 if side == long else 1) for side in ("left", "right")}
    return StubCatalog(
        f"CREATE TABLE l AS SELECT i AS id, i % {groups} AS k, 'left ' || i || '{padding['left']}' AS body"
        f" FROM range({left}) t(i)",
        f"CREATE TABLE r AS SELECT i AS id, i % {groups} AS k, 'right ' || i || '{padding['right']}' AS word"
        f" FROM range({right}) t(i)",
    )


def start(sql: str, catalog: StubCatalog, **options: Any) -> RelationalRun:
    return RelationalRun(bind_sql(sql, None, catalog), catalog, RunControl(**options))


def take_all(running: RelationalRun, limit: int = 1000) -> list[Asks]:
    found = []
    while batches := running.feed.take(limit):
        found += batches
    return found


class Watch(Stub):
    """A stub that follows documents as an engine would: what is asked, kept, let go."""

    def __init__(self, answer: Any, batch: int = 7) -> None:
        super().__init__(answer, batch)
        self.order: list[tuple[int, int]] = []
        self.kept: dict[int, bool] = {}

    def _values(self, call: AICall, asks: Asks) -> pa.Array:
        for handle, follows in zip(asks.documents.tolist(), asks.may_follow.tolist(), strict=True):
            assert handle not in self.released, "a document was asked about after it was let go"
            self.order.append((call.index, handle))
            self.kept[handle] = follows
        return super()._values(call, asks)


@pytest.mark.parametrize("long", ["left", "right"])
def test_pairs_come_anchor_by_anchor_and_the_long_side_is_the_anchor(long: str) -> None:
    running = start(JOIN, tables(long=long))
    assert running.calls[0].anchor == (0 if long == "left" else 1)
    [asks] = take_all(running)
    anchors = [key[running.calls[0].anchor] for key in keys_of(asks)]
    assert len(anchors) == 30
    assert [anchors[i] for i in range(30) if i == 0 or anchors[i] != anchors[i - 1]] == list(
        dict.fromkeys(anchors)
    )
    assert asks.partners is not None
    per_anchor = 5 if long == "left" else 6
    assert asks.may_follow.tolist() == ([True] * (per_anchor - 1) + [False]) * (30 // per_anchor)
    running.close()


@pytest.mark.parametrize("sides", [("l.body", "r.word"), ("r.word", "l.body")])
@pytest.mark.parametrize(
    ("anchor", "text"), [("left", "left"), ("right", "right"), ("l", "left"), ("R", "right")]
)
def test_the_statement_may_say_which_side_is_the_anchor(
    sides: tuple[str, str], anchor: str, text: str
) -> None:
    condition = f"AI.IF(PROMPT('{{0}} and {{1}}', {', '.join(sides)}), anchor := '{anchor}')"
    for sql in (
        f"SELECT 1 FROM l, r WHERE {condition}",
        f"SELECT 1 FROM l WHERE EXISTS (SELECT 1 FROM r WHERE {condition})",
    ):
        running = start(sql, tables())
        asks = take_all(running)[0]
        assert all(key[running.calls[0].anchor].startswith(text) for key in keys_of(asks))
        running.close()


def test_pairs_known_only_after_answers_have_their_anchor_before() -> None:
    sql = (
        "SELECT l.id FROM l WHERE AI.IF('ok? ' || l.body) AND EXISTS"
        " (SELECT 1 FROM r WHERE AI.IF(PROMPT('{0} and {1}', l.body, r.word)))"
    )
    for long, anchor in (("left", 0), ("right", 1)):
        running = start(sql, tables(left=50, right=50, long=long))
        assert running.calls[1].anchor == anchor
        running.close()


def test_a_batch_that_ends_within_an_anchor_leaves_it_open() -> None:
    running = start(JOIN, tables())
    (first,) = running.feed.take(7)
    assert first.may_follow.tolist() == [True] * 4 + [False] + [True] * 2
    assert len(set(first.documents.tolist())) == 2
    running.close()


@pytest.mark.parametrize("name", JOINS)
@pytest.mark.parametrize("block", [1, 7, 64])
def test_rows_do_not_depend_on_how_many_pairs_are_looked_at(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK_ROWS", block)
    monkeypatch.setattr(reading, "FIRST_WINDOW_ROWS", block)
    found = catalog(*TABLES)
    stub = Watch(StoredAnswers())
    result = run(ai_sql(PLACEMENTS[name]), found, stub)
    expected = found.connection.sql(plain_sql(PLACEMENTS[name])).to_arrow_table()
    assert sorted(map(repr, rows(result))) == sorted(map(repr, rows(expected)))


def test_a_passing_anchor_meets_its_partners_at_once_and_is_let_go_behind_the_last() -> None:
    stub = Watch(lambda call, key: "and so on" in key[0] and int(key[0].split()[1]) % 2 == 0, batch=4)
    found = rows(run(FILTERED, tables(), stub))
    assert len(found) == 15
    assert sorted(stub.follow_ups) == sorted((call, key) for call, key in stub.asked if len(key) == 2)
    assert sorted(stub.released) == sorted(stub.kept)
    first = [call for call, _ in stub.order[:4]]
    assert first == [len(first) and stub.order[0][0]] * 4
    assert stub.order[4][0] != first[0], "pairs follow before the next filter question"


def test_two_joins_on_the_same_anchors_keep_them() -> None:
    stub = Watch(lambda call, key: True)
    sql = (
        "SELECT count(*) FROM l, r, r AS s WHERE AI.IF(PROMPT('{0} and {1}', l.body, r.word))"
        " AND AI.IF(PROMPT('{0} or {1}', l.body, s.word))"
    )
    assert rows(run(sql, tables(), stub)) == [(6 * 25,)]
    assert len(stub.asked) == 60
    assert len(set(stub.released)) == len(stub.released) == 6


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT id FROM l WHERE EXISTS (SELECT 1 FROM r WHERE {})", 1),
        ("SELECT id FROM l WHERE NOT EXISTS (SELECT 1 FROM r WHERE {})", 0),
        ("SELECT l.id FROM l SEMI JOIN r ON {}", 1),
        ("SELECT l.id FROM l ANTI JOIN r ON r.id >= 0 AND {}", 0),
        ("SELECT l.id FROM (SELECT * FROM l) AS l SEMI JOIN r ON {}", 1),
        ("SELECT l.id FROM (SELECT * FROM l) AS l ANTI JOIN r ON {}", 0),
        ("SELECT id FROM (SELECT id, body FROM l) SEMI JOIN r ON {bare}", 1),
        ("WITH l AS MATERIALIZED (FROM l) SELECT l.id FROM l SEMI JOIN r ON {}", 1),
        ("SELECT l.q FROM l AS l(q, k, body) SEMI JOIN r ON {}", 1),
        ("SELECT l.id FROM l JOIN l AS o USING (id) SEMI JOIN r ON {}", 1),
        ("SELECT l.id FROM l LEFT JOIN l AS o ON l.id + 1 = o.id SEMI JOIN r ON {}", 1),
        ("SELECT l.id FROM l SEMI JOIN l AS o ON l.id = o.id ANTI JOIN r ON {}", 0),
        ("SELECT l.id FROM l CROSS JOIN range(1) SEMI JOIN r ON {}", 1),
    ],
)
def test_the_first_match_ends_the_search(sql: str, expected: int) -> None:
    pair = "AI.IF(PROMPT('{0} and {1}', l.body, r.word))"
    sql = sql.format(pair, bare=pair.replace("l.body", "body"))
    for batch, num_asked in ((5, 5), (100, 16)):
        stub = Watch(lambda call, key: key[1].startswith("right 2 "), batch=batch)
        assert len(rows(run(sql, tables(left=1, right=1000), stub))) == expected
        assert len(stub.asked) == num_asked
    late = Watch(lambda call, key: key[1].startswith("right 100 "), batch=16)
    run(sql, tables(left=3, right=1000), late)
    assert len(late.asked) == 3 * 112
    assert len(set(late.released)) == len(late.released) == 3


@pytest.mark.parametrize("batch", [1, 5, 64])
@pytest.mark.parametrize("seed", range(8))
def test_an_anchor_asks_all_its_pairs_of_a_join_together(seed: int, batch: int) -> None:
    """Whichever answers come first, and whether the order of questions is revised on the way."""
    rng = np.random.default_rng(seed)
    truths: dict[tuple[int, Key], bool | None] = {}

    def answer(call: AICall, key: Key) -> bool | None:
        value = rng.random()
        return truths.setdefault((call.index, key), None if value < 0.05 else bool(value < 0.6))

    some = tables(left=9, right=7, groups=3, long=str(rng.choice(["left", "right"])))
    some.connection.execute("INSERT INTO l VALUES (99, 1, NULL); CREATE TABLE s AS FROM r WHERE id <> 2")
    some.connection.execute("INSERT INTO s SELECT id + 50, k, word FROM s WHERE id < 2")
    hints = rng.choice(["", ", selectivity := 0.3", ", selectivity := 0.9"], 5)
    sql = (
        f"SELECT l.id, r.id AS i, s.id AS j FROM l, r, s WHERE AI.IF('new? ' || l.body{hints[0]})"
        f" AND AI.IF('ok? ' || r.word{hints[1]}) AND AI.IF(PROMPT('{{0}} and {{1}}', l.body, r.word){hints[2]})"
        f" AND NOT AI.IF('fit? ' || s.word{hints[3]})"
        f" AND AI.IF(PROMPT('{{0}} or {{1}}', {rng.choice(['l.body', 'r.word'])}, s.word){hints[4]})"
    )
    running = start(sql, some, order=str(rng.choice(["auto", "as_written"])))
    asked: list[tuple[int, int]] = []
    take, answered = running.feed.take, running.feed.answered

    def noted(batches: tuple[Asks, ...]) -> None:
        for asks in batches:
            if asks.partners is not None:
                asked.extend((asks.call, anchor) for anchor in set(asks.documents.tolist()))

    class Noting:
        def __getattr__(self, name: str) -> Any:
            return getattr(running.feed, name)

        def take(self, limit: int) -> tuple[Asks, ...]:
            found = take(limit)
            noted(found)
            return found

        def answered(self, call: int, keys: Any, values: Any) -> FollowUp:
            found = answered(call, keys, values)
            noted(found.asks)
            return found

    stub = Stub(answer, batch)
    stub.run(running.calls, Noting(), RunControl())
    assert len(set(stub.asked)) == len(stub.asked)
    assert len(asked) == len(set(asked)), asked
    found = rows(running.result())
    running.close()
    columns = [some.connection.sql(f"FROM {name}").fetchall() for name in ("l", "r", "s")]
    calls = running.calls

    def holds(*texts: str | None) -> bool:
        body, word, last = texts
        keys = [
            (body,),
            (word,),
            (body, word),
            (last,),
            (body if "l.body, s" in calls[4].text else word, last),
        ]
        values = [truths.get((index, key)) for index, key in enumerate(keys)]
        return values[:3] + values[4:] == [True] * 4 and values[3] is False

    expected = [(a[0], b[0], c[0]) for a, b, c in itertools.product(*columns) if holds(a[2], b[2], c[2])]
    assert sorted(found) == sorted(expected)


LEFT_SIDES = {
    "table": "l",
    "subquery": "(SELECT * FROM l WHERE id <> 3) AS l",
    "with columns named": "(SELECT id, k, body FROM l) AS l(id, k, body)",
    "outer join": "l LEFT JOIN (SELECT * FROM l WHERE id < 5) AS o ON l.k = o.id",
    "full join": "l FULL JOIN range(5, 12) AS o(n) ON l.id = o.n",
    "natural join": "l NATURAL JOIN (SELECT id, k FROM l WHERE id < 6)",
    "nested": "(l SEMI JOIN range(6) AS o(n) ON l.id = o.n) CROSS JOIN (VALUES (1), (2)) AS v(n)",
    "lateral": "l CROSS JOIN LATERAL (SELECT unnest([l.id, l.k]) AS n) AS o",
    "union": "(SELECT * FROM l UNION ALL SELECT * FROM l WHERE id < 2) AS l",
    "numbered itself": "(SELECT *, row_number() OVER (ORDER BY id DESC) AS n FROM l) AS l",
}


@pytest.mark.parametrize("kind", ["SEMI", "ANTI"])
@pytest.mark.parametrize("side", LEFT_SIDES)
def test_whatever_stands_on_the_left_stops_at_its_first_match(side: str, kind: str) -> None:
    """The rows are those of plain DuckDB; fewer pairs are asked than there are."""
    some = tables(left=8, right=40, groups=3)
    some.connection.execute("INSERT INTO l SELECT id + 100, (k + 1) % 3, body FROM l WHERE id < 3")
    some.connection.execute("INSERT INTO l VALUES (200, 1, NULL); INSERT INTO r VALUES (200, 1, NULL)")
    sql = f"SELECT * FROM {LEFT_SIDES[side]} {kind} JOIN r ON l.k = r.k AND "
    number = "CAST(split_part({}, ' ', 2) AS INTEGER)"
    plain = f"({number.format('l.body')} + {number.format('r.word')}) % 5 = 0"
    stub = Stub(lambda call, key: sum(int(text.split()[1]) for text in key) % 5 == 0, batch=9)
    running = start(sql + "AI.IF(PROMPT('{0} and {1}', l.body, r.word))", some, exists_wave=2)
    stub.run(running.calls, running.feed, RunControl())
    found = rows(running.result())
    running.close()
    expected = some.connection.sql(sql + plain).fetchall()
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    pairs = f"FROM {LEFT_SIDES[side]} JOIN r ON l.k = r.k"
    query = f"SELECT count(DISTINCT (l.body, r.word)) {pairs} WHERE l.body IS NOT NULL AND word IS NOT NULL"
    ((num_pairs,),) = some.connection.sql(query).fetchall()
    assert 0 < len(stub.asked) < num_pairs * 0.8


@pytest.mark.parametrize("wave", [1, 3, 16, 100])
@pytest.mark.parametrize("seed", range(6))
def test_waves_of_random_rows(wave: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    share = rng.choice([0.0, 0.1, 0.5])
    truth: dict[Key, bool | None] = {}

    def answer(call: AICall, key: Key) -> bool | None:
        value = rng.random()
        return truth.setdefault(key, None if value < 0.1 else value < share + 0.1)

    some = tables(left=8, right=40, groups=3)
    some.connection.execute("INSERT INTO l SELECT id + 100, (k + 1) % 3, body FROM l WHERE id < 3")
    some.connection.execute("INSERT INTO l VALUES (200, 1, NULL); INSERT INTO r VALUES (200, 1, NULL)")
    sql = (
        "SELECT id FROM l WHERE EXISTS"
        " (SELECT 1 FROM r WHERE r.k = l.k AND AI.IF(PROMPT('{0} and {1}', l.body, r.word))) ORDER BY id"
    )
    stub = Stub(answer, batch=9)
    running = start(sql, some, exists_wave=wave)
    stub.run(running.calls, running.feed, RunControl())
    found = [row[0] for row in rows(running.result())]
    running.close()
    left = some.connection.sql("SELECT id, k, body FROM l").fetchall()
    right = some.connection.sql("SELECT k, word FROM r").fetchall()
    for id_, k, body in left:
        pairs = [
            (body, word) for other, word in right if other == k and body is not None and word is not None
        ]
        asked = [pair for pair in pairs if pair in truth]
        assert (id_ in found) == any(truth[pair] for pair in asked)
        if id_ not in found:
            assert asked == pairs, "a row without a match has asked all its pairs"
    assert len(set(stub.asked)) == len(stub.asked)


def test_a_row_limit_ends_a_large_join_early() -> None:
    stub = Stub(lambda call, key: int(key[0].split()[1]) % 100 == 5, batch=64)
    tracemalloc.start()
    sql = "SELECT l.id, r.id AS rid FROM l, r WHERE AI.IF(PROMPT('{0} and {1}', l.body, r.word)) LIMIT 10"
    found = rows(run(sql, tables(3000, 3000, long="right"), stub))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 10
    assert len(stub.asked) <= 2048 * 7
    assert peak < 64e6


class Tireless:
    """Answers TRUE where the keys are even, and remembers nothing."""

    def __init__(self) -> None:
        self.num_asked = 0

    def run(self, running: RelationalRun) -> None:
        waiting: list[Asks] = []
        while not running.feed.done:
            waiting += [] if waiting else running.feed.take(2**14)
            asks = waiting.pop()
            self.num_asked += len(asks)
            waiting += running.feed.answered(asks.call, asks.keys, pa.array(asks.keys % 2 == 0)).asks


def test_a_count_over_many_pairs_holds_a_part_of_them_at_a_time() -> None:
    sql = "SELECT count(*) FROM l, r WHERE AI.IF(PROMPT('{0} and {1}', l.body, r.word))"
    running = start(sql, tables(1500, 1500))
    stub = Tireless()
    tracemalloc.start()
    stub.run(running)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert stub.num_asked == 1500 * 1500
    assert rows(running.result()) == [(1500 * 1500 // 2,)]
    assert running.stages()[0]["evaluated"] == 1500 * 1500
    assert running.stages()[0]["passed"] == 1500 * 1500 // 2
    running.close()
    assert peak < 2**18 * 400 + 1500 * 1500 * 20


@pytest.mark.parametrize("order", ["auto", "as_written"])
@pytest.mark.parametrize("block", [3, 20, 10_000])
@pytest.mark.parametrize(
    "sql",
    [
        "SELECT l.id, r.id AS rid, {} AS a FROM l, r",
        "SELECT l.id, r.id AS rid FROM l LEFT JOIN r ON l.k = r.k AND {}",
        "SELECT l.id, r.id AS rid FROM l FULL JOIN r ON {}",
        "SELECT l.id, CASE WHEN r.id > 3 THEN NOT {} END AS a FROM l, r",
        "SELECT l.id, coalesce({}, r.id > 4) AS a FROM l, r",
        "SELECT l.id FROM l WHERE EXISTS (SELECT 1 FROM r WHERE l.k = r.k AND {})",
        "SELECT l.id FROM l WHERE NOT EXISTS (SELECT 1 FROM r WHERE {})",
        "SELECT l.id FROM (SELECT * FROM l) AS l ANTI JOIN r ON {}",
        "SELECT l.id FROM l WHERE NOT (SELECT bool_or({}) FROM r)",
    ],
)
def test_parts_that_are_done_keep_the_truth_alone(
    sql: str, block: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK_ROWS", block)
    some = tables(left=7, right=6, groups=2)
    some.connection.execute("INSERT INTO l SELECT id + 100, 1 - k, body FROM l WHERE id < 3")
    some.connection.execute("INSERT INTO l VALUES (200, 1, NULL); INSERT INTO r VALUES (200, 1, NULL)")
    left, right = (f"split_part({column}, ' ', 2)::INT" for column in ("l.body", "r.word"))
    code = f"({left} * 5 + {right} * 3) % 7"
    stub = Stub(lambda call, key: [None, True, False, False, True, False, True][_code(key)], batch=9)
    running = start(
        sql.format("AI.IF(PROMPT('{0} and {1}', l.body, r.word))"), some, order=order, exists_wave=2
    )
    stub.run(running.calls, running.feed, RunControl())
    found = rows(running.result())
    running.close()
    plain = f"CASE {code} WHEN 0 THEN NULL ELSE {code} IN (1, 4, 6) END"
    expected = some.connection.sql(sql.format(plain)).fetchall()
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    assert len(set(stub.asked)) == len(stub.asked)


def _code(key: Key) -> int:
    left, right = (int(text.split()[1]) for text in sorted(key))
    return (left * 5 + right * 3) % 7


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT count(*) FROM (SELECT {} AS a FROM l, r) WHERE a", 800 * 800 // 2),
        ("SELECT count(r.word) FROM l LEFT JOIN r ON {}", 800 * 800 // 2),
        ("SELECT count(*) FROM l ANTI JOIN r ON {}", 0),
    ],
)
def test_pairs_of_any_join_are_held_a_part_at_a_time(
    sql: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK_ROWS", 2**15)
    running = start(sql.format("AI.IF(PROMPT('{0} and {1}', l.body, r.word))"), tables(800, 800))
    stub = Tireless()
    tracemalloc.start()
    stub.run(running)
    found = rows(running.result())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    running.close()
    assert found == [(expected,)]
    assert peak < 2**15 * 400 + 800 * 800 * 20
