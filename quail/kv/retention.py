"""KV kept for later operators and later queries, under a cap, the least valuable given up first.

    priority = probability_of_reuse * recompute_seconds / pages

An entry is found by the exact token ids of its document, never by a row number: a changed character makes
another document.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quail.kv.pages import PageArena, PageTable

Int32s = npt.NDArray[np.int32]

SCHEDULED = 1.0
"""Probability that a document is read again when a later operator of the query is planned to."""

UNSCHEDULED = 0.1
"""The same between queries, when nothing is known."""


def cap_pages(num_pages: int, token_budget: int, page_tokens: int) -> int:
    """Most pages that retained KV may take: what two forward passes leave."""
    return max(0, num_pages - math.ceil(2 * token_budget / page_tokens))


@dataclass(eq=False)
class _Entry:
    table: PageTable
    probability: float
    recompute_seconds: float
    age: int


class RetentionPool:
    """Retained documents of one arena.

    Args:
        pages: the arena's accounting.
        cap_pages: most pages that retained KV may take.
        recompute_seconds: estimate of the time to compute so many tokens again.
    """

    def __init__(
        self,
        pages: PageArena,
        cap_pages: int,
        recompute_seconds: Callable[[int], float] = float,
    ) -> None:
        self.pages, self.cap_pages = pages, cap_pages
        self.num_evicted = 0
        self._recompute_seconds = recompute_seconds
        self._entries: dict[bytes, _Entry] = {}
        self._clock = 0
        # A heap of (priority when queued, age, key); entries that are gone may still stand in it.
        self._queue: list[tuple[float, int, bytes]] = []
        self._is_ordered = True

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, ids: Int32s) -> bool:
        return ids.tobytes() in self._entries

    def put(self, ids: Int32s, table: PageTable, probability: float) -> None:
        """Takes over a table that holds the KV of exactly these ids; it may be evicted at once.

        An entry of the same ids is given up for the new one, at the greater probability of the two.
        """
        assert table.num_tokens == len(ids), "a retained table holds its document and nothing else"
        key = ids.tobytes()
        before = self._entries.get(key)
        if before is not None:
            probability = max(probability, before.probability)
            self._drop(key)
        self.pages.trim(table)
        self.pages.retain(table)
        self._clock += 1
        self._entries[key] = _Entry(table, probability, self._recompute_seconds(len(ids)), self._clock)
        self._enqueue(key)
        while self._entries and self.pages.num_retained_pages > self.cap_pages:
            self._drop(self._least())

    def take(self, ids: Int32s) -> PageTable | None:
        """Hands back the table of a document, if it is here."""
        entry = self._entries.pop(ids.tobytes(), None)
        if entry is None:
            return None
        self.pages.resume(entry.table)
        return entry.table

    def expect(self, ids: Int32s, probability: float) -> None:
        """Changes the probability that a document is read again."""
        key = ids.tobytes()
        entry = self._entries.get(key)
        if entry is not None and entry.probability != probability:
            entry.probability = probability
            self._enqueue(key)

    def discard(self, ids: Int32s) -> None:
        """Gives up a document, if it is here."""
        if ids in self:
            self._drop(ids.tobytes())

    def make_room(self, num_pages: int) -> bool:
        """Evicts until so many pages are free; whether they are."""
        while self._entries and self.pages.num_free_pages < num_pages:
            self._drop(self._least())
        return self.pages.num_free_pages >= num_pages

    def clear(self) -> None:
        """Gives up everything (another model, another dtype, the end of the session)."""
        for key in list(self._entries):
            self._drop(key)

    def priority(self, ids: Int32s) -> float:
        """The priority of a document that is here."""
        return self._priority(self._entries[ids.tobytes()])

    def _priority(self, entry: _Entry) -> float:
        alone = max(1, self.pages.num_pages_held_alone(entry.table))
        return entry.probability * entry.recompute_seconds / alone

    def _enqueue(self, key: bytes) -> None:
        entry = self._entries[key]
        heapq.heappush(self._queue, (self._priority(entry), entry.age, key))
        if len(self._queue) > 2 * len(self._entries) + 64:
            self._is_ordered = False

    def _least(self) -> bytes:
        """The key of the lowest priority; of equals, the oldest.

        A priority that rose is looked up when its turn comes. Where an evicted entry shared pages, those of
        others may have fallen: all are looked up. (One that fell as a live table closed waits till then.)
        """
        if not self._is_ordered:
            self._queue = [(self._priority(entry), entry.age, key) for key, entry in self._entries.items()]
            heapq.heapify(self._queue)
            self._is_ordered = True
        while True:
            priority, age, key = self._queue[0]
            entry = self._entries.get(key)
            if entry is None or entry.age != age:
                heapq.heappop(self._queue)
            elif (risen := self._priority(entry)) > priority:
                heapq.heapreplace(self._queue, (risen, age, key))
            else:
                return key

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self.num_evicted += 1
        if self.pages.num_pages_held_alone(entry.table) < len(entry.table.pages):
            self._is_ordered = False  # others hold some of its pages alone now
        self.pages.resume(entry.table)
        self.pages.close(entry.table)
