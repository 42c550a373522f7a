"""The relational side of a run: DuckDB decides which questions there are and uses their answers.

A run holds one transaction of one cursor. Views and files that the statement reads are copied into temporary
tables at its start, so that all its queries see one state. Each AI call is a SQL function that looks its
answers up by the hash of the argument texts; the questions themselves come from the candidate queries of the
sites, in the order in which they depend on each other. At the end the statement runs with the lookups in the
calls' places.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import duckdb
import pyarrow as pa
from duckdb.func import ARROW, SPECIAL

from quail.arrays import of_objects, to_numbers
from quail.errors import BindError, SourceError
from quail.execution.answers import CallAnswers, Texts, UInt64s
from quail.execution.asks import Feed, RunControl
from quail.execution.feed import RunFeed, RunNames
from quail.execution.pair_planning import AnchorChoice, KeptAnchor
from quail.execution.reading import changed_documents
from quail.plan import syntax
from quail.plan.functions import is_unordered_aggregate
from quail.plan.logical import AICall, Operator
from quail.plan.lookups import SQL_TYPES, readable
from quail.plan.statement import BoundStatement, Source, Stage
from quail.planner.anchors import LengthCounter, TokenCounter

ARROW_TYPES = {
    Operator.IF: pa.bool_(),
    Operator.SCORE: pa.float64(),
    Operator.CLASSIFY: pa.string(),
    Operator.PROBABILITIES: pa.map_(pa.string(), pa.float64()),
}


class HasCursor(Protocol):
    """What a run needs of a catalog."""

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A fresh cursor of the session's DuckDB."""


class RelationalRun:
    """One run of a statement: its questions (`feed`), and its result once they are answered.

    Args:
        bound: the statement.
        catalog: the session's tables.
        control: how the run is watched and stopped; `order` says whether filters keep their written order.
        counter: counts tokens of the documents of joins; None estimates them from lengths.
        kept_anchor: the anchor of a call whose answers are stored, None of others.
    """

    def __init__(
        self,
        bound: BoundStatement,
        catalog: HasCursor,
        control: RunControl,
        counter: TokenCounter | None = None,
        kept_anchor: KeptAnchor = lambda call: None,
    ) -> None:
        self._bound = bound
        self._names = RunNames(bound.nonce)
        self._cursor = catalog.cursor()
        control.on_interruptible(self.interrupt)
        row = self._cursor.execute("SELECT hash(NULL::VARCHAR)").fetchone()
        assert row is not None
        texts = Texts(row[0])
        self._answers = [
            CallAnswers(call.prompt.num_arguments, ARROW_TYPES[call.operator], texts) for call in bound.calls
        ]
        try:
            self._begin()
            self._feed = RunFeed(
                bound,
                self._cursor,
                self._names,
                texts,
                self._answers,
                control,
                counter or LengthCounter(),
                kept_anchor,
            )
        except BaseException:
            self.close()
            raise

    @property
    def calls(self) -> tuple[AICall, ...]:
        """The calls of the statement, those over two relations with the anchors of this run."""
        return self._feed.calls

    @property
    def feed(self) -> Feed:
        """The questions of the run."""
        return self._feed

    @property
    def anchors(self) -> Mapping[int, AnchorChoice]:
        """Why each call over two relations has the anchor that it has, by its index."""
        return self._feed.anchors

    def result(self) -> pa.Table:
        """The rows of the statement; of a statement that writes, what DuckDB says it wrote.

        Raises:
            BindError: DuckDB refuses the statement.
        """
        assert self._feed.done, "the statement runs once its questions are answered"
        bound = self._bound
        text = self._names.in_run(bound.final_sql)
        try:
            if bound.query is not None and _is_whole(bound):
                for answers in self._answers:
                    answers.num_unknown_lookups = 0
                table = self._cursor.sql(text).to_arrow_table()
                self._check_documents()
                return table if bound.column_names is None else table.rename_columns(bound.column_names)
            return self._write(text)
        except duckdb.InterruptException:
            raise
        except duckdb.Error as error:
            raise BindError(readable(error, bound.nonce)) from error

    def stages(self) -> list[dict[str, Any]]:
        """For each call its text and how many rows needed it, were asked, passed, were NULL, repeated."""
        return [self._stage_report(index) for index in range(len(self._bound.calls))]

    def orders(self) -> list[dict[str, Any]]:
        """How the filters and joins of each WHERE with several of them were ordered."""
        return self._feed.orders()

    def interrupt(self) -> None:
        """Stops DuckDB's work for this run; may be called from another thread, and when it has ended."""
        with contextlib.suppress(duckdb.Error):
            self._cursor.interrupt()

    def close(self) -> None:
        """Ends the transaction; copies and lookups vanish with it."""
        with contextlib.suppress(duckdb.Error):
            self._cursor.rollback()
        self._cursor.close()

    def _check_documents(self) -> None:
        """Finds documents that an aggregate made in another order than for the questions."""
        for site in self._bound.sites:
            place = site.place
            block = self._bound.blocks[place.block]
            if place.stage is not Stage.RESULT or place.steps or block.limit is not None:
                continue
            is_unordered = any(map(is_unordered_aggregate, syntax.walk(list(site.arguments))))
            if is_unordered and self._answers[site.call].num_unknown_lookups:
                raise changed_documents()

    def _begin(self) -> None:
        self._cursor.execute("SET SESSION preserve_insertion_order = true")
        if self._bound.query is None:
            return
        self._cursor.begin()
        for name, value in self._bound.parameters.items():
            self._cursor.execute(f"SET VARIABLE {name} = ?", [value])
        for number, source in enumerate(self._bound.sources):
            self._copy(source, f"quail_{self._bound.nonce}_copy_{number}")
        for call, answers in zip(self._bound.calls, self._answers, strict=True):
            lookup: Any = _lookup(answers)
            self._cursor.create_function(
                self._names.lookup(call.index),
                lookup,
                ["UBIGINT"] * call.prompt.num_arguments,
                SQL_TYPES[call.operator],
                type=ARROW,
                null_handling=SPECIAL,
            )

    def _copy(self, source: Source, interim: str) -> None:
        """Reads a source once; its copy takes the place of a view of that name."""
        name = source.name.replace('"', '""')
        try:
            self._cursor.execute(f"CREATE TEMP TABLE {interim} AS {source.sql}")
            self._cursor.execute(f'DROP VIEW IF EXISTS temp.main."{name}"')
            self._cursor.execute(f'ALTER TABLE temp.main.{interim} RENAME TO "{name}"')
        except duckdb.InterruptException:
            raise
        except duckdb.Error as error:
            raise SourceError(f"table {source.name!r}: {readable(error, self._bound.nonce)}") from error

    def _write(self, text: str) -> pa.Table:
        """Runs a statement that is more than a query, and keeps what it wrote."""
        is_open = self._bound.query is not None
        parameters = None if is_open else _plain(self._bound.parameters)
        cursor = self._cursor.execute(text, parameters) if parameters else self._cursor.execute(text)
        rows = cursor.fetchall()
        names = [column[0] for column in cursor.description or []]
        if is_open:
            for call in self._bound.calls:
                self._cursor.remove_function(self._names.lookup(call.index))
            self._cursor.commit()
        return pa.table({name: of_objects([row[i] for row in rows]) for i, name in enumerate(names)})

    def _stage_report(self, index: int) -> dict[str, Any]:
        call, answers = self._bound.calls[index], self._answers[index]
        tally = answers.tally()
        num_rows, num_null = self._feed.evaluations(index)
        passed = tally.num_true if call.operator is Operator.IF else None
        report = {
            "call": call.text,
            "rows": num_rows,
            "evaluated": tally.num_values,
            "passed": passed,
            "observed_selectivity": passed / tally.num_values
            if passed is not None and tally.num_values
            else None,
            "null": num_null,
            "deduplicated": max(0, num_rows - num_null - tally.num_values),
        }
        if index in self._feed.anchors:
            report["anchor"] = self._feed.anchors[index].anchor
        return report


def _is_whole(bound: BoundStatement) -> bool:
    return bound.query_span[0] == 0


def _plain(parameters: dict[str, Any]) -> list[Any] | dict[str, Any] | None:
    if not parameters:
        return None
    if all(name.isdigit() for name in parameters):
        return [parameters[name] for name in sorted(parameters, key=int)]
    return parameters


def _lookup(answers: CallAnswers) -> Callable[..., pa.Array]:
    """The SQL function of a call; DuckDB counts its parameters, so there is one for each number."""

    def one(document: pa.Array) -> pa.Array:
        return answers.lookup([_numbers(document)])

    def two(anchor: pa.Array, partner: pa.Array) -> pa.Array:
        return answers.lookup([_numbers(anchor), _numbers(partner)])

    return one if answers.handles.shape[1] == 1 else two


def _numbers(column: pa.Array | pa.ChunkedArray) -> UInt64s:
    numbers: UInt64s = to_numbers(column)
    return numbers
