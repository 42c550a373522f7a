"""The relational side of a run: DuckDB decides which questions there are and uses their answers.

A run holds one transaction of one cursor. Views and files that the statement reads are copied into temporary
tables at its start, so that all its queries see one state. Each AI call is a SQL function that looks its
answers up by the hash of the argument texts; the questions themselves come from the candidate queries of the
sites, in the order in which they depend on each other. At the end the statement runs with the lookups in the
calls' places.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from duckdb.func import ARROW, SPECIAL

from quail.errors import BindError, QuailError, SourceError
from quail.execution.answers import CallAnswers, Texts, UInt64s, distinct
from quail.execution.asks import Asks, Feed, FollowUp, Int64s, RunControl
from quail.execution.groups import Chain, Due, Filter, Group, Wave
from quail.plan import syntax
from quail.plan.functions import aggregate_names, is_unordered_aggregate
from quail.plan.logical import Operator
from quail.plan.lookups import SQL_TYPES, lookup_name, readable
from quail.plan.statement import BoundStatement, Clause, Site, Source, Stage, holds_call
from quail.plan.syntax import Node
from quail.planner.candidates import CandidatePlanner, CandidateQuery
from quail.planner.optimize import optimize

ARROW_TYPES = {
    Operator.IF: pa.bool_(),
    Operator.SCORE: pa.float64(),
    Operator.CLASSIFY: pa.string(),
    Operator.PROBABILITIES: pa.map_(pa.string(), pa.float64()),
}
_LOCAL_ROWS_START = 36028797018960000
"""Row numbers of rows written in the same transaction start here (DuckDB's MAX_ROW_ID)."""
_SALT = "quail:"
"""Put in front of a text for its second hash."""


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
    """

    def __init__(self, bound: BoundStatement, catalog: HasCursor, control: RunControl) -> None:
        self._bound = bound
        self._names = _RunNames(bound.nonce)
        self._cursor = catalog.cursor()
        row = self._cursor.execute("SELECT hash(NULL::VARCHAR)").fetchone()
        assert row is not None
        texts = Texts(row[0])
        self._answers = [
            CallAnswers(call.prompt.num_arguments, ARROW_TYPES[call.operator], texts) for call in bound.calls
        ]
        try:
            self._begin()
            self._feed = _RunFeed(bound, self._cursor, self._names, texts, self._answers, control.order)
        except BaseException:
            self.close()
            raise

    @property
    def feed(self) -> Feed:
        """The questions of the run."""
        return self._feed

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

    def interrupt(self) -> None:
        """Stops DuckDB's work for this run; may be called from another thread."""
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
                raise _changed_documents()

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
        return pa.table({name: [row[i] for row in rows] for i, name in enumerate(names)})

    def _stage_report(self, index: int) -> dict[str, Any]:
        call, answers = self._bound.calls[index], self._answers[index]
        values = answers.all_values()
        num_rows, num_null = self._feed.evaluations(index)
        passed = int(pc.sum(values).as_py() or 0) if call.operator is Operator.IF else None
        return {
            "call": call.text,
            "rows": num_rows,
            "evaluated": len(values),
            "passed": passed,
            "observed_selectivity": passed / len(values) if passed is not None and len(values) else None,
            "null": num_null,
            "deduplicated": max(0, num_rows - num_null - len(values)),
        }


class _RunNames:
    """Names of the lookups in one run: two runs of one statement may go on at once."""

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce
        self._run = secrets.token_hex(4)

    def lookup(self, call: int) -> str:
        """Name of a call's lookup."""
        return lookup_name(self._run, call)

    def in_run(self, sql: str) -> str:
        """A query of the statement with this run's lookups."""
        return sql.replace(lookup_name(self._nonce, ""), lookup_name(self._run, ""))


class _RunFeed:
    """The feed of a run: groups of questions, each started once the answers that it reads are there."""

    def __init__(
        self,
        bound: BoundStatement,
        cursor: duckdb.DuckDBPyConnection,
        names: _RunNames,
        texts: Texts,
        answers: Sequence[CallAnswers],
        order: str,
    ) -> None:
        self._bound = bound
        self._cursor = cursor
        self._names = names
        self._answers = answers
        self._texts = texts
        blocks = optimize(bound, order)
        self._planner = CandidatePlanner(bound, blocks, order, self._binds)
        self._pending = _plan_groups(bound, self._planner)
        self._active: list[tuple[_Planned, Group]] = []
        self._settled: set[int] = set()
        self._evaluations = np.zeros((len(answers), 2), dtype=np.int64)
        self._start_ready()

    @property
    def done(self) -> bool:
        return not self._pending and not self._active

    @property
    def num_documents(self) -> int | None:
        return len(self._texts) if not self._pending else None

    @property
    def row_limited(self) -> bool:
        groups = [planned for planned, _ in self._active] + self._pending
        return any(planned.row_limit is not None for planned in groups)

    def take(self, limit: int) -> tuple[Asks, ...]:
        asks: list[Asks] = []
        for planned, group in self._active:
            for due in group.take(limit):
                found = self._asks(planned, due)
                if found is not None:
                    asks.append(found)
                    limit -= len(found)
            if limit <= 0:
                break
        return tuple(asks)

    def answered(self, call: int, keys: Int64s, values: pa.Array) -> FollowUp:
        self._answers[call].store(keys, _as_array(values))
        asks: list[Asks] = []
        released: list[Int64s] = []
        for planned, group in self._active:
            dues, handles = group.answered(call, keys)
            asks += [found for due in dues if (found := self._asks(planned, due)) is not None]
            released.append(handles)
        self._settle()
        self._start_ready()
        return FollowUp(tuple(asks), distinct(np.concatenate([np.zeros(0, dtype=np.int64), *released])))

    def evaluations(self, call: int) -> tuple[int, int]:
        """Rows that needed a call, and rows of those in which an argument was NULL."""
        return int(self._evaluations[call, 0]), int(self._evaluations[call, 1])

    # Groups

    def _settle(self) -> None:
        for planned, group in self._active:
            if group.is_settled:
                self._settled.update(site.index for site in planned.sites)
                for call, num_rows, num_null in group.evaluations():
                    self._evaluations[call] += (num_rows, num_null)
        self._active = [(planned, group) for planned, group in self._active if not group.is_settled]

    def _start_ready(self) -> None:
        """Starts every group whose candidate query reads settled calls only."""
        while True:
            ready = [planned for planned in self._pending if planned.sites_read <= self._settled]
            if not ready:
                break
            for planned in ready:
                self._pending.remove(planned)
                self._active.append((planned, self._start(planned)))
            self._settle()
        assert self._active or not self._pending, "calls of the statement depend on each other in a circle"

    def _start(self, planned: _Planned) -> Group:
        documents, rows = self._candidates(planned.query)
        position = 0
        filters, first_documents = [], []
        for site in planned.sites:
            names = planned.query.arguments[position : position + len(site.arguments)]
            position += len(names)
            keys = self._register(site, [documents[name] for name in names], rows)
            filters.append(Filter(site.call, keys, 0 if planned.is_negated(site) else 1))
            first_documents.append(names[0])
        if not planned.is_chain:
            call = filters[0].call
            releases = not self._is_read_later(planned, 0)
            return Wave(call, self._answers[call], filters[0].keys, releases=releases)
        num_stages = len(planned.sites)
        is_shared = any(self._is_read_later(planned, i, elsewhere=True) for i in range(num_stages))
        is_one_document = len(set(first_documents)) == 1 and not is_shared
        return Chain(
            self._answers,
            filters,
            planned.row_limit,
            [documents[first_documents[0]]] if is_one_document else [],
            keeps_passed=self._is_read_later(planned, num_stages - 1),
        )

    def _is_read_later(self, planned: _Planned, stage: int, *, elsewhere: bool = False) -> bool:
        """Whether a group that has not started may read the same documents; in another block, if so asked."""
        block = planned.sites[stage].place.block
        return any(
            signature == planned.signatures[stage] and not (elsewhere and site.place.block == block)
            for other in self._pending
            for site, signature in zip(other.sites, other.signatures, strict=True)
        )

    # Candidates

    def _candidates(self, query: CandidateQuery) -> tuple[dict[str, Int64s], Int64s]:
        """For each argument column the handles of its texts row by row (-1 of NULL), and the row numbers."""
        names = list(dict.fromkeys(query.arguments))
        columns = [f'CASE WHEN "{name}" IS NOT NULL THEN hash("{name}") END' for name in names]
        if query.row is not None:
            columns.append(f'"{query.row}"')
        inner = self._names.in_run(syntax.to_sql(query.node))
        table = self._cursor.sql(f"SELECT {', '.join(columns)} FROM ({inner})").to_arrow_table()
        documents = {
            name: self._handles(inner, name, table.column(position)) for position, name in enumerate(names)
        }
        if query.row is None:
            return documents, np.arange(table.num_rows, dtype=np.int64)
        rows = table.column(len(names)).to_numpy()
        return documents, np.where(rows >= _LOCAL_ROWS_START, rows - _LOCAL_ROWS_START, rows)

    def _handles(self, inner: str, name: str, column: pa.ChunkedArray) -> Int64s:
        is_present = column.is_valid().to_numpy().astype(np.bool_)
        hashes: UInt64s = pc.fill_null(column, 0).to_numpy()[is_present]
        handles = self._texts.find(hashes)
        num_unknown = int(np.count_nonzero(handles < 0))
        if num_unknown:
            is_mostly_new = 2 * len(distinct(hashes[handles < 0])) > len(hashes)
            self._store_texts(inner, name, is_mostly_new=is_mostly_new)
            handles = self._texts.find(hashes)
        if (handles < 0).any():
            raise _changed_documents()
        documents = np.full(len(is_present), -1, dtype=np.int64)
        documents[is_present] = handles
        return documents

    def _store_texts(self, inner: str, name: str, *, is_mostly_new: bool) -> None:
        """Reads the texts of an argument: in row order where most are needed, else only distinct ones."""
        distinct = "" if is_mostly_new else "DISTINCT "
        sql = (
            f"SELECT hash(t) AS h, hash('{_SALT}' || t) AS c, t FROM "
            f'(SELECT {distinct}"{name}" AS t FROM ({inner})) WHERE t IS NOT NULL'
        )
        table = self._cursor.sql(sql).to_arrow_table()
        hashes, checks = (table.column(i).to_numpy() for i in (0, 1))
        self._texts.add(hashes, checks, table.column(2))

    def _register(self, site: Site, documents: Sequence[Int64s], rows: Int64s) -> Int64s:
        """The key of the site's question in each row, -1 where an argument is NULL."""
        handles = np.stack(documents, axis=1)
        is_present = (handles >= 0).all(axis=1)
        keys = np.full(len(rows), -1, dtype=np.int64)
        keys[is_present] = self._answers[site.call].register(handles[is_present], rows[is_present])
        return keys

    def _asks(self, planned: _Planned, due: Due) -> Asks | None:
        answers = self._answers[due.call]
        keys = due.keys[~answers.asked[due.keys]]
        if not len(keys):
            return None
        answers.asked[keys] = True
        handles = answers.handles[keys]
        stage = due.stage if planned.is_chain else 0
        follows = planned.signatures[stage] in planned.signatures[stage + 1 :]
        follows = follows or self._is_read_later(planned, stage)
        return Asks(
            due.call,
            keys,
            tuple(self._texts.take(handles[:, i]) for i in range(handles.shape[1])),
            handles[:, 0],
            np.full(len(keys), follows),
            answers.rows[keys],
            self._planner.blocks[planned.sites[stage].place.block].table,
        )

    def _binds(self, node: Node) -> bool:
        try:
            self._cursor.sql(self._names.in_run(syntax.to_sql(node)))
        except (duckdb.BinderException, duckdb.CatalogException):
            return False
        return True


class _Planned:
    """A group before it is started: its sites in order, and the query of their candidates."""

    def __init__(
        self, sites: Sequence[Site], query: CandidateQuery, *, is_chain: bool, row_limit: int | None = None
    ) -> None:
        self.sites = tuple(sites)
        self.query = query
        self.is_chain = is_chain
        self.row_limit = row_limit
        self.signatures = tuple(_signature(site) for site in sites)
        self.sites_read = query.sites_read - {site.index for site in sites}

    def is_negated(self, site: Site) -> bool:
        """Whether the conjunct is the negation of the call."""
        return site.place.root is not site.node


def row_limits(bound: BoundStatement, planner: CandidatePlanner) -> dict[int, int]:
    """Blocks in which a row limit ends the run early, and the number of passing rows that suffice."""
    groups = _plan_groups(bound, planner)
    return {g.sites[0].place.block: g.row_limit for g in groups if g.row_limit is not None}


def _plan_groups(bound: BoundStatement, planner: CandidatePlanner) -> list[_Planned]:
    """A chain for the leading filters of each WHERE, a wave for every other site."""
    groups: list[_Planned] = []
    chained: set[int] = set()
    for block in planner.blocks:
        sites = _chain_sites(bound, block.index, planner)
        if not sites:
            continue
        query = planner.chain(block, sites)
        if query is None:
            continue
        num_asking = sum(map(holds_call, block.conjuncts))
        row_limit = _row_limit(bound, block.index) if len(sites) == num_asking else None
        groups.append(_Planned(sites, query, is_chain=True, row_limit=row_limit))
        chained.update(site.index for site in sites)
    groups += [
        _Planned([site], planner.site(site), is_chain=False)
        for site in bound.sites
        if site.index not in chained
    ]
    return groups


def _chain_sites(bound: BoundStatement, block: int, planner: CandidatePlanner) -> list[Site]:
    """Sites whose calls alone, or negated, are the first conjuncts that ask anything."""
    own = [site for site in bound.sites if site.place.block == block and site.place.clause is Clause.WHERE]
    chain: list[Site] = []
    for conjunct in planner.blocks[block].conjuncts:
        if not holds_call(conjunct):
            continue
        site = next((site for site in own if site.is_conjunct and site.place.root is conjunct), None)
        if (
            site is None
            or bound.call_of(site).operator is not Operator.IF
            or holds_call(list(site.arguments))
        ):
            break
        chain.append(site)
    return chain


def _row_limit(bound: BoundStatement, index: int) -> int | None:
    """How many rows that pass WHERE suffice, None where all are needed."""
    block = bound.blocks[index]
    node = block.node
    if bound.query is not node or len(node["modifiers"]) != 1 or block.limit is None:
        return None
    roots = [*node["select_list"], node["having"], node["qualify"]]
    if node["group_expressions"] or node["aggregate_handling"] != "STANDARD_HANDLING" or node["having"]:
        return None
    if node["qualify"] is not None or any(_reads_all_rows(below) for below in syntax.walk(roots)):
        return None
    total = 0
    for part in ("limit", "offset"):
        value = block.limit[part]
        if value is None:
            continue
        if block.limit["limit_type"] != "ROW_COUNT" or value["class"] != "CONSTANT":
            return None
        total += int(value["literal"]["text"])
    return total


def _reads_all_rows(node: Node) -> bool:
    """Whether an expression may be an aggregate or a window, which read every row."""
    if node.get("class") == "FUNCTION":
        return not node["schema"] and node["function_name"].lower() in aggregate_names()
    return node.get("class") == "WINDOW"


def _changed_documents() -> QuailError:
    return QuailError(
        "documents of the statement changed between two reads: they depend on the order in which rows are read",
        hint="give the aggregate or window that makes them an order: string_agg(body, ' ' ORDER BY id)",
    )


def _signature(site: Site) -> str:
    """Text that is equal for sites that may read the same documents."""
    return syntax.to_sql({**site.arguments[0], "alias": ""})


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
    numbers: UInt64s = _as_array(column).to_numpy(zero_copy_only=False)
    return numbers


def _as_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
