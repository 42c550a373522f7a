"""A model whose "KV" is a rolling hash: any wrong page, position, order or stale read changes or breaks the
answer.

The state of a token is hash(token, state of the token before). A page slot stores (token, position, state). A
segment's first token takes the state of the last paged token, after the whole paged history has been checked:
positions run from 0, and each stored state follows from the one before.
"""

from __future__ import annotations

import numpy as np

from quail.execution.chunk import Chunk

SEED = 1469598103934665603
MASK = (1 << 63) - 1


def step(token: int, before: int) -> int:
    return ((before ^ (int(token) + 0x9E3779B9)) * 1099511628211 + 12345) & MASK


def state_of(ids) -> int:
    state = SEED
    for token in ids:
        state = step(token, state)
    return state


class WrongRead(AssertionError):
    pass


class HashModel:
    """Runs chunks on (token, position, state) slots; `forward` returns one state a read row."""

    def __init__(self, num_pages: int, page_tokens: int = 16) -> None:
        self.page_tokens = page_tokens
        self.slots = np.full((num_pages * page_tokens, 3), -1, dtype=np.int64)
        self.rows_run = 0

    def forward(self, chunk: Chunk) -> np.ndarray:
        segments = chunk.segments
        writes = dict(zip(chunk.write_rows.tolist(), chunk.write_slots.tolist(), strict=True))
        states = self.states = np.zeros(len(chunk), dtype=np.int64)
        pending = list(range(len(segments)))
        # As in a real layer, everything is written before anything is read: run until all segments found
        # their past.
        for _ in range(len(segments) + 1):
            waiting = []
            for place in pending:
                before = self._past(chunk, place)
                if before is None:
                    waiting.append(place)
                    continue
                for row in range(int(segments.q_start[place]), int(segments.q_stop[place])):
                    before = states[row] = step(chunk.ids[row], before)
                    if row in writes:
                        self.slots[writes[row]] = (chunk.ids[row], chunk.positions[row], before)
            if not waiting:
                break
            assert len(waiting) < len(pending) or self._raise(chunk, waiting[0])
            pending = waiting
        self.rows_run += len(chunk)
        return states[chunk.read_rows]

    def _past(self, chunk: Chunk, place: int):
        segments = chunk.segments
        paged = int(segments.paged_tokens[place])
        first = int(chunk.positions[segments.q_start[place]])
        expected = np.arange(first, first + int(segments.q_stop[place] - segments.q_start[place]))
        if not np.array_equal(chunk.positions[segments.q_start[place] : segments.q_stop[place]], expected):
            raise WrongRead("positions of a segment do not run on")
        ranges = segments.context_of(place)
        if first != paged + sum(stop - start for start, stop in ranges):
            raise WrongRead(f"a segment at position {first} reads {paged} paged tokens and {ranges}")
        state = SEED
        if paged:
            pages = chunk.block_table.of_row(int(segments.table_row[place]), paged, self.page_tokens)
            for position in range(paged):
                slot = pages[position // self.page_tokens] * self.page_tokens + position % self.page_tokens
                token, at, stored = self.slots[slot].tolist()
                if at != position or stored != step(token, state):
                    return None
                state = stored
        for row in (row for start, stop in ranges for row in range(start, stop)):
            if self.states[row] != step(chunk.ids[row], state):
                return None
            state = int(self.states[row])
        return state

    def _raise(self, chunk, place):
        raise WrongRead(f"segment {place} reads pages that do not hold the beginning of its prompt")
