"""Passes that were started and not yet collected.

While the device runs one, the host packs and starts the next: the device never waits for the host, and a
question that follows from an answer runs two passes behind it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quail.execution.packing import Pass
from quail.execution.reads import Model, Pending, Read
from quail.execution.stages import Float32s, Stage

MASS_ROWS = 16
"""Rows at which the probability of a question's answers is looked at."""


@dataclass(frozen=True, eq=False)
class Collected:
    """A pass that ran.

    Attributes:
        planned: the pass.
        answers: the answer logits of each request in it, as its stage reads them.
        masses: for each stage looked at, the mean share of the probability that its answers hold.
        seconds: while it was the oldest in flight.
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


class PassesInFlight:
    """The passes of a run between start and answers, in order.

    Args:
        model: runs them.
        stages: of the run.
        depth: most passes in flight.

    Attributes:
        num_rows: rows of the pass that was started or waited for last.
    """

    def __init__(self, model: Model, stages: Sequence[Stage], depth: int) -> None:
        assert depth > 0
        self._model, self._stages, self._depth = model, stages, depth
        self._flying: deque[tuple[PassReads, Pending, float]] = deque()
        self._watched: set[Stage] = set()
        self._collected_at = 0.0
        self.num_rows = 0

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._flying)

    @property
    def is_full(self) -> bool:
        """Whether one must be collected before the next is started."""
        return len(self._flying) >= self._depth

    def start(self, planned: Pass) -> None:
        """Starts a pass behind those in flight."""
        started, self.num_rows = time.perf_counter(), len(planned.chunk)
        reads = PassReads(planned, self._stages, self._watched)
        self._flying.append((reads, self._model.start(planned.chunk, reads.reads), started))
        self._watched.update(reads.looked_at)

    def collect(self) -> Collected:
        """Waits for the oldest."""
        reads, pending, started = self._flying[0]
        self.num_rows = len(reads.planned.chunk)
        found = pending.answers()
        answers, masses = reads.answers(found), reads.masses(found)
        self._flying.popleft()
        before, self._collected_at = self._collected_at, time.perf_counter()
        return Collected(reads.planned, answers, masses, self._collected_at - max(started, before))

    def drop(self) -> None:
        """Forgets those in flight; nobody waits for their answers."""
        for reads, _, _ in self._flying:
            self._watched.difference_update(reads.looked_at)
        self._flying.clear()
