"""Plain versions of the kernels: slow, obvious, and the oracle of every faster one."""

from __future__ import annotations

import torch

from quail.execution.chunk import BlockTable, Segments


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
    """Attention of the rows of a pass over paged KV, earlier rows and themselves.

    Args:
        q: (t, heads, head_dim) queries.
        k: (t, kv_heads, head_dim) keys of this pass, rotated.
        v: (t, kv_heads, head_dim) values of this pass.
        k_pages: (pages, page_tokens, kv_heads, head_dim) keys in pages, those of this pass written already.
        v_pages: the same for values.
        segments: what each row reads.
        block_table: pages of the tables that segments read.
        scale: factor on the scores, 1 / sqrt(head_dim).

    Returns:
        (t, heads, head_dim) of q's dtype, and the (t, heads) float32 log-sum-exp of the scaled scores.
    """
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    group = num_heads // num_kv_heads
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for place in range(len(segments)):
        start, stop = int(segments.q_start[place]), int(segments.q_stop[place])
        keys, values = history(k, v, k_pages, v_pages, segments, block_table, place)
        num_before = keys.shape[0]
        keys = torch.cat([keys, k[start:stop]]).float().repeat_interleave(group, dim=1)
        values = torch.cat([values, v[start:stop]]).float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].float(), keys) * scale
        row = torch.arange(stop - start, device=q.device).unsqueeze(1)
        column = torch.arange(keys.shape[0], device=q.device).unsqueeze(0)
        scores.masked_fill_(column > row + num_before, float("-inf"))
        lse[start:stop] = torch.logsumexp(scores, dim=-1).transpose(0, 1)
        weights = torch.softmax(scores, dim=-1)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    return out, lse


def history(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    segments: Segments,
    block_table: BlockTable,
    place: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that a segment reads before its own: (tokens, kv_heads, head_dim) each.

    A view where one run of pages holds them all, else a copy.
    """
    pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
    num_tokens = int(segments.paged_tokens[place])
    if num_tokens:
        pages = block_table.of_row(int(segments.table_row[place]), num_tokens, k_pages.shape[1])
        first = int(pages[0])
        if int(pages[-1]) - first == len(pages) - 1 and (pages[1:] - pages[:-1] == 1).all():
            slots = slice(first * k_pages.shape[1], first * k_pages.shape[1] + num_tokens)
            pieces.append((k_pages.flatten(0, 1)[slots], v_pages.flatten(0, 1)[slots]))
        else:
            index = torch.from_numpy(pages).to(k_pages.device)
            pieces.append(
                (
                    k_pages.index_select(0, index).flatten(0, 1)[:num_tokens],
                    v_pages.index_select(0, index).flatten(0, 1)[:num_tokens],
                )
            )
    pieces.extend((k[a:b], v[a:b]) for a, b in segments.context_of(place))
    if len(pieces) == 1:
        return pieces[0]
    if not pieces:
        return k[:0], v[:0]
    return torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces])
