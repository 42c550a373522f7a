"""Answer logits to SQL values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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
        logits: (n, answers) float32, finite, the answer that means TRUE first; None for a single NULL.

    Returns:
        (n,) values. AI.IF is TRUE where the first logit is greater, in float32; a tie is FALSE. AI.SCORE is
        the softmax of the two.
    """
    if logits is None:
        return pa.nulls(1, value_type(call))
    assert logits.dtype == np.float32
    margin = logits[:, 0] - logits[:, 1]
    if call.operator is Operator.IF:
        return pa.array(logits[:, 0] > logits[:, 1])
    assert call.operator is Operator.SCORE, f"{call.operator} is not read from two answers"
    return pa.array(1.0 / (1.0 + np.exp(-margin.astype(np.float64))))
