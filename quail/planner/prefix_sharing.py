"""Rule: documents that begin alike share KV when the compute saved exceeds the cost of extra KV writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quail.cost.budgets import ModelShape
from quail.cost.roofline import Rates, seconds
from quail.cost.work import Work
from quail.kv.prefix_sharing import PrefixTree


@dataclass(frozen=True)
class SharingDecision:
    """Whether documents share, and the numbers behind it.

    Attributes:
        shares: the decision.
        mode: `auto`, `on` or `off`, as configured.
        document_tokens: tokens of all distinct documents.
        shared_tokens: tokens that need not be computed when shared.
        written_tokens: tokens whose KV is written only because of sharing.
        saved_seconds: compute that sharing saves.
        write_seconds: what the extra writes cost.
        reason: in words.
    """

    shares: bool
    mode: str
    document_tokens: int
    shared_tokens: int
    written_tokens: int
    saved_seconds: float
    write_seconds: float
    reason: str


def decide(
    tree: PrefixTree,
    lengths: Sequence[int] | npt.NDArray[np.int64],
    kept: Sequence[bool] | npt.NDArray[np.bool_],
    *,
    shape: ModelShape,
    rates: Rates,
    mode: str = "auto",
    row_limited: bool = False,
) -> SharingDecision:
    """Decides for one set of documents.

    Args:
        tree: their sharing plan.
        lengths: tokens of each document.
        kept: whether its KV is written anyway; then lending it costs nothing more.
        shape: the model.
        rates: the device.
        mode: `auto` compares costs; `on` and `off` decide.
        row_limited: whether the rows must be answered in order because a limit ends the run early.
    """
    saved = Work()
    lent = np.zeros(len(lengths), dtype=np.int64)
    for parent, shared in zip(tree.parent, tree.shared, strict=True):
        if parent is not None:
            saved += Work(tokens=shared, pairs=shared * (shared + 1) / 2)
            lent[parent] = max(lent[parent], shared)
    owned = np.maximum(0, lent - np.asarray(tree.shared, dtype=np.int64))
    written = int(owned[~np.asarray(kept, dtype=bool)].sum())
    saved_seconds = seconds(saved, shape, rates).total
    write_seconds = seconds(Work(kv_written=written), shape, rates).total
    shares, reason = _verdict(int(saved.tokens), saved_seconds, write_seconds, mode, row_limited)
    return SharingDecision(
        shares, mode, int(sum(lengths)), int(saved.tokens), written, saved_seconds, write_seconds, reason
    )


def _verdict(
    shared_tokens: int, saved_seconds: float, write_seconds: float, mode: str, row_limited: bool
) -> tuple[bool, str]:
    if row_limited:
        return False, "off: a row limit keeps the order of rows"
    if mode != "auto":
        return mode == "on", f"{mode}: configured"
    if not shared_tokens:
        return False, "off: no document begins like another for a whole page"
    costs = f"saves {saved_seconds:.3g} s of compute, costs {write_seconds:.3g} s of extra KV writes"
    return saved_seconds > write_seconds, f"{'on' if saved_seconds > write_seconds else 'off'}: {costs}"
