"""Questions about pairs: streams of blocks of them, and waves that end at the first match."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from quail.execution.answers import CallAnswers, distinct, distinct_in_order, ranks_in_order
from quail.execution.asks import Bools, Int64s
from quail.execution.chain import Chain
from quail.execution.groups import Due, Group, Inverse, Queue
from quail.execution.reading import Candidates

MakeGroup = Callable[[Candidates, int | None], Group]


class Stream(Group):
    """Groups over parts of the rows, one after another, so that no more than one part is looked at.

    Args:
        blocks: the parts.
        make: the group of a part, and of the passing rows that still suffice.
        row_limit: passing rows, in row order, that suffice; None for all.
        forgets: answers that are forgotten with their part, and the truth that matters of them
            (`CallAnswers.forget`). The next part waits for all that were asked, needed or not.
    """

    def __init__(
        self,
        blocks: Iterator[Candidates],
        make: MakeGroup,
        row_limit: int | None,
        forgets: Sequence[tuple[CallAnswers, int | None]] = (),
    ) -> None:
        self._blocks, self._make, self._forgets = blocks, make, forgets
        self._row_limit = self._num_wanted = row_limit
        self._group: Group | None = None
        self._evaluations: dict[int, list[int]] = {}
        self._advance()

    def take(self, limit: int) -> list[Due]:
        return self._group.take(limit) if self._group is not None else []

    def answered(self, call: int, keys: Int64s) -> tuple[list[Due], Int64s]:
        if self._group is None:
            return [], np.zeros(0, dtype=np.int64)
        due, released = self._group.answered(call, keys)
        self._advance()
        return due, released

    def num_uses(self, documents: Int64s) -> Int64s:
        if self._group is None:
            return np.zeros(len(documents), dtype=np.int64)
        return self._group.num_uses(documents)

    @property
    def is_settled(self) -> bool:
        return self._group is None

    def evaluations(self) -> list[tuple[int, int, int]]:
        return [(call, num_rows, num_null) for call, (num_rows, num_null) in self._evaluations.items()]

    def _advance(self) -> None:
        """Goes on to the next part that has a question, once the one before is done."""
        while self._group is None or self._is_done(self._group):
            if self._group is not None:
                self._finish(self._group)
            block = next(self._blocks, None) if self._num_wanted is None or self._num_wanted > 0 else None
            if block is None:
                self._group = None
                return
            if block.starts_over:
                self._num_wanted = self._row_limit
            self._group = self._make(block, self._num_wanted)

    def _is_done(self, group: Group) -> bool:
        """Whether a part is settled and no answer can come any more whose question would be forgotten."""
        return group.is_settled and not any(answers.has_outstanding for answers, _ in self._forgets)

    def _finish(self, group: Group) -> None:
        for call, num_rows, num_null in group.evaluations():
            total = self._evaluations.setdefault(call, [0, 0])
            total[0] += num_rows
            total[1] += num_null
        if self._num_wanted is not None:
            assert isinstance(group, Chain), "only a chain counts rows that pass"
            self._num_wanted -= group.num_passed
        for answers, passing in self._forgets:
            answers.forget(passing)


class FirstMatch(Group):
    """Rows of one relation, each with its pairs, of which one TRUE answer is all that is wanted.

    A few pairs of each row are asked at a time, and the next few only if none of them matched.

    Args:
        call: the call.
        answers: its answers.
        keys: (pairs,) key of each pair's question, -1 where an argument is NULL.
        rows: (pairs,) number of the row that each pair decides; pairs of a row are asked in their order.
        wave: pairs of a row that are asked at a time.
        anchor: argument whose document's KV is kept.
        releases: whether no later question reads the documents.
    """

    def __init__(
        self,
        call: int,
        answers: CallAnswers,
        keys: Int64s,
        rows: Int64s,
        *,
        wave: int,
        anchor: int,
        releases: bool,
    ) -> None:
        self._call, self._answers, self._wave = call, answers, wave
        self._anchor, self._releases = anchor, releases
        self._num_pairs, self._num_null = len(keys), int(np.count_nonzero(keys < 0))
        rows, keys = rows[keys >= 0], keys[keys >= 0]
        order = np.argsort(rows, kind="stable")
        self._keys, rows = keys[order], rows[order]
        starts = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1]])) if len(rows) else rows
        self._starts = np.append(starts, len(rows))
        self._row = np.repeat(np.arange(len(starts)), np.diff(self._starts))
        self._given = self._starts[:-1].copy()
        self._num_waiting = np.zeros(len(starts), dtype=np.int64)
        self._is_open: Bools = np.ones(len(starts), dtype=np.bool_)
        self._pairs_by_key = Inverse(self._keys, len(answers))
        self._uses = np.bincount(answers.handles[self._keys, anchor])
        self._num_open = np.bincount(self._keys, minlength=len(answers))
        first = self._next_waves(np.arange(len(starts), dtype=np.int64))
        self._queue = Queue(call, answers, self._by_anchor(first))

    def take(self, limit: int) -> list[Due]:
        while len(keys := self._queue.take(limit)):
            keys = keys[self._num_open[keys] > 0]
            if len(keys):
                return [Due(self._call, keys)]
        return []

    def answered(self, call: int, keys: Int64s) -> tuple[list[Due], Int64s]:
        if call != self._call:
            return [], np.zeros(0, dtype=np.int64)
        pairs = self._pairs_by_key.rows(keys)
        pairs = pairs[self._is_open[self._row[pairs]]]
        rows = self._row[pairs]
        was_given = pairs < self._given[rows]
        np.subtract.at(self._num_waiting, rows[was_given], 1)
        touched = distinct(rows)
        matched = distinct(rows[self._answers.truth[self._keys[pairs]] == 1])
        released = [self._close(matched)]
        waiting = touched[self._is_open[touched] & (self._num_waiting[touched] == 0)]
        due = self._next_waves(waiting)
        released.append(self._close(waiting[self._num_waiting[waiting] == 0]))
        asking = self._by_anchor(due)
        return [Due(self._call, asking)] if len(asking) else [], distinct(np.concatenate(released))

    def num_uses(self, documents: Int64s) -> Int64s:
        return self._uses[documents]

    @property
    def is_settled(self) -> bool:
        return not self._is_open.any()

    def evaluations(self) -> list[tuple[int, int, int]]:
        num_asked = int((self._given - self._starts[:-1]).sum())
        return [(self._call, num_asked + self._num_null, self._num_null)]

    def _next_waves(self, rows: Int64s) -> Int64s:
        """Gives out the next pairs of open rows until one is unanswered; returns keys that nobody asked.

        Of a row that a known answer closes none is returned.
        """
        due: list[Int64s] = []
        while len(rows):
            starts = self._given[rows]
            stops = np.minimum(starts + self._wave, self._starts[rows + 1])
            counts = stops - starts
            pairs = np.repeat(stops - np.cumsum(counts), counts) + np.arange(counts.sum())
            self._given[rows] = stops
            keys = self._keys[pairs]
            is_known = self._answers.is_answered(keys)
            np.add.at(self._num_waiting, self._row[pairs[~is_known]], 1)
            due.append(pairs[~is_known & ~self._answers.asked[keys]])
            self._close(self._row[pairs[is_known & (self._answers.truth[keys] == 1)]])
            rows = rows[self._is_open[rows] & (self._num_waiting[rows] == 0)]
            self._close(rows[self._given[rows] == self._starts[rows + 1]])
            rows = rows[self._is_open[rows]]
        pairs = np.concatenate([np.zeros(0, dtype=np.int64), *due])
        return distinct_in_order(self._keys[pairs[self._is_open[self._row[pairs]]]])

    def _by_anchor(self, keys: Int64s) -> Int64s:
        """Keys with those of one anchor together."""
        anchors = self._answers.handles[keys, self._anchor]
        return keys[np.argsort(ranks_in_order(anchors), kind="stable")]

    def _close(self, rows: Int64s) -> Int64s:
        """Decides rows; returns documents that nobody reads from now on."""
        rows = distinct(rows[self._is_open[rows]])
        if not len(rows):
            return np.zeros(0, dtype=np.int64)
        self._is_open[rows] = False
        counts = np.diff(self._starts)[rows]
        pairs = np.repeat(self._starts[rows + 1] - np.cumsum(counts), counts) + np.arange(counts.sum())
        np.subtract.at(self._num_open, self._keys[pairs], 1)
        documents = self._answers.handles[self._keys[pairs], self._anchor]
        np.subtract.at(self._uses, documents, 1)
        documents = distinct(documents)
        return documents[self._uses[documents] == 0] if self._releases else documents[:0]


def last_of_anchor(anchors: Int64s) -> Bools:
    """Whether each position is the last at which its anchor stands."""
    is_last = np.zeros(len(anchors), dtype=np.bool_)
    _, from_end = np.unique(anchors[::-1], return_index=True)
    is_last[len(anchors) - 1 - from_end] = True
    return is_last


def counts_of(anchors: Int64s) -> Int64s:
    """How often the anchor of each position stands there."""
    _, inverse, counts = np.unique(anchors, return_inverse=True, return_counts=True)
    found: Int64s = counts[inverse]
    return found


def places_in_group(groups: Int64s) -> Int64s:
    """For each position how many earlier ones have the same group.

    >>> places_in_group(np.array([5, 5, 2, 5, 2]))
    array([0, 1, 0, 2, 1])
    """
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(groups) else order
    places = np.empty(len(groups), dtype=np.int64)
    places[order] = np.arange(len(groups)) - np.repeat(starts, np.diff(np.append(starts, len(groups))))
    return places
