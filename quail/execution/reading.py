"""Candidates as DuckDB gives them: the texts that calls may be asked about, as handles."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quail.arrays import filled, to_numbers
from quail.errors import QuailError
from quail.execution.answers import Texts, UInt64s, distinct, ranks_in_order
from quail.execution.asks import Bools, Int64s
from quail.plan import syntax
from quail.planner.candidates import CandidateQuery

Int32s = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.integer]

BLOCK_ROWS = 2**18
"""Rows of pairs that are looked at together, where all are read."""

FIRST_WINDOW_ROWS = 2**11
"""Rows of pairs that are read first where a row limit ends the run early; then twice as many, and so on."""

NUM_WINDOWS = 3
"""After so many windows all rows are read."""

_BATCH_ROWS = 2**17
_TEXT_BATCH_ROWS, _TEXT_BATCHES = 2**11, 2**6
"""Texts come in small batches, since one of Arrow's holds at most 2 GiB, and are added many at a time."""

_LOCAL_ROWS_START = 36028797018960000
"""Row numbers of rows written in the same transaction start here (DuckDB's MAX_ROW_ID)."""
_WINDOW = "quail_window_of_pairs"
_SALT = "quail:"
"""Put in front of a text for its second hash."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Rows in which calls may be asked.

    Attributes:
        documents: for each argument column the handles of its texts row by row, -1 of NULL.
        rows: row numbers, for messages.
        groups: for each row the row of another relation that one TRUE answer decides; None without such.
        starts_over: whether these are the first rows again, after some that were read before.
    """

    documents: Mapping[str, Numbers]
    rows: Int64s
    groups: Int64s | None = None
    starts_over: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def taken(self, rows: Numbers | slice) -> Candidates:
        """Some of the rows."""
        documents = {name: column[rows].astype(np.int64) for name, column in self.documents.items()}
        return Candidates(documents, self.rows[rows], None if self.groups is None else self.groups[rows])

    def has_one_in_group(self, name: str) -> bool:
        """Whether a column holds the same document in all rows of each group."""
        assert self.groups is not None
        numbers, documents = self.groups + 1, self.documents[name]
        if numbers.max(initial=0) > 4 * len(self):
            numbers = ranks_in_order(numbers)
        last = np.zeros(numbers.max(initial=0) + 1, dtype=documents.dtype)
        last[numbers] = documents
        return bool((last[numbers] == documents).all())

    def by_anchor(self, name: str) -> Candidates:
        """The rows of each document of a column one after another, documents as they come first."""
        ranks = ranks_in_order(self.documents[name])
        if (ranks[1:] >= ranks[:-1]).all():
            return self
        order = np.argsort(ranks, kind="stable")
        documents = {column: handles[order] for column, handles in self.documents.items()}
        return Candidates(documents, self.rows[order], None if self.groups is None else self.groups[order])

    def blocks(self, name: str) -> Iterator[Candidates]:
        """Parts of about `BLOCK_ROWS` rows that are sorted by anchor; no anchor is in two of them."""
        column = self.documents[name]
        start = 0
        while start < len(self):
            stop = min(start + BLOCK_ROWS, len(self))
            if stop < len(self):
                later = np.flatnonzero(column[stop:] != column[stop - 1])
                stop = stop + int(later[0]) if len(later) else len(self)
            yield self.taken(slice(start, stop))
            start = stop


class CandidateReader:
    """Reads candidates of one run.

    Args:
        cursor: of the run.
        in_run: a query of the statement with this run's lookups.
        texts: takes the texts.
    """

    def __init__(self, cursor: duckdb.DuckDBPyConnection, in_run: Callable[[str], str], texts: Texts) -> None:
        self._cursor, self._in_run, self._texts = cursor, in_run, texts

    def read(self, query: CandidateQuery) -> Candidates:
        """All rows of a query."""
        names = list(dict.fromkeys(query.arguments))
        extra = [*([query.row] if query.row is not None else []), *query.group]
        inner = self._in_run(syntax.to_sql(query.node))
        columns = [*map(_hashed, names), *(f'"{column}"' for column in extra)]
        table = self._cursor.sql(f"SELECT {', '.join(columns)} FROM ({inner})").to_arrow_table()
        documents = {
            name: self._handles(inner, name, table.column(position)) for position, name in enumerate(names)
        }
        found = {column: table.column(len(names) + place) for place, column in enumerate(extra)}
        rows = np.arange(table.num_rows, dtype=np.int64)
        if query.row is not None:
            rows = to_numbers(found[query.row])
            rows = np.where(rows >= _LOCAL_ROWS_START, rows - _LOCAL_ROWS_START, rows)
        return Candidates(documents, rows, _groups([_numbers_of(found[column]) for column in query.group]))

    def read_pairs(self, query: CandidateQuery) -> Candidates:
        """All rows of a query over two relations: eight bytes a pair stay in memory, whatever the texts, and
        eight more for each column of `group`.
        """
        names = list(dict.fromkeys(query.arguments))
        inner = self._in_run(syntax.to_sql(query.node))
        for name in names:
            self._store_texts(inner, name, is_mostly_new=False)
        columns = [*map(_hashed, names), *(f'"{column}"' for column in query.group)]
        parts: list[list[Int32s]] = [[np.zeros(0, dtype=np.int32)] for _ in names]
        groups: list[list[Int64s]] = [[np.zeros(0, dtype=np.int64)] for _ in query.group]
        reader = self._cursor.sql(f"SELECT {', '.join(columns)} FROM ({inner})").to_arrow_reader(_BATCH_ROWS)
        for batch in reader:
            for part, column in zip(parts, batch.columns[: len(names)], strict=True):
                is_present, hashes = _present(column)
                part.append(self._spread(is_present, self._texts.find(hashes)).astype(np.int32))
            for group, column in zip(groups, batch.columns[len(names) :], strict=True):
                group.append(_numbers_of(column))
        documents = {name: np.concatenate(part) for name, part in zip(names, parts, strict=True)}
        numbers = _groups([np.concatenate(group) for group in groups])
        return Candidates(documents, np.arange(len(documents[names[0]]), dtype=np.int32), numbers)

    def windows(self, query: CandidateQuery) -> Iterator[Candidates]:
        """The first rows of a query, then as many again twice, then all of them in their order.

        Where a few rows suffice the others need not be read. What is read of a limited query need not be its
        first rows each time, so the last part, which `starts_over`, holds the rows before it too.
        """
        start, size = 0, FIRST_WINDOW_ROWS
        inner = self._in_run(syntax.to_sql(query.node))
        for _ in range(NUM_WINDOWS):
            window = self._window(query, f"SELECT * FROM ({inner}) LIMIT {size} OFFSET {start}")
            if len(window):
                yield window
            if not start and len(window) < size:
                return
            start, size = start + size, 2 * size
        everything = self.read_pairs(query)
        for place in range(0, len(everything), BLOCK_ROWS):
            yield replace(everything.taken(slice(place, place + BLOCK_ROWS)), starts_over=not place)

    def measured(self, queries: Sequence[syntax.Node]) -> tuple[int, int]:
        """Number and bytes of the distinct texts of the first query that can be asked by itself."""
        for node in queries:
            inner = self._in_run(syntax.to_sql(node))
            (name,) = (item["alias"] for item in node["select_list"])
            texts = f'SELECT DISTINCT "{name}" AS t FROM ({inner})'
            sizes = f"SELECT count(t), coalesce(sum(strlen(t)), 0) FROM ({texts})"
            with contextlib.suppress(duckdb.BinderException, duckdb.CatalogException):
                ((count, size),) = self._cursor.sql(sizes).fetchall()
                return int(count), int(size)
        return 0, 0

    def _window(self, query: CandidateQuery, sql: str) -> Candidates:
        self._cursor.execute(f"CREATE TEMP TABLE {_WINDOW} AS {sql}")
        node = syntax.query(f"SELECT * FROM {_WINDOW}")
        window = self.read(CandidateQuery(node, query.arguments, query.row))
        self._cursor.execute(f"DROP TABLE {_WINDOW}")
        return window

    def _handles(self, inner: str, name: str, column: pa.ChunkedArray) -> Int64s:
        is_present, hashes = _present(column)
        handles = self._texts.find(hashes)
        num_unknown = int(np.count_nonzero(handles < 0))
        if num_unknown:
            is_mostly_new = 2 * len(distinct(hashes[handles < 0])) > len(hashes)
            self._store_texts(inner, name, is_mostly_new=is_mostly_new)
            handles = self._texts.find(hashes)
        return self._spread(is_present, handles)

    @staticmethod
    def _spread(is_present: Bools, handles: Int64s) -> Int64s:
        """Handles row by row, -1 where the text is NULL."""
        if (handles < 0).any():
            raise changed_documents()
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
        batches = self._cursor.sql(sql).to_arrow_reader(_TEXT_BATCH_ROWS)
        while several := list(itertools.islice(batches, _TEXT_BATCHES)):
            table = pa.Table.from_batches(several)
            hashes, checks = (to_numbers(table.column(i)) for i in (0, 1))
            self._texts.add(hashes, checks, table.column(2))


def _numbers_of(column: pa.Array | pa.ChunkedArray) -> Int64s:
    """A column of row numbers; NULL is a number too."""
    return to_numbers(filled(column.cast(pa.int64()), -1))


def _groups(columns: Sequence[Int64s]) -> Int64s | None:
    """A number for each row, equal where all of some columns are; None without columns."""
    if len(columns) <= 1:
        return columns[0] if columns else None
    numbers = ranks_in_order(columns[0])
    for column in columns[1:]:
        ranks = ranks_in_order(column)
        numbers = ranks_in_order(numbers * (int(ranks.max(initial=0)) + 1) + ranks)
    return numbers


def changed_documents() -> QuailError:
    """The error of documents that were others when they were read again."""
    return QuailError(
        "documents of the statement changed between two reads: they depend on the order of rows",
        hint="give the aggregate or window that makes them an order: string_agg(body, ' ' ORDER BY id)",
    )


def _hashed(name: str) -> str:
    return f'CASE WHEN "{name}" IS NOT NULL THEN hash("{name}") END'


def _present(column: pa.Array | pa.ChunkedArray) -> tuple[Bools, UInt64s]:
    """Which rows of a column of hashes are there, and the hashes of those."""
    is_present = to_numbers(column.is_valid())
    hashes: UInt64s = to_numbers(filled(column, 0))[is_present]
    return is_present, hashes
