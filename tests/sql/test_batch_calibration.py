"""`calibrate := 'batch'`: all rows of a block are asked before any answer comes, whatever other calls say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from quail.execution.asks import Asks, Feed, RunControl
from quail.execution.relational import ARROW_TYPES, RelationalRun
from quail.explain import explain
from quail.frontend.sql import bind_sql
from quail.plan.logical import AICall
from tests.sql.stub import StubCatalog, keys_of, rows

B = "calibrate := 'batch'"


class Barrier:
    """Answers calls that are calibrated by batch only when nothing else is left, all at once."""

    def __init__(self) -> None:
        self.held: dict[int, list[Asks]] = {}
        self.batches: list[tuple[int, set[tuple[str, ...]]]] = []

    def run(self, calls: tuple[AICall, ...], feed: Feed, control: RunControl) -> None:
        due: list[Asks] = []
        while not feed.done:
            due += feed.take(3)
            if due:
                asks = due.pop(0)
                if calls[asks.call].options.calibrate == "batch":
                    self.held.setdefault(asks.call, []).append(asks)
                else:
                    due += self.answer(calls, feed, asks)
                continue
            held, self.held = self.held, {}
            assert held, "the feed is not done but has no question"
            for call, parts in held.items():
                self.batches.append((call, {key for part in parts for key in keys_of(part)}))
                for part in parts:
                    due += self.answer(calls, feed, part)

    def answer(self, calls: tuple[AICall, ...], feed: Feed, asks: Asks) -> list[Asks]:
        values = [len("".join(key)) % 2 == 0 for key in keys_of(asks)]
        array = pa.array(values, type=ARROW_TYPES[calls[asks.call].operator])
        return list(feed.answered(asks.call, np.asarray(asks.keys), array).asks)


@pytest.fixture(scope="module")
def tables() -> StubCatalog:
    return StubCatalog(
        "CREATE TABLE r AS SELECT i AS id, repeat('x', i::INT) AS body FROM range(1, 11) t(i)",
        "CREATE TABLE u AS SELECT repeat('y', i::INT) AS word FROM range(1, 4) t(i)",
    )


def run(sql: str, tables: StubCatalog) -> tuple[list[tuple[Any, ...]], Barrier]:
    bound, control, barrier = bind_sql(sql, None, tables), RunControl(), Barrier()
    running = RelationalRun(bound, tables, control)
    try:
        barrier.run(bound.calls, running.feed, control)
        return rows(running.result()), barrier
    finally:
        running.close()


EVEN = [2, 4, 6, 8, 10]
ALL = set(range(1, 11))
CASES = {
    f"SELECT id FROM r WHERE AI.IF('q' || body, {B})": (EVEN, ALL),
    f"SELECT id FROM r WHERE id > 3 AND AI.IF('q' || body, {B})": ([4, 6, 8, 10], ALL - {1, 2, 3}),
    f"SELECT id FROM r WHERE AI.IF('p' || body || 'x') AND AI.IF('q' || body, {B})": (EVEN, ALL),
    f"SELECT id FROM r WHERE AI.IF('q' || body, {B}) AND NOT AI.IF('p' || body) AND id < 9": ([], ALL - {9, 10}),
    f"SELECT id FROM r WHERE AI.IF('q' || body, {B}) ORDER BY id LIMIT 2": ([2, 4], ALL),
    f"SELECT id FROM r WHERE id = 1 OR AI.IF('q' || body, {B})": ([1, *EVEN], ALL),
    f"SELECT CASE WHEN AI.IF('q' || body, {B}) THEN id END FROM r WHERE AI.IF('p' || body) AND id < 5": ([2, 4], {1, 2, 3, 4}),
    f"SELECT CASE WHEN AI.IF('q' || body, {B}) THEN id END FROM r WHERE id < 5 LIMIT 2": ([None, 2], {1, 2, 3, 4}),
    f"SELECT id FROM r GROUP BY id, body HAVING AI.IF('q' || body, {B})": (EVEN, ALL),
    f"SELECT id FROM r QUALIFY AI.IF('q' || body, {B}) AND row_number() OVER (ORDER BY id) < 5": ([2, 4], ALL),
}  # fmt: skip


@pytest.mark.parametrize("sql", CASES)
def test_all_rows_are_asked_in_one_batch(sql: str, tables: StubCatalog) -> None:
    expected, asked = CASES[sql]
    found, barrier = run(sql, tables)
    assert sorted((row[0] for row in found), key=str) == sorted(expected, key=str)
    (batch,) = barrier.batches
    assert {len(texts[0]) for texts in batch[1]} == asked


@pytest.mark.parametrize(
    "sql",
    [
        f"SELECT count(*) FROM r, u WHERE id < 5 AND AI.IF('p' || body) AND AI.IF(PROMPT('{{0}} {{1}}', body, word), {B})",
        f"SELECT count(*) FROM r JOIN u ON id < 5 AND AI.IF(PROMPT('{{0}} {{1}}', body, word), {B})",
    ],
)  # fmt: skip
def test_pairs_are_asked_in_one_batch(sql: str, tables: StubCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quail.execution.reading.BLOCK_ROWS", 3)
    _, barrier = run(sql, tables)
    ((_, pairs),) = barrier.batches
    assert {(len(body), len(word)) for body, word in pairs} == {
        (i, j) for i in range(1, 5) for j in range(1, 4)
    }


def test_a_row_is_not_spared_by_the_first_match(tables: StubCatalog) -> None:
    sql = f"SELECT id FROM r WHERE id < 3 AND EXISTS (SELECT 1 FROM u WHERE AI.IF(PROMPT('{{0}} {{1}}', body, word), {B}))"
    found, barrier = run(sql, tables)
    assert [row[0] for row in found] == [1, 2]
    ((_, pairs),) = barrier.batches
    assert len(pairs) == 6


def test_explain_says_so(tables: StubCatalog) -> None:
    sql = f"SELECT id FROM r WHERE AI.IF('p' || body) AND AI.IF('q' || body, {B}) AND id > 3 LIMIT 2"
    text = explain(bind_sql(sql, None, tables), tables)
    assert "ask call 1 in WHERE: 7 questions (exact)" in text
    assert "calibrated by batch: no answer before the last question, over all rows" in text
    assert '"is_barrier": true' in explain(bind_sql(sql, None, tables), tables, format="json")
