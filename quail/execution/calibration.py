"""What a model leans to before it reads a document, so that it can be subtracted.

`content` measures a question once on documents without content; `batch` takes the mean over the run's own
documents, which needs all their answers before the first can be given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from quail.errors import PlanError
from quail.execution.packing import Pass
from quail.execution.requests import Document, Failure, Request
from quail.execution.scheduler import Scheduler
from quail.execution.stages import Stage
from quail.kv.retention import RetentionPool

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

CONTENT_FREE = ("N/A", "", "[MASK]")
"""Documents without content, as in contextual calibration (arXiv:2102.09690)."""

Means = dict[tuple[bytes, ...], Float32s]


def stage_key(stage: Stage) -> tuple[bytes, ...]:
    """What answers depend on beside documents: the fixed ids of a question, what is read, and as what."""
    branches = tuple(branch.ids.tobytes() for branch in stage.branches)
    wanted = tuple(ids.tobytes() for ids in stage.readout.wanted)
    return (stage.frame.tobytes(), stage.tail.tobytes(), *branches, *wanted, stage.readout.meaning)


def content_mean(
    stage: Stage,
    documents: Sequence[Int32s],
    partners: Sequence[Int32s],
    *,
    pool: RetentionPool,
    token_budget: int,
    forward: Callable[[Pass], Sequence[Float32s]],
) -> tuple[Float32s, int]:
    """Mean answer of a question over content-free documents.

    Args:
        stage: the question.
        documents: prefix ids of the documents.
        partners: ids of a partner for each, empty arrays without partners.
        pool: of the arena; gives way if pages are short.
        token_budget: most rows a pass.
        forward: runs a pass, returns the answer of each request in it.

    Returns:
        The mean, and the tokens computed for it.

    Raises:
        PlanError: the arena is too small, or the logits are not finite.
    """
    scheduler = Scheduler(
        pool.pages,
        token_budget=token_budget,
        longest_suffix_tokens=stage.num_own_tokens,
        longest_frame_tokens=len(stage.frame),
        pool=pool,
    )
    for index, (ids, partner) in enumerate(zip(documents, partners, strict=True)):
        document = Document(index, ids, name="content-free document")
        scheduler.add(document)
        suffix = np.concatenate([partner, stage.tail])
        prefix_tokens = len(ids) + len(stage.frame)
        scheduler.submit(Request(document, 0, index, suffix, prefix_tokens, stage.frame, stage.branches))
    answers: list[Float32s] = []
    try:
        while (planned := scheduler.next_pass()) is not None:
            if isinstance(planned, Failure):
                raise PlanError(f"no room to calibrate {stage.call.text}: {planned.reason}")
            answers += forward(planned)
            scheduler.complete()
    finally:
        scheduler.abandon()
    mean: Float32s = np.mean(answers, axis=0, dtype=np.float32)
    if not np.isfinite(mean).all():
        raise PlanError(
            f"the model's logits on content-free documents are not finite: {stage.call.text}",
            hint="leave out calibrate, or set dtype = 'float32'",
        )
    return mean, scheduler.ledger.computed


class HeldAnswers:
    """Answers that wait for their mean, by call."""

    def __init__(self) -> None:
        self._keys: dict[int, list[Int64s]] = {}
        self._logits: dict[int, list[Float32s]] = {}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def add(self, call: int, keys: Int64s, logits: Float32s) -> None:
        """Holds answers of a call: (n,) keys and (n, answers) logits."""
        self._keys.setdefault(call, []).append(keys)
        self._logits.setdefault(call, []).append(logits)

    def take(self) -> list[tuple[int, Int64s, Float32s, Float32s]]:
        """(call, keys, logits, their mean) of every call held; nothing is held afterwards."""
        found = []
        for call, keys in self._keys.items():
            logits = np.concatenate(self._logits[call])
            mean: Float32s = logits.mean(axis=0, dtype=np.float64).astype(np.float32)
            found.append((call, np.concatenate(keys), logits, mean))
        self._keys.clear()
        self._logits.clear()
        return found
