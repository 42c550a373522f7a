"""Attention on torch's `varlen_attn`: what segments read from pages is gathered into packed keys and values.

`varlen_attn` takes runs of query rows and of keys, and aligns its causal mask bottom-right: the last row sees
all keys, each row before it one fewer. Two ways to put a pass like that:

* one call: each segment's keys are its history and its own rows behind it. Without any history these are the
  keys of the pass as they lie, and nothing is gathered.
* where consecutive segments read one history (the partners of an anchor), gathering it for each would copy it
  as often. So each segment reads its own rows in a first call and, in a second one without a mask, all rows
  of such a run read the history once; the two are merged by their log-sum-exp.

What is gathered at a time is bounded, so that its memory is: a pass that reads more is put in several calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quail.execution.chunk import BlockTable, Int32s, Segments
from quail.kernels import attention
from quail.kernels.upload import upload

Varlen = Callable[..., Any]
Gather = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Merge = Callable[..., None]

MOST_GATHERED = 2**15
"""Keys that a call gathers at most where nothing is said."""

CAUSAL, UNMASKED = (-1, 0), (-1, -1)
"""Windows of `varlen_attn`: keys to the left and to the right that a row sees, -1 for all."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of `varlen_attn`, its indexes on the device.

    Attributes:
        rows: (m,) int32 query rows, merged into those of calls before; None for those of `span`.
        span: first query row and end of what a call without `rows` takes; together these are the whole pass.
        source: (n,) int32 of each packed key: its slot in the pages (page · page_tokens + offset), or
            -1 - r for row r of the pass. None takes the keys of the pass as they lie.
        q_ends, k_ends: (runs + 1,) int32 where each run starts, and where the last one ends.
        longest_q, longest_k: rows and keys of the longest run.
        window: `CAUSAL` or `UNMASKED`.
    """

    rows: torch.Tensor | None
    source: torch.Tensor | None
    q_ends: torch.Tensor
    k_ends: torch.Tensor
    longest_q: int
    longest_k: int
    window: tuple[int, int]
    span: tuple[int, int]


@dataclass(frozen=True, eq=False)
class _Part:
    """A call with its indexes on the host."""

    rows: Int32s | None
    source: Int32s | None
    q_ends: Int32s
    k_ends: Int32s
    window: tuple[int, int]
    span: tuple[int, int]


def plan(
    segments: Segments,
    block_table: BlockTable,
    page_tokens: int,
    device: torch.device,
    most_gathered: int = MOST_GATHERED,
) -> tuple[Call, ...]:
    """The calls of a pass; their indexes reach the device in one copy.

    Args:
        segments, block_table: of the pass.
        page_tokens: tokens a page.
        device: where they run.
        most_gathered: keys that a call gathers at most; those of one segment are gathered however many.
    """
    own = np.append(segments.q_start, segments.q_stop[-1]).astype(np.int32)
    histories = [
        (first, behind, _history(segments, block_table, first, page_tokens))
        for first, behind in segments.with_history
    ]
    alone = _Part(None, None, own, own, CAUSAL, (int(own[0]), int(own[-1])))
    if not histories:
        parts = [alone]
    elif all(behind - first == 1 for first, behind, _ in histories):
        parts = _with_histories(segments, histories, own, most_gathered)
    else:
        parts = [alone, *_histories_only(segments, histories, most_gathered)]
    hosts = [(part.rows, part.source, part.q_ends, part.k_ends) for part in parts]
    there = iter(upload([array for host in hosts for array in host if array is not None], device))
    calls = []
    for part, host in zip(parts, hosts, strict=True):
        rows, source, q_ends, k_ends = (None if array is None else next(there) for array in host)
        assert q_ends is not None and k_ends is not None
        longest_q, longest_k = (int(np.diff(ends).max()) for ends in (part.q_ends, part.k_ends))
        calls.append(Call(rows, source, q_ends, k_ends, longest_q, longest_k, part.window, part.span))
    return tuple(calls)


def _groups(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Neighbours that take no more than `most` together, or one that takes more: first and end of each."""
    groups, start, total = [], 0, 0
    for place, size in enumerate(sizes):
        if place > start and total + size > most:
            groups.append((start, place))
            start, total = place, 0
        total += size
    return [*groups, (start, len(sizes))]


def gather(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, source: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values side by side: (n, kv_heads, head_dim) each.

    Args:
        k, v: (t, kv_heads, head_dim) of the pass; rows may lie apart.
        k_pages, v_pages: (pages, page_tokens, kv_heads, head_dim).
        source: (n,) int32, as of `Call`.
    """
    paged = (source >= 0).view(-1, 1, 1)
    rows = (-1 - source).clamp(min=0)

    def packed(own: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        of_rows = own.index_select(0, rows)
        if not len(pages):
            return of_rows
        return torch.where(paged, pages.flatten(0, 1).index_select(0, source.clamp(min=0)), of_rows)

    return packed(k, k_pages), packed(v, v_pages)


def merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor, targets: torch.Tensor
) -> None:
    """Merges attention of some rows over other keys into `out` and `lse`, in place.

    Args:
        out: (t, heads, head_dim), changed.
        lse: (t, heads) float32, changed.
        other: (m, heads, head_dim).
        other_lse: (m, heads) float32.
        targets: (m,) int32 rows of `out`, distinct.
    """
    rows = targets.long()
    mixed, mixed_lse = out.index_select(0, rows), lse.index_select(0, rows)
    attention.merge(mixed, mixed_lse, other, other_lse)
    out.index_copy_(0, rows, mixed)
    lse.index_copy_(0, rows, mixed_lse)


@dataclass(frozen=True)
class GatheredAttention:
    """The attention of a planned pass.

    Attributes:
        varlen: torch's `varlen_attn`, or what takes the same arguments.
        gather, merge: as the functions of this module.
    """

    varlen: Varlen
    gather: Gather = gather
    merge: Merge = merge

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        calls: tuple[Call, ...],
        *,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Arguments and results as `reference.attend`, the pass as planned."""
        spans = [call for call in calls if call.rows is None]
        if len(spans) == 1:
            out, lse = self._call(q, k, v, k_pages, v_pages, spans[0], scale)
        else:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            for call in spans:
                own = slice(*call.span)
                out[own], lse[own] = self._call(q[own], k, v, k_pages, v_pages, call, scale)
        for call in calls:
            if call.rows is None:
                continue
            far, far_lse = self._call(q.index_select(0, call.rows), k, v, k_pages, v_pages, call, scale)
            self.merge(out, lse, far, far_lse, call.rows)
        return out, lse

    def _call(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        call: Call,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if call.source is not None:
            k, v = self.gather(k, v, k_pages, v_pages, call.source)
        options: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        if options and "enable_gqa" not in inspect.signature(self.varlen).parameters:
            options = {}  # torch 2.11 takes fewer KV heads than query heads unasked
        out, lse = self.varlen(
            q,
            k,
            v,
            call.q_ends,
            call.k_ends,
            call.longest_q,
            call.longest_k,
            return_aux=_with_lse(),
            scale=scale,
            window_size=call.window,
            **options,
        )
        # Its documentation says (rows, heads); what it returns is (heads, rows).
        return out, lse.transpose(0, 1).contiguous()


def _with_lse() -> Any:
    from torch.nn.attention.varlen import AuxRequest

    return AuxRequest(lse=True)


def _history(segments: Segments, block_table: BlockTable, place: int, page_tokens: int) -> Int32s:
    """Sources of the keys that a segment reads before its own."""
    pieces = []
    num_tokens = int(segments.paged_tokens[place])
    if num_tokens:
        pages = block_table.of_row(int(segments.table_row[place]), num_tokens, page_tokens)
        slots = pages[:, None] * page_tokens + np.arange(page_tokens)
        pieces.append(slots.reshape(-1)[:num_tokens])
    pieces.extend(-1 - np.arange(start, stop) for start, stop in segments.context_of(place))
    return np.concatenate(pieces).astype(np.int32)


def _with_histories(
    segments: Segments, histories: list[tuple[int, int, Int32s]], own: Int32s, most_gathered: int
) -> list[_Part]:
    """Each segment's history and, behind it, its own rows."""
    before = np.zeros(len(segments), dtype=np.int64)
    history_of = {}
    for first, _, history in histories:
        before[first], history_of[first] = len(history), history
    num_keys = before + segments.q_stop - segments.q_start
    parts = []
    for first, end in _groups(num_keys.tolist(), most_gathered):
        ends = np.concatenate([[0], np.cumsum(num_keys[first:end])]).astype(np.int32)
        source = np.empty(int(ends[-1]), dtype=np.int32)
        for place in range(first, end):
            start, stop = int(ends[place - first]), int(ends[place - first + 1])
            middle = start + int(before[place])
            if middle > start:
                source[start:middle] = history_of[place]
            source[middle:stop] = -1 - np.arange(segments.q_start[place], segments.q_stop[place])
        span = int(own[first]), int(own[end])
        parts.append(_Part(None, source, own[first : end + 1] - own[first], ends, CAUSAL, span))
    return parts


def _histories_only(
    segments: Segments, histories: list[tuple[int, int, Int32s]], most_gathered: int
) -> list[_Part]:
    """All rows of the segments of each run against their one history."""
    parts = []
    for first, end in _groups([len(history) for *_, history in histories], most_gathered):
        some = histories[first:end]
        spans = [(int(segments.q_start[a]), int(segments.q_stop[b - 1])) for a, b, _ in some]
        rows = np.concatenate([np.arange(start, stop) for start, stop in spans]).astype(np.int32)
        q_ends = np.cumsum([0, *(stop - start for start, stop in spans)]).astype(np.int32)
        k_ends = np.cumsum([0, *(len(history) for *_, history in some)]).astype(np.int32)
        source = np.concatenate([history for *_, history in some])
        parts.append(_Part(rows, source, q_ends, k_ends, UNMASKED, (0, 0)))
    return parts
