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

ROW_LIMIT = "a row limit keeps the order of rows"
FOLLOW_UP = "the documents become known one by one, as earlier answers come"


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
    obstacle: str | None = None,
    scale: float = 1.0,
) -> SharingDecision:
    """Decides for one set of documents.

    Args:
        tree: their sharing plan.
        lengths: tokens of each document.
        kept: whether its KV is written anyway; then lending it costs nothing more.
        shape: the model.
        rates: the device.
        mode: `auto` compares costs; `on` and `off` decide.
        obstacle: why these documents cannot be run in the order of a tree, such as `ROW_LIMIT`.
        scale: documents that each of these stands for, where they are a sample.
    """
    shared = np.asarray(tree.shared, dtype=np.int64)
    lent = np.zeros(len(shared), dtype=np.int64)
    children = np.flatnonzero(shared)
    np.maximum.at(
        lent, np.array([tree.parent[i] for i in children.tolist()], dtype=np.int64), shared[children]
    )
    owned = np.maximum(0, lent - shared)
    written = float(owned[~np.asarray(kept, dtype=bool)].sum()) * scale
    pairs = float((shared * (shared + 1.0) / 2).sum())
    saved = Work(tokens=float(shared.sum()), pairs=pairs) * scale
    saved_seconds = seconds(saved, shape, rates).total
    write_seconds = seconds(Work(kv_written=written), shape, rates).total
    shares, why = _verdict(mode, obstacle, saved.tokens > 0, saved_seconds > write_seconds)
    costs = f"saves {saved_seconds:.3g} s of compute, costs {write_seconds:.3g} s of extra KV writes"
    return SharingDecision(
        shares=shares,
        mode=mode,
        document_tokens=round(float(np.sum(lengths)) * scale),
        shared_tokens=round(saved.tokens),
        written_tokens=round(written),
        saved_seconds=saved_seconds,
        write_seconds=write_seconds,
        reason=f"{'on' if shares else 'off'}: {why}" + ("" if obstacle else costs),
    )


def _verdict(mode: str, obstacle: str | None, is_shared: bool, pays: bool) -> tuple[bool, str]:
    """Whether to share, and why, to be followed by the costs if nothing stands in the way."""
    if obstacle is not None:
        return False, obstacle
    if mode != "auto":
        return mode == "on", "configured; it "
    if not is_shared:
        return False, "no document begins like another for a whole page; it "
    return pays, "it "
