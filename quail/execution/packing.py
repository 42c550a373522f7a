"""A forward pass while it is being filled, and when it is full."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quail.execution.chunk import BlockTable, Chunk, Segments
from quail.execution.requests import Request
from quail.kv.pages import PageTable

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward pass as planned.

    Attributes:
        chunk: its arrays.
        answered: the requests that are answered by it.
        first_reads: for each of them the place in `chunk.read_rows` of its suffix; its branches follow.
    """

    chunk: Chunk
    answered: tuple[Request, ...]
    first_reads: tuple[int, ...]


class Packing:
    """A pass while it is being filled."""

    def __init__(self, token_budget: int) -> None:
        self.room = token_budget
        self.num_rows = 0
        self._ids: list[Int32s] = []
        self._starts: list[int] = []
        self._positions: list[int] = []
        self._tables: list[PageTable] = []
        self._table_rows: list[int] = []
        self._row_of_table: dict[PageTable, int] = {}
        self._paged: list[int] = []
        self._write_rows: list[Int64s] = []
        self._write_slots: list[Int64s] = []
        self._read_rows: list[int] = []
        self._requests: list[Request] = []
        self._first_reads: list[int] = []
        self._context: list[tuple[tuple[int, int], ...]] = []

    def add(self, ids: Int32s, position: int, table: PageTable | None, *, writes: int) -> None:
        """Adds a segment behind paged tokens.

        Args:
            ids: its tokens.
            position: position of its first token in the prompt = tokens it reads from pages.
            table: where those are, and where the first `writes` of its own go.
            writes: leading rows whose KV is kept.
        """
        start = self.num_rows
        if table is not None and writes:
            self._write_rows.append(np.arange(start, start + writes, dtype=np.int64))
            self._write_slots.append(table.append(writes))
        self._append(ids, position, self._table_row(table) if position else -1, position, ())

    def _append(
        self, ids: Int32s, position: int, table_row: int, paged: int, context: tuple[tuple[int, int], ...]
    ) -> None:
        self._ids.append(ids)
        self._starts.append(self.num_rows)
        self._positions.append(position)
        self._paged.append(paged)
        self._table_rows.append(table_row)
        self._context.append(context)
        self.num_rows += len(ids)
        self.room -= len(ids)

    def _table_row(self, table: PageTable | None) -> int:
        assert table is not None, "history without pages"
        row = self._row_of_table.setdefault(table, len(self._tables))
        if row == len(self._tables):
            self._tables.append(table)
        return row

    def read(self, request: Request) -> None:
        """The answer of `request` is read at the last row so far, and behind each of its branches."""
        self._requests.append(request)
        self._first_reads.append(len(self._read_rows))
        self._read_rows.append(self.num_rows - 1)
        if not request.branches:
            return
        trunk = ((self._starts[-1], self.num_rows),)
        table_row, paged = self._table_rows[-1], self._paged[-1]
        contexts: list[tuple[tuple[int, int], ...]] = []
        for branch in request.branches:
            context = contexts[branch.parent] if branch.parent >= 0 else trunk
            start = self.num_rows
            position = paged + sum(stop - first for first, stop in context)
            self._append(branch.ids, position, table_row, paged, context)
            contexts.append((*context, (start, self.num_rows)))
            self._read_rows.append(self.num_rows - 1)

    def finish(self) -> Pass:
        starts = np.array(self._starts, dtype=np.int64)
        stops = np.append(starts[1:], self.num_rows)
        segments = Segments(
            starts,
            stops,
            np.array(self._table_rows, dtype=np.int64),
            np.array(self._paged, dtype=np.int64),
            tuple(self._context) if any(self._context) else (),
        )
        chunk = Chunk(
            ids=np.concatenate(self._ids),
            positions=np.arange(self.num_rows)
            + np.repeat(np.array(self._positions, dtype=np.int64) - starts, stops - starts),
            segments=segments,
            block_table=BlockTable.of([table.pages for table in self._tables]),
            write_rows=_join(self._write_rows),
            write_slots=_join(self._write_slots),
            read_rows=np.array(self._read_rows, dtype=np.int64),
        )
        return Pass(chunk, tuple(self._requests), tuple(self._first_reads))


def _join(arrays: list[Int64s]) -> Int64s:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
