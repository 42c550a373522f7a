"""Questions that become due together: a wave of independent ones, or a chain of filters over rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quail.execution.answers import CallAnswers, distinct, distinct_in_order
from quail.execution.asks import Bools, Int64s


@dataclass(frozen=True)
class Due:
    """Questions of one call that are due: `keys` in the order in which they should be asked."""

    call: int
    keys: Int64s
    stage: int = 0


class Group(ABC):
    """Questions whose candidates are known: which are due, and which documents are done with."""

    @abstractmethod
    def take(self, limit: int) -> list[Due]:
        """Up to `limit` fresh questions that were not asked before."""

    @abstractmethod
    def answered(self, call: int, keys: Int64s) -> tuple[list[Due], Int64s]:
        """Takes note of stored answers: questions due because of them, documents no longer needed."""

    def num_uses(self, documents: Int64s) -> Int64s:
        """Rows that are open and read each document, as far as the group counts them."""
        return np.zeros(len(documents), dtype=np.int64)

    @property
    @abstractmethod
    def is_settled(self) -> bool:
        """Whether every question that will be needed has its answer."""

    @abstractmethod
    def evaluations(self) -> list[tuple[int, int, int]]:
        """(call, rows that needed it, rows of those in which an argument was NULL)."""


class Queue:
    """Keys of one call that wait to be asked."""

    def __init__(self, call: int, answers: CallAnswers, keys: Int64s) -> None:
        self.call = call
        self._answers = answers
        self._keys = keys
        self._position = 0

    def take(self, limit: int) -> Int64s:
        """Up to `limit` keys that nobody has asked yet."""
        taken: list[Int64s] = []
        missing = limit
        while missing > 0 and self._position < len(self._keys):
            stop = self._position + missing
            keys = self._keys[self._position : stop]
            self._position += len(keys)
            keys = keys[~self._answers.asked[keys]]
            missing -= len(keys)
            taken.append(keys)
        return np.concatenate(taken) if taken else np.zeros(0, dtype=np.int64)


class Wave(Group):
    """Questions of one site that depend on no answer of each other.

    Args:
        call: the call.
        answers: its answers.
        keys: (rows,) key of each row's question, -1 where an argument is NULL.
        releases: whether no later question reads the documents.
        anchor: argument whose document's KV is kept.
    """

    def __init__(
        self, call: int, answers: CallAnswers, keys: Int64s, *, releases: bool, anchor: int = 0
    ) -> None:
        self._call = call
        self._answers = answers
        self._anchor = anchor
        self._num_rows = len(keys)
        asked = keys[keys >= 0]
        self._num_null = len(keys) - len(asked)
        waiting = distinct_in_order(asked)
        waiting = waiting[~answers.is_answered(waiting)]
        self._is_waiting: Bools = np.zeros(len(answers), dtype=np.bool_)
        self._is_waiting[waiting] = True
        self._num_waiting = len(waiting)
        self._queue = Queue(call, answers, waiting)
        self._releases = releases
        self._uses = np.bincount(answers.handles[waiting, anchor])

    def take(self, limit: int) -> list[Due]:
        keys = self._queue.take(limit)
        return [Due(self._call, keys)] if len(keys) else []

    def answered(self, call: int, keys: Int64s) -> tuple[list[Due], Int64s]:
        nothing = np.zeros(0, dtype=np.int64)
        if call != self._call:
            return [], nothing
        keys = keys[keys < len(self._is_waiting)]
        keys = keys[self._is_waiting[keys]]
        self._is_waiting[keys] = False
        self._num_waiting -= len(keys)
        documents = self._answers.handles[keys, self._anchor]
        np.subtract.at(self._uses, documents, 1)
        documents = distinct(documents)
        return [], documents[self._uses[documents] == 0] if self._releases else nothing

    def num_uses(self, documents: Int64s) -> Int64s:
        return self._uses[documents]

    @property
    def is_settled(self) -> bool:
        return self._num_waiting == 0

    def evaluations(self) -> list[tuple[int, int, int]]:
        return [(self._call, self._num_rows, self._num_null)]


@dataclass(frozen=True)
class Filter:
    """One filter of a chain.

    Attributes:
        call: the call.
        keys: (rows,) key of each row's question, -1 where an argument is NULL.
        passing: the truth that lets a row pass: 1, or 0 under NOT.
    """

    call: int
    keys: Int64s
    passing: int


class Chain(Group):
    """Filters over the rows of one WHERE: a row that passes one asks the next, a row that fails is done.

    Args:
        answers: the answers by call.
        filters: the filters in the order in which they are asked.
        row_limit: the number of passing rows, in row order, that suffice; None for all.
        documents: (rows,) handles of documents whose KV later questions of the chain may read, -1 for NULL;
            one array for each expression that gives documents.
        keeps_passed: whether a later question may read the document of a row that passed.
    """

    def __init__(
        self,
        answers: Sequence[CallAnswers],
        filters: Sequence[Filter],
        row_limit: int | None = None,
        documents: Sequence[npt.NDArray[np.integer]] = (),
        keeps_passed: bool = False,
    ) -> None:
        self._answers = answers
        self._filters = filters
        num_rows = len(filters[0].keys)
        self._stage: npt.NDArray[np.int32] = np.zeros(num_rows, dtype=np.int32)
        self._decided: Bools = np.zeros(num_rows, dtype=np.bool_)
        self._passed: Bools = np.zeros(num_rows, dtype=np.bool_)
        self._num_open = num_rows
        self._row_limit = row_limit
        self._prefix = 0
        self._num_passed_in_prefix = 0
        self._rows_by_key = [Inverse(f.keys, len(answers[f.call])) for f in filters]
        self._documents = tuple(documents)
        self._uses = np.bincount(self._handles(np.arange(num_rows)))
        self._keeps_passed = keeps_passed
        first = self._advance(np.arange(num_rows, dtype=np.int64))
        self._released(np.flatnonzero(self._decided))
        self._first = [Queue(due.call, answers[due.call], due.keys) for due in first]
        self._extend_prefix()

    def take(self, limit: int) -> list[Due]:
        if self.is_settled:
            return []
        due = []
        for queue in self._first:
            keys = queue.take(limit)
            if len(keys):
                limit -= len(keys)
                due.append(Due(queue.call, keys))
        return due

    def answered(self, call: int, keys: Int64s) -> tuple[list[Due], Int64s]:
        if self.is_settled:
            return [], np.zeros(0, dtype=np.int64)
        affected = []
        for stage, filter_ in enumerate(self._filters):
            if filter_.call == call:
                rows = self._rows_by_key[stage].rows(keys)
                affected.append(rows[(self._stage[rows] == stage) & ~self._decided[rows]])
        if not affected:
            return [], np.zeros(0, dtype=np.int64)
        rows = np.concatenate(affected)
        due = self._advance(rows)
        self._extend_prefix()
        released = self._released(rows[self._decided[rows]])
        return ([] if self._is_over() else due), released

    def num_uses(self, documents: Int64s) -> Int64s:
        uses: Int64s = np.zeros(len(documents), dtype=np.int64)
        is_counted = documents < len(self._uses)
        uses[is_counted] = self._uses[documents[is_counted]]
        return uses

    @property
    def num_passed(self) -> int:
        """Rows that passed in front of the first undecided one, as long as there is a row limit."""
        return self._num_passed_in_prefix

    @property
    def is_settled(self) -> bool:
        return self._is_over()

    def _is_over(self) -> bool:
        enough = self._row_limit is not None and self._num_passed_in_prefix >= self._row_limit
        return enough or self._num_open == 0

    def evaluations(self) -> list[tuple[int, int, int]]:
        found = []
        for stage, filter_ in enumerate(self._filters):
            reached = self._stage >= stage
            num_null = int(np.count_nonzero(reached & (filter_.keys < 0)))
            found.append((filter_.call, int(np.count_nonzero(reached)), num_null))
        return found

    def _advance(self, rows: Int64s) -> list[Due]:
        """Moves rows on as far as answers reach; returns unasked questions at which they stop."""
        due = []
        for stage, filter_ in enumerate(self._filters):
            here = rows[self._stage[rows] == stage]
            if not len(here):
                continue
            keys = filter_.keys[here]
            answers = self._answers[filter_.call]
            is_null = keys < 0
            is_known = ~is_null
            is_known[is_known] = answers.is_answered(keys[is_known])
            passes = is_known.copy()
            passes[is_known] = answers.truth[keys[is_known]] == filter_.passing
            self._decide(here[is_null | (is_known & ~passes)], passed=False)
            going = here[passes]
            if stage + 1 == len(self._filters):
                self._decide(going, passed=True)
            else:
                self._stage[going] = stage + 1
            rows = rows[~self._decided[rows]]
            asking = distinct_in_order(keys[~is_null & ~is_known])
            asking = asking[~answers.asked[asking]]
            if len(asking):
                due.append(Due(filter_.call, asking, stage))
        return due

    def _decide(self, rows: Int64s, *, passed: bool) -> None:
        self._decided[rows] = True
        self._passed[rows] = passed
        self._num_open -= len(rows)

    def _extend_prefix(self) -> None:
        """Counts passing rows in front of the first row that is undecided."""
        if self._row_limit is None:
            return
        step = 4096
        while self._prefix < len(self._decided):
            window = slice(self._prefix, self._prefix + step)
            undecided = np.flatnonzero(~self._decided[window])
            stop = self._prefix + (int(undecided[0]) if len(undecided) else step)
            self._num_passed_in_prefix += int(np.count_nonzero(self._passed[self._prefix : stop]))
            self._prefix = min(stop, len(self._decided))
            if len(undecided):
                break

    def _released(self, rows: Int64s) -> Int64s:
        """Documents of rows just decided that nobody reads from now on."""
        if not len(rows):
            return np.zeros(0, dtype=np.int64)
        handles = self._handles(rows[~self._passed[rows]] if self._keeps_passed else rows)
        np.subtract.at(self._uses, handles, 1)
        handles = distinct(handles)
        unused: Int64s = handles[self._uses[handles] == 0]
        return unused

    def _handles(self, rows: Int64s) -> Int64s:
        """Documents of some rows, one for each row that reads it."""
        if not self._documents:
            return np.zeros(0, dtype=np.int64)
        handles = np.concatenate([column[rows] for column in self._documents]).astype(np.int64)
        return handles[handles >= 0]


class Inverse:
    """From keys to the rows that hold them."""

    def __init__(self, keys: Int64s, num_keys: int) -> None:
        self._order = np.argsort(keys, kind="stable")
        self._starts = np.searchsorted(keys[self._order], np.arange(num_keys + 1))

    def rows(self, keys: Int64s) -> Int64s:
        """All rows that hold any of the keys."""
        keys = keys[keys < len(self._starts) - 1]
        starts, counts = self._starts[keys], self._starts[keys + 1] - self._starts[keys]
        if (counts == 1).all():
            return self._order[starts]
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows: Int64s = self._order[np.repeat(starts, counts) + offsets]
        return rows
