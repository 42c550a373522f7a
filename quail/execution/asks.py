"""What the relational side and the answering side say to each other.

The relational side knows rows, columns and SQL's logic; the answering side knows documents, tokens and KV.
Between them run only batches of questions (`Asks`) one way and batches of values the other. Whoever answers -
the engine, or a stub that reads a stored table - runs the loop:

    while not feed.done:
        asks = feed.take(limit) ...
        follow_up = feed.answered(call, keys, values)

Everything is an array: a million rows must not be a million Python objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quail.arrays import of_numbers
from quail.plan.logical import AICall

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Asks:
    """A batch of questions of one call, in the order in which they should be admitted.

    Attributes:
        call: index of the call in the plan.
        keys: (n,) one number per distinct (call, argument values), unique within the call and the run.
        arguments: one string array of length n per argument of the call. No NULLs: a NULL argument is a NULL
            answer and is never asked.
        documents: (n,) handle of the document's text (the anchor's, of two): equal handles mean equal text,
            across all calls of the run, so the KV of one serves the other.
        may_follow: (n,) whether a later question of this run may read the same document, so that keeping its
            KV may pay. False everywhere in a filter with one question.
        rows: (n,) a row number of the source in which the question first stood, for messages.
        table: name of the source, for messages.
        partners: (n,) handle of the text that is not the anchor's; None for questions about one document.
        operator: number of the operator that asks; those that go on at the same time count as one. None where
            it is not known.
    """

    call: int
    keys: Int64s
    arguments: tuple[pa.Array, ...]
    documents: Int64s
    may_follow: Bools
    rows: Int64s
    table: str = ""
    partners: Int64s | None = None
    operator: int | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def taken(self, places: Int64s) -> Asks:
        """Some of the questions, in the order given."""
        at = of_numbers(places)
        return replace(
            self,
            keys=self.keys[places],
            arguments=tuple(argument.take(at) for argument in self.arguments),
            documents=self.documents[places],
            may_follow=self.may_follow[places],
            rows=self.rows[places],
            partners=None if self.partners is None else self.partners[places],
        )


def _no_documents() -> Int64s:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class FollowUp:
    """What some answers led to.

    Attributes:
        asks: questions that became due because of the answers (the next predicate of rows that passed).
        released: handles of documents that no later question of this run will read: their KV can go.
    """

    asks: tuple[Asks, ...] = ()
    released: Int64s = field(default_factory=_no_documents)


class Feed(Protocol):
    """The relational side of a run: which questions are due, given the answers so far."""

    @property
    def done(self) -> bool:
        """No answer is wanted any more: none is outstanding and none will come, or enough is known (a row
        limit).
        """

    @property
    def num_documents(self) -> int | None:
        """Upper bound of fresh documents of the run, for progress; None while unknown."""

    @property
    def row_limited(self) -> bool:
        """Whether a row limit ends the run early: then fresh documents are answered in the order given."""

    def take(self, limit: int) -> tuple[Asks, ...]:
        """Up to `limit` fresh questions, never one that was given before; empty when all depend on
        answers.
        """

    def answered(self, call: int, keys: Int64s, values: pa.Array) -> FollowUp:
        """Takes the answers of questions of one call.

        Args:
            call: index of the call.
            keys: (n,) as in `Asks.keys`, in any order, each once.
            values: (n,) of the call's result type; NULL where the row failed and the run goes on.
        """


@dataclass
class RunControl:
    """How a run is watched and stopped.

    Attributes:
        on_progress: called after each pass with `documents` finished, `num_documents` (an upper bound, or
            None), `tokens` computed, `passes` and `seconds` since the start; what it raises ends the run.
        cancelled: asked before each pass; True stops the run with `QueryCancelled`.
        on_interruptible: told how to stop work that does not ask `cancelled`.
        on_long: `'error'` or `'truncate'`, for documents longer than the model's context.
        on_error: `'raise'` stops at the first row that cannot be answered; `'null'` answers it with NULL,
            counts it and lists the first ones; `'details'` lists all.
        max_error_ratio: share of failed questions that stops the run with `TooManyErrors`, or None.
        audit: share of the questions that are asked again without reuse, 0 to 1.
        order: `'auto'` or `'as_written'`.
        exists_wave: pairs of one row that are asked at a time where the first match ends the search.
    """

    on_progress: Callable[[dict[str, Any]], None] | None = None
    cancelled: Callable[[], bool] = lambda: False
    on_interruptible: Callable[[Callable[[], None]], None] = lambda interrupt: None
    on_long: str = "error"
    on_error: str = "raise"
    max_error_ratio: float | None = None
    audit: float = 0.0
    order: str = "auto"
    exists_wave: int = 16


class Answerer(Protocol):
    """Answers questions: the engine, or a stub in tests."""

    def run(self, calls: tuple[AICall, ...], feed: Feed, control: RunControl) -> dict[str, Any]:
        """Answers until the feed is done; returns its part of the report (tokens, passes, memory,
        seconds).
        """
