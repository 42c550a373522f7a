"""A relational side for engine tests: texts that pass through questions in turn."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from quail.execution.asks import Asks, FollowUp
from quail.plan.logical import AICall, CallOptions, Operator, Prompt


def question(
    index: int, text: str, *, before: bool = False, answers=("TRUE", "FALSE"), operator=Operator.SCORE
) -> AICall:
    """A call over one document; AI.SCORE shows the margin, AI.IF only its sign."""
    parts = (text, 0) if before else (0, text)
    return AICall(
        index, operator, Prompt(parts), options=CallOptions(answers=answers), text=f"AI.IF({text!r})"
    )


class ChainFeed:
    """Each text is asked each question in turn as long as `passes` says so of the answer; NULL ends the
    chain."""

    def __init__(
        self, texts, num_questions: int, passes=lambda row, question, value: True, order=None, stop_after=None
    ):
        self.texts, self.num_questions, self.passes = texts, num_questions, passes
        self.order = np.arange(len(texts)) if order is None else np.asarray(order)
        self.answers: list[dict[int, object]] = [{} for _ in range(num_questions)]
        self.taken = self.outstanding = 0
        self.stop_after = stop_after

    @property
    def done(self) -> bool:
        return self._full or (self.outstanding == 0 and self.taken == len(self.texts))

    @property
    def _full(self) -> bool:
        return self.stop_after is not None and len(self.answers[-1]) >= self.stop_after

    @property
    def row_limited(self) -> bool:
        return self.stop_after is not None

    @property
    def num_documents(self) -> int:
        return len(self.texts)

    def _asks(self, rows, index: int) -> Asks:
        rows = np.asarray(rows, dtype=np.int64)
        self.outstanding += len(rows)
        return Asks(
            call=index,
            keys=rows,
            arguments=(pa.array([self.texts[row] for row in rows], pa.string()),),
            documents=rows,
            may_follow=np.full(len(rows), index + 1 < self.num_questions),
            rows=rows,
            table="t",
        )

    def take(self, limit: int):
        rows = [] if self._full else self.order[self.taken : self.taken + limit]
        self.taken += len(rows)
        return (self._asks(rows, 0),) if len(rows) else ()

    def answered(self, call: int, keys, values) -> FollowUp:
        self.outstanding -= len(keys)
        onward, released = [], []
        for key, value in zip(keys.tolist(), values.to_pylist(), strict=True):
            assert key not in self.answers[call], "a question was asked twice"
            self.answers[call][key] = value
            goes_on = value is not None and call + 1 < self.num_questions and self.passes(key, call, value)
            (onward if goes_on else released).append(key)
        asks = (self._asks(onward, call + 1),) if onward else ()
        return FollowUp(asks, np.array(released, dtype=np.int64))
