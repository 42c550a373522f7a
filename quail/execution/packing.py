"""A forward pass while it is being filled, and when it is full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quail.cost.work import Work
from quail.execution.chunk import BlockTable, Chunk, Segments
from quail.execution.requests import Document, Request
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
        works: what the pass computes for each stage that has rows in it.
        repeated: the part of all of it that had been computed before and was lost.
        reached: for each document with rows in it the most of its prefix that was ever computed, with it.
    """

    chunk: Chunk
    answered: tuple[Request, ...]
    first_reads: tuple[int, ...]
    works: Mapping[int, Work]
    repeated: Work
    reached: Mapping[Document, int]


class Packing:
    """A pass while it is being filled.

    Attributes:
        room: rows that it may still take.
        num_rows: rows in it.
        repeated, reached: as of `Pass`.
    """

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
        self._stages: list[int] = []
        self._writes: list[int] = []
        self.repeated = Work()
        self.reached: dict[Document, int] = {}

    def add(self, stage: int, ids: Int32s, position: int, table: PageTable | None, *, writes: int) -> None:
        """Adds a segment behind paged tokens.

        Args:
            stage: stage of the request that it serves.
            ids: its tokens.
            position: position of its first token in the prompt = tokens it reads from pages.
            table: where those are, and where the first `writes` of its own go.
            writes: leading rows whose KV is kept.
        """
        start = self.num_rows
        if table is not None and writes:
            self._write_rows.append(np.arange(start, start + writes, dtype=np.int64))
            self._write_slots.append(table.append(writes))
        self._writes.append(writes)
        self._append(stage, ids, position, self._table_row(table) if position else -1, position, ())

    def _append(
        self,
        stage: int,
        ids: Int32s,
        position: int,
        table_row: int,
        paged: int,
        context: tuple[tuple[int, int], ...],
    ) -> None:
        self._stages.append(stage)
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
            self._writes.append(0)
            self._append(request.stage, branch.ids, position, table_row, paged, context)
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
        return Pass(
            chunk,
            tuple(self._requests),
            tuple(self._first_reads),
            self._works(segments),
            self.repeated,
            self.reached,
        )

    def _works(self, segments: Segments) -> dict[int, Work]:
        """What the segments of each stage compute.

        Neighbours that read the same paged tokens read them together: they count once.
        """
        tokens = (segments.q_stop - segments.q_start).astype(np.float64)
        behind = segments.paged_tokens.astype(np.float64)
        reads = behind.copy()
        is_together = (segments.table_row[1:] == segments.table_row[:-1]) & (behind[1:] == behind[:-1])
        reads[1:][is_together] = 0.0
        if segments.context:
            behind += [sum(stop - start for start, stop in ranges) for ranges in segments.context]
        pairs = tokens * behind + tokens * (tokens + 1) / 2
        stages = np.array(self._stages, dtype=np.int64)
        sums = [np.bincount(stages, weights=each) for each in (tokens, pairs, np.array(self._writes), reads)]
        return {stage: Work(*(float(each[stage]) for each in sums)) for stage in set(self._stages)}


def _join(arrays: list[Int64s]) -> Int64s:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
