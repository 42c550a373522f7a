"""A stub that answers from stored values instead of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from quail.execution.asks import Asks, Feed, RunControl
from quail.execution.relational import ARROW_TYPES, RelationalRun
from quail.frontend.sql import bind_sql
from quail.plan.logical import AICall
from quail.plan.statement import BoundStatement

Key = tuple[str, ...]


class Stub:
    """Answers questions from a table of values.

    Args:
        answer: value of (call, argument texts), or a mapping from the argument texts alone.
        batch: the most questions answered at once.
    """

    def __init__(self, answer: Callable[[AICall, Key], Any] | Mapping[Any, Any], batch: int = 7) -> None:
        self._answer = answer
        self._batch = batch
        self.asked: list[tuple[int, Key]] = []
        self.tables: set[str] = set()
        self.rows: list[int] = []
        self.follow_ups: list[tuple[int, Key]] = []
        self.released: list[int] = []
        self.documents: dict[int, str] = {}

    def run(self, calls: tuple[AICall, ...], feed: Feed, control: RunControl) -> dict[str, Any]:
        due: list[Asks] = []
        while not feed.done:
            fresh = [] if due else list(feed.take(self._batch))
            assert due or fresh or feed.done, "the feed is not done but has no question"
            due += fresh
            if not due:
                break
            asks = due.pop(0)
            if len(asks) > self._batch:
                due.insert(0, cut(asks, self._batch, len(asks)))
                asks = cut(asks, 0, self._batch)
            follow = feed.answered(asks.call, asks.keys, self._values(calls[asks.call], asks))
            self.released += follow.released.tolist()
            for later in follow.asks:
                assert later.documents.tolist(), "no empty batches"
                self.follow_ups += [(later.call, key) for key in keys_of(later)]
            due = list(follow.asks) + due
        return {}

    def _values(self, call: AICall, asks: Asks) -> pa.Array:
        keys = keys_of(asks)
        assert None not in [text for key in keys for text in key], "NULL is never asked"
        self.asked += [(call.index, key) for key in keys]
        self.tables.add(asks.table)
        self.rows += asks.rows.tolist()
        for handle, key in zip(asks.documents.tolist(), keys, strict=True):
            text = key[call.anchor]
            assert self.documents.setdefault(handle, text) == text, "a handle means one text"
        assert (asks.partners is None) == (call.prompt.num_arguments == 1)
        for handle, key in zip([] if asks.partners is None else asks.partners.tolist(), keys, strict=False):
            text = key[1 - call.anchor]
            assert self.documents.setdefault(handle, text) == text, "a handle means one text"
        if isinstance(self._answer, Mapping):
            values = [self._answer.get(key if len(key) > 1 else key[0]) for key in keys]
        else:
            values = [self._answer(call, key) for key in keys]
        return pa.array(values, type=ARROW_TYPES[call.operator])


def cut(asks: Asks, start: int, stop: int) -> Asks:
    """A part of a batch."""
    return Asks(
        asks.call,
        asks.keys[start:stop],
        tuple(argument[start:stop] for argument in asks.arguments),
        asks.documents[start:stop],
        asks.may_follow[start:stop],
        asks.rows[start:stop],
        asks.table,
        None if asks.partners is None else asks.partners[start:stop],
    )


def keys_of(asks: Asks) -> list[Key]:
    """The argument texts of each question."""
    assert len({len(argument) for argument in asks.arguments} | {len(asks.keys), len(asks.rows)}) == 1
    assert len(np.unique(asks.keys)) == len(asks.keys)
    return list(zip(*(argument.to_pylist() for argument in asks.arguments), strict=True))


class StubCatalog:
    """A session's DuckDB without a session."""

    def __init__(self, *statements: str) -> None:
        self.connection = duckdb.connect(config={"python_enable_replacements": False})
        for statement in statements:
            self.connection.execute(statement)

    def cursor(self) -> duckdb.DuckDBPyConnection:
        return self.connection.cursor()


def run(sql: str, catalog: StubCatalog, stub: Stub, parameters: Any = None, order: str = "auto") -> pa.Table:
    """The result of a statement whose calls a stub answers; checks that nothing is asked twice."""
    table, _ = run_with_report(bind_sql(sql, parameters, catalog), catalog, stub, order)
    return table


def run_with_report(
    bound: BoundStatement, catalog: StubCatalog, stub: Stub, order: str = "auto"
) -> tuple[pa.Table, list[dict[str, Any]]]:
    """The result and the report of a bound statement."""
    control = RunControl(order=order)
    running = RelationalRun(bound, catalog, control)
    try:
        stub.run(running.calls, running.feed, control)
        assert len(set(stub.asked)) == len(stub.asked), "a question was asked twice"
        return running.result(), running.stages()
    finally:
        running.close()


def rows(table: pa.Table) -> list[tuple[Any, ...]]:
    """The rows of a table."""
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))
