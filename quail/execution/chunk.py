"""One forward pass as arrays: which tokens run, what each may read, what is written and what is read out.

A `Chunk` is built by the scheduler and read by a model; it is all that passes between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Segments:
    """Runs of consecutive rows of a pass, each a piece of one prompt.

    A row sees the paged tokens of its segment, then the listed earlier rows of the pass, then its own segment
    up to itself.

    Attributes:
        q_start: (n,) first row.
        q_stop: (n,) row behind the last.
        table_row: (n,) row of the block table, -1 without paged tokens.
        paged_tokens: (n,) tokens read from pages.
        context: for each segment the ranges of earlier rows of this pass that it reads too.
    """

    q_start: Int64s
    q_stop: Int64s
    table_row: Int64s
    paged_tokens: Int64s
    context: tuple[tuple[tuple[int, int], ...], ...] = ()

    def __post_init__(self) -> None:
        assert (self.q_start < self.q_stop).all(), "empty segment"
        assert (self.q_start[1:] == self.q_stop[:-1]).all(), "segments follow each other without gaps"
        assert len(self.context) in (0, len(self.q_start))
        for place, ranges in enumerate(self.context):
            assert all(0 <= a < b <= self.q_start[place] for a, b in ranges), (
                "context lies before its segment"
            )

    def __len__(self) -> int:
        return len(self.q_start)

    def context_of(self, place: int) -> tuple[tuple[int, int], ...]:
        """Ranges of earlier rows that the segment at `place` reads."""
        return self.context[place] if self.context else ()

    @cached_property
    def by_length(self) -> tuple[tuple[int, Int64s], ...]:
        """(length, places) of segments of equal length, so that they can share a kernel call."""
        lengths = self.q_stop - self.q_start
        return tuple((int(length), np.nonzero(lengths == length)[0]) for length in np.unique(lengths))

    @cached_property
    def with_history(self) -> tuple[tuple[int, int], ...]:
        """Ranges of places whose segments read the same history beside themselves, consecutive in the pass.

        The partners of one anchor read its KV in a single kernel call.
        """
        found: list[tuple[int, int]] = []
        for place in range(len(self)):
            if not (self.paged_tokens[place] or self.context_of(place)):
                continue
            if found and found[-1][1] == place and self._same_history(place - 1, place):
                found[-1] = (found[-1][0], place + 1)
            else:
                found.append((place, place + 1))
        return tuple(found)

    def _same_history(self, one: int, other: int) -> bool:
        same_table = bool(self.table_row[one] == self.table_row[other])
        same_tokens = bool(self.paged_tokens[one] == self.paged_tokens[other])
        return same_table and same_tokens and self.context_of(one) == self.context_of(other)


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Page ids of the tables that a pass reads, one row each.

    Attributes:
        pages: (rows, longest) page ids, padded with -1.
    """

    pages: Int64s

    @classmethod
    def of(cls, tables: Sequence[Sequence[int]]) -> BlockTable:
        """Builds it from lists of page ids."""
        width = max((len(table) for table in tables), default=0)
        pages = np.full((len(tables), width), -1, dtype=np.int64)
        for row, table in enumerate(tables):
            pages[row, : len(table)] = table
        return cls(pages)

    def of_row(self, row: int, num_tokens: int, page_tokens: int) -> Int64s:
        """Pages that hold the first `num_tokens` tokens of a row."""
        found: Int64s = self.pages[row, : -(-num_tokens // page_tokens)]
        assert (found >= 0).all(), "the block table is shorter than the tokens to read"
        return found


@dataclass(frozen=True, eq=False)
class Chunk:
    """One forward pass.

    Attributes:
        ids: (t,) token ids.
        positions: (t,) position of each token in its own prompt.
        segments: which rows belong together and what they read.
        block_table: pages of the tables that segments read.
        write_rows: (w,) rows whose KV goes into pages.
        write_slots: (w,) the slots they go to (page · page_tokens + offset).
        read_rows: (r,) rows whose final hidden state is wanted.
    """

    ids: Int32s
    positions: Int64s
    segments: Segments
    block_table: BlockTable
    write_rows: Int64s
    write_slots: Int64s
    read_rows: Int64s

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.positions) == int(self.segments.q_stop[-1]), (
            "rows and segments differ"
        )
        assert len(self.write_rows) == len(self.write_slots)
        assert len(np.unique(self.write_slots)) == len(self.write_slots), (
            "a slot is written twice in one pass"
        )

    def __len__(self) -> int:
        return len(self.ids)
