"""A twin of torch's `varlen_attn` on its attention for CPUs: a run at a time, masks written out."""

from __future__ import annotations

import torch


def varlen_twin(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux=None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
):
    """(rows, heads, head_dim), and (heads, rows) float32 as torch returns it, whatever its documentation says."""
    num_rows, num_heads, head_dim = query.shape
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and len(cu_seq_q) == len(cu_seq_k)
    assert (
        cu_seq_q[0] == cu_seq_k[0] == 0
        and cu_seq_q[-1] == num_rows
        and cu_seq_k[-1] == len(key) == len(value)
    )
    assert enable_gqa or key.shape[1] == num_heads
    assert max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max()
    assert window_size in ((-1, 0), (-1, -1))
    group = num_heads // key.shape[1]
    out = torch.full_like(query, float("nan"), memory_format=torch.contiguous_format)
    lse = torch.full((num_heads, num_rows), float("nan"))
    for a, b, c, d in zip(cu_seq_q[:-1], cu_seq_q[1:], cu_seq_k[:-1], cu_seq_k[1:], strict=True):
        rows, keys = b - a, d - c
        assert rows > 0 and keys > 0, "an empty run"
        q = query[a:b].float().transpose(0, 1).unsqueeze(0)
        k, v = (
            each[c:d].float().repeat_interleave(group, dim=1).transpose(0, 1).unsqueeze(0)
            for each in (key, value)
        )
        mask = torch.ones(rows, keys, dtype=torch.bool)
        if window_size == (-1, 0):
            mask = mask.tril(int(keys - rows))
        bias = torch.zeros(rows, keys, dtype=torch.float32).masked_fill_(~mask, float("-inf"))
        found, found_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias, scale=scale
        )
        out[a:b], lse[:, a:b] = found[0].transpose(0, 1), found_lse[0]
    return (out, lse) if return_aux is not None and return_aux.lse else out
