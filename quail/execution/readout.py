"""Answer logits to SQL values."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quail.arrays import of_numbers, of_texts
from quail.plan.logical import AICall, Operator


def value_type(call: AICall) -> pa.DataType:
    """The Arrow type of a call's result."""
    return {
        Operator.IF: pa.bool_(),
        Operator.SCORE: pa.float64(),
        Operator.CLASSIFY: pa.string(),
        Operator.PROBABILITIES: pa.map_(pa.string(), pa.float64()),
    }[call.operator]


def values_of(call: AICall, logits: npt.NDArray[np.float32] | None) -> pa.Array:
    """The values of a call.

    Args:
        call: what was asked.
        logits: float32, finite: (n, 2) logits of two answers, the one that means TRUE first, or (n, labels)
            log-probabilities; None for a single NULL.

    Returns:
        (n,) values. AI.IF is TRUE where the first logit is greater, in float32; a tie is FALSE. AI.SCORE is
        the softmax of the two. AI.CLASSIFY is the most probable label, of equals the earlier.
    """
    if logits is None:
        return pa.nulls(1, value_type(call))
    assert logits.dtype == np.float32
    if call.operator is Operator.IF:
        margin = logits[:, 0] - logits[:, 1]
        return of_numbers(margin > _log_odds(call.options.threshold))
    if call.operator is Operator.SCORE:
        margin = (logits[:, 0] - logits[:, 1]).astype(np.float64)
        return of_numbers(np.exp(-np.logaddexp(0.0, -margin)))
    labels = of_texts([category.label for category in call.categories])
    if call.operator is Operator.CLASSIFY:
        return labels.take(of_numbers(logits.argmax(axis=1)))
    return _probabilities(labels, logits)


def calibrated(logits: npt.NDArray[np.float32], mean: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Answers with a mean subtracted: of log-odds (of two answers) or of log-probabilities (of labels).

    Contextual calibration, arXiv:2102.09690, in log space; with the mean over the run's own documents batch
    calibration, arXiv:2309.17249.
    """
    found: npt.NDArray[np.float32] = (logits - mean).astype(np.float32)
    return found


def _log_odds(threshold: float | None) -> float:
    """The margin of two logits above which the first has more than `threshold` of their probability."""
    if threshold is None or threshold == 0.5:
        return 0.0
    if threshold in (0.0, 1.0):
        return math.inf if threshold else -math.inf
    return math.log(threshold / (1.0 - threshold))


def _probabilities(labels: pa.Array, logits: npt.NDArray[np.float32]) -> pa.Array:
    """(n,) maps from label to probability, each summing to 1."""
    num_rows, num_labels = logits.shape
    raw = np.exp(logits.astype(np.float64))
    shares = raw / raw.sum(axis=1, keepdims=True)
    keys = labels.take(of_numbers(np.tile(np.arange(num_labels), num_rows)))
    offsets = of_numbers(np.arange(0, (num_rows + 1) * num_labels, num_labels, dtype=np.int32))
    return pa.MapArray.from_arrays(offsets, keys, of_numbers(shares.ravel()))
