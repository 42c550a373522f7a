"""An engine for tests: its answers come from a Python function."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from quail.errors import QueryCancelled
from quail.execution.asks import Asks, Feed, RunControl
from quail.plan.logical import AICall, Operator

Answer = Callable[[AICall, tuple[str, ...]], Any]

TYPES = {
    Operator.IF: pa.bool_(),
    Operator.SCORE: pa.float64(),
    Operator.CLASSIFY: pa.string(),
    Operator.PROBABILITIES: pa.map_(pa.string(), pa.float64()),
}


class StubEngine:
    """Answers by `answer(call, argument texts)` and remembers what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[tuple[int, tuple[str, ...]]] = []
        self.threads: set[int] = set()
        self.is_running = False

    def run(self, calls: tuple[AICall, ...], feed: Feed, control: RunControl) -> dict[str, Any]:
        assert not self.is_running, "two runs at once"
        self.is_running = True
        self.threads.add(threading.get_ident())
        try:
            self._answer_all(calls, feed, control)
        finally:
            self.is_running = False
        return {
            "tokens": {"naive": 10 * len(self.asked), "computed": 10 * len(self.asked)},
            "passes": 1,
            "seconds": {"tokenize": 0.0, "run": 0.1},
            "documents": len({arguments[0] for _, arguments in self.asked}),
        }

    def describe(self) -> dict[str, Any]:
        return {"model": "stub", "device": "cpu", "dtype": "float32"}

    def _answer_all(self, calls: tuple[AICall, ...], feed: Feed, control: RunControl) -> None:
        waiting: list[Asks] = []
        while not feed.done:
            if control.cancelled():
                raise QueryCancelled("cancelled")
            waiting.extend(feed.take(64))
            if not waiting:
                assert feed.done, "the feed is not done but asks nothing"
                break
            asks = waiting.pop(0)
            values = [
                self._answer(calls[asks.call], row)
                for row in zip(*(a.to_pylist() for a in asks.arguments), strict=True)
            ]
            array = pa.array(values, TYPES[calls[asks.call].operator])
            waiting.extend(feed.answered(asks.call, np.asarray(asks.keys), array).asks)
            if control.on_progress is not None:
                control.on_progress(
                    {"documents": len(self.asked), "num_documents": None, "tokens": 0, "passes": 1}
                )

    def _answer(self, call: AICall, arguments: tuple[str, ...]) -> Any:
        self.asked.append((call.index, arguments))
        return self.answer(call, arguments)
