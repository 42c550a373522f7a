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


def pair_question(index: int, template: tuple, *, anchor: int = 0, operator=Operator.SCORE) -> AICall:
    """A call over two documents; 0 and 1 stand in `template` where they belong."""
    return AICall(index, operator, Prompt(template), text=f"AI.IF({template!r})", anchor=anchor)


class PairFeed:
    """All pairs of anchors and partners for each call in turn, anchor by anchor."""

    row_limited = False

    def __init__(self, anchors, partners, calls) -> None:
        self.sides, self.calls = (anchors, partners), calls
        self.pairs = [
            (call.index, a, p)
            for call in calls
            for a in range(len(self.sides[call.anchor]))
            for p in range(len(self.sides[1 - call.anchor]))
        ]
        self.position = 0
        self.values: dict[tuple[int, int, int], object] = {}
        self.last = {(c, a): place for place, (c, a, p) in enumerate(self.pairs)}

    @property
    def done(self) -> bool:
        return len(self.values) == len(self.pairs)

    @property
    def num_documents(self) -> int:
        return len(self.sides[0])

    def _handle(self, side: int, row: int) -> int:
        return row if side == 0 else 10_000 + row

    def take(self, limit: int):
        start, self.position = self.position, min(len(self.pairs), self.position + limit)
        batches = []
        for call in self.calls:
            some = [
                (i, *self.pairs[i]) for i in range(start, self.position) if self.pairs[i][0] == call.index
            ]
            if not some:
                continue
            anchors = [a for _, _, a, _ in some]
            partners = [p for _, _, _, p in some]
            texts = [
                pa.array([self.sides[call.anchor][a] for a in anchors], pa.string()),
                pa.array([self.sides[1 - call.anchor][p] for p in partners], pa.string()),
            ]
            follows = [self.last[c, a] > i or call is not self.calls[-1] for i, c, a, _ in some]
            batches.append(
                Asks(
                    call=call.index,
                    keys=np.array([i for i, *_ in some]),
                    arguments=tuple(texts if call.anchor == 0 else texts[::-1]),
                    documents=np.array([self._handle(call.anchor, a) for a in anchors]),
                    may_follow=np.array(follows),
                    rows=np.array(anchors),
                    table="t",
                    partners=np.array([self._handle(1 - call.anchor, p) for p in partners]),
                )
            )
        return tuple(batches)

    def answered(self, call: int, keys, values) -> FollowUp:
        released = []
        for key, value in zip(keys.tolist(), values.to_pylist(), strict=True):
            c, a, p = self.pairs[key]
            self.values[c, a, p] = value
            if self.last[c, a] == key and c == self.calls[-1].index:
                released.append(self._handle(self.calls[c].anchor, a))
        return FollowUp((), np.array(released, dtype=np.int64))
