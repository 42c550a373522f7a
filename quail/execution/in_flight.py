"""Passes that were started and not yet collected.

While the device runs one, the host packs and starts the next: the device never waits for the host, and a
question that follows from an answer runs two passes behind it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quail.execution.packing import Pass
from quail.execution.reads import Model, Pending, Read
from quail.execution.stages import Float32s, Stage

MASS_ROWS = 8
"""Rows at which the probability of a question's answers is looked at."""


@dataclass(frozen=True, eq=False)
class Collected:
    """A pass that ran.

    Attributes:
        planned: the pass.
        answers: the answer logits of each request in it, as its stage reads them.
        masses: for each stage looked at, the mean share of the probability that its answers hold.
        seconds: that the host spent starting it and waiting for it; while it does something else, the device
            may be at work.
    """

    planned: Pass
    answers: list[Float32s]
    masses: list[tuple[Stage, float]]
    seconds: float


class PassReads:
    """What is read of a pass, and how it becomes answers.

    Args:
        planned: the pass.
        stages: of the run; requests name theirs by index.
        watched: stages whose answers' probability was looked at before; None looks at none.

    Attributes:
        reads: what the model is asked for.
        looked_at: stages whose answers' probability is among it.
    """

    def __init__(self, planned: Pass, stages: Sequence[Stage], watched: set[Stage] | None = None) -> None:
        self.planned = planned
        self.reads: list[Read] = []
        self._groups: list[tuple[Stage, list[int]]] = []
        self.looked_at: list[Stage] = []
        first_reads = np.array(planned.first_reads, dtype=np.int64)
        masses: list[Read] = []
        for index in {request.stage for request in planned.answered}:
            places = [place for place, request in enumerate(planned.answered) if request.stage == index]
            stage, rows = stages[index], first_reads[places]
            wanted = stage.readout.wanted
            self.reads += [Read(rows + node, vocab_ids) for node, vocab_ids in enumerate(wanted)]
            self._groups.append((stage, places))
            if watched is not None and stage not in watched and len(wanted[0]):
                masses.append(Read(rows[:MASS_ROWS], wanted[0], is_mass=True))
                self.looked_at.append(stage)
        self.reads += masses

    def answers(self, found: Sequence[Float32s]) -> list[Float32s]:
        """The answer logits of each request, from an array for each read."""
        answers: list[Float32s] = [np.zeros(0, dtype=np.float32)] * len(self.planned.answered)
        arrays = iter(found)
        for stage, places in self._groups:
            logits = [next(arrays) for _ in stage.readout.wanted]
            for place, answer in zip(places, stage.readout.answers(logits), strict=True):
                answers[place] = answer
        return answers

    def masses(self, found: Sequence[Float32s]) -> list[tuple[Stage, float]]:
        """Each stage looked at, with the mean share of the probability that its answers hold."""
        arrays = found[len(found) - len(self.looked_at) :]
        return [(stage, float(array.mean())) for stage, array in zip(self.looked_at, arrays, strict=True)]


def run_alone(model: Model, planned: Pass, stages: Sequence[Stage]) -> list[Float32s]:
    """Starts a pass, waits for it, and returns the answer logits of each request in it."""
    reads = PassReads(planned, stages)
    return reads.answers(model.start(planned.chunk, reads.reads).answers())


class _Flight:
    """A pass between start and answers.

    Attributes:
        reads: what is read of it.
        most_rows: of it and of those that were in flight as it was started, whose memory it shares.
        seconds: that the host spent starting it and waiting for it.
    """

    def __init__(self, reads: PassReads, others: Iterable[_Flight]) -> None:
        self.reads = reads
        rows = len(reads.planned.chunk)
        self.most_rows = max([rows, *(len(other.reads.planned.chunk) for other in others)])
        self.seconds = 0.0
        self._pending: Pending | None = None
        self._found: list[Float32s] | None = None
        self._error: Exception | None = None

    def start(self, model: Model) -> None:
        started = time.perf_counter()
        self._pending = model.start(self.reads.planned.chunk, self.reads.reads)
        self.seconds += time.perf_counter() - started

    def wait(self) -> bool:
        """Waits for it; whether it ran well."""
        assert self._pending is not None, "a pass that was not started is waited for"
        started = time.perf_counter()
        try:
            if self._found is None and self._error is None:
                self._found = self._pending.answers()
        except Exception as error:
            self._error = error
        self.seconds += time.perf_counter() - started
        return self._error is None

    def collected(self) -> Collected:
        """Waits for it, and reads its answers."""
        self.wait()
        if self._error is not None:
            raise self._error
        assert self._found is not None
        started = time.perf_counter()
        answers, masses = self.reads.answers(self._found), self.reads.masses(self._found)
        seconds = self.seconds + time.perf_counter() - started
        return Collected(self.reads.planned, answers, masses, seconds)


class PassesInFlight:
    """The passes of a run between start and answers, in order.

    Args:
        model: runs them.
        stages: of the run.
        depth: most passes in flight.
    """

    def __init__(self, model: Model, stages: Sequence[Stage], depth: int) -> None:
        assert depth > 0
        self._model, self._stages, self._depth = model, stages, depth
        self._flying: deque[_Flight] = deque()
        self._watched: set[Stage] = set()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._flying)

    @property
    def is_full(self) -> bool:
        """Whether one must be collected before the next is started."""
        return len(self._flying) >= self._depth

    @property
    def most_rows(self) -> int:
        """Rows of the largest, or of a larger one that was in flight as one of them was started.

        One that could not be started is among them.
        """
        return max((flight.most_rows for flight in self._flying), default=0)

    def start(self, planned: Pass) -> None:
        """Starts a pass behind those in flight."""
        reads = PassReads(planned, self._stages, self._watched)
        self._flying.append(_Flight(reads, self._flying))
        self._flying[-1].start(self._model)
        self._watched.update(reads.looked_at)

    def collect(self) -> Collected:
        """Waits for the oldest."""
        found = self._flying[0].collected()
        self._flying.popleft()
        return found

    def wait(self) -> None:
        """Waits for all of them, so that what is timed next has none of their time. What fails is raised when
        it is collected.
        """
        for flight in self._flying:
            if not flight.wait():
                break

    def drop(self) -> None:
        """Forgets those in flight; nobody waits for their answers."""
        for flight in self._flying:
            self._watched.difference_update(flight.reads.looked_at)
        self._flying.clear()
