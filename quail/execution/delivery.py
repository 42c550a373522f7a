"""Answers out: logits become values of their call and go to the feed, at once or once their mean is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from quail.execution.asks import Feed, FollowUp
from quail.execution.calibration import HeldAnswers, Means, stage_key
from quail.execution.readout import calibrated, values_of
from quail.execution.stages import Float32s, Int64s, Stage


class Delivery:
    """Hands answers to a feed.

    Args:
        stages: of the run.
        feed: the relational side.
        means: answers on content-free documents, subtracted where a call says so.
    """

    def __init__(self, stages: Sequence[Stage], feed: Feed, means: Means) -> None:
        self._stages, self._feed, self._means = stages, feed, means
        self._held = HeldAnswers()

    @property
    def holds_answers(self) -> bool:
        """Whether answers wait for their mean."""
        return bool(self._held)

    def deliver(self, index: int, keys: Int64s, logits: Float32s) -> FollowUp:
        """Hands over answers of one call, or holds them for their mean.

        Args:
            index: of the call.
            keys: (n,) its questions.
            logits: (n, answers), finite.
        """
        call = self._stages[index].call
        if call.options.calibrate == "batch":
            self._held.add(index, keys, logits)
            return FollowUp()
        if call.options.calibrate == "content":
            logits = calibrated(logits, self._means[stage_key(self._stages[index])])
        return self._feed.answered(index, keys, values_of(call, logits))

    def deliver_held(self) -> Iterator[FollowUp]:
        """Hands over what waited: no question is left that could run, so the means are complete."""
        for index, keys, logits, mean in self._held.take():
            yield self._feed.answered(
                index, keys, values_of(self._stages[index].call, calibrated(logits, mean))
            )

    def deliver_null(self, index: int, key: int) -> FollowUp:
        """Answers a question of a call with NULL."""
        null = values_of(self._stages[index].call, None)
        return self._feed.answered(index, np.array([key], dtype=np.int64), null)
