"""Selectivities observed on a pilot, and the order of filters revised: the same rows for fewer questions."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quail.execution.asks import Asks, Feed, RunControl
from quail.execution.relational import RelationalRun
from quail.frontend.sql import bind_sql
from quail.plan.logical import AICall
from quail.planner.observed_order import LARGEST_PILOT
from tests.sql.generate import TABLES, Generator, Scope
from tests.sql.reference import StoredAnswers, ai_sql, catalog, plain_sql
from tests.sql.stub import Key, Stub, StubCatalog, keys_of, rows

Truth = dict[tuple[str, str], bool | None]


class Watch(Stub):
    """A stub that takes as much as it is given, and follows documents as an engine would."""

    def __init__(self, answer: Any, batch: int = 7, most_taken: int | None = None) -> None:
        super().__init__(answer, batch)
        self._most_taken = batch if most_taken is None else most_taken
        self.given: list[int] = []
        self.num_taken = 0

    def run(self, calls: tuple[AICall, ...], feed: Feed, control: RunControl) -> dict[str, Any]:
        due: list[Asks] = []
        while not feed.done:
            fresh = list(feed.take(self._most_taken)) if sum(map(len, due)) < self._batch else []
            self.num_taken = max(self.num_taken, sum(map(len, fresh)))
            due += self._note(fresh)
            assert due, "the feed is not done but has no question"
            asks, rest = due[0], due[1:]
            later = [] if len(asks) <= self._batch else [_part(asks, slice(self._batch, None))]
            asks = _part(asks, slice(self._batch))
            follow = feed.answered(asks.call, asks.keys, self._values(calls[asks.call], asks))
            self.released += follow.released.tolist()
            due = self._note(follow.asks) + later + rest
        return {}

    def _note(self, asks: Any) -> list[Asks]:
        for each in asks:
            handles = each.documents.tolist()
            assert not set(handles) & set(self.released), "a question about a document that was let go"
            self.given += handles
        return list(asks)


def _part(asks: Asks, which: slice) -> Asks:
    return Asks(
        asks.call,
        asks.keys[which],
        tuple(argument[which] for argument in asks.arguments),
        asks.documents[which],
        asks.may_follow[which],
        asks.rows[which],
        asks.table,
        None if asks.partners is None else asks.partners[which],
    )


def run(
    sql: str, tables: StubCatalog, stub: Stub, order: str = "auto"
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Rows and orders; no question is asked twice."""
    control = RunControl(order=order)
    running = RelationalRun(bind_sql(sql, None, tables), tables, control)
    try:
        stub.run(running.calls, running.feed, control)
        assert len(set(stub.asked)) == len(stub.asked), "a question was asked twice"
        return rows(running.result()), running.orders()
    finally:
        running.close()


def table(num_rows: int) -> StubCatalog:
    return StubCatalog(f"CREATE TABLE r AS SELECT i AS id, 'b' || i AS body FROM range({num_rows}) t(i)")


def answers(*passes: Callable[[int], bool]) -> Callable[[AICall, Key], bool]:
    """Answers of call 0, 1, …  by the number of the row."""
    return lambda call, key: bool(passes[call.index](int(key[0][1:])))


def statement(num_filters: int, options: str = "") -> str:
    filters = (f"AI.IF('question {n} ' || body{options})" for n in range(num_filters))
    return f"SELECT id FROM r WHERE {' AND '.join(filters)}"


def shuffled(num_rows: int, share: float, seed: int) -> Callable[[int], bool]:
    passing = np.random.default_rng(seed).permutation(num_rows) < share * num_rows
    return lambda row: passing[row]


NUM_ROWS = 2000
LAYOUTS = {
    "shuffled": lambda share, seed: shuffled(NUM_ROWS, share, seed),
    "passing rows first": lambda share, seed: lambda row: row < share * NUM_ROWS,
    "passing rows last": lambda share, seed: lambda row: row >= (1 - share) * NUM_ROWS,
    "repeating": lambda share, seed: lambda row: row % 20 < 20 * share,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("batch", "most_taken"), [(10, 10), (64, 10**6), (500, 10**6)])
def test_skewed_filters_take_little_more_than_in_the_best_order(
    layout: str, batch: int, most_taken: int
) -> None:
    """95 % pass the first, 5 % the second; as written and by length the first would be asked of all rows."""
    first, second = (LAYOUTS[layout](share, seed) for seed, share in enumerate((0.95, 0.05)))
    stub = Watch(answers(first, second), batch, most_taken)
    found, (order,) = run(statement(2), table(NUM_ROWS), stub)
    assert found == [(row,) for row in range(NUM_ROWS) if first(row) and second(row)]
    best = NUM_ROWS + sum(map(second, range(NUM_ROWS)))
    assert len(stub.asked) <= 1.02 * best + order["pilot_rows"]
    assert order["pilot_rows"] == 44
    assert order["calls"] == [1, 0]
    assert order["planned"] == [0, 1]
    assert order["revisions"] == 1


def test_the_order_follows_a_table_that_changes() -> None:
    """In each half another filter drops nearly all rows."""
    stub = Watch(answers(lambda row: row < 3000, lambda row: row >= 3000), 50)
    found, (order,) = run(statement(2), table(6000), stub)
    assert found == []
    assert len(stub.asked) <= 1.1 * 6000 + order["pilot_rows"]
    assert 1 <= order["revisions"] <= 3


def test_filters_alike_are_not_revised_again_and_again() -> None:
    stub = Watch(answers(*(shuffled(5000, 0.5, seed) for seed in range(3))), 20)
    _, (order,) = run(statement(3), table(5000), stub)
    assert order["revisions"] <= 2
    assert len(stub.asked) <= 1.05 * 5000 * 1.75 + LARGEST_PILOT * 2


def test_three_filters_come_in_the_order_of_what_they_drop() -> None:
    stub = Watch(answers(*(shuffled(4000, share, seed) for seed, share in enumerate((0.9, 0.5, 0.1)))), 100)
    _, (order,) = run(statement(3), table(4000), stub)
    assert order["calls"] == [2, 1, 0]
    assert len(stub.asked) <= 1.03 * 4000 * (1 + 0.1 + 0.05) + 3 * order["pilot_rows"]


def test_a_filter_on_short_texts_comes_before_one_on_long_texts() -> None:
    tables = StubCatalog(
        "CREATE TABLE r AS SELECT i AS id, 'b' || i AS title, 'b' || i || repeat(' and so on', 300) AS body"
        " FROM range(1000) t(i)"
    )
    stub = Watch(lambda call, key: int(key[0].split()[0][1:]) % 2 == 0)
    sql = "SELECT id FROM r WHERE AI.IF('q ' || body) AND AI.IF('a longer question ' || title)"
    found, (order,) = run(sql, tables, stub)
    assert len(found) == 500
    assert order["calls"] == [1, 0]
    assert sum(call == 0 for call, _ in stub.asked) <= 500 + LARGEST_PILOT


def test_hints_stand_and_need_no_pilot() -> None:
    stub = Watch(answers(lambda row: True, lambda row: False))
    sql = (
        "SELECT id FROM r WHERE AI.IF('question 0 ' || body, selectivity := 0.1)"
        " AND AI.IF('question 1 ' || body, selectivity := 0.9)"
    )
    _, (order,) = run(sql, table(1000), stub)
    assert order == {"planned": [0, 1], "calls": [0, 1], "pilot_rows": 0, "revisions": 0}
    assert len(stub.asked) == 2000


def test_one_hint_of_two_stands_and_the_other_filter_is_observed() -> None:
    stub = Watch(answers(lambda row: True, lambda row: row % 20 == 0), 10)
    sql = "SELECT id FROM r WHERE AI.IF('question 0 ' || body, selectivity := 0.3) AND AI.IF('question 1 ' || body)"
    _, (order,) = run(sql, table(1000), stub)
    assert order["calls"] == [1, 0]
    assert order["pilot_rows"] == 31
    assert len(stub.asked) <= 1000 + 50 + 31


def test_the_written_order_is_never_revised() -> None:
    stub = Watch(answers(lambda row: True, lambda row: False))
    _, (order,) = run(statement(2), table(1000), stub, order="as_written")
    assert order == {"planned": [0, 1], "calls": [0, 1], "pilot_rows": 0, "revisions": 0}
    assert [call for call, _ in stub.asked[:14]] == [0] * 7 + [1] * 7
    assert len(stub.asked) == 2000


def test_a_small_table_has_no_pilot_but_learns_on_its_way() -> None:
    stub = Watch(answers(lambda row: True, lambda row: False), 5)
    _, (order,) = run(statement(2), table(100), stub)
    assert order["pilot_rows"] == 0
    assert order["calls"] == [1, 0]
    assert len(stub.asked) <= 100 + 32


def test_many_filters_alike_need_no_pilot_and_keep_about_their_order() -> None:
    """Each row fails at one filter of a hundred: all shares are alike, and a pilot would ask all of them."""
    counts = {}
    for order in ("auto", "as_written"):
        stub = Watch(lambda call, key: (int(key[0][1:]) * 7 + call.index) % 100 != 3, 100)
        found, (report,) = run(statement(110), table(200), stub, order)
        assert found == []
        assert report["pilot_rows"] == 0
        counts[order] = len(stub.asked)
    assert counts["auto"] <= 1.1 * counts["as_written"]


def test_one_filter_has_no_order() -> None:
    stub = Watch(answers(lambda row: True))
    assert run(statement(1), table(1000), stub)[1] == []
    assert stub.asked[:3] == [(0, ("b0",)), (0, ("b1",)), (0, ("b2",))]


@pytest.mark.parametrize("limit", [1, 5, 20, 100])
@pytest.mark.parametrize("batch", [1, 16])
def test_a_row_limit_stops_in_time_with_the_first_rows(limit: int, batch: int) -> None:
    def first(row: int) -> bool:
        return row % 20 != 0

    def second(row: int) -> bool:
        return row % 10 == 5

    stub = Watch(answers(first, second), batch)
    found, (order,) = run(f"{statement(2)} LIMIT {limit}", table(10_000), stub)
    assert found == [(5 + 10 * n,) for n in range(limit)]
    read = 10 * limit
    assert max(int(key[0][1:]) for _, key in stub.asked) <= read + 2 * batch
    assert len(stub.asked) <= 1.2 * read + 70 + 2 * batch
    assert order["pilot_rows"] == (0 if limit < 16 else min(limit, 64))


def test_fresh_questions_are_handed_out_in_growing_windows() -> None:
    """What is handed out is asked, whatever is learnt meanwhile."""
    stub = Watch(answers(shuffled(20_000, 0.5, 0), shuffled(20_000, 0.5, 1)), 256, most_taken=10**6)
    run(statement(2), table(20_000), stub)
    assert 5000 < stub.num_taken < 15_000
    limited = Watch(answers(lambda row: True), 256, most_taken=10**6)
    run(statement(1), table(20_000), limited)
    assert limited.num_taken == 20_000


def test_a_pilot_row_asks_its_filters_together() -> None:
    tables = table(1000)
    running = RelationalRun(bind_sql(statement(3), None, tables), tables, RunControl())
    first = running.feed.take(30)
    assert [asks.call for asks in first] == [0, 1, 2]
    assert len({tuple(asks.documents.tolist()) for asks in first}) == 1
    assert all(asks.may_follow.all() for asks in first)
    assert sum(map(len, first)) == 30
    drawn = [int(key[0][1:]) for key in keys_of(first[0])]
    assert drawn[0] < 33 < drawn[9]
    while running.feed.take(30):
        pass
    assert not running.feed.done, "the rest waits for the pilot"
    running.close()


def test_the_last_question_of_a_row_keeps_no_document() -> None:
    stub = Watch(answers(*(shuffled(600, 0.5, seed) for seed in range(2))), 8)
    tables = table(600)
    running = RelationalRun(bind_sql(statement(2), None, tables), tables, RunControl())
    last: dict[int, bool] = {}
    note = stub._note

    def noting(asks: Any) -> list[Asks]:
        for each in asks:
            last.update(zip(each.documents.tolist(), each.may_follow.tolist(), strict=True))
        return note(asks)

    stub._note = noting  # type: ignore[method-assign]
    stub.run(running.calls, running.feed, RunControl())
    running.close()
    asked = {handle: stub.given.count(handle) for handle in last}
    assert sum(last.values()) < 350
    assert all(follows for handle, follows in last.items() if asked[handle] == 1)
    assert sum(not follows for handle, follows in last.items() if asked[handle] == 2) > 250
    assert sorted(stub.released) == sorted(last)


def random_case(seed: int) -> tuple[str, str, StubCatalog, Truth]:
    """A statement over a random table, the same over stored answers, and the answers."""
    rng = random.Random(seed)
    num_rows = rng.choice((0, 1, 3, 40, 127, 128, 200, 500))
    num_texts = rng.choice((1, 5, num_rows + 1, 10 * num_rows + 1))
    layout = rng.choice(("shuffled", "sorted"))
    columns = {
        name: [
            None if rng.random() < share_null else f"{name}{rng.randrange(num_texts)}"
            for _ in range(num_rows)
        ]
        for name, share_null in (("a", rng.choice((0, 0, 0.2, 1.0))), ("b", rng.choice((0, 0.2))))
    }
    if layout == "sorted":
        columns = {name: sorted(texts, key=str) for name, texts in columns.items()}
    truth: Truth = {}
    conjuncts, plain, stored = [], [], {}
    for number in range(rng.randint(2, 4)):
        question = f"q{rng.randrange(4)} "
        name = rng.choice(("a", "a", "b"))
        share = rng.choice((0.0, 0.05, 0.5, 0.95, 1.0))
        texts = sorted({text for text in columns[name] if text is not None})
        for place, text in enumerate(texts):
            value = place < share * len(texts) if layout == "sorted" else rng.random() < share
            truth.setdefault((question, text), None if rng.random() < 0.1 else value)
        hint = rng.choice(("", "", f", selectivity := {rng.choice((0.0, 0.1, 0.9, 1.0))}"))
        negation = rng.choice(("", "", "NOT "))
        conjuncts.append(f"{negation}AI.IF('{question}' || {name}{hint})")
        plain.append(f"{negation}v{number}")
        stored[f"v{number}"] = [None if t is None else truth[question, t] for t in columns[name]]
    limit = rng.choice(("", "", " LIMIT 0", " LIMIT 1", " LIMIT 20", " LIMIT 30 OFFSET 3"))
    tables = StubCatalog()
    names = ["id", *columns, *stored]
    types = ["INTEGER", *["VARCHAR"] * 2, *["BOOLEAN"] * len(stored)]
    tables.connection.execute(
        f"CREATE TABLE r ({', '.join(f'{n} {t}' for n, t in zip(names, types, strict=True))})"
    )
    values = list(zip(range(num_rows), *columns.values(), *stored.values(), strict=True))
    if values:
        tables.connection.executemany(f"INSERT INTO r VALUES ({', '.join('?' * len(names))})", values)
    sql = "SELECT id FROM r WHERE {}" + limit
    return sql.format(" AND ".join(conjuncts)), sql.format(" AND ".join(plain)), tables, truth


@pytest.mark.parametrize("seed", range(40))
def test_random_tables_have_the_rows_of_stored_answers(seed: int) -> None:
    sql, plain, tables, truth = random_case(seed)
    expected = tables.connection.sql(plain).fetchall()
    for batch, most_taken in ((1, 1), (13, 40), (100, 10**6)):
        for order in ("auto", "as_written"):
            stub = Watch(lambda call, key: truth[str(call.prompt.parts[0]), key[0]], batch, most_taken)
            found, _ = run(sql, tables, stub, order)
            assert found == expected, sql


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pilots of a row or two in the smallest table, one fresh question at a time, an eager change of order."""
    for name, value in (("SMALLEST_PILOT", 1), ("ROWS_A_QUESTION", 1)):
        monkeypatch.setattr(f"quail.planner.observed_order.{name}", value)
    for name, value in (
        ("FIRST_LOOK", 1),
        ("FIRST_WINDOW", 1),
        ("CLEARLY", 1.0),
        ("DOUBT", 1e-3),
        ("MEMORY", 3),
    ):
        monkeypatch.setattr(f"quail.execution.ask_order.{name}", value)


def chain_statement(rng: random.Random, generator: Generator) -> str:
    """Some filters over one or two tables, perhaps a join and another condition, as a template."""
    aliases = ["t", "z"][: rng.choice((1, 1, 2))]
    scope = Scope(aliases)
    conjuncts = [
        f"{rng.choice(('', '', 'NOT '))}@IF[{rng.choice('pqrs')}]({generator._text(scope)})"
        for _ in range(rng.randint(2, 4))
    ]
    if len(aliases) > 1:
        conjuncts += rng.choice(([], ["@IF[j](t.body, z.body)"], ["t.k = z.k", "NOT @IF[j](z.body, t.body)"]))
    if rng.random() < 0.3:
        conjuncts.append(generator._boolean(scope, 1))
    rng.shuffle(conjuncts)
    source = ", ".join(f"{rng.choice('ruv')} AS {alias}" for alias in aliases)
    ids = ", ".join(f"{alias}.id" for alias in aliases)
    limit = f" LIMIT {rng.randint(0, 4)}" if len(aliases) == 1 and rng.random() < 0.3 else ""
    return f"SELECT {ids} FROM {source} WHERE {' AND '.join(conjuncts)}{limit}"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_random_statements_have_their_rows_however_restless_the_order(seed: int, restless: None) -> None:
    rng, tables, stored = random.Random(seed), catalog(*TABLES), StoredAnswers()
    generator = Generator(seed)
    orders = []
    for number in range(120):
        template = chain_statement(rng, generator)
        expected = tables.connection.sql(plain_sql(template)).fetchall()
        found, some = run(ai_sql(template), tables, Stub(stored, batch=1 + number % 9))
        assert sorted(map(repr, found)) == sorted(map(repr, expected)), template
        orders += some
    assert len(orders) > 80
    assert sum(order["revisions"] > 0 for order in orders) > 30


@pytest.mark.parametrize("seed", range(100, 130))
def test_random_tables_have_their_rows_however_restless_the_order(seed: int, restless: None) -> None:
    sql, plain, tables, truth = random_case(seed)
    expected = tables.connection.sql(plain).fetchall()
    for batch, most_taken in ((1, 1), (13, 40)):
        stub = Watch(lambda call, key: truth[str(call.prompt.parts[0]), key[0]], batch, most_taken)
        assert run(sql, tables, stub)[0] == expected, sql


JOINED = (
    "SELECT l.id, r.id AS rid FROM l, r WHERE AI.IF(PROMPT('{0} and {1}', l.body, r.word))"
    " AND AI.IF('long question about the left ' || l.body) AND AI.IF('right ' || r.word)"
)


@pytest.mark.parametrize("shares", [(0.9, 0.05), (0.05, 0.9), (0.5, 0.5), (0.0, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("block", [500, 2**18])
def test_filters_of_a_join_are_observed_and_pairs_stay_few(
    shares: tuple[float, float], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quail.execution.reading.BLOCK_ROWS", block)
    sizes = 200, 30
    tables = StubCatalog(
        "CREATE TABLE l AS SELECT i AS id, 'l' || i || repeat(' and so on', 20) AS body FROM range(200) t(i)",
        "CREATE TABLE r AS SELECT i AS id, 'r' || i AS word FROM range(30) t(i)",
    )
    left, right = (
        shuffled(size, share, seed) for seed, (size, share) in enumerate(zip(sizes, shares, strict=True))
    )

    def number(text: str) -> int:
        return int(text.split()[0][1:])

    def answer(call: AICall, key: Key) -> bool:
        if len(key) == 2:
            return (number(key[0]) + number(key[1])) % 3 == 0
        return bool(left(number(key[0])) if key[0].startswith("l") else right(number(key[0])))

    stub = Watch(answer, 32)
    found, (order,) = run(JOINED, tables, stub)
    assert sorted(found) == [
        (a, b) for a in range(200) for b in range(30) if left(a) and right(b) and (a + b) % 3 == 0
    ]
    num_pairs = sum(len(key) == 2 for _, key in stub.asked)
    assert num_pairs == sum(map(left, range(200))) * sum(map(right, range(30)))
    assert order["planned"] != []
