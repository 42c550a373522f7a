"""Questions that become due together, and the simplest of them: a wave of independent ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from quail.execution.answers import CallAnswers, distinct, distinct_in_order
from quail.execution.asks import Bools, Int64s


@dataclass(frozen=True)
class Due:
    """Questions of one call that are due.

    Attributes:
        call: the call.
        keys: in the order in which they should be asked.
        place: of their site in the group.
        may_follow: (keys,) whether the group may ask another question about the same document; None: it does
            not.
    """

    call: int
    keys: Int64s
    place: int = 0
    may_follow: Bools | None = None


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


class Inverse:
    """From keys to the rows that hold them."""

    def __init__(self, keys: Int64s, num_keys: int) -> None:
        self._order = np.argsort(keys, kind="stable")
        self._starts = np.searchsorted(keys[self._order], np.arange(num_keys + 1))

    def holds(self, keys: Int64s) -> Bools:
        """Whether a row holds each key."""
        found: Bools = np.zeros(len(keys), dtype=np.bool_)
        is_known = keys < len(self._starts) - 1
        known = keys[is_known]
        found[is_known] = self._starts[known + 1] > self._starts[known]
        return found

    def rows(self, keys: Int64s) -> Int64s:
        """All rows that hold any of the keys."""
        keys = keys[keys < len(self._starts) - 1]
        starts, counts = self._starts[keys], self._starts[keys + 1] - self._starts[keys]
        if (counts == 1).all():
            return self._order[starts]
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows: Int64s = self._order[np.repeat(starts, counts) + offsets]
        return rows
