"""Fast attention on torch's flash kernel for CPUs; `reference.attend` is its slow twin, and runs elsewhere.

Two kinds of calls, merged by their log-sum-exp:

* each segment against itself, causal, all segments of one length in a single call;
* consecutive segments of one history (the partners of an anchor, the question of a document) against it,
  without a mask, the query heads of one KV head stacked as further query rows: each key is read once a group.
"""

from __future__ import annotations

import numpy as np
import torch

from quail.execution.chunk import BlockTable, Int64s, Segments
from quail.kernels.reference import history


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    segments: Segments,
    block_table: BlockTable,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the rows of a pass; arguments and results as `reference.attend`."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    for length, places in segments.by_length:
        _within(q, k, v, out, lse, length, segments.q_start[places], scale)
    for first, behind in segments.with_history:
        rows = slice(int(segments.q_start[first]), int(segments.q_stop[behind - 1]))
        keys, values = history(k, v, k_pages, v_pages, segments, block_table, first)
        far, far_lse = _against(q[rows], keys, values, scale)
        merge(out[rows], lse[rows], far, far_lse)
    return out, lse


def merge(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Merges attention over other keys into `out` and `lse`, in place.

    softmax over a union of key sets is the mean of the softmaxes over each, weighted by exp(log-sum-exp).

    Args:
        out: (t, heads, head_dim), changed.
        lse: (t, heads) float32, changed.
        other: (t, heads, head_dim).
        other_lse: (t, heads) float32.
    """
    weight = torch.sigmoid(other_lse - lse).unsqueeze(-1)
    out.copy_(torch.lerp(out.float(), other.float(), weight))
    torch.logaddexp(lse, other_lse, out=lse)


def _within(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    length: int,
    starts: Int64s,
    scale: float,
) -> None:
    """Causal attention of segments of one length to themselves, written into `out` and `lse`."""
    num_kv_heads, head_dim = k.shape[1:]
    group = q.shape[1] // num_kv_heads
    first, num_rows = int(starts[0]), len(starts) * length
    contiguous = int(starts[-1]) - first == num_rows - length
    rows = slice(first, first + num_rows)
    index = None if contiguous else torch.from_numpy((starts[:, None] + np.arange(length)).reshape(-1))

    def split(tensor: torch.Tensor, heads: int) -> torch.Tensor:
        picked = tensor[rows] if index is None else tensor.index_select(0, index)
        return picked.view(len(starts), length, num_kv_heads, heads, head_dim).permute(0, 2, 3, 1, 4)

    shape = (len(starts), num_kv_heads, group, length, head_dim)
    queries, keys, values = split(q, group), split(k, 1).expand(shape), split(v, 1).expand(shape)
    # (segment, KV head) cannot merge into one batch dimension without a copy: one of the two is looped over.
    if len(starts) == 1:
        found, found_lse = flash(queries[0], keys[0], values[0], True, scale)
        found, found_lse = found.unsqueeze(0), found_lse.unsqueeze(0)
    else:
        parts = [flash(queries[:, h], keys[:, h], values[:, h], True, scale) for h in range(num_kv_heads)]
        found = torch.stack([part[0] for part in parts], dim=1)
        found_lse = torch.stack([part[1] for part in parts], dim=1)
    found = found.permute(0, 3, 1, 2, 4).reshape(num_rows, -1, head_dim)
    found_lse = found_lse.permute(0, 3, 1, 2).reshape(num_rows, -1)
    if index is None:
        out[rows], lse[rows] = found, found_lse
    else:
        out.index_copy_(0, index, found)
        lse.index_copy_(0, index, found_lse)


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's CPU flash kernel: (batch, heads, rows, head_dim) in, the same and (batch, heads, rows) float32
    out.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _against(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all rows of some segments to the same keys, without a mask."""
    length, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    stacked = (
        q.view(length, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, 1, -1, head_dim)
    )
    out, lse = flash(
        stacked, keys.transpose(0, 1).unsqueeze(1), values.transpose(0, 1).unsqueeze(1), False, scale
    )
    out = (
        out.view(num_kv_heads, -1, length, head_dim).permute(2, 0, 1, 3).reshape(length, num_heads, head_dim)
    )
    lse = lse.view(num_kv_heads, -1, length).permute(2, 0, 1).reshape(length, num_heads)
    return out, lse
