"""A model that answers late, as a device does: passes run in order, and only when an answer is waited for."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from quail.execution.chunk import Chunk
from quail.execution.reads import Float32s, Pending, Read


class Deferred:
    """Wraps a model. Passes whose answers nobody can ask for any more never run: their KV is never written.

    Attributes:
        most_in_flight: passes that were started and not asked for, at most.
        num_run: passes that ran.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.started: deque[weakref.ref[Later]] = deque()
        self.most_in_flight = self.num_run = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def start(self, chunk: Chunk, reads: Sequence[Read]) -> Pending:
        later = Later(self, chunk, reads)
        self.started.append(weakref.ref(later))
        self.most_in_flight = max(self.most_in_flight, sum(each() is not None for each in self.started))
        return later


class Ordered(Deferred):
    """Wraps a model. Passes whose answers nobody asks for run all the same, late but in order, as on a card: what
    they write goes to pages that may be others' by then.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._held: list[Later] = []

    def start(self, chunk: Chunk, reads: Sequence[Read]) -> Pending:
        later = super().start(chunk, reads)
        assert isinstance(later, Later)
        self._held.append(later)
        return later


class Later:
    """A pass that was started, and runs when it or one behind it is waited for."""

    def __init__(self, owner: Deferred, chunk: Chunk, reads: Sequence[Read]) -> None:
        self._owner, self._chunk, self._reads = owner, chunk, reads
        self._found: list[Float32s] | None = None

    def answers(self) -> list[Float32s]:
        while self._found is None:
            oldest = self._owner.started.popleft()()
            if oldest is not None:
                oldest.run()
        return self._found

    def run(self) -> None:
        self._owner.num_run += 1
        self._found = self._owner.model.start(self._chunk, self._reads).answers()
