"""Some answers of a run are computed again, alone and without any reuse, and compared.

Which ones is decided by the tokens of the prompt, so that order, batch and other questions do not matter.
Each is a document of its own in passes of its own: no shared beginning, no retained KV, no neighbour.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from quail.execution.packing import Pass
from quail.execution.readout import values_of
from quail.execution.requests import Document, Failure, Request
from quail.execution.scheduler import Scheduler
from quail.execution.stages import Float32s, Stage
from quail.kv.pages import pages_for
from quail.plan.logical import AICall, Operator

RELATIVE_TOLERANCE = {"float32": 1e-4}
"""Of the largest logit's size: five times what packing and reuse may move float32 logits by."""

ABSOLUTE_TOLERANCE = 0.25
"""In other formats: what rounding alone may move a logit by."""

Forward = Callable[[Pass, Sequence[Stage]], Sequence[Float32s]]


@dataclass
class AuditReport:
    """What an audit found.

    Attributes:
        audited: answers that were computed again.
        greatest_gap: largest difference of a logit (of label questions: of a log-probability).
        tolerance: what was allowed where the gap was greatest beside it.
        beyond_tolerance: answers that differ by more than is allowed.
        flips: answers that came out otherwise, before calibration.
        audit_tokens: tokens computed for it; they are in no other count.
        seconds: time taken by it.
    """

    audited: int = 0
    greatest_gap: float = 0.0
    tolerance: float = 0.0
    beyond_tolerance: int = 0
    flips: int = 0
    audit_tokens: int = 0
    seconds: float = 0.0


class Audit:
    """The audit of one run.

    Args:
        share: of the questions, 0 to 1.
        stages: of the run.
        scheduler: of the run: most rows a pass, and the pool that gives way to documents longer than a pass.
        dtype: of products, as the report names it.
        forward: runs a pass for some stages; returns the answer of each request in it.
        wait: waits for passes in flight, whose time is not the audit's.
    """

    def __init__(
        self,
        share: float,
        stages: Sequence[Stage],
        *,
        scheduler: Scheduler,
        dtype: str,
        forward: Forward,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.report = AuditReport()
        self.warning: str | None = None
        self._stages, self._scheduler, self._forward = stages, scheduler, forward
        self._wait = wait
        self._threshold = int(share * 2**64)
        self._relative_tolerance = RELATIVE_TOLERANCE.get(dtype)
        self._waiting: list[tuple[Request, Float32s]] = []

    def check(self, answered: Sequence[Request], answers: Sequence[Float32s]) -> None:
        """Computes some answers of a pass again; those that need pages wait for `finish`."""
        for request, answer in zip(answered, answers, strict=True):
            if not np.isfinite(answer).all() or _number_of(request) >= self._threshold:
                continue
            if request.prefix_tokens + request.num_own_tokens <= self._scheduler.token_budget:
                self._compare(request, answer)
            else:
                self._waiting.append((request, answer))

    def finish(self) -> None:
        """Computes what waits; the run holds no pages any more. Warns if an answer was wrong."""
        for request, answer in self._waiting:
            self._compare(request, answer)
        self._waiting.clear()
        if self.warning is not None:
            found = self.report
            self.warning = (
                f"the audit found {found.beyond_tolerance:,} of {found.audited:,} answers that differ from "
                f"the same question asked alone, by up to {found.greatest_gap:.3g} (allowed "
                f"{found.tolerance:.2g}), "
                f"and {found.flips:,} that came out otherwise; the first: {self.warning}. Do not trust this "
                "result; EngineConfig(prefix_sharing='off', retention='off') reuses less"
            )
            warnings.warn(self.warning, UserWarning, stacklevel=2)

    def _compare(self, request: Request, answer: Float32s) -> None:
        self._wait()
        started = time.perf_counter()
        stage, found = self._stages[request.stage], self.report
        alone, num_tokens = self._alone(request, stage)
        found.audit_tokens += num_tokens
        if alone is not None:
            gap = float(np.abs(answer - alone).max())
            tolerance = self._tolerance(answer, alone)
            is_beyond = not gap <= tolerance  # NaN is beyond any
            found.audited += 1
            found.flips += _decision(stage.call, answer) != _decision(stage.call, alone)
            found.beyond_tolerance += is_beyond
            if is_beyond and self.warning is None:
                self.warning = f"{request.document.name}, {stage.call.text}"
            if not gap < found.greatest_gap:
                found.greatest_gap, found.tolerance = gap, tolerance
        found.seconds += time.perf_counter() - started

    def _alone(self, request: Request, stage: Stage) -> tuple[Float32s | None, int]:
        """The answer of a request without any reuse, and the tokens computed for it; None without room."""
        num_tokens = request.prefix_tokens + request.num_own_tokens
        if num_tokens > self._scheduler.token_budget:
            self._scheduler.pool.make_room(pages_for(num_tokens, self._scheduler.pages.page_tokens))
        scheduler = Scheduler(
            self._scheduler.pages,
            token_budget=self._scheduler.token_budget,
            longest_suffix_tokens=request.num_own_tokens,
            longest_frame_tokens=len(request.frame),
        )
        ids = request.document.ids[: request.prefix_tokens - len(request.frame)]
        document = Document(0, ids, name=f"audited {request.document.name}")
        scheduler.add(document)
        scheduler.submit(
            replace(request, document=document, stage=0, suffix_done=0, prefix_computed=0, recomputed=0)
        )
        answers: list[Float32s] = []
        try:
            while (planned := scheduler.next_pass()) is not None:
                if isinstance(planned, Failure):
                    return None, 0
                answers += self._forward(planned, [stage])
                scheduler.complete()
        finally:
            scheduler.abandon()
        return answers[0], num_tokens

    def _tolerance(self, answer: Float32s, alone: Float32s) -> float:
        if self._relative_tolerance is None:
            return ABSOLUTE_TOLERANCE
        return self._relative_tolerance * max(1.0, float(np.abs(answer).max()), float(np.abs(alone).max()))


def _number_of(request: Request) -> int:
    """A number below 2**64 that depends on the tokens of a prompt and on nothing else."""
    digest = hashlib.blake2b(digest_size=8)
    num_own = request.prefix_tokens - len(request.frame)
    branches = [branch.ids for branch in request.branches]
    for ids in (request.document.ids[:num_own], request.frame, request.suffix, *branches):
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(ids).tobytes())
    return int.from_bytes(digest.digest(), "little")


def _decision(call: AICall, answer: Float32s) -> Any:
    """What an answer comes to: its value where it is a choice, else the most probable answer."""
    if call.operator in (Operator.IF, Operator.CLASSIFY):
        values: pa.Array = values_of(call, answer[None, :])
        return values[0].as_py()
    return int(answer.argmax())
