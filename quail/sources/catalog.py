"""The session's DuckDB: its tables, who may read what, and one cursor a query."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import duckdb

from quail.errors import SourceError
from quail.sources.files import PREFIX, RegisteredFiles, find_files
from quail.sources.frames import to_frame

SETTINGS = (
    *("Calendar", "default_collation", "default_null_order", "default_order", "ieee_floating_point_ops"),
    *("integer_division", "max_memory", "memory_limit", "null_order", "order_by_non_integer_literal"),
    *("pivot_limit", "preserve_insertion_order", "scalar_subquery_error_on_multiple_rows", "schema"),
    *("search_path", "threads", "TimeZone", "worker_threads"),
)
"""What `SET` may change: the meaning and the speed of queries. Others of DuckDB's settings write files, look
for Python's variables, or let a statement nest until the process ends.
"""


@dataclass(frozen=True)
class SourceInfo:
    """What is known of a registered table.

    Attributes:
        name: as registered.
        kind: `parquet`, `csv`, `json`, `arrow`, `arrow dataset`, `arrow reader`, `pandas`, `polars`,
            `duckdb`, `huggingface` or `python`.
        columns: name and DuckDB type of each column.
        num_rows: number of rows where it is known without reading, else None.
        paths: the files, for sources that are files.
        num_replaced_surrogates: lone surrogates in its text that were replaced by U+FFFD.
    """

    name: str
    kind: str
    columns: tuple[tuple[str, str], ...]
    num_rows: int | None = None
    paths: tuple[str, ...] = ()
    num_replaced_surrogates: int = 0


@dataclass(frozen=True)
class _Source:
    """A registered table and how a cursor sees it: by a scan of `data`, else by the text of a view."""

    info: SourceInfo
    data: Any = None
    view: str = ""

    def attach(self, cursor: duckdb.DuckDBPyConnection) -> None:
        if self.data is not None:
            cursor.register(self.info.name, self.data)
        else:
            cursor.execute(f"CREATE OR REPLACE TEMPORARY VIEW {quote_name(self.info.name)} AS {self.view}")

    def attach_failure(self, cursor: duckdb.DuckDBPyConnection, message: str) -> None:
        """Lets only the statements fail that read this table."""
        text = quote_text(f"table {self.info.name!r} can no longer be read: {message}")
        columns = ", ".join(
            f"CAST(error({text}) AS {kind}) AS {quote_name(column)}" for column, kind in self.info.columns
        )
        cursor.execute(f"CREATE OR REPLACE TEMPORARY VIEW {quote_name(self.info.name)} AS SELECT {columns}")


def quote_name(name: str) -> str:
    """A name as DuckDB reads it back.

    >>> print(quote_name('a "b" c'))
    "a ""b"" c"
    """
    return '"' + name.replace('"', '""') + '"'


def quote_text(text: str) -> str:
    """A text literal as DuckDB reads it back.

    >>> quote_text("it's")
    "'it''s'"
    """
    return "'" + text.replace("'", "''") + "'"


class Catalog:
    """The tables of a session, in a DuckDB of its own.

    DuckDB reads registered sources, files under `allow`, and nothing else: no other file, no address, no
    variable of the caller. Registered sources are never changed.

    Args:
        database: DuckDB file that keeps tables made by `CREATE TABLE`; None keeps them in memory.
        allow: files and folders that statements may read and write (`COPY … TO`, `read_csv(…)`, `ATTACH`).

    Raises:
        SourceError: the database cannot be opened, or `allow` names no path.
    """

    def __init__(
        self, database: str | os.PathLike[str] | None = None, allow: Iterable[str | os.PathLike[str]] = ()
    ) -> None:
        self._lock = threading.RLock()
        self._sources: dict[str, _Source] = {}
        self._files = RegisteredFiles()
        self.connection = _connect(database)
        try:
            self.connection.register_filesystem(self._files)
            _restrict(self.connection, allow)
        except duckdb.InvalidInputException as error:
            self.connection.close()
            raise SourceError(
                f"database {os.fspath(database or ':memory:')!r} is open in another session: {error}",
                hint="close that session first, or use one session for both",
            ) from None

    @property
    def tables(self) -> Mapping[str, SourceInfo]:
        """The registered tables by name."""
        with self._lock:
            return MappingProxyType({source.info.name: source.info for source in self._sources.values()})

    def register(self, name: str, source: object) -> SourceInfo:
        """Makes a source a table of the session; a table registered before under that name is replaced.

        Files are read again by every query; data frames and Arrow tables are read where they lie; record
        batch readers, lazy frames and relations of another DuckDB are read once, now.

        Args:
            name: the table's name. As in DuckDB, upper and lower case are the same.
            source: path or glob of Parquet, CSV or JSON-lines files; Arrow table, batch, reader or dataset;
                pandas or polars frame; DuckDB relation; Hugging Face dataset; list of dicts; dict of lists.

        Raises:
            SourceError: a name or source that cannot be used.
        """
        _check_name(name)
        with self._lock:
            self._check_free(name)
            if isinstance(source, str | Path):
                made = self._from_files(name, source)
            else:
                made = self._from_object(name, source)
            self._sources[name.lower()] = made
        if made.info.num_replaced_surrogates:
            warnings.warn(
                f"table {name!r}: {made.info.num_replaced_surrogates:,} lone surrogates, which are no text, "
                "were replaced by U+FFFD",
                UserWarning,
                stacklevel=3,
            )
        return made.info

    def unregister(self, name: str) -> None:
        """Forgets a registered table; one that is not registered is no error."""
        with self._lock:
            self._sources.pop(name.lower(), None)

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A connection of its own for one query, with the tables registered so far. The caller closes it."""
        with self._lock:
            cursor = self.connection.cursor()
            for source in self._sources.values():
                try:
                    source.attach(cursor)
                except duckdb.Error as error:
                    source.attach_failure(cursor, self.message_of(error))
            return cursor

    def message_of(self, error: duckdb.Error) -> str:
        """DuckDB's message in short, with the real paths of registered files."""
        message = str(error).partition("\n\nLINE ")[0].strip()
        if "Traceback (most recent call last)" in message:
            message = message.splitlines()[-1].strip()
        return self._files.real_names(message)

    def close(self) -> None:
        """Closes the database; what it keeps is on disk. Cursors of it cannot be used any more."""
        with self._lock:
            self._sources.clear()
            self.connection.close()

    def _check_free(self, name: str) -> None:
        taken = self.connection.execute(
            "SELECT 1 FROM duckdb_tables() WHERE lower(table_name) = lower(?) "
            "AND schema_name = current_schema() AND database_name = current_database()",
            [name],
        ).fetchone()
        if taken:
            raise SourceError(
                f"table {name!r} already is a table of the session's database",
                hint=f"DROP TABLE {quote_name(name)}, or register the source under another name",
            )

    def _from_files(self, name: str, source: str | Path) -> _Source:
        files = find_files(name, source)
        addresses = ", ".join(quote_text(address) for address in self._files.add(files.paths))
        options = ", hive_partitioning = false" if files.kind == "parquet" else ""
        view = f"SELECT * FROM {files.reader}([{addresses}]{options})"
        return self._described(_Source(SourceInfo(name, files.kind, (), paths=files.paths), view=view))

    def _from_object(self, name: str, source: object) -> _Source:
        frame = to_frame(name, source)
        num_rows = getattr(frame.data, "num_rows", None)
        info = SourceInfo(
            name, frame.kind, (), num_rows, num_replaced_surrogates=frame.num_replaced_surrogates
        )
        return self._described(_Source(info, data=frame.data))

    def _described(self, source: _Source) -> _Source:
        """The source with its columns, as DuckDB sees them; refuses what DuckDB cannot read."""
        name = source.info.name
        cursor = self.connection.cursor()
        try:
            source.attach(cursor)
            rows = cursor.execute(f"DESCRIBE {quote_name(name)}").fetchall()
        except duckdb.Error as error:
            raise SourceError(f"table {name!r} cannot be read: {self.message_of(error)}") from None
        finally:
            cursor.close()
        return replace(source, info=replace(source.info, columns=tuple((row[0], row[1]) for row in rows)))


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise SourceError(f"a table's name is text, not {type(name).__name__}", hint="register(name, source)")
    if not name.strip() or "\0" in name:
        raise SourceError(f"{name!r} is not a name for a table")


def _connect(database: str | os.PathLike[str] | None) -> duckdb.DuckDBPyConnection:
    path = None if database is None else os.path.abspath(os.path.expanduser(os.fspath(database)))
    if path is not None:
        _check_database(path)
    config: dict[str, str | bool | int | float | list[str]] = {
        "python_enable_replacements": False,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    try:
        return duckdb.connect(path or ":memory:", config=config)
    except duckdb.Error as error:
        raise SourceError(f"database {path!r} cannot be opened: {error}") from None


def _check_database(path: str) -> None:
    if os.path.isdir(path):
        raise SourceError(f"database {path!r} is a folder, not a DuckDB file")
    if os.path.isfile(path) and os.path.getsize(path):
        with open(path, "rb") as file:
            if file.read(12)[8:] != b"DUCK":
                raise SourceError(
                    f"database {path!r} is not a DuckDB file",
                    hint="register data files with register(name, path)",
                )


def _restrict(connection: duckdb.DuckDBPyConnection, allow: Iterable[str | os.PathLike[str]]) -> None:
    """Switches external access off for good, but for registered files and what the caller allows, and locks
    all settings but `SETTINGS`.
    """
    if isinstance(allow, str | os.PathLike):
        allow = (allow,)
    folders: list[str] = [PREFIX]
    files: list[str] = []
    for each in allow:
        text = os.fspath(each)
        if not text.strip():
            raise SourceError(f"allow = {text!r} names no file or folder")
        path = os.path.abspath(os.path.expanduser(text))
        (folders if os.path.isdir(path) else files).extend({path, os.path.realpath(path)})
    connection.execute(f"SET allowed_directories = [{', '.join(map(quote_text, folders))}]")
    if files:
        connection.execute(f"SET allowed_paths = [{', '.join(map(quote_text, files))}]")
    connection.execute("SET enable_external_file_cache = false")
    connection.execute("SET enable_external_access = false")
    connection.execute(f"SET allowed_configs = [{', '.join(map(quote_text, SETTINGS))}]")
    connection.execute("SET lock_configuration = true")
