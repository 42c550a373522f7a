"""The rows of a run that failed: how many of which kind, and which, without filling memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa

MOST_LISTED = 1_000
"""Failed rows that a report lists; those behind are counted."""

TOO_LONG, NO_ROOM, NOT_FINITE, NOT_TEXT = "too_long", "no_room", "not_finite", "not_text"
"""Kinds of failures: a prompt longer than the model's context, a document that needs more pages than there
are, logits that are NaN or infinite, a text that cannot be tokenized."""

_WORD = pa.dictionary(pa.int32(), pa.string())
ERROR_SCHEMA = pa.schema(
    [("table", _WORD), ("row", pa.int64()), ("call", _WORD), ("kind", _WORD), ("message", pa.string())]
)
"""Of the table of failed rows: where, in which call, of which kind, and the whole message."""

_FLUSHED_ROWS = 2**14
_Row = tuple[str, int, str, str, str]


class ErrorLog:
    """Failed rows in the order in which they failed.

    Args:
        lists_all: whether all are kept, as Arrow columns, or the first ones only.

    Attributes:
        num_errors: all that were added.
        kinds: how many of each kind.
    """

    def __init__(self, *, lists_all: bool) -> None:
        self.num_errors = 0
        self.kinds: Counter[str] = Counter()
        self._lists_all = lists_all
        self._first: list[_Row] = []
        self._rows: list[_Row] = []
        self._batches: list[pa.RecordBatch] = []

    def add(self, table: str, row: int, call: str, kind: str, message: str) -> None:
        """Adds a failed question.

        Args:
            table: its source.
            row: the first row of the source in which it stands.
            call: its text.
            kind: one of those above.
            message: what is wrong, with the numbers.
        """
        self.num_errors += 1
        self.kinds[kind] += 1
        entry = (table, row, call, kind, message)
        if len(self._first) < MOST_LISTED:
            self._first.append(entry)
        if self._lists_all:
            self._rows.append(entry)
            if len(self._rows) >= _FLUSHED_ROWS:
                self._flush()

    def first(self) -> list[dict[str, Any]]:
        """The first of them, for the report."""
        return [dict(zip(ERROR_SCHEMA.names, entry, strict=True)) for entry in self._first]

    def table(self) -> pa.Table:
        """All of them if all are kept, else the first."""
        if not self._lists_all:
            return pa.Table.from_batches([_batch(self._first)], ERROR_SCHEMA)
        self._flush()
        return pa.Table.from_batches(self._batches, ERROR_SCHEMA).unify_dictionaries()

    def summary(self) -> str:
        """The counts by kind, most first.

        >>> log = ErrorLog(lists_all=False)
        >>> for kind in ("too_long", "not_finite", "too_long"):
        ...     log.add("t", 1, "AI.IF(…)", kind, "…")
        >>> log.summary()
        '2 too_long, 1 not_finite'
        """
        return ", ".join(f"{count:,} {kind}" for kind, count in self.kinds.most_common())

    def _flush(self) -> None:
        if self._rows:
            self._batches.append(_batch(self._rows))
            self._rows = []


def _batch(rows: list[_Row]) -> pa.RecordBatch:
    if not rows:
        arrays = [pa.nulls(0, field.type) for field in ERROR_SCHEMA]
    else:
        columns = zip(*rows, strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, ERROR_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ERROR_SCHEMA)
