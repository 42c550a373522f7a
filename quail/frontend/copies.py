"""Relations that a run copies once: views, and files that the statement names."""

from __future__ import annotations

from collections.abc import Callable

import duckdb

from quail.errors import BindError
from quail.frontend.drafts import is_constant
from quail.frontend.ranges import closing_parenthesis, name_stop
from quail.plan import syntax
from quail.plan.statement import Edit, Source
from quail.plan.syntax import Node

_READERS = ("read_", "parquet_scan", "glob", "iceberg_scan", "delta_scan")


class Copies:
    """Collects the relations of a statement that a run copies.

    Args:
        encoded: the bytes of the statement.
        offset: where its SELECT begins.
        cursor: a cursor of the session's DuckDB; gets a view in each copy's place.
        nonce: makes the names of copies unlike the user's.
        fail: makes the located error for a node.

    Attributes:
        sources: the copies by name or by the query that they hold.
        edits: what stands in the text in the places of files.
    """

    def __init__(
        self,
        encoded: bytes,
        offset: int,
        cursor: duckdb.DuckDBPyConnection,
        nonce: str,
        fail: Callable[[str, Node, str | None], BindError],
    ) -> None:
        self.sources: dict[str, Source] = {}
        self.edits: list[Edit] = []
        self._encoded = encoded
        self._offset = offset
        self._cursor = cursor
        self._nonce = nonce
        self._fail = fail

    def add_table(self, table: Node, tables: frozenset[str]) -> None:
        """Has views and files copied; tables are read in the run's transaction."""
        name, qualifier = table["table_name"], [table["catalog_name"], table["schema_name"]]
        if table.get("at_clause") or (not any(qualifier) and name.lower() in tables):
            return
        written = ".".join(quote_name(part) for part in (*qualifier, name) if part)
        is_view, is_table = _kind_of(self._cursor, name)
        if is_table and not is_view:
            return
        if is_view and not any(qualifier):
            self.sources.setdefault(name.lower(), Source(name, f"SELECT * FROM {written}"))
            return
        self._copy_under_new_name(table, f"SELECT * FROM {written}")

    def add_reader(self, table: Node) -> None:
        """Has files that a table function reads copied."""
        name = table["function"]["function_name"].lower()
        if name.startswith(_READERS) and all(
            is_constant(argument["expression"]) or argument["expression"]["class"] == "COMPARISON"
            for argument in table["function"]["arguments"]
        ):
            bare = {**table, "alias": "", "column_name_alias": [], "sample": None}
            star = syntax.parse_query("SELECT * FROM x")
            self._copy_under_new_name(table, syntax.to_sql({**star, "from_table": bare}))

    def _copy_under_new_name(self, table: Node, sql: str) -> None:
        """Makes the table of FROM a reference to a copy, in the tree and in the text."""
        span = syntax.extent(table)
        assert span is not None
        key = f"{sql}"
        source = self.sources.get(key)
        if source is None:
            source = Source(f"quail_{self._nonce}_source_{len(self.sources)}", sql, is_renamed=True)
            self.sources[key] = source
            try:
                self._cursor.execute(f"CREATE TEMP VIEW {source.name} AS {sql}")
            except duckdb.Error as error:
                raise self._fail(first_line(error), table, None) from error
        old_name = table["alias"] or table.get("table_name") or table["function"]["function_name"]
        start = span[0] + self._offset
        is_function = table["type"] == "TABLE_FUNCTION"
        stop = (closing_parenthesis if is_function else name_stop)(self._encoded, start)
        alias = "" if table["alias"] else f" AS {quote_name(old_name)}"
        self.edits.append(Edit((start, stop), f"{source.name}{alias}"))
        template = syntax.parse_query("SELECT * FROM x")["from_table"]
        columns, sample = table["column_name_alias"], table["sample"]
        table.clear()
        table.update(
            template,
            alias=old_name,
            table_name=source.name,
            qualified_name={"path": [source.name]},
            column_name_alias=columns,
            sample=sample,
        )


def _kind_of(cursor: duckdb.DuckDBPyConnection, name: str) -> tuple[bool, bool]:
    """Whether views and whether tables of that name exist, in any schema."""
    row = cursor.execute(
        "SELECT (SELECT count(*) FROM duckdb_views() WHERE lower(view_name) = lower($1)),"
        " (SELECT count(*) FROM duckdb_tables() WHERE lower(table_name) = lower($1))",
        [name],
    ).fetchone()
    assert row is not None
    return row[0] > 0, row[1] > 0


def quote_name(name: str) -> str:
    """A name as DuckDB reads it back."""
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).split("\n", 1)[0]
